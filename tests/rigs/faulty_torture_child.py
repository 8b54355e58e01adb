"""The wrapped command of a torture run with faults: it loses, repeats and changes messages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "streams" / "cli" / "selftest"))

import torture_child  # type: ignore[import-not-found]

LOST, TWICE, DAMAGED = 1, 2, 3

send = torture_child._send


def faulty(message: dict) -> None:  # type: ignore[type-arg]
    """Send it, or do not."""
    data = message.get("params", {}).get("data", {})
    if data.get("number") == DAMAGED:
        data["proof"] = data["proof"][::-1]
    if data.get("number") != LOST:
        send(message)
    if data.get("number") == TWICE:
        send(message)


torture_child._send = faulty
torture_child.serve(Path(sys.argv[1]))
