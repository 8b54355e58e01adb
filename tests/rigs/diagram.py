"""Draws the life of a stream from the transition table. Run it to see what belongs in
docs/inside/design.md; tests/system/test_docs.py compares."""

from streams.engine.lifecycle import TRANSITIONS
from streams.journal.records import Outcome


def state_diagram() -> str:
    """The transition table as a Mermaid state diagram, in the table's own order."""
    lines = ["stateDiagram-v2", f"    [*] --> {Outcome.LIVE.value}"]
    for before, moves in TRANSITIONS.items():
        lines += [
            f"    {before.value} --> {after.value}: {event.value}" for event, after in moves.items()
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(state_diagram(), end="")
