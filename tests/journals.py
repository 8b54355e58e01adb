"""Streams and lines for the tests of journals."""

from typing import Any

from streams.journal import Append, Grant, Record, SessionRecord
from streams.messages import RequestId, Run

PLENTY = 1024 * 1024


def record(stream: str = "s", fence: int = 1) -> Record:
    return Record(
        stream=stream,
        principal="os(0)",
        origin=b'{"jsonrpc":"2.0","id":"1","method":"tools/call"}',
        min_s=1.5,
        max_s=3600.0,
        created_at=1_750_000_000.25,
        fence=fence,
        is_announced=True,
    )


def lines(first: int, last: int) -> Run:
    body = b"".join(b'{"line":%d}\n' % n for n in range(first, last + 1))
    return Run(first, last + 1 - first, body)


def append(first: int, last: int, *, stream: str = "s", fence: int = 1, **more: Any) -> Append:
    return Append(
        stream,
        fence,
        lines(first, last),
        last_request=more.get("last_request", 0),
        last_error=more.get("last_error", 0),
        ends_at=more.get("ends_at", 0.0),
    )


def session(key: str = "k", seen_at: float = 1_750_000_000.25) -> SessionRecord:
    return SessionRecord(
        key=key,
        principal=f"session({key})",
        revision="2025-11-25",
        capabilities=b'{"streams":{}}',
        level="warning",
        seen_at=seen_at,
    )


def grant(
    session: str = "k", delivery: str = "d", stream: str = "s", reply_id: RequestId = 1
) -> Grant:
    return Grant(session, delivery, stream, reply_id)
