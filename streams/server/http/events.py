"""Server-sent events and media types: how the response to one HTTP request is written."""

from collections.abc import Sequence
from typing import Final

from streams.engine.sessions import END
from streams.exchange import Headers
from streams.messages import Run

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"  # not of MCP: lines as over stdio

_EVENT: Final = b"data: %b\n"
# This comment also opens a response without a priming event.
_COMMENT: Final = b":\n\n"
KEEP_ALIVE: Final = {EVENTS: _COMMENT, LINES: b"\n"}
RETRY_MS_MAX: Final = 15_000  # a stock client that waits longer seems dead


class Events:
    """The `Framing` of one HTTP response: events, or plain JSON for a single message.

    Revisions before 2025-11-25 have no priming event. There the first announcement has the event id
    of the position where the delivery starts.
    """

    announces = True

    def __init__(self, *, is_priming: bool = True, may_be_json: bool = True) -> None:
        self.has_ids = True
        self.is_json = False
        self._is_priming = is_priming
        self._may_be_json = may_be_json  # nothing is written yet, and the client accepts JSON
        self._id = b""  # the id line of an event, with %d in place of the seq

    def identify(self, event_id: bytes) -> None:
        self.has_ids = bool(event_id)
        self._id = b"id: " + event_id + b"\n"

    def opening(
        self, preamble: Sequence[bytes], position: int, *, retry_s: float, is_lone: bool
    ) -> bytes:
        if is_lone and self._may_be_json:
            self._be_json()
            return b""
        self._may_be_json = False
        told = b"".join(self.line(line) for line in preamble)
        if not self.has_ids:
            return _COMMENT + told
        event_id = self._id % position
        if self._is_priming:
            retry_ms = min(int(retry_s * 1000), RETRY_MS_MAX)
            return event_id + b"retry: %d\ndata: \n\n" % retry_ms + told
        # Proposal 925: the policy "causes the Streamable HTTP transport to send a usable
        # Last-Event-ID". The preamble at any other position consists of requests to the client,
        # whose seqs are not that position.
        is_announced = bool(told) and position == 0
        return _COMMENT + (event_id if is_announced else b"") + told

    def line(self, line: bytes) -> bytes:
        if self._may_be_json:  # an error, and nothing follows it
            self._be_json()
        return line if self.is_json else _EVENT % line

    def run(self, stream_id: str, run: Run, *, is_last: bool) -> Sequence[bytes]:
        if self.is_json:
            return (run.body,)
        lines: list[int | bytes] = [*run.lines]
        if not self.has_ids:
            return (_EVENT * run.count % tuple(lines),)
        fields = lines * 2
        fields[::2], fields[1::2] = range(run.seq, run.last + 1), lines
        return ((self._id + _EVENT) * run.count % tuple(fields),)

    def reply(self, line: bytes, position: int | None) -> bytes:
        event_id = b"" if position is None else self._id % position
        return event_id + self.line(line)

    def _be_json(self) -> None:
        self.is_json, self.has_ids, self._may_be_json = True, False, False


def end_event(last_event_id: str, line: bytes) -> bytes:
    """The event that ends a resumed response; its id says that no more messages follow."""
    return f"id: {last_event_id}{END}\n".encode() + _EVENT % line


def notice_event(event_id: str, line: bytes) -> bytes:
    """An event of the standing stream."""
    return b"id: %b\n" % event_id.encode() + _EVENT % line


def content(media_type: str, *, is_whole: bool = True) -> Headers:
    """The headers of a body of this type. Events that are not whole end with their connection.

    Without chunks, a stock client takes a cut connection for the end of the response and resumes
    behind the last event. If it is cut off within a chunk, it resumes from where it began.
    """
    if media_type == JSON:
        return (("content-type", JSON),)
    headers = (
        ("content-type", media_type),
        ("cache-control", "no-cache, no-transform"),
        ("x-accel-buffering", "no"),  # otherwise nginx buffers the response
    )
    return headers if is_whole or media_type != EVENTS else (*headers, ("connection", "close"))
