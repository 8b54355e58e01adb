"""The client's words on the wire: how it writes requests and reads responses.

`streams.protocol.dialects` does the same for servers. The camelCase of the wire stops in both.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
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
from streams.protocol.revisions import REVISIONS
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import Announcing, Dialect, Lead, Polling, Resuming, Standing

__all__ = ["Standing"]

INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
PROGRESS: Final = "notifications/progress"
UPDATED: Final = "notifications/resources/updated"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"

# The capability that declares that the client answers requests of this method.
_CAPABILITIES: Final = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}

# The server has ended a delivery of a stream, which can be resumed.
RELEASED: Final = "released"
DRAINING: Final = "draining"

# The client repeats a request after these errors.
RETRIED: Final = frozenset(
    {"too_early", "too_many_requests", "id_in_use", RELEASED, "unavailable", DRAINING}
)

# A method that only reads, or that sets what is set already, may be sent a second time.
HARMLESS: Final = frozenset(
    {
        "ping",
        "tools/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        SUBSCRIBE,
        UNSUBSCRIBE,
        "prompts/list",
        "prompts/get",
        "completion/complete",
        "logging/setLevel",
    }
)

# The capability of a server that offers a method, where that is not the name before the slash.
_OFFERED_AS: Final = {"completion": "completions"}


def missing(method: str, capabilities: Mapping[str, Any]) -> str | None:
    """The capability that the method needs and that the server does not declare, if any."""
    name = method.partition("/")[0]
    name = _OFFERED_AS.get(name, name)
    if name not in capabilities:
        return name
    declared = capabilities[name]
    is_subscribing = method in (SUBSCRIBE, UNSUBSCRIBE)
    if is_subscribing and not (isinstance(declared, dict) and declared.get("subscribe")):
        return "resources.subscribe"
    return None


# The response was lost, though its connection lives on. Transports report this, servers never do.
LOST: Final = "lost"

# The server has refused the session, and so it has not taken the request. Reported in the same way.
UNTAKEN: Final = "untaken"

# The longest pause before a resume or a repeated request that a server may ask for; a pause without
# a limit would look like a hang.
PAUSE_MAX_S: Final = 300.0

_UNKNOWN: Final = Dialect()  # for names that this client does not know


class Hello(msgspec.Struct, frozen=True, rename="camel", dict=True):
    """A server's answer to `initialize`."""

    protocol_version: str
    capabilities: dict[str, Any] = {}
    server_info: dict[str, Any] = {}
    instructions: str = ""

    @cached_property
    def has_positions(self) -> bool:
        """Whether this server can number what it sends, as ours do."""
        return bool(self._extensions)

    @cached_property
    def key_memory(self) -> str:
        """The id of the server's memory of idempotency keys; empty if it has none."""
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
    earliest_seq: int | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """A JSON-RPC error, as the peer sent it."""

    code: int
    message: str = ""
    data: Any = None

    @property
    def reason(self) -> str:
        """The wire's `data.reason`; empty if it is absent."""
        return self._known.reason

    @property
    def retry_after_s(self) -> float:
        """Seconds for which the server wants no repeat; 0 if it does not say."""
        return min(max(0.0, self._known.retry_after), PAUSE_MAX_S)

    @property
    def earliest(self) -> int | None:
        """The wire's `data.earliestSeq`."""
        return self._known.earliest_seq

    @property
    def _known(self) -> _Data:
        try:
            return msgspec.convert(self.data, _Data)
        except msgspec.ValidationError:
            return _Data()  # another server's data, of another shape


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
        "protocolVersion": REVISIONS[0],
        "capabilities": capabilities,
        "clientInfo": {"name": name, "version": version},
    }


def wants_positions(hello: dict[str, Any]) -> bool:
    """Whether these params of `initialize` ask the server to number what it sends."""
    return bool(hello["capabilities"]["experimental"][EXTENSION]["positions"])


def call(
    name: str,
    arguments: Mapping[str, Any],
    token: str,
    key: str | None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, msgspec.Raw]:
    """The params of `tools/call`. `token` is its progress token, and `key` its idempotency key.

    `meta` are other fields of `_meta`. Each field is encoded once, so that a repeat has the same
    bytes.
    """
    meta = {**(meta or {}), "progressToken": token} | ({} if key is None else {KEY: key})
    params = {"name": name, "arguments": dict(arguments), "_meta": meta}
    return {field: msgspec.Raw(messages.encode(value)) for field, value in params.items()}


