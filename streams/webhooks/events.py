"""The events of calls, as webhooks tell them.

    {"type": "call.completed", "timestamp": "2026-11-23T20:15:00.250000Z",
     "data": {"streamId": "…", "tool": "…", "status": "completed", "createdAt": "…"}}

What a call has sent is not in them unless the operator wants that: the receiver of a webhook may
not be the one that the result is for.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from streams import messages
from streams.journal.records import Record

# "The recommended size of the payload is smaller than 20kb" (Standard Webhooks).
CONTENT_BYTES_MAX: Final = 16 * 1024

COMPLETED: Final = "call.completed"
FAILED: Final = "call.failed"  # the response is an error, or says isError
QUESTION: Final = "call.question"  # asked while no client was attached

_STATUS: Final = {COMPLETED: "completed", FAILED: "failed", QUESTION: "asking"}


class _Line(msgspec.Struct):
    """A message that is told: a response, or a request to the client."""

    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_line: Final = msgspec.json.Decoder(_Line).decode


def event_id(record: Record, kind: str, seq: int, url: str) -> str:
    """The id of the event that the line `seq` tells of: the same whenever it is made again.

    It differs for each receiver. It does not depend on the lines that are committed together.
    """
    text = f"{record.stream}\0{kind}\0{seq}\0{url}"
    return f"msg_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def event(kind: str, record: Record, call: str, tool: str, at: float, line: bytes | None) -> bytes:
    """The body of a webhook, for an event at this wall time.

    `call` is as much of the streamId as the receiver may know. `line` is the message that it tells
    of, where that shall be in it.
    """
    data: dict[str, Any] = {
        "streamId": call,
        "tool": tool,
        "status": _STATUS[kind],
        "createdAt": _timestamp(record.created_at),
    }
    if line is not None:
        data |= _content(line)
    return messages.encode({"type": kind, "timestamp": _timestamp(at), "data": data})


def _content(line: bytes) -> dict[str, Any]:
    if len(line) > CONTENT_BYTES_MAX:
        return {"isContentOmitted": True}
    try:
        found = _line(line)
    except RecursionError:  # nested too deeply
        return {"isContentOmitted": True}
    if found.method is not msgspec.UNSET:
        return {"question": {"method": found.method, "params": found.params}}
    if found.error is not msgspec.UNSET:
        return {"error": found.error}
    return {"result": found.result}


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
