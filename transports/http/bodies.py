"""Reads the bodies of HTTP responses: bytes become lines, for each media type that servers use.

Each body is read by a task of its own, and all lines go into one channel. There the lines that a
position header announces must follow it at once. So a body returns only single lines, and position
headers together with all of their lines.
"""

import enum
import re
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol
from urllib.parse import urljoin

import msgspec

from streams import messages
from streams.errors import INTERNAL_ERROR, Refusal
from streams.messages import (
    BATCH_LINES_MAX,
    POSITION,
    Block,
    Incoming,
    Message,
    Position,
    RequestId,
    TooLarge,
    look,
)
from transports.http.connections import ResponseHead
from transports.lines import LineSplitter, in_blocks, last_lines, one_line
from transports.net.dialing import HTTP, Address


class Media(enum.StrEnum):
    """The media types that a body may have."""

    NDJSON = "application/x-ndjson"
    JSON = "application/json"
    EVENTS = "text/event-stream"


ACCEPT: Final = ", ".join(Media)

# A server writes no longer runs, unless one message alone is longer.
RUN_BYTES_MAX: Final = 256 * 1024

# The size of one event, including bytes that were discarded. An event without end is an error.
EVENT_BYTES_MAX: Final = 32 * 1024 * 1024

# A longer event id is not sent back in a header: the event stream cannot be continued. Our ids have
# 60 bytes.
EVENT_ID_BYTES_MAX: Final = 1024

# How many event ids of each event stream are remembered, to recognize repeated events.
EVENT_IDS_MAX: Final = 1_000

# The longest pause before a reconnect, even if the server asks for a longer one.
RETRY_MAX_S: Final = 30.0

# Statuses of a request that was not processed, and may be sent again (RFC 9110, 8470, 6585).
UNPROCESSED: Final = frozenset({408, 425, 429})

# How many characters of a server's own words an error has.
SAID_MAX: Final = 200

_EVENT_ID: Final = re.compile(rb"[\x21-\x7e\x80-\xff]([\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")
_RETRY: Final = re.compile(rb"[0-9]{1,15}")
_METHOD: Final = POSITION.encode()
_HEADER_BYTES: Final = 128  # a position header has its method in these


class Malformed(Exception):
    """A body that violates a rule, which the message names."""


class Body(Protocol):
    """Reads the body of one response."""

    tail_lines: ClassVar[int]
    """The response to the request is among so many of the last lines that `feed` returns."""

    is_useless: bool
    """Whether the rest of the body has no messages and need not be read."""

    def feed(self, data: bytes) -> list[Block | TooLarge]:
        """The lines that are complete now. Raises `Malformed`."""

    def end(self) -> list[Block | TooLarge]:
        """The last lines, at the proper end of the body. Raises `Malformed`."""

    def held(self) -> list[Block | TooLarge]:
        """The whole lines of an incomplete run, for a channel that ends with them."""


def body_of(head: ResponseHead, limit: int, trail: "EventTrail | None" = None) -> Body | None:
    """The reader for the body after `head`; None for a media type that MCP does not use.

    `limit` is the maximum of bytes in a message. An event stream records its progress in `trail`.
    """
    match head.content_type:
        case Media.NDJSON:
            return LineBody(limit)
        case Media.JSON:
            return JsonBody(limit)
        case Media.EVENTS:
            return EventBody(limit, trail)
    return None


class LineBody:
    """Our own framing: a line for each message, and blank lines to keep the connection alive."""

    # The last lines: the response, the announcement that the stream has ended, the reply to a
    # resume.
    tail_lines: ClassVar[int] = 4
    is_useless = False

    def __init__(self, limit: int) -> None:
        self._splitter = LineSplitter(limit)
        self._held: list[Block | TooLarge] = []  # the start of an incomplete run
        self._held_bytes = 0
        self._held_bytes_max = RUN_BYTES_MAX + limit
        self._run_left = 0  # how many of its lines have not come

    def feed(self, data: bytes) -> list[Block | TooLarge]:
        found = self._whole(self._splitter.blocks(data, 0, len(data)))
        if self._held_bytes > self._held_bytes_max:
            raise Malformed(f"the server sent a run above {RUN_BYTES_MAX} bytes")
        return found

    def end(self) -> list[Block | TooLarge]:
        # A proxy may properly end a body that its own server did not.
        if self._splitter.flush():
            raise Malformed("the server's response ended inside a line")
        if self._held:
            raise Malformed("the server's response ended inside a run")
        return []

    def held(self) -> list[Block | TooLarge]:
        return self._held

    def _whole(self, blocks: list[Block | TooLarge]) -> list[Block | TooLarge]:
        """The held and the new blocks, up to the start of an incomplete run."""
        found: list[Block | TooLarge] = []
        for block in blocks:
            if isinstance(block, TooLarge):
                self._run_left = max(0, self._run_left - 1)
                self._held_bytes += block.limit  # it had more, and a run has at most one such
                self._held.append(block)
                if not self._run_left:
                    found += self._release()
                continue
            at = block.start
            while at < block.end:
                at = self._hold(block, at)
                if not self._run_left:
                    found += self._release()
        return found

    def _hold(self, block: Block, at: int) -> int:
        """Hold the next line, or the next lines of the run; return where they end."""
        if not self._run_left:
            end = block.data.index(b"\n", at) + 1
            self._run_left = _run_length(block.data[at:end])
            self._held.append(Block(block.data, at, end))
            return end
        body, count, is_plain = block.take(at, min(self._run_left, BATCH_LINES_MAX))
        self._run_left -= count
        self._held_bytes += len(body)
        self._held.append(Block(body, 0, len(body), count if is_plain else 0, is_plain))
        return at + len(body)

    def _release(self) -> list[Block | TooLarge]:
        held, self._held = self._held, []
        self._held_bytes = 0
        return held


