"""One HTTP request and its response, as the endpoint sees them: no socket and no framework.

A listener (`transports.http`) reads the request, body and all, and hands it over with a
`Responder`. An ASGI application could do the same. Who may come in at all is decided on the head of
a request alone, by an `Admit`: a stranger's body is not read. Nor is that of a request which its
head alone refuses: that is for a `Screen` to say.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, runtime_checkable

import msgspec

from streams.errors import INVALID_REQUEST, Refusal
from streams.messages import Block, Incoming, RequestId, TooLarge

Scopes = frozenset[str] | None
"""The scopes of a peer; None for a peer that may use all tools."""

Headers = Sequence[tuple[str, str]]

_SCOPE: Final = re.compile(r"[!#-\[\]-~]{1,255}")  # RFC 6749, 3.3; the length is ours


def checked_scopes(given: Iterable[str]) -> tuple[str, ...]:
    """Scopes, each of them once. Raises `TypeError` for one string, `ValueError` for no scope."""
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


Handler = Callable[[Channel], Awaitable[object]]
"""What a transport runs for each connection; the connection closes when it returns."""


class Head(msgspec.Struct, frozen=True):
    """What comes ahead of a request's body.

    Names of `headers` are lower-case; what came twice is joined by ", ".
    """

    method: str
    path: str  # without the query
    headers: Mapping[str, str]


class Caller(msgspec.Struct, frozen=True):
    """Somebody who has shown who they are."""

    principal: str
    holds_for_s: Callable[[], float]
    """For how many seconds from now that may be taken for granted, and is to be asked again then;
    0 or less once it holds no longer.
    """
    scopes: frozenset[str] = frozenset()  # that the token was given


def authenticated(principal: str) -> str:
    """A principal of an authenticated caller; empty for any other.

    An anonymous connection is not the same one after a reconnect.
    """
    return principal if principal.startswith(("os(", "bearer(")) else ""


def is_anonymous(principal: str) -> bool:
    """Whether a principal stands for a session or a connection, and not for a known caller."""
    return principal.startswith(("session(", "conn("))


class Request(Head, frozen=True):
    """A whole request."""

    body: bytes
    caller: Caller | None = None  # None where nobody is asked who they are


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
    """Where the response goes: either `respond` once, or `start`, any number of `write`, `finish`.

    All but the last two properties raise `trio.BrokenResourceError` when the peer is gone. One
    caller at a time; a cancelled call leaves half a response, so the connection closes.
    """

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Send a whole response; the length of `body` is announced here."""

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        """Begin a response whose length nobody knows; head and `first` go out in one write.

        With `("connection", "close")` among the headers it ends with the connection.
        """

    async def write(self, *data: bytes) -> None:
        """Send more of it, in pieces; when this returns it is the operating system's."""

    async def finish(self) -> None:
        """End it; the connection may be used again."""

    async def gone(self) -> None:
        """Wait until the peer has hung up, which counts however politely it does so."""

    def is_open(self) -> bool:
        """Whether the peer may still read; once False, always False."""

    def unsent_bytes(self) -> int | None:
        """Bytes that were written but not yet taken by the peer; None where nobody can tell."""


Endpoint = Callable[[Request, Responder], Awaitable[None]]

Admit = Callable[[Head], Awaitable[Caller | None]]
"""Who a request comes from; None for who need not say so. Raises `HttpError`."""

Screen = Callable[[Request], int | None]
"""How long the body of a request may be, in bytes, before any of it is read; None for as long as
any. The request that it is asked about has none yet. Raises `HttpError` for what the head refuses.
"""
