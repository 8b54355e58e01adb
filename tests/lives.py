"""A stream's record and lines, for the tests of its life."""

from typing import Any

from streams.journal import Record

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
