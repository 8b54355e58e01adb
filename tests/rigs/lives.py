"""A stream's record and lines, and the steps of its life."""

from typing import Any

from streams.engine.lifecycle import StreamState
from streams.journal.records import Record
from streams.messages import Run

FENCE = 1


def record(**more: Any) -> Record:
    known: dict[str, Any] = {
        "stream": "a-stream",
        "principal": "alice",
        "origin": b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}',
        "min_s": 5.0,
        "max_s": 100.0,
        "created_at": 0.0,
        "fence": FENCE,
        "is_announced": True,
    }
    return Record(**(known | more))


def line(text: object) -> bytes:
    return f'{{"{text}":0}}\n'.encode()


def commit(state: StreamState) -> Run:
    """Make the numbered entries durable."""
    append = state.take(FENCE)
    assert append is not None
    state.committed(append.run.last)
    return append.run


def write(state: StreamState) -> Run:
    """Make the numbered entries durable, and hand them to the sender."""
    run = commit(state)
    state.hand(run)
    return run


def end(state: StreamState, *, is_error: bool = False) -> None:
    state.end(line("final"), is_error=is_error, at=1.0)
