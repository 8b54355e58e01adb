"""JSON-RPC messages: the only place where bytes become objects.

A *line* is one message as UTF-8 JSON, without a newline inside and with one at its end. The engine
moves `Run`s: lines of one stream, in order, exactly as they were first encoded. A client receives
`Block`s: lines of any streams, as they came. `params`, `result` and `error` stay raw JSON until
they are needed.

A look at each line would cost more than all the rest of receiving. So blocks are searched as a
whole, in memory order.
"""

import contextlib
import enum
import gc
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final, Literal, TypeVar, cast, get_args

import msgspec

from streams.errors import INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR, Refusal, refusal

# An id keeps its JSON type: "1" is not 1. Only an error response may have the id null, where the
# request's id could not be read.
RequestId = int | str

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
LEADING_BYTES_MAX: Final = 1024  # of a message that is too large: its id is searched in these

# How many lists and objects a message may have; a longer message may have one in so many bytes.
# Each takes 60 bytes of memory or more, and up to 0.3 µs, in which the server does nothing else.
CONTAINER_BYTES: Final = 16
CONTAINERS_MAX: Final = MESSAGE_BYTES_MAX // CONTAINER_BYTES
# How many of them may lie within one another. Python allows nearly 1,000, less the calls that are
# under way: a message could be read when it came, and not where it is read again.
NESTED_MAX: Final = 500
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and -1, as signed bytes

_HALF_PAIR: Final = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)
_REPLACEMENT: Final = rb"\\ufffd"
# Of a message in which each half is replaced, to read its id: that takes 50 ns a byte at worst.
_HALVES_BYTES_MAX: Final = 256 * 1024

# While a large value is decoded, the garbage collector visits all new objects several times. That
# takes ten times as long as the decoding, and finds nothing: the value is still being built.
_COLLECTED_BYTES_MAX: Final = 64 * 1024

# Lines of a block that the client hands to a call in one piece. Lines of equal size make pieces of
# `BATCH_LINES_AIM`; no piece has more than `BATCH_LINES_MAX`.
BATCH_LINES_AIM: Final = 350
BATCH_LINES_MAX: Final = 400

# Lines above this length are counted and looked at one by one. That is faster than to split them.
_LONG_BYTES: Final = 700

# The method of a position header, which our servers send ahead of each run of a stream's messages.
POSITION: Final = "notifications/stream/position"

_NEWLINE: Final = ord("\n")  # an int is found in an eighth of the time of a bytes

_NOTIFICATION: Final = b'{"jsonrpc":"2.0","method":"notifications/'
_NEXT_NOTIFICATION: Final = b"\n" + _NOTIFICATION

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)
"""MCP's levels of log messages, the least severe first."""


class Run(msgspec.Struct, frozen=True, gc=False):  # refers to nothing that could refer back
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
        """The part behind `seq`, which must lie before the last line."""
        skipped = seq + 1 - self.seq
        if skipped <= 0:
            return self
        return Run(seq + 1, self.count - skipped, self.body[skip_lines(self.body, 0, skipped) :])

    def until(self, seq: int) -> "Run":
        """The part up to `seq`, which must lie in this run."""
        if seq >= self.last:
            return self
        return Run(self.seq, seq + 1 - self.seq, self.body[: -len(self.after(seq).body)])

    def without_last(self) -> tuple["Run", bytes]:
        """This run without its last line, perhaps with no line left, and that line."""
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
    """Whole lines, each ended by a newline: the bytes of `data` from `start` to `end`.

    Nothing is copied until the client knows which call the lines belong to. No newline has a
    carriage return before it. Some lines may be blank.

    A transport that had to `take` the lines of a run gives them on as they were taken: a block with
    a `count` is the whole of `data`, and part of one run.
    """

    data: bytes
    start: int
    end: int
    count: int = 0
    is_plain: bool = False

    def take(self, at: int, most: int) -> tuple[bytes, int, bool]:
        """Copy the piece that begins at `at`, and count its lines, without blank ones.

        The piece has at most `most` lines, and at least one. The third value is True where every
        line begins exactly as our servers write a notification; then no line is blank. False proves
        nothing.
        """
        data, count = self.data, 1
        end = first_end = data.index(b"\n", at) + 1
        is_plain = data.startswith(_NOTIFICATION, at)
        if first_end - at > _LONG_BYTES:
            most = min(most, BATCH_LINES_AIM)
            while end < self.end and count < most:
                is_plain = is_plain and data.startswith(_NOTIFICATION, end)
                end = data.index(b"\n", end) + 1
                count += 1
            body = data[at:end]
        elif most > 1:
            aim = min(most, BATCH_LINES_AIM)  # right at once where all lines have the same size
            end = min(at + (first_end - at) * aim, self.end)
            if end < self.end:
                end = data.rfind(b"\n", at, end) + 1
            body = data[at:end]
            count = len(lines_in(body))
            if count > most:
                body, count = data[at : skip_lines(data, at, most)], most
            # JSON strings contain no unescaped newline, so each match is the start of a line.
            is_plain = is_plain and body.count(_NEXT_NOTIFICATION) == count - 1
        else:
            body = data[at:end]
        return body, count if is_plain else sum(map(bool, body.split(b"\n"))), is_plain


