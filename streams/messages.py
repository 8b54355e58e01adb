"""JSON-RPC messages: the only place where bytes become objects.

A *line* is one message as UTF-8 JSON, without a newline inside and with one at its end. A `Run` is
what the engine moves: some lines of one stream, in order, exactly as they were first encoded. What
is inside `params`, `result` and `error` stays raw until somebody needs it.
"""

import contextlib
import enum
import gc
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final, Literal, TypeVar, cast, get_args

import msgspec

from streams.errors import INVALID_REQUEST, PARSE_ERROR, Refusal, refusal

# An id keeps its JSON type: "1" is not 1. Null stands only in an answer to what had no readable id.
RequestId = int | str

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
LEADING_BYTES_MAX: Final = 1024  # at the start of a message, in which its id is looked for

# How many lists and objects a message may have, or one for so many bytes of a longer message. Each
# takes 60 bytes of memory or more and up to 0.3 µs, in which nothing else of the server runs.
CONTAINER_BYTES: Final = 16
CONTAINERS_MAX: Final = MESSAGE_BYTES_MAX // CONTAINER_BYTES
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[{'))

# The garbage collector goes through all new objects several times while a large value is decoded,
# which takes ten times as long as the decoding. Nothing of a value is garbage before it is whole.
_COLLECTED_BYTES_MAX: Final = 64 * 1024

# What is handed on in one piece. Messages of one size make pieces of the former, whatever comes
# makes none above the latter.
BATCH_LINES_AIM: Final = 350
BATCH_LINES_MAX: Final = 400

# From this length on it is faster to go from newline to newline than to make lines and count them.
_LONG_BYTES: Final = 700

# The method of a position header, which our servers send ahead of each run of a stream's messages.
POSITION: Final = "notifications/stream/position"

_NOTIFICATION: Final = b'{"jsonrpc":"2.0","method":"notifications/'
_NEXT_NOTIFICATION: Final = b"\n" + _NOTIFICATION
_NEXT_HEADER: Final = b'\n{"jsonrpc":"2.0","method":"%b"' % POSITION.encode()

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)
"""MCP's levels of log messages, the least severe first."""


class Run(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """Lines seq … seq+count-1 of one stream, concatenated in `body`."""

    seq: int
    count: int
    body: bytes

    @property
    def last(self) -> int:
        """The seq of the last line."""
        return self.seq + self.count - 1

    @property
    def lines(self) -> list[bytes]:
        """The lines, each with its newline."""
        return lines_in(self.body)

    def after(self, seq: int) -> "Run":
        """What follows `seq` in this run; `seq` must lie before its last line."""
        skipped = seq + 1 - self.seq
        if skipped <= 0:
            return self
        return Run(seq + 1, self.count - skipped, self.body[skip_lines(self.body, 0, skipped) :])

    def until(self, seq: int) -> "Run":
        """This run as far as `seq`, which must lie in it."""
        if seq >= self.last:
            return self
        return Run(self.seq, seq + 1 - self.seq, self.body[: -len(self.after(seq).body)])

    def without_last(self) -> tuple["Run", bytes]:
        """This run without its last line, which may leave none, and that line."""
        start = self.body.rfind(b"\n", 0, -1) + 1
        return Run(self.seq, self.count - 1, self.body[:start]), self.body[start:]

    def split(self, bytes_max: int) -> Iterator["Run"]:
        """This run in pieces of at most `bytes_max` bytes; a longer line is a piece of its own."""
        if len(self.body) <= bytes_max:
            yield self
            return
        seq = self.seq
        for body in split_lines(self.body, bytes_max):
            count = len(lines_in(body))
            yield Run(seq, count, body)
            seq += count


class Block(msgspec.Struct, frozen=True, gc=False):
    """Whole lines, each ended by a newline: what lies in `data` from `start` to `end`.

    So nothing is copied until it is known whose it is. No carriage return stands before a newline;
    blank lines may be among the others.
    """

    data: bytes
    start: int
    end: int

    def measure(self, at: int, most: int) -> tuple[int, int, bool]:
        """Where the next piece ends, and how many lines it has, blank ones not counted: up to
        `most`, or one.

        `at` is where it begins. A piece goes no further than to the next position header. The last
        value is whether all of its lines begin as our servers write notifications; there are no
        blank ones among them then, and nothing is said about lines that are written in another way.
        """
        end, count = self._reach(at, most)
        # An unescaped newline stands in no JSON string.
        starts = self.data.startswith(_NOTIFICATION, at) + self.data.count(
            _NEXT_NOTIFICATION, at, end
        )
        if starts == count:
            return end, count, True
        return end, sum(map(bool, self.data[at:end].split(b"\n"))), False

    def _reach(self, at: int, most: int) -> tuple[int, int]:
        data = self.data
        first = data.index(b"\n", at) + 1 - at
        if most <= 1:
            return at + first, 1
        end = min(at + first * BATCH_LINES_AIM, self.end)
        if header := data.find(_NEXT_HEADER, at, end) + 1:
            end = header
        elif end < self.end:
            end = data.rfind(b"\n", at, end) + 1
        is_long = first > _LONG_BYTES
        count = _walk(data, at, end) if is_long else len(lines_in(data[at:end]))
        if count <= most:
            return end, count
        return skip_lines(data, at, most), most


class Position(msgspec.Struct, frozen=True, rename="camel"):
    """What a position header says: the next `count` messages are the stream's from `seq` on."""

    stream_id: str
    seq: int
    count: int

    def __post_init__(self) -> None:
        if self.seq < 1 or self.count < 1:
            raise ValueError("seq and count start at 1")


class Kind(enum.Enum):
    """What a JSON-RPC message is."""

    REQUEST = "request"
    NOTIFICATION = "notification"
    RESULT = "result"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, gc=False):  # it can be part of no cycle
    """One message, looked at but not decoded: `params`, `result` and `error` are raw JSON."""

    jsonrpc: Literal["2.0"]
    id: RequestId | msgspec.UnsetType | None = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    params: msgspec.Raw = msgspec.Raw(b"{}")
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def kind(self) -> Kind:
        if self.method is not msgspec.UNSET:
            return Kind.NOTIFICATION if self.id is msgspec.UNSET else Kind.REQUEST
        return Kind.ERROR if self.result is msgspec.UNSET else Kind.RESULT


class TooLarge(msgspec.Struct, frozen=True):
    """Stands in for a received message that was longer than `limit` bytes and was thrown away.

    `id` is that of a request which it began with, if it did.
    """

    limit: int
    id: RequestId | None = None


Incoming = bytes | TooLarge

_T = TypeVar("_T")
_encode: Final = msgspec.json.Encoder().encode
_message_decoder: Final = msgspec.json.Decoder(Message)
_decode_message: Final = _message_decoder.decode

# `parse` at half its price, for a peer that is trusted to speak JSON-RPC: UTF-8 is not checked, nor
# what goes with what. An alias, since a frame of Python would cost a seventh of it. Raises
# `ValueError` for what is no message, `TypeError` for a `TooLarge`.
look: Final = cast(Callable[[Incoming], Message], _decode_message)

# The same for many lines at once, at half the price of one call for each. It takes a message for
# what it is wherever it ends: only as many of them as there are lines are one on each line.
look_at_lines: Final = cast(Callable[[bytes], list[Message]], _message_decoder.decode_lines)


class _Salvaged(msgspec.Struct):
    """The readable parts of a message that was refused; an id of another type does not fit."""

    id: RequestId | None = None
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


# An id and a method ahead of all that is nested: a response has no method.
_LEADING_ID: Final = re.compile(
    rb'\s*{\s*(?=[^][{}]*"method"\s*:)(?:"(?:jsonrpc|method)"\s*:\s*"[!#-[\]-~]*"\s*,\s*)*'
    rb'"id"\s*:\s*("[ !#-[\]-~]*"|0|-?[1-9][0-9]{0,17})\s*,'
)
_salvage: Final = msgspec.json.Decoder(_Salvaged).decode


class _ToolResult(msgspec.Struct, rename="camel"):
    is_error: bool = False


def parse(line: bytes) -> Message:
    """Look at one message.

    Raises `Refusal`: a parse error for what is no UTF-8 JSON, an invalid request for JSON that is
    no JSON-RPC 2.0 message. Use `salvage_id` to find whom to answer.
    """
    try:
        line.decode()  # msgspec does not look into strings that it skips
        message = _decode_message(line)
    except (ValueError, RecursionError) as error:
        raise _why_unreadable(line, error) from None
    has_answer = message.result is not msgspec.UNSET or message.error is not msgspec.UNSET
    if message.method is msgspec.UNSET:
        if message.id is msgspec.UNSET or not has_answer:
            raise _invalid("a message needs a method, or an id and a result or error")
    elif message.id is None or has_answer:
        raise _invalid("a request needs an id (string or integer) and no result or error")
    return message


def parse_bounded(line: bytes) -> Message:
    """`parse`, and raises `Refusal` as well for too many lists and objects."""
    limit = max(CONTAINERS_MAX, len(line) // CONTAINER_BYTES)
    # Each takes two bytes at least: in a shorter message there is nothing to count.
    if len(line) > 2 * limit and (count := _containers(line, limit)) > limit:
        raise refusal("too_large", limit=limit).saying(
            f"{count} lists and objects are too many: send at most {limit} in one message."
        )
    return parse(line)


def _containers(line: bytes, limit: int) -> int:
    """How many lists and objects a message has. Brackets in strings are counted as well where all
    together are no more than `limit`.
    """
    found = line.count(b"[") + line.count(b"{")
    if found <= limit:
        return found
    # Quotes without anything between them go: that changes neither what is in a string nor what
    # is not. Every second part of the rest is outside of strings.
    unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    return len(b"".join(structure.split(b'"')[::2]))


def _why_unreadable(line: bytes, error: Exception) -> Refusal:
    try:
        line.decode()
        msgspec.json.decode(line, type=msgspec.Raw)  # builds no objects: it may be 4 MiB of lists
    except (ValueError, RecursionError) as malformed:
        return Refusal(PARSE_ERROR, f"Not UTF-8 JSON: {malformed}; send one JSON-RPC message.")
    return _invalid(str(error))


def _invalid(why: str) -> Refusal:
    return Refusal(INVALID_REQUEST, f"Not a JSON-RPC 2.0 message: {why}.")


def salvage_id(line: bytes) -> RequestId | None:
    """The id of a request that `parse` has refused; None where no id can be read.

    The rest may be any JSON, but not a response, since a response is not answered. Text that is no
    JSON has no id (JSON-RPC 2.0, 5: "it MUST be Null").
    """
    try:
        found = _salvage(line)
    except ValueError:
        return None
    except RecursionError:
        return leading_id(line)
    is_response = found.method is msgspec.UNSET and (
        found.result is not msgspec.UNSET or found.error is not msgspec.UNSET
    )
    return None if is_response else found.id


def leading_id(start: bytes) -> RequestId | None:
    """The id of a request of which only the start can be read, where the id stands at the start."""
    found = _LEADING_ID.match(start, 0, LEADING_BYTES_MAX)
    leading: RequestId | None = found and msgspec.json.decode(found[1])
    return leading


def decode(raw: bytes | msgspec.Raw, shape: type[_T]) -> _T:
    """Decode raw JSON into `shape`. Raises `ValueError` with a sentence on what does not fit."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def uncollected(size: int) -> contextlib.AbstractContextManager[None]:
    """Decode a text of so many bytes meanwhile: the garbage collector waits if it is large."""
    is_large = size > _COLLECTED_BYTES_MAX and gc.isenabled()
    return _uncollected() if is_large else _COLLECTED  # which takes a fifth of the time


_COLLECTED: Final = contextlib.nullcontext()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_tool_error(result: msgspec.Raw) -> bool:
    """Whether a result says `isError: true`."""
    try:
        return msgspec.json.decode(result, type=_ToolResult).is_error
    except ValueError:
        return False  # a result of another shape is no tool's


def encode(value: Any) -> bytes:
    """Any value as JSON. Raises `TypeError` for what is none."""
    return _encode(value)


def request(id: RequestId, method: str, params: Any) -> bytes:
    """A request, as a line."""
    return _line({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def notification(method: str, params: Any = None) -> bytes:
    """A notification, as a line."""
    if params is None:
        return _line({"jsonrpc": "2.0", "method": method})
    return _line({"jsonrpc": "2.0", "method": method, "params": params})


def result(id: RequestId, value: Any) -> bytes:
    """A successful response, as a line."""
    return _line({"jsonrpc": "2.0", "id": id, "result": value})


def error(id: RequestId | None, refused: Refusal) -> bytes:
    """An error response, as a line."""
    body: dict[str, Any] = {"code": refused.code, "message": refused.message}
    if refused.data is not None:
        body["data"] = refused.data
    return _line({"jsonrpc": "2.0", "id": id, "error": body})


def answer(response: Message) -> bytes:
    """A response that was parsed, as a line again."""
    if response.result is msgspec.UNSET:
        return _line({"jsonrpc": "2.0", "id": response.id, "error": response.error})
    return _line({"jsonrpc": "2.0", "id": response.id, "result": response.result})


def readdressed(response: bytes, id: RequestId) -> bytes:
    """A response as the answer to another request; what it says is left as it is."""
    return answer(msgspec.structs.replace(_decode_message(response), id=id))


def _line(message: dict[str, Any]) -> bytes:
    return _encode(message) + b"\n"


def lines_in(data: bytes) -> list[bytes]:
    """The lines in `data`, each with its newline.

    In a third of the time of `data.count(b"\\n")`, and a fifth of that of `data.split(b"\\n")`:
    those look at every byte, this skips to the next newline.
    """
    return BytesIO(data).readlines()


def skip_lines(data: bytes, at: int, count: int) -> int:
    """Where the line `count` lines further on begins."""
    for _ in range(count):
        at = data.index(b"\n", at) + 1
    return at


def split_lines(data: bytes, bytes_max: int) -> Iterator[bytes]:
    """Whole lines in pieces of at most `bytes_max` bytes; a longer line is a piece of its own."""
    start = 0
    while start < len(data):
        end = start + bytes_max
        if end < len(data):
            end = data.rfind(b"\n", start, end) + 1 or data.find(b"\n", end) + 1 or len(data)
        yield data[start:end]  # no copy where that is all of it
        start = end


def _walk(data: bytes, at: int, end: int) -> int:
    count = 0
    while at < end:
        at = data.index(b"\n", at) + 1
        count += 1
    return count