def _run_length(line: bytes) -> int:
    """How many lines belong to this line: 0, except for a position header."""
    if _METHOD not in line[:_HEADER_BYTES]:
        return 0
    try:
        message = look(line)
        if message.method != POSITION:
            return 0
        return messages.decode(message.params, Position).count
    except (ValueError, RecursionError):
        return 0  # the client finds the error when it reads the line


class JsonBody:
    """One message, which may be pretty-printed."""

    tail_lines: ClassVar[int] = sys.maxsize

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._text = bytearray()
        self.is_useless = False

    def feed(self, data: bytes) -> list[Block | TooLarge]:
        # A pretty-printed message may have twice the limit. A longer one is discarded at once: it
        # may have no end.
        if self.is_useless:
            return []
        if len(self._text) + len(data) > 2 * self._limit:
            self.is_useless = True
            self._text.clear()
            return [TooLarge(self._limit)]
        self._text += data
        return []

    def end(self) -> list[Block | TooLarge]:
        return in_blocks(_message(bytes(self._text), self._limit))

    def held(self) -> list[Block | TooLarge]:
        return []


class EventTrail:
    """The progress of an event stream, over all the responses that carry it."""

    def __init__(self) -> None:
        self.last_id = b""  # for `Last-Event-ID`; empty where the stream cannot be continued
        self.retry_s: float | None = None  # the pause before a reconnect that the server asks for
        self.events = 0
        self.responses = 0  # how many have continued it
        self._ids: deque[bytes] = deque(maxlen=EVENT_IDS_MAX)  # of the current response
        self._earlier: deque[bytes] = deque(maxlen=EVENT_IDS_MAX)  # of earlier responses

    def continues(self) -> None:
        """Another response carries the stream from now on."""
        self.responses += 1
        self._earlier += self._ids
        self._ids.clear()

    def passes(self, event_id: bytes | None) -> bool:
        """Record a complete event, with its id if it has one. False for a repeated event."""
        if event_id and event_id in self._earlier:
            return False
        self.events += 1
        if event_id is None:
            return True
        is_usable = len(event_id) <= EVENT_ID_BYTES_MAX and _EVENT_ID.fullmatch(event_id)
        self.last_id = event_id if is_usable else b""
        if is_usable:
            self._ids.append(event_id)
        return True

    def pause(self, value: bytes) -> None:
        """Record the `retry` field: milliseconds to wait before a reconnect."""
        if _RETRY.fullmatch(value):
            self.retry_s = min(int(value) / 1000, RETRY_MAX_S)


