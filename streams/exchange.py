"""The contract between the engine or a client and the transports, which know nothing else of them.

- `Channel`, `ResponseChannel`, `ClientChannel`, `RequestChannel`, `Dialer`: a connection as
  messages. `transports` tells the promises that each of them keeps.
- `Request`, `Responder`, `Endpoint`: one HTTP request and its response, without sockets. The
  listener of `transports.http` calls an endpoint, and so does its ASGI adapter.
- `Departure`: the end of a server, which its listeners hear of.
- `AsgiApp` is an endpoint as an ASGI server runs it.
- `Admit` authenticates a request, and `Screen` may refuse it, by its head alone: then its body is
  not read.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from streams.errors import INVALID_REQUEST, Refusal
from streams.messages import Block, Incoming, RequestId, TooLarge

Scopes = frozenset[str] | None
"""The scopes of a peer's bearer token; None for a peer that may use all tools."""

Headers = Sequence[tuple[str, str]]

NO_CLAIMS: Final[Mapping[str, Any]] = MappingProxyType({})

_SCOPE: Final = re.compile(r"[!#-\[\]-~]{1,255}")  # RFC 6749, 3.3; the length is ours


def checked_scopes(given: Iterable[str]) -> tuple[str, ...]:
    """Scopes without duplicates.

    Raises `TypeError` for a single string, `ValueError` for an invalid scope.
    """
    if isinstance(given, str):
        raise TypeError(f"scopes: expected several, such as ({given!r},), got a string")
    found = tuple(dict.fromkeys(given))
    for scope in found:
        if not isinstance(scope, str) or not _SCOPE.fullmatch(scope):
            raise ValueError(
                f"scope {scope!r}: expected up to 255 visible ASCII characters but quotes and \\"
            )
    return found


class Channel(Protocol):
    """One connection as messages; `transports` lists the promises of every channel."""

    @property
    def principal(self) -> str:
        """The name of the caller, as far as the transport knows it: `os(0)`, `conn(…)`."""

    @property
    def scopes(self) -> Scopes:
        """The scopes of the peer's bearer token; None for a user of this machine."""

    async def receive(self) -> Sequence[Incoming]:
        """Wait for the next messages, at least one, in order, without their newlines.

        Raises `trio.EndOfChannel` when the peer will send no more.
        """

    def is_writable(self) -> bool:
        """Whether the peer may still read. Once False, it stays False, and `send` fails."""

    async def send(self, *lines: bytes) -> None:
        """Write pieces of one or more whole lines; on return the kernel has all of them.

        One caller at a time. Raises `trio.BrokenResourceError` when the peer is gone. Cancelled
        half-way, it closes the channel.
        """

    async def ping(self) -> bool:
        """Return True once the peer has proved that it read all that was sent before this call.

        Returns False at once where the transport has no pings.
        """

    def unsent_bytes(self) -> int | None:
        """Bytes that were sent and not yet taken by the peer; None where that is unknown."""

    async def aclose(self) -> None:
        """Close, gracefully if that takes at most a second. May be called twice."""


class ResponseChannel(Channel, Protocol):
    """A channel that sends the response to one request."""

    async def send_whole(self, *lines: bytes) -> None:
        """As `send`, for lines that are the whole response."""

    @property
    def is_over(self) -> bool:
        """Whether the response is complete, or its client has gone: nothing is left to close."""


class ClientChannel(Channel, Protocol):
    """A channel for a client, which receives far more than it sends."""

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        """Like `receive`, but many messages in one block, as they came: that costs less.

        A `TooLarge` stands between two blocks. Each message is received once, by either method.
        """


@runtime_checkable
class RequestChannel(Protocol):
    """A channel with a connection for each request, as HTTP has: one may fail and others live.

    Where the server offers that, the channel continues an interrupted response by itself. A stream
    with a resume token is resumed over the next channel instead: then this channel must end when
    the response is interrupted.
    """

    def leave_to_token(self, request_id: RequestId) -> None:
        """Do not continue the response to this request: a resume token does that."""

    def listen(self) -> None:
        """Receive what belongs to no request as well, where that takes a response of its own."""

    def prepare(
        self,
        request_id: RequestId,
        last_event_id: bytes,
        *,
        is_resume: bool = False,
        may_lack_reply: bool = False,
    ) -> None:
        """Announce the next request, about a stream that was read up to this event.

        The response to a resume is not continued: the stream is resumed once more. A response that
        `may_lack_reply` may end without one: then an error with the reason `lost` is received in
        its place, and the channel goes on.
        """

    def settle(self, request_id: RequestId) -> None:
        """Stop waiting for the response to this request."""

    def last_event_id(self, request_id: RequestId) -> bytes:
        """The id of the response's last event whose lines were received and handled."""

    @property
    def received_for(self) -> RequestId | None:
        """The request whose response brought what was received last; None where that is unknown."""

    def heard_at(self, request_id: RequestId) -> float | None:
        """The time of the response's last byte, by trio's clock; None without a response."""

    def abandon(self, why: str) -> None:
        """End the channel, but not the session: the server may still work for it."""


