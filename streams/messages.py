"""JSON-RPC messages: the only place where bytes become objects.

A *line* is one message as UTF-8 JSON, without a newline inside and with one at its end. A `Run` is
what the engine moves: some lines of one stream, in order, exactly as they were first encoded. What
is inside `params`, `result` and `error` stays raw until somebody needs it.
"""

import contextlib
import enum
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from streams.blocks import Block, lines_in, skip
from streams.errors import INVALID_REQUEST, PARSE_ERROR, Refusal

# An id keeps its JSON type: "1" is not 1. Null stands only in an answer to what had no readable id.
RequestId = int | str

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
LEADING_BYTES_MAX: Final = 1024  # at the start of a message, in which its id is looked for

# The garbage collector goes through all new objects several times while a large value is decoded,
# which takes ten times as long as the decoding. Nothing of a value is garbage before it is whole.
_COLLECTED_BYTES_MAX: Final = 64 * 1024

Scopes = frozenset[str] | None
"""The scopes of a peer; None for a peer that may use all tools."""


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
        return Run(seq + 1, self.count - skipped, self.body[skip(self.body, 0, skipped) :])

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
        seq, start = self.seq, 0
        while start < len(self.body):
            end = self._cut(start, bytes_max)
            body = self.body[start:end]
            count = len(lines_in(body))
            yield Run(seq, count, body)
            seq, start = seq + count, end

    def _cut(self, start: int, bytes_max: int) -> int:
        end = start + bytes_max
        if end >= len(self.body):
            return len(self.body)
        return self.body.rfind(b"\n", start, end) + 1 or self.body.index(b"\n", end) + 1


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


class Channel(Protocol):
    """One connection, seen as messages; `transports` says what every one of them promises."""

    @property
    def principal(self) -> str:
        """Who the peer is, as far as the transport can tell: `os(0)`, `conn(…)`."""

    @property
    def scopes(self) -> Scopes:
        """Those of the token that the peer has shown; None for a user of this machine."""

    async def receive(self) -> Sequence[Incoming]:
        """Wait for the next messages, at least one, in order, without the newline at their end.

        Raises `trio.EndOfChannel` when the peer will send no more.
        """

    def is_writable(self) -> bool:
        """Whether the peer may still read; once False, always False, and `send` must fail."""

    async def send(self, *lines: bytes) -> None:
        """Write pieces of one or more whole lines; when it returns they are the operating system's.

        One sender at a time. Raises `trio.BrokenResourceError` when the peer is gone. Cancelled
        half-way, it closes the channel.
        """

    async def ping(self) -> bool:
        """Return True once the peer has shown that it read all that was sent before this call.

        Returns False at once where the transport has no such question.
        """

    def unsent_bytes(self) -> int | None:
        """Bytes that were sent but not yet taken by the peer; None where nobody can tell."""

    async def aclose(self) -> None:
        """Close, politely if that takes no more than a second. Twice is as good as once."""


class ClientChannel(Channel, Protocol):
    """A channel as a client needs it, which is given far more than it sends."""

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        """`receive` for who can do with less: many messages in one piece, as they came.

        A `TooLarge` stands between two blocks. What has been received one way will not be received
        the other way.
        """


@runtime_checkable
class RequestChannel(Protocol):
    """A channel that has a connection for each request, as HTTP: one may be dead while others live.

    It continues the response to a request by itself, where its server offers that. Another way is a
    token, which is used over the next channel; the channel must then end when the response breaks
    off.
    """

    def leave_to_token(self, request_id: RequestId) -> None:
        """Do not continue the response to this request."""

    def prepare(
        self,
        request_id: RequestId,
        last_event_id: bytes,
        *,
        is_resume: bool = False,
        may_lack_reply: bool = False,
    ) -> None:
        """The request with this id is sent next, about a stream that was read up to this event.

        The response to a resume is not continued: the stream is resumed again. Where it
        `may_lack_reply`, its end is what counts: the request is then answered by an error with the
        reason `lost`, and the channel goes on.
        """

    def settle(self, request_id: RequestId) -> None:
        """The response to this request is not waited for any more."""

    def last_event_id(self, request_id: RequestId) -> bytes:
        """The id of the last event of its response whose lines were received and done with."""

    def heard_at(self, request_id: RequestId) -> float | None:
        """When the last byte of its response came, by trio's clock; None where there is none."""

    def abandon(self, why: str) -> None:
        """The channel is over, but not the session: its server may be working for it."""


class Dialer(Protocol):
    """Opens a new connection to one and the same server, as often as it is called."""

    def __call__(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Connect; leaving the block closes. Raises `OSError` when nobody answers."""


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
