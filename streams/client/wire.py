"""The client's side of the wire: what it says, and how it reads what a server says.

`dialects` is the mirror; as there, the wire's camelCase stops here.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from streams import messages
from streams.errors import (
    INTERNAL_ERROR,
    CallFailed,
    CallLost,
    ClientError,
    StreamGone,
    Superseded,
)
from streams.messages import Kind, Message, RequestId
from streams.protocol import extension
from streams.protocol.dialects import DIALECTS, STREAMS, pagings
from streams.protocol.extension import ACK, EXTENSION, KEY
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import Announcing, Dialect, Lead, Polling, Resuming, Standing

__all__ = ["Standing"]

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
RETRIED: Final = frozenset(
    {"too_early", "too_many_requests", "id_in_use", "released", "unavailable"}
)


# The response was lost on its way, though its connection goes on: a transport says so, no server.
LOST: Final = "lost"

# A server may ask for a longer pause than these seconds before a call is resumed or a request is
# repeated; it is given this. A pause without an end would look like a hang.
PAUSE_MAX_S: Final = 300.0

_UNKNOWN: Final = Dialect()  # of which no word is known


class Hello(msgspec.Struct, frozen=True, rename="camel"):
    """What a server says of itself when a connection begins."""

    protocol_version: str
    capabilities: dict[str, Any] = {}
    server_info: dict[str, Any] = {}
    instructions: str = ""

    @property
    def has_positions(self) -> bool:
        """Whether this server numbers what it sends, as ours do."""
        return bool(self._extensions)

    @property
    def key_memory(self) -> str:
        """Which memory of idempotency keys this server has; empty where it has none."""
        memories = (each.get("idempotencyKeys") for each in self._extensions)
        return next((memory for memory in memories if isinstance(memory, str)), "")

    @property
    def _extensions(self) -> list[dict[str, Any]]:
        places = map(self.capabilities.get, ("experimental", "extensions"))
        said = (place.get(EXTENSION) for place in places if isinstance(place, dict))
        return [each for each in said if isinstance(each, dict)]


class _Meta(msgspec.Struct, frozen=True):
    ended: str = msgspec.field(name="mcp-streams/ended", default="")


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
        """For how long to leave the server alone, as it says; 0 where it does not."""
        return min(max(0.0, self._known.retry_after), PAUSE_MAX_S)

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
    """A page of how all streams stand."""

    statuses: list[Standing]
    next_cursor: str | None = None


def hello(
    name: str, version: str, answered: Iterable[str], dialects: Sequence[str]
) -> dict[str, Any]:
    """The params of `initialize`; `answered` are the methods that the client has handlers for."""
    spoken = [DIALECTS[each] for each in dialects]
    has_positions = any(each.announcing and each.announcing.names_stream for each in spoken)
    settings = {
        "dialects": list(dialects),
        "positions": has_positions,
        "replayResponse": True,
    }
    capabilities: dict[str, Any] = {"experimental": {EXTENSION: settings}}
    capabilities |= {each.capability: {} for each in spoken if each.capability}
    capabilities |= {_CAPABILITIES[method]: {} for method in answered if method in _CAPABILITIES}
    return {
        "protocolVersion": PROTOCOL_VERSION,
        "capabilities": capabilities,
        "clientInfo": {"name": name, "version": version},
    }


def wants_positions(hello: dict[str, Any]) -> bool:
    """Whether the params of `initialize` ask the server to number what it sends."""
    return bool(hello["capabilities"]["experimental"][EXTENSION]["positions"])


def call(
    name: str, arguments: Mapping[str, Any], token: str, key: str | None
) -> dict[str, msgspec.Raw]:
    """The params of `tools/call`; `token` is that of its progress, and `key` stands for the call,
    however often it is sent. Each field is encoded once, to be repeated byte for byte.
    """
    meta = {"progressToken": token} | ({} if key is None else {KEY: key})
    params = {"name": name, "arguments": dict(arguments), "_meta": meta}
    return {field: msgspec.Raw(messages.encode(value)) for field, value in params.items()}


def page_call(params: dict[str, msgspec.Raw], lead: Lead) -> dict[str, Any]:
    """The params of the call for the page behind the one that `lead` came with.

    `params` are those of the call for the first page: 1003, "MUST only mutate the `resumeToken`
    field of a resumed request".
    """
    if not lead.is_in_meta:
        return params | _merged(word.ask(lead.token) for word in pagings())
    meta = messages.decode(params["_meta"], dict[str, msgspec.Raw])
    return params | {"_meta": meta | _merged(word.ask_in_meta(lead.token) for word in pagings())}


def _merged(fields: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return dict(itertools.chain.from_iterable(each.items() for each in fields))


def next_page(result: Any) -> Lead | None:
    """What leads to the page behind this one; None where it is the last. Raises `ValueError`."""
    return next((lead for word in pagings() if (lead := word.hear(result))), None)


def resuming(ticket: Ticket) -> Resuming:
    """How to ask for the rest of a call. Raises `ValueError` where this client does not know."""
    word = DIALECTS.get(ticket.dialect, _UNKNOWN).resuming
    if word is None:
        raise ValueError(f"a ticket of {ticket.dialect!r}, which this client does not speak")
    return word


def resume(ticket: Ticket, request_id: RequestId, after: int | None) -> bytes:
    """The line that asks for the rest of a call, from a cursor on."""
    word = resuming(ticket)
    params = word.ask(ticket.stream, ticket.token, after)
    return messages.request(request_id, word.method, params)


def poll(ticket: Ticket) -> tuple[Polling, Any]:
    """How to ask how a call stands, and with what params. Raises `ValueError` as `resuming`."""
    word = DIALECTS.get(ticket.dialect, _UNKNOWN).polling
    if word is None:
        raise ValueError(f"a ticket of {ticket.dialect!r}, which this client cannot poll")
    return word, word.ask(ticket.stream, ticket.token, ticket.request_id, ticket.after)


def poll_all() -> str:
    """The method that asks how all calls stand."""
    assert STREAMS.listing is not None
    return STREAMS.listing.method


def ack(stream: str, seq: int) -> bytes:
    """The line that says: I have this stream up to `seq`."""
    return messages.notification(ACK, {"streamId": stream, "seq": seq})


def cancelled(request_id: RequestId) -> bytes:
    """The line that says: never mind this request."""
    return messages.notification(CANCELLED, {"requestId": request_id})


def announcements() -> dict[str, Callable[[msgspec.Raw], Ticket]]:
    """What reads each notification that tells how to come back, by its method.

    The ticket's `request_id` is empty where the notification does not say whose it is. Raises
    `ValueError` for a notification that cannot be used.
    """
    words = {name: each.announcing for name, each in DIALECTS.items() if each.announcing}
    return {word.method: partial(_announced, name, word) for name, word in words.items()}


def _announced(dialect: str, word: Announcing, params: msgspec.Raw) -> Ticket:
    made = word.hear(params)
    request_id = "" if made.request_id is None else made.request_id
    return Ticket(made.stream, made.token, request_id, None, made.min_s, made.max_s, dialect)


def is_as_good(ticket: Ticket, other: Ticket) -> bool:
    """Whether one may come back by this one instead of the other."""
    order = list(DIALECTS)
    return order.index(ticket.dialect) <= order.index(other.dialect)


def endings() -> dict[str, Callable[[msgspec.Raw], str]]:
    """What reads the stream in each notification that a stream is over, by its method.

    Raises `ValueError` where there is none.
    """
    words = [each.ending for each in DIALECTS.values() if each.ending]
    return {word.method: word.hear for word in words}


def completed(request_id: RequestId) -> Message:
    """The reply to a resume that says that all of the stream was sent."""
    return messages.look(extension.resumed(request_id, "completed"))


def progress_token(params: msgspec.Raw) -> RequestId | None:
    """Whose progress a notification tells; None where it does not say."""
    try:
        return messages.decode(params, _Progress).progress_token
    except ValueError:
        return None


def how_it_ended(message: Message) -> str:
    """Why a delivery is over: `completed`, `released` or `superseded`.

    Empty where the response does not say: a server that only knows the proposal answers `{}`.
    """
    try:
        return messages.decode(result_of(message), _Resumed).meta.ended
    except ValueError:
        return ""


def says_nothing(message: Message) -> bool:
    """Whether a response to a resume is a result that does not say that the delivery is over."""
    return message.kind is Kind.RESULT and not how_it_ended(message)


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


def ends_delivery(message: Message) -> bool:
    """Whether an error says that nothing more comes over this connection, and not what came of the
    call.
    """
    reason = error_of(message).reason
    return reason in _GONE or reason in RETRIED or reason == "superseded"


def as_error(error: ErrorBody) -> ClientError:
    """What to raise for an error response: by its reason where it has one that we know."""
    if error.reason == "superseded":
        return Superseded(error.message)
    if error.reason in _GONE:
        return StreamGone(error.message, error.reason)
    if error.reason == LOST:
        return CallLost(f"{error.message} The call may or may not have run.")
    return CallFailed(error.code, error.message, error.data)


# The cursor is of no use, though the stream is there.
MISPLACED: Final = frozenset({"messages_gone", "cursor_ahead"})

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