class EventBody:
    """Server-sent events (WHATWG HTML, 9.2), which other servers use.

    "Lines must be separated by either a U+000D CARRIAGE RETURN U+000A LINE FEED (CRLF) character
    pair, a single U+000A LINE FEED (LF) character, or a single U+000D CARRIAGE RETURN (CR)", and by
    nothing else: `bytes.splitlines` does just that, `str.splitlines` does more.
    """

    tail_lines: ClassVar[int] = sys.maxsize

    is_useless = False

    def __init__(self, limit: int, trail: EventTrail | None = None) -> None:
        self._limit = limit
        self._trail = trail or EventTrail()
        self._rest = bytearray()  # the start of a line whose end has not come
        # Of the current event:
        self._id: bytes | None = None
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._event_bytes = 0  # received; some count twice
        self._type = b""
        self._is_too_large = False
        self._is_start = True
        self._ended_with_cr = False

    def feed(self, data: bytes) -> list[Block | TooLarge]:
        return in_blocks(self._read(data))

    def end(self) -> list[Block | TooLarge]:
        # "Once the end of the file is reached, any pending data must be discarded."
        return []

    def held(self) -> list[Block | TooLarge]:
        return []

    def _read(self, data: bytes) -> list[Incoming]:
        if self._ended_with_cr and data:
            data = data.removeprefix(b"\n")
            self._ended_with_cr = False
        if b"\n" not in data and b"\r" not in data:
            self._keep(data)
            return []
        found: list[Incoming] = []
        lines = (bytes(self._rest) + data).splitlines(keepends=True)
        self._rest.clear()
        self._ended_with_cr = lines[-1].endswith(b"\r")
        if not lines[-1].endswith((b"\n", b"\r")):
            self._keep(lines.pop())
        for line in lines:
            found += self._take_line(line.rstrip(b"\r\n"))
        return found

    def _keep(self, data: bytes) -> None:
        self._count(len(data))
        if len(self._rest) + len(data) > 2 * self._limit + _HEADER_BYTES:
            self._is_too_large |= not (self._rest or data).startswith(b":")
            self._rest[:] = b":"  # the rest of the line is skipped like a comment
        else:
            self._rest += data

    def _take_line(self, line: bytes) -> list[Incoming]:
        if self._is_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._is_start = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._type = value
        elif field == b"data":
            self._data_bytes += len(value) + 1  # with the newline between two data lines
            self._count(len(line) + 1)
            if self._data_bytes > 2 * self._limit:
                self._is_too_large = True
                self._data.clear()
            else:
                self._data.append(value)
        elif field == b"id" and b"\0" not in value:
            self._id = value
        elif field == b"retry":
            self._trail.pause(value)
        return []

    def _count(self, size: int) -> None:
        self._event_bytes += size
        if self._event_bytes > EVENT_BYTES_MAX:
            raise Malformed(f"the server sent an event above {EVENT_BYTES_MAX} bytes")

    def _dispatch(self) -> list[Incoming]:
        data, kind, is_too_large = b"\n".join(self._data), self._type, self._is_too_large
        event_id, self._id = self._id, None
        has_event = bool(data or kind or is_too_large) or event_id is not None
        self._data, self._data_bytes, self._type, self._is_too_large = [], 0, b"", False
        self._event_bytes = 0
        if not has_event or not self._trail.passes(event_id) or kind not in (b"", b"message"):
            return []
        return [TooLarge(self._limit)] if is_too_large else _message(data, self._limit)


def _message(text: bytes, limit: int) -> list[Incoming]:
    """The message in `text` as a line, if there is one."""
    line = one_line(text.strip())
    if not line:
        return []
    return [line if len(line) <= limit else TooLarge(limit)]


def answer_in(
    blocks: Sequence[Block | TooLarge], request_id: RequestId, most: int
) -> Message | TooLarge | None:
    """The response to a request, or a `TooLarge` that may be it, among the last `most` lines."""
    needle = msgspec.json.encode(request_id)
    for line in last_lines(blocks, most):
        if isinstance(line, TooLarge):
            return line
        if needle not in line:
            continue
        try:
            message = look(line)
        except (ValueError, RecursionError):
            continue
        if message.method is msgspec.UNSET and message.id == request_id:
            return message
    return None


def refusal_line(
    head: ResponseHead, text: bytes, request_id: RequestId | None, url: str = ""
) -> bytes:
    """The JSON-RPC error response for an HTTP error. The request was sent to `url`."""
    try:
        said = msgspec.json.decode(text)
        error = said["error"]
        refused = Refusal(int(error["code"]), str(error["message"]), error.get("data"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        refused = Refusal(INTERNAL_ERROR, _sentence(head, text, url))
    if head.status == 401:  # from the server or from a proxy
        refused.data = {"reason": "unauthorized"}
    elif (head.status >= 500 or head.status in UNPROCESSED) and refused.data is None:
        refused.data = {"reason": "unavailable"}  # perhaps from a proxy
        pause = head.fields.get("retry-after", "")
        if _RETRY.fullmatch(pause.encode()):
            refused.data["retryAfter"] = int(pause)
    return messages.error(request_id, refused).rstrip(b"\n")


def _sentence(head: ResponseHead, text: bytes, url: str) -> str:
    if head.status < 300:
        return f"The server answered with {head}, and a body that MCP does not allow."
    if location := head.fields.get("location"):
        return f"The server answered with {head}: {_redirected(url, location)}"
    said = " ".join(text.decode(errors="replace").split())
    is_text = said and head.content_type != "text/html"
    return f"The server answered with {head}{f': {said[:SAID_MAX]}' if is_text else '.'}"


def _redirected(url: str, location: str) -> str:
    """The advice for a redirect, which is not followed: the bearer token is for this server only.

    The new URL comes from the server: it is checked, and quoted for a shell.
    """
    try:
        to = urljoin(url, location)
        is_tls = Address(to, HTTP).is_tls
    except ValueError:
        return "it redirects to a URL that cannot be dialed."
    if url.startswith("https:") and not is_tls:
        return "it redirects to an address without TLS, which is not safe to dial."
    if len(to) > SAID_MAX:
        return f"it redirects to a URL above {SAID_MAX} characters."
    return f"dial {shlex.quote(to)} instead."