def page_call(params: dict[str, msgspec.Raw], lead: Lead) -> dict[str, Any]:
    """The params of the call for the page that `lead` leads to.

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
    """The page token of the next page; None on the last page. Raises `ValueError`."""
    return next((lead for word in pagings() if (lead := word.hear(result))), None)


def resuming(ticket: Ticket) -> Resuming:
    """How to resume a call. Raises `ValueError` for a dialect that this client does not know, and
    `TypeError` for what is no ticket, such as a word that was not parsed.
    """
    if not isinstance(ticket, Ticket):
        given = type(ticket).__name__
        raise TypeError(f"expected a Ticket, got a {given}: Ticket.parse reads a ticket's word")
    word = DIALECTS.get(ticket.dialect, _UNKNOWN).resuming
    if word is None:
        raise ValueError(f"a ticket of {ticket.dialect!r}, which this client does not speak")
    return word


def resume(ticket: Ticket, request_id: RequestId, after: int | None) -> bytes:
    """The line that resumes a call from a cursor on."""
    word = resuming(ticket)
    params = word.ask(ticket.stream, ticket.token, after)
    return messages.request(request_id, word.method, params)


def poll(ticket: Ticket) -> tuple[Polling, Any]:
    """How to poll a call, and the params. Raises `ValueError` as `resuming` does."""
    word = DIALECTS.get(ticket.dialect, _UNKNOWN).polling
    if word is None:
        raise ValueError(f"a ticket of {ticket.dialect!r}, which this client cannot poll")
    return word, word.ask(ticket.stream, ticket.token, ticket.request_id, ticket.after)


def poll_all() -> str:
    """The method that asks for the status of all calls."""
    assert STREAMS.listing is not None
    return STREAMS.listing.method


def ack(stream: str, seq: int) -> bytes:
    """The line that acks a stream up to `seq`."""
    return messages.notification(ACK, {"streamId": stream, "seq": seq})


def cancelled(request_id: RequestId, reason: Any = None) -> bytes:
    """The line that cancels a request, perhaps for a reason."""
    why = {} if reason is None else {"reason": reason}
    return messages.notification(CANCELLED, {"requestId": request_id, **why})


def announcements() -> dict[str, Callable[[msgspec.Raw], Ticket]]:
    """The readers of the notifications that announce a ticket, by method.

    The ticket's `request_id` is empty if the notification names none. A reader raises `ValueError`
    for a notification that it cannot use.
    """
    words = {name: each.announcing for name, each in DIALECTS.items() if each.announcing}
    return {word.method: partial(_announced, name, word) for name, word in words.items()}


def _announced(dialect: str, word: Announcing, params: msgspec.Raw) -> Ticket:
    made = word.hear(params)
    request_id = "" if made.request_id is None else made.request_id
    return Ticket(made.stream, made.token, request_id, None, made.min_s, made.max_s, dialect)


def is_preferred(ticket: Ticket, other: Ticket) -> bool:
    """Whether the first ticket's dialect is preferred to the other's, or the same."""
    order = list(DIALECTS)
    return order.index(ticket.dialect) <= order.index(other.dialect)


def endings() -> dict[str, Callable[[msgspec.Raw], str]]:
    """The readers of the notifications that end a stream, by method. They return the stream's id.

    A reader raises `ValueError` if there is no id.
    """
    words = [each.ending for each in DIALECTS.values() if each.ending]
    return {word.method: word.hear for word in words}


def completed(request_id: RequestId) -> Message:
    """The reply to a resume which says that all of the stream was sent."""
    return messages.look(extension.resumed(request_id, "completed"))


def progress_token(params: msgspec.Raw) -> RequestId | None:
    """The progress token of a notification; None if it has none."""
    try:
        return messages.decode(params, _Progress).progress_token
    except ValueError:
        return None


def how_it_ended(message: Message) -> str:
    """Why a delivery has ended: `completed`, `released` or `superseded`.

    Empty if the response does not say: a server that knows only the proposal answers `{}`.
    """
    try:
        return messages.decode(result_of(message), _Resumed).meta.ended
    except ValueError:
        return ""


def says_nothing(message: Message) -> bool:
    """Whether a response to a resume is a result that does not end the delivery."""
    return message.kind is Kind.RESULT and not how_it_ended(message)


def result_of(message: Message) -> msgspec.Raw:
    """The result in a response. Raises `ValueError` for an error response."""
    if isinstance(message.result, msgspec.Raw):
        return message.result
    raise ValueError("a response without a result")


def error_of(message: Message) -> ErrorBody:
    """The error in an error response. A malformed one becomes an `ErrorBody` too."""
    try:
        return messages.decode(message.error or b"null", ErrorBody)
    except ValueError:
        return ErrorBody(INTERNAL_ERROR, "The server answered with a malformed error.")


def is_draining(message: Message) -> bool:
    """Whether an error says that the server begins no call any more."""
    return error_of(message).reason == DRAINING


def is_untaken(message: Message) -> bool:
    """Whether a response is an error which says that the request was not taken."""
    return message.kind is Kind.ERROR and error_of(message).reason == UNTAKEN


def ends_delivery(message: Message) -> bool:
    """Whether an error ends only the delivery, over this connection, and is not the call's
    response.
    """
    reason = error_of(message).reason
    return reason in _GONE or reason in RETRIED or reason == "superseded"


def as_error(error: ErrorBody) -> ClientError:
    """The exception for an error response, by its reason if that is known."""
    if error.reason == "superseded":
        return Superseded(error.message)
    if error.reason in _GONE:
        return StreamGone(error.message, error.reason, error.earliest)
    if error.reason == LOST:
        return CallLost(f"{error.message} The call may or may not have run.")
    return CallFailed(error.code, error.message, error.data)


def tells_of_end(error: ClientError) -> bool:
    """Whether the error says that the work of a call is over, or that no server knows of it."""
    if isinstance(error, StreamGone):
        return error.reason not in _UNREAD
    return isinstance(error, CallLost)


# The client has stopped to read a call that may still run.
_UNREAD: Final = frozenset({"too_large", "unreadable"})

# The stream exists, but cannot be read from this cursor.
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
