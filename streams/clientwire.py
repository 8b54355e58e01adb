"""The client's side of the wire: what it says, and how it reads what a server says.

`dialects` is the mirror; as there, the wire's camelCase stops here.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from streams import messages
from streams.dialects import ACK, CREATE, END, EXTENSION, POLL, POLL_ALL, POSITION, RESUME, Standing
from streams.errors import INTERNAL_ERROR, CallFailed, ClientError, StreamGone, Superseded
from streams.messages import Message, RequestId
from streams.ticket import Ticket

__all__ = ["CREATE", "END", "POLL", "POLL_ALL", "POSITION", "RESUME", "Standing"]

PROTOCOL_VERSION: Final = "2025-11-25"
# What `tools/call` and the rest mean is the same in all of these.
PROTOCOL_VERSIONS: Final = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"})

INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
PROGRESS: Final = "notifications/progress"

# Which capability tells the server that a request of this method will be answered.
_CAPABILITIES: Final = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}

# The same call may do better in a while: the client waits and asks again.
RETRIED: Final = frozenset({"too_early", "id_in_use", "released"})


class Hello(msgspec.Struct, frozen=True, rename="camel"):
    """What a server says of itself when a connection begins."""

    protocol_version: str
    capabilities: dict[str, Any] = {}
    server_info: dict[str, Any] = {}
    instructions: str = ""

    @property
    def has_positions(self) -> bool:
        """Whether this server numbers what it sends, as ours do."""
        return any(
            isinstance(place, dict) and isinstance(place.get(EXTENSION), dict)
            for place in map(self.capabilities.get, ("experimental", "extensions"))
        )


class Position(msgspec.Struct, frozen=True, rename="camel"):
    """The next `count` messages of this connection are the stream's from `seq` on."""

    stream_id: str
    seq: int
    count: int

    def __post_init__(self) -> None:
        if self.seq < 1 or self.count < 1:
            raise ValueError("seq and count start at 1")


class _Interval(msgspec.Struct, frozen=True):
    min: float = 0.0
    max: float | None = None


class _Create(msgspec.Struct, frozen=True, rename="camel"):
    stream_id: str
    request_id: RequestId
    resume_interval: _Interval = _Interval()
    resume_token: str = ""


class _Nested(msgspec.Struct, frozen=True):
    stream: _Create | None = None


class _Meta(msgspec.Struct, frozen=True):
    ended: str = msgspec.field(name="mcp-streams/ended", default="completed")


class _Resumed(msgspec.Struct, frozen=True):
    meta: _Meta = msgspec.field(name="_meta", default=_Meta())


class _Progress(msgspec.Struct, frozen=True, rename="camel"):
    progress_token: RequestId | None = None


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    reason: str = ""
    retry_after: float = 0.0


class ErrorBody(msgspec.Struct, frozen=True):
    """A JSON-RPC error, as the peer sent it."""

    code: int
    message: str = ""
    data: Any = None

    @property
    def reason(self) -> str:
        """The wire's `data.reason`, empty where there is none."""
        return self._known.reason

    @property
    def retry_after_s(self) -> float:
        """For how long the server wants to be left alone; 0 where it does not say."""
        return max(0.0, self._known.retry_after)

    @property
    def _known(self) -> _Data:
        try:
            return msgspec.convert(self.data, _Data)
        except msgspec.ValidationError:
            return _Data()  # another server's data, of another shape


class Tool(msgspec.Struct, frozen=True, rename="camel"):
    """A tool as the server lists it. `input_schema` is JSON Schema."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str = ""
    title: str = ""
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] = {}
    meta: dict[str, Any] = msgspec.field(name="_meta", default={})


class ToolPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of `tools/list`."""

    tools: list[Tool]
    next_cursor: str | None = None


class StatusPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of `stream/poll/all`."""

    statuses: list[Standing]
    next_cursor: str | None = None


def hello(name: str, version: str, answered: Iterable[str]) -> dict[str, Any]:
    """The params of `initialize`; `answered` are the methods that the client has handlers for."""
    settings = {"dialects": ["streams"], "positions": True, "replayResponse": True}
    capabilities: dict[str, Any] = {"streams": {}, "experimental": {EXTENSION: settings}}
    capabilities |= {_CAPABILITIES[method]: {} for method in answered if method in _CAPABILITIES}
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "capabilities": capabilities,
        "clientInfo": {"name": name, "version": version},
    }


def call(name: str, arguments: dict[str, Any], token: str) -> dict[str, Any]:
    """The params of `tools/call`; `token` is that of its progress."""
    return {"name": name, "arguments": arguments, "_meta": {"progressToken": token}}


def named(stream: str, token: str | None, after: int | None) -> dict[str, Any]:
    """The params of `stream/resume` and `stream/poll`."""
    params: dict[str, Any] = {"streamId": stream}
    if token:
        params["resumeToken"] = token
    if after is not None:
        params["after"] = after
    return params


def ack(stream: str, seq: int) -> bytes:
    """The line that says: I have this stream up to `seq`."""
    return messages.notification(ACK, {"streamId": stream, "seq": seq})


def cancelled(request_id: RequestId) -> bytes:
    """The line that says: never mind this request."""
    return messages.notification(CANCELLED, {"requestId": request_id})


def created(params: msgspec.Raw) -> Ticket:
    """Read `notifications/stream/create`, nested as the page prints it or flat as its schema has
    it. Raises `ValueError`.
    """
    made = messages.decode(params, _Nested).stream or messages.decode(params, _Create)
    interval = made.resume_interval
    return Ticket(
        stream=made.stream_id,
        token=made.resume_token,
        request_id=made.request_id,
        min_s=interval.min,
        max_s=interval.max,
    )


def position(params: msgspec.Raw) -> Position:
    """Read a position header. Raises `ValueError`."""
    return messages.decode(params, Position)


def progress_token(params: msgspec.Raw) -> RequestId | None:
    """Whose progress a notification tells; None where it does not say."""
    try:
        return messages.decode(params, _Progress).progress_token
    except ValueError:
        return None


def how_it_ended(message: Message) -> str:
    """Why a delivery is over: `completed`, `released` or `superseded`."""
    try:
        return messages.decode(result_of(message), _Resumed).meta.ended
    except ValueError:
        return "completed"  # a server that only knows the proposal answers `{}`


def result_of(message: Message) -> msgspec.Raw:
    """The result in a response. Raises `ValueError` where there is none."""
    if isinstance(message.result, msgspec.Raw):
        return message.result
    raise ValueError("a response without a result")


def error_of(message: Message) -> ErrorBody:
    """The error in an error response. Whatever is there makes an `ErrorBody`."""
    try:
        return messages.decode(message.error or b"null", ErrorBody)
    except ValueError:
        return ErrorBody(INTERNAL_ERROR, "The server answered with a malformed error.")


def as_error(error: ErrorBody) -> ClientError:
    """What to raise for an error response: by its reason where it has one that we know."""
    if error.reason == "superseded":
        return Superseded(error.message)
    if error.reason in _GONE:
        return StreamGone(error.message, error.reason)
    return CallFailed(error.code, error.message, error.data)


_GONE: Final = frozenset(
    {
        "stream_not_found",
        "abandoned",
        "cancelled",
        "messages_gone",
        "cursor_ahead",
        "id_in_use",
        "too_early",
    }
)