class Position(msgspec.Struct, frozen=True, rename="camel"):
    """The params of a position header: the next `count` messages are the stream's from `seq`."""

    stream_id: str
    seq: int
    count: int

    def __post_init__(self) -> None:
        if self.seq < 1 or self.count < 1:
            raise ValueError("seq and count start at 1")


class Kind(enum.Enum):
    """The four kinds of JSON-RPC messages."""

    REQUEST = "request"
    NOTIFICATION = "notification"
    RESULT = "result"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, gc=False):  # refers to nothing that could refer back
    """One message, of which only the outer members are decoded."""

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
    """Takes the place of a received message that was longer than `limit` bytes and was discarded.

    `id` is the request's id, where it stood at the start of the message.
    """

    limit: int
    id: RequestId | None = None


Incoming = bytes | TooLarge

_T = TypeVar("_T")


def as_builtin(value: Any) -> Any:
    """The `str`, `int`, `float` or `bytes` that an instance of a subclass holds.

    msgspec encodes these classes alone, and libraries return subclasses of them: `Markup`, the
    strings of lxml, a float of numpy. Their own methods are not asked. Raises `TypeError` for a
    value of any other class.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes):
        return bytes.__bytes__(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encode: Final = msgspec.json.Encoder(enc_hook=as_builtin).encode
_message_decoder: Final = msgspec.json.Decoder(Message)
_decode_message: Final = _message_decoder.decode

# `parse` at half the cost, for messages of a server, which a client trusts to be JSON-RPC: it
# checks neither UTF-8 nor which members occur together. An alias, because the call of a Python
# function would add a seventh. Raises `ValueError` for other JSON, `TypeError` for a `TooLarge`.
look: Final = cast(Callable[[Incoming], Message], _decode_message)

# The same for many lines at once, at half the cost of a call for each line. It does not look at
# newlines: where it finds as many messages as there are lines, each line holds one message.
look_at_lines: Final = cast(Callable[[bytes], list[Message]], _message_decoder.decode_lines)


class _Salvaged(msgspec.Struct):
    """The readable parts of a message that was refused."""

    id: RequestId | None = None
    method: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


# An id and a method before anything nested. The method is required, since a response has none.
_LEADING_ID: Final = re.compile(
    rb'\s*{\s*(?=[^][{}]*"method"\s*:)(?:"(?:jsonrpc|method)"\s*:\s*"[!#-[\]-~]*"\s*,\s*)*'
    rb'"id"\s*:\s*("[ !#-[\]-~]*"|0|-?[1-9][0-9]{0,17})\s*,'
)
_salvage: Final = msgspec.json.Decoder(_Salvaged).decode


class _ToolResult(msgspec.Struct, rename="camel"):
    is_error: bool = False


def parse(line: bytes) -> Message:
    """Decode the outer members of one message and check that they belong together.

    Raises `Refusal`: a parse error for anything but JSON in UTF-8, an invalid request for JSON that
    is not a JSON-RPC 2.0 message. `salvage_id` then finds the id to answer.
    """
    try:
        line.decode()  # msgspec does not check UTF-8 in values that it skips
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
    """`parse`; also refuses a message with too many lists and objects, or nested too deeply."""
    message = parse(line)
    if (brackets := line.count(b"[") + line.count(b"{")) > NESTED_MAX:
        _check_structure(line, brackets)
    return message


def _check_structure(line: bytes, brackets: int) -> None:
    structure = _structure(line)
    limit = max(CONTAINERS_MAX, len(line) // CONTAINER_BYTES)
    if brackets > limit and (count := structure.count(b"[") + structure.count(b"{")) > limit:
        raise refusal("too_large", limit=limit).saying(
            f"{count} lists and objects are too many: send at most {limit} in one message."
        )
    steps = memoryview(structure.translate(_STEPS)).cast("b")
    if max(itertools.accumulate(steps), default=0) > NESTED_MAX:
        raise refusal("too_large", limit=NESTED_MAX).saying(
            f"Lists and objects are nested too deeply: nest at most {NESTED_MAX}."
        )


def _structure(line: bytes) -> bytes:
    """The brackets of a message outside of strings."""
    # Empty pairs of quotes can be removed: all other brackets stay inside or outside of strings.
    # Then every second part between two quotes is outside.
    unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    return b"".join(structure.split(b'"')[::2])


def _why_unreadable(line: bytes, error: Exception) -> Refusal:
    try:
        line.decode()
        msgspec.json.decode(line, type=msgspec.Raw)  # builds no objects of a hostile 4 MiB
    except (ValueError, RecursionError) as malformed:
        # msgspec calls most of these messages truncated.
        why = "half of a surrogate pair" if _HALF_PAIR.search(line) else malformed
        return Refusal(PARSE_ERROR, f"Not UTF-8 JSON: {why}; send one JSON-RPC message.")
    return _invalid(str(error))


def _invalid(why: str) -> Refusal:
    return Refusal(INVALID_REQUEST, f"Not a JSON-RPC 2.0 message: {why}.")


def salvage_id(line: bytes) -> RequestId | None:
    """The id of a request that `parse` has refused; None where no id can be read.

    None as well for a response, since a response is not answered, and for text that is not JSON
    (JSON-RPC 2.0, 5: "it MUST be Null"). But half of a surrogate pair is JSON to other readers:
    JavaScript writes it where a text was cut within a character.
    """
    try:
        found = _salvage(line)
    except ValueError:
        return _id_beside_half(line)
    except RecursionError:
        return leading_id(line)
    is_response = found.method is msgspec.UNSET and (
        found.result is not msgspec.UNSET or found.error is not msgspec.UNSET
    )
    return None if is_response else found.id


def _id_beside_half(line: bytes) -> RequestId | None:
    """The id of a request that has half of a surrogate pair, but not in its id."""
    if len(line) > _HALVES_BYTES_MAX or _HALF_PAIR.search(line) is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        found = _salvage(_HALF_PAIR.sub(_REPLACEMENT, line))
        if found.method is not msgspec.UNSET and "\ufffd" not in str(found.id):
            return found.id
    return None


def leading_id(start: bytes) -> RequestId | None:
    """The id of a request, read from its first bytes alone; None where it does not stand there."""
    found = _LEADING_ID.match(start, 0, LEADING_BYTES_MAX)
    leading: RequestId | None = found and msgspec.json.decode(found[1])
    return leading


def decode(raw: bytes | msgspec.Raw, shape: type[_T]) -> _T:
    """Decode raw JSON into `shape`. Raises `ValueError`, which says what does not fit."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def uncollected(size: int) -> contextlib.AbstractContextManager[None]:
    """Pause the garbage collector while the block decodes `size` bytes, if that is much."""
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
    except (ValueError, RecursionError):
        return False  # not the result of a tool