class Dialer(Protocol):
    """Opens a new connection to the same server with each call."""

    def __call__(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Connect; leaving the block closes. Raises `OSError` when the server does not answer."""


Handler = Callable[[Channel], Awaitable[object]]
"""A transport runs it for each connection, and closes the connection when it returns."""


class Head(msgspec.Struct, frozen=True):
    """The head of a request: everything before its body.

    Names of `headers` are lower-case; repeated headers are joined by ", ".
    """

    method: str
    path: str  # without the query
    headers: Mapping[str, str]


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller."""

    principal: str
    holds_for_s: Callable[[], float]
    """For how many seconds from now the authentication is valid; check again after that. 0 or less
    once it has expired.
    """
    scopes: frozenset[str] = frozenset()  # of the bearer token
    claims: Mapping[str, Any] = NO_CLAIMS  # of a JWT; empty for other tokens


def claims_of(channel: Channel) -> Mapping[str, Any]:
    """The claims of the peer's bearer token. Channels that carry such tokens have `claims`."""
    claims: Mapping[str, Any] = getattr(channel, "claims", NO_CLAIMS)
    return claims


class TraceHeaders(msgspec.Struct, frozen=True):
    """The trace context of an HTTP request: headers of W3C Trace Context and W3C Baggage."""

    traceparent: str
    tracestate: str = ""
    baggage: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "TraceHeaders | None":
        """Those among these headers; None without a `traceparent`."""
        traceparent = headers.get("traceparent")
        if traceparent is None:
            return None
        return cls(traceparent, headers.get("tracestate", ""), headers.get("baggage", ""))


def http_trace_of(channel: Channel) -> TraceHeaders | None:
    """The trace context of the HTTP request that the channel answers or was opened by.

    Channels that come by HTTP have `http_trace`.
    """
    trace: TraceHeaders | None = getattr(channel, "http_trace", None)
    return trace


def transport_of(channel: Channel) -> str:
    """The transport's name: stdio, relay, websocket, http, memory. "" if the channel has none."""
    name: str = getattr(channel, "transport", "")
    return name


def has_refused_length(channel: Channel) -> bool:
    """Whether the peer has ended the connection because a message was longer than it accepts.

    Channels that are told such reasons have `has_refused_length`.
    """
    return bool(getattr(channel, "has_refused_length", False))


def authenticated(principal: str) -> str:
    """The principal, if it is that of an authenticated caller, else an empty string.

    An anonymous caller has another principal after each reconnect, so it proves nothing.
    """
    return principal if principal.startswith(("os(", "bearer(")) else ""


def is_anonymous(principal: str) -> bool:
    """Whether a principal names a session or a connection instead of an authenticated caller."""
    return principal.startswith(("session(", "conn("))


class Request(Head, frozen=True):
    """A whole request."""

    body: bytes
    caller: Caller | None = None  # None where the listener authenticates no callers
    query: str = ""  # of the target, behind its "?"


class HttpError(Exception):
    """A request that is answered with an HTTP error; the body is a JSON-RPC error.

    `refusal` is that error. A string becomes the message of an invalid request.
    """

    def __init__(self, status: int, refusal: Refusal | str, headers: Headers = ()) -> None:
        super().__init__(refusal)
        self.status = status
        self.refusal = Refusal(INVALID_REQUEST, refusal) if isinstance(refusal, str) else refusal
        self.headers = headers
        self.request_id: RequestId | None = None  # where the body of the request was read


class Responder(Protocol):
    """Sends the response: either `respond` once, or `start`, any number of `write`, `finish`.

    These four raise `trio.BrokenResourceError` when the peer is gone. One caller at a time. A
    cancelled call leaves half a response, so the connection closes. Raises `ValueError` for headers
    that HTTP does not allow, or that say where the body ends.
    """

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Send a whole response, with a Content-Length."""

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        """Begin a response of unknown length; head and `first` go out in one write.

        With `("connection", "close")` among the headers, the response ends with the connection.
        """

    async def write(self, *data: bytes) -> None:
        """Send more of the body, in pieces; on return the kernel has all of them."""

    async def finish(self) -> None:
        """End the response; the connection may be used for the next request."""

    async def gone(self) -> None:
        """Wait until the peer has closed its side of the connection, or broken it."""

    def is_open(self) -> bool:
        """Whether the peer may still read. Once False, it stays False."""

    def unsent_bytes(self) -> int | None:
        """Bytes that were written and not yet taken by the peer; None where that is unknown."""


Endpoint = Callable[[Request, Responder], Awaitable[None]]

Admit = Callable[[Head], Awaitable[Caller | None]]
"""Authenticates a request. None for a request that needs no caller. Raises `HttpError`."""

Screen = Callable[[Request], int | None]
"""Looks at a request before its body is read: `Request.body` is empty. Returns how many bytes the
body may have; None for the listener's limit. Raises `HttpError` to refuse the request.
"""

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]


class Departure(Protocol):
    """The end of a server as its listeners see it: they accept nothing more, and answer what came.

    A balancer sends a request to another process only if this one has not accepted the connection.
    So the server waits for what was accepted before it ends: listeners and requests `enter`, and
    `leave` when they are closed and when a response has begun.
    """

    @property
    def has_begun(self) -> bool:
        """Whether nothing new is accepted any more."""

    async def begun(self) -> None:
        """Wait until it begins."""

    def enter(self) -> None:
        """One more listener, or request, that the server must wait for."""

    def leave(self) -> None:
        """The opposite of `enter`."""


class AsgiApp(Protocol):
    """An ASGI application, for an ASGI server or to mount in another application."""

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Answer one request, or run for the length of the server's lifespan."""

    def lifespan(self, app: Any = None) -> AbstractAsyncContextManager[None]:
        """Serve for the length of a block: `FastAPI(lifespan=mounted.lifespan)`.

        Entering opens the journal. Leaving shuts down within 4 s, after the grace if one is set,
        and closes the journal.
        """

    async def metrics(self, accept: str = "") -> tuple[bytes, str]:
        """The text for Prometheus and its media type, for a request with this `Accept`.

        Each process tells of itself. Raises `RuntimeError` without `Server.asgi(metrics=True)`, and
        while the server does not run.
        """
