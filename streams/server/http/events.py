"""Server-sent events and media types: how the response to one HTTP request is written."""

from collections.abc import Sequence
from typing import Final

from streams.engine.sessions import END
from streams.exchange import Headers
from streams.messages import Run

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"  # ours: the framing of stdio

_EVENT: Final = b"data: %b\n"
# A comment. It also opens a response that has no priming event.
_COMMENT: Final = b":\n\n"
KEEP_ALIVE: Final = {EVENTS: _COMMENT, LINES: b"\n"}
RETRY_MS_MAX: Final = 15_000  # a stock client that waits longer is taken for a dead one


class Events:
    """The `Framing` of one HTTP response: events, or plain JSON where it is one message alone.

    A revision before 2025-11-25 knows no priming event: there the first announcement has the id of
    the position where the delivery starts.
    """

    announces = True

    def __init__(self, *, is_priming: bool = True, may_be_json: bool = True) -> None:
        self.has_ids = True
        self.is_json = False
        self._is_priming = is_priming
        self._may_be_json = may_be_json  # nothing is written yet, and the client takes JSON too
        self._id = b""  # the line that has a message's id, made with its number

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
        # 925: the policy "causes the Streamable HTTP transport to send a usable Last-Event-ID". A
        # preamble behind another position holds questions, whose numbers are not that position.
        is_announced = bool(told) and position == 0
        return _COMMENT + (event_id if is_announced else b"") + told

    def line(self, line: bytes) -> bytes:
        if self._may_be_json:  # a refusal: nothing follows it
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


def content(media_type: str) -> Headers:
    """The headers of a body of this type."""
    if media_type == JSON:
        return (("content-type", JSON),)
    headers = (
        ("content-type", media_type),
        ("cache-control", "no-cache, no-transform"),
        ("x-accel-buffering", "no"),  # nginx would wait for more
    )
    # A stock client that is cut off in the middle of a chunk goes back to where it began; where
    # there are no chunks it takes a cut for the end, and goes on from the last event.
    return (*headers, ("connection", "close")) if media_type == EVENTS else headers