def encode(value: Any) -> bytes:
    """A value as JSON. Raises `TypeError` for a value that JSON cannot express."""
    return _encode(value)


def checked_params(params: Any) -> Any:
    """The params of a message of an author's. Raises `TypeError` unless they are an object or None.

    MCP allows no others, and a client may drop the message, or its connection.
    """
    if params is None or type(params) is dict:
        return params
    encoded = _encode(params)
    if not encoded.lstrip().startswith(b"{"):
        raise TypeError(f"params: expected an object in JSON, got {type(params).__name__}")
    return msgspec.Raw(encoded)


def request(id: RequestId, method: str, params: Any) -> bytes:
    """A request, as a line. Params that are `UNSET` are left out."""
    if params is msgspec.UNSET:
        return _line({"jsonrpc": "2.0", "id": id, "method": method})
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
    """A parsed response, as a line."""
    if response.result is msgspec.UNSET:
        return _line({"jsonrpc": "2.0", "id": response.id, "error": response.error})
    return _line({"jsonrpc": "2.0", "id": response.id, "result": response.result})


def readdressed(response: bytes, id: RequestId) -> bytes:
    """A response with the id of another request; its result or error stays as it is."""
    try:
        return answer(msgspec.structs.replace(_decode_message(response), id=id))
    except RecursionError:
        refused = Refusal(INTERNAL_ERROR, "The response is nested too deeply to be sent again.")
        return error(id, refused)


def _line(message: dict[str, Any]) -> bytes:
    line = _encode(message)
    if _NEWLINE in line:  # of a `msgspec.Raw` alone, which is taken as it is: pretty-printed JSON
        line = msgspec.json.format(line, indent=-1)
    return line + b"\n"


def lines_in(data: bytes) -> list[bytes]:
    """The lines in `data`, each with its newline.

    Takes a third of the time of `data.count(b"\\n")` and a fifth of that of `data.split(b"\\n")`,
    which look at every byte: this searches the next newline with `memchr`.
    """
    return BytesIO(data).readlines()


def skip_lines(data: bytes, at: int, count: int) -> int:
    """The place where the line `count` lines further on begins."""
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
        yield data[start:end]  # not a copy where that is all of `data`
        start = end


# Messages of other servers with usual faults

# A longer line is not mended: its decoding takes 100 ms, in which the server does nothing else.
MENDED_BYTES_MAX: Final = 1024 * 1024

ENDS_BYTES: Final = 1024  # of a long line, at each end: the id of a response is in one of them

# How a response that is too long to be parsed begins or ends. The SDKs in TypeScript write the id
# last, the one in Python first.
_ID: Final = rb'"id"\s*:\s*("[^"\\]{1,200}"|-?[0-9]{1,18})\s*'
_HEAD: Final = re.compile(rb'\s*{\s*(?:"jsonrpc"\s*:\s*"2.0"\s*,\s*)?' + _ID + rb",")
_TAIL: Final = re.compile(_ID + rb'(?:,\s*"jsonrpc"\s*:\s*"2.0"\s*)?}\s*\Z')
_METHOD: Final = re.compile(rb'\s*{[^][{}]*"method"\s*:')


def sound(line: bytes) -> bytes | None:
    """A message as it came, or mended; None for a line that is no message."""
    try:
        if not line.isascii():
            line.decode()  # msgspec does not check UTF-8 in values that it skips
        look(line)
    except (ValueError, RecursionError):
        return mend(line)
    return line


def mend(line: bytes) -> bytes | None:
    """A message with faults that lenient clients take, without them; None for anything else.

    They are: text that is no UTF-8, half of a surrogate pair, NaN and Infinity, an id with a
    fraction of 0, and no `jsonrpc`.
    """
    if len(line) > MENDED_BYTES_MAX or not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line.decode("utf-8-sig", errors="replace"))
        if isinstance(found, dict) and ("method" in found or "result" in found or "error" in found):
            members: dict[str, Any] = {"jsonrpc": "2.0"} | found
            if isinstance(found.get("id"), float) and found["id"].is_integer():
                members["id"] = int(found["id"])
            mended = encode(_sound(members))
            look(mended)
            return mended
    return None


def _sound(value: Any) -> Any:
    """A value that JSON can express."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_sound(each) for each in value]
    if isinstance(value, dict):
        return {_sound(name): _sound(each) for name, each in value.items()}
    return value


def has_method(head: bytes) -> bool:
    """Whether a line that begins so is a request or a notification."""
    return _METHOD.match(head) is not None


def id_in(head: bytes, tail: bytes) -> RequestId | None:
    """The id of a message of which only the ends are known."""
    found = _HEAD.match(head) or _TAIL.search(tail)
    try:
        return decode(found[1], RequestId) if found else None  # type: ignore[arg-type]
    except ValueError:
        return None  # no UTF-8, or a number with leading zeros
