"""How a client connects: the URL, the bearer token, TCP and TLS, and the tasks of a channel.

A bearer token works for anyone who reads it. So it is sent over TLS, or to this machine only.
"""

import errno
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from streams.errors import ServerRefused
from transports.net.origins import names_loopback
from transports.net.sockets import close_at_once, keep_alive

# How long connecting may take, including TLS and the handshake of a WebSocket.
CONNECT_S: Final = 10.0

# While a network is down, the first packet of a connection is lost. TCP sends it again after 1, 3,
# 7 and 15 s. A second connection, begun after this time, is often faster.
SECOND_TRY_S: Final = 2.0

_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")

_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_VALUE: Final = re.compile(r"[\x20-\x7e]*")
_OWN_FIELDS: Final = frozenset(
    {
        *("host", "connection", "upgrade", "transfer-encoding", "content-length", "content-type"),
        *("accept", "accept-encoding", "user-agent", "last-event-id"),
        *("mcp-session-id", "mcp-protocol-version"),
    }
)

Headers = Sequence[tuple[str, str]]
"""Headers that a client adds to each of its requests, or to its WebSocket handshake."""

Token = str | Callable[[], str] | None
"""A bearer token, or a function that returns it for each new connection."""

ClientStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Scheme(msgspec.Struct, frozen=True):
    """The scheme of a URL, such as `http`; with an s at its end, the connection uses TLS."""

    plain: str
    name: str
    default_path: str


HTTP: Final = Scheme("http", "HTTP", "/mcp")
WEBSOCKET: Final = Scheme("ws", "WebSocket", "/")


class Address:
    """The parts of a URL of this scheme. Raises `ValueError`, which says what is wrong with it."""

    def __init__(self, url: str, scheme: Scheme) -> None:
        parts = urlsplit(url)
        plain, secure = scheme.plain, f"{scheme.plain}s"
        if parts.scheme not in (plain, secure) or not parts.hostname:
            raise ValueError(
                f"{url!r} is no {scheme.name} URL: write {plain}://HOST:PORT or {secure}://HOST"
            )
        if parts.username is not None:
            raise ValueError("a URL must not contain a password: leave out the part before the @")
        self.url = url
        self.is_tls = parts.scheme == secure
        self.host = parts.hostname
        default = 443 if self.is_tls else 80
        self.port = default if parts.port is None else parts.port  # a 0 is refused by the system
        self.target = (parts.path or scheme.default_path) + (
            f"?{parts.query}" if parts.query else ""
        )
        if not _PRINTABLE.fullmatch(self.target):
            raise ValueError(f"{url!r} has characters that must be percent-encoded")
        self.host.encode("idna")  # raises UnicodeError, which is a ValueError

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def check_place(address: Address, token: Token) -> None:
    """Raises `ValueError` for an invalid token, or an address to which it must not be sent."""
    if isinstance(token, str) and not _PRINTABLE.fullmatch(token):
        raise ValueError("a bearer token has printable ASCII characters without blanks")
    if token is not None and not (address.is_tls or names_loopback(address.host)):
        raise ValueError(f"{address.url}: others could read the bearer token on its way: use TLS")


def bearer_for(address: Address, token: Token) -> str | None:
    """The bearer token to send to an address, if any.

    Raises `ValueError` as `check_place` does, or `OSError` where there is no valid token now.
    """
    check_place(address, token)
    if token is None:
        return None
    given = token if isinstance(token, str) else _asked(address, token)
    # The function may return a valid one the next time.
    if not (isinstance(given, str) and _PRINTABLE.fullmatch(given)):
        raise ConnectionError(f"{address.url}: the bearer token is missing or invalid")
    return given


def _asked(address: Address, token: Callable[[], str]) -> str:
    """The bearer token of a user's function, whose failure is one to connect: it may pass."""
    try:
        return token()
    except OSError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConnectionError(f"{address.url}: there is no bearer token: {why}") from error


def check_headers(address: Address, headers: Headers) -> None:
    """Raises `ValueError` for a header that HTTP does not allow, that the client sets itself, or
    that must not be sent to this address, since it may be a secret. Raises `TypeError` for a dict.
    """
    if isinstance(headers, Mapping):
        raise TypeError("headers: expected pairs, such as [('name', 'value')], got a dict")
    for name, value in headers:
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is no header of printable ASCII characters")
        if name.lower() in _OWN_FIELDS or name.lower().startswith("sec-"):
            raise ValueError(f"the header {name} is set by the client itself: leave it out")
    if headers and not (address.is_tls or names_loopback(address.host)):
        raise ValueError(f"{address.url}: others could read the headers on their way: use TLS")


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header with the bearer token, if there is one."""
    return [] if token is None else [("Authorization", f"Bearer {token}")]


async def reach(
    address: Address,
    ssl_context: ssl.SSLContext | None,
    deadline: float,
    *,
    place: str | None = None,
) -> tuple[trio.SocketStream, ClientStream]:
    """Connect, including TLS. Returns the TCP connection, and the stream over it to use.

    `place` is the IP address to connect to; by default all that the host has are tried. Raises
    `OSError` for every failure, and at `deadline`.
    """
    with trio.CancelScope(deadline=deadline):
        tcp = await _connect(address, place or address.host)
        try:
            keep_alive(tcp.socket)
            return tcp, await _secure(tcp, address, ssl_context) if address.is_tls else tcp
        except BaseException as error:
            await close_at_once(tcp)
            if not isinstance(error, trio.BrokenResourceError):
                raise
            raise _handshake_failed(address, error.__cause__) from error
    raise too_late(address)


async def _connect(address: Address, host: str) -> trio.SocketStream:
    """The first to succeed of several connections, begun one after the other. Raises `OSError`."""
    found: list[trio.SocketStream] = []
    failures: list[OSError] = []

    async def begin(first: trio.CancelScope) -> None:
        try:
            tcp = await trio.open_tcp_stream(host, address.port)
        except OSError as error:
            failures.append(error)
        else:
            found.append(tcp)
        first.cancel()

    try:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(begin, nursery.cancel_scope)
                await trio.sleep(SECOND_TRY_S)
    except BaseException:
        for each in found:
            await close_at_once(each)
        raise
    for late in found[1:]:
        await close_at_once(late)
    if not found:
        raise _unreachable(address, failures[0]) from failures[0]
    return found[0]


def _unreachable(address: Address, error: OSError) -> OSError:
    """The same error, with the name of the host in it and the reasons that the system gives."""
    if isinstance(error, socket.gaierror):
        why = f"{address.url}: the host {address.host} cannot be found ({error.strerror})"
        return socket.gaierror(why)
    cause = error.__cause__
    causes = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
    reasons = ", ".join(dict.fromkeys(map(_reason, causes)))
    return type(error)(f"{address.url}: {error}{reasons and f': {reasons}'}")


def _reason(error: BaseException) -> str:
    """The system's own words: those of trio's error repeat the address."""
    number = getattr(error, "errno", None)
    if number == errno.ECONNREFUSED:
        return f"{os.strerror(number)} (no server listens there)"
    return str(error) if number is None else os.strerror(number)


def _handshake_failed(address: Address, cause: BaseException | None) -> OSError:
    """The error for a failed TLS handshake, which a retry does not always help."""
    why = cause or "the server hung up during the handshake"
    reason = cause.reason if isinstance(cause, ssl.SSLError) else ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        plain = address.url.replace("s:", ":", 1)
        advice = f"the server speaks no TLS there; without TLS, its URL is {plain}"
    elif isinstance(cause, ssl.SSLCertVerificationError):
        advice = "name the certificate authority in SSL_CERT_FILE if you trust it"
    else:
        return ConnectionResetError(f"{address.url}: {why}")
    return ServerRefused(f"{address.url}: {why}: {advice}")


async def _secure(
    tcp: trio.SocketStream, address: Address, ssl_context: ssl.SSLContext | None
) -> trio.SSLStream[trio.SocketStream]:
    context = ssl_context or ssl.create_default_context()
    stream = trio.SSLStream(tcp, context, server_hostname=address.host, https_compatible=True)
    await stream.do_handshake()
    return stream


def too_late(address: Address) -> TimeoutError:
    return TimeoutError(f"{address.url}: no answer in time")


@asynccontextmanager
async def tasks_until(aclose: Callable[[], Awaitable[object]]) -> AsyncIterator[trio.Nursery]:
    """A nursery for the tasks of a channel; `aclose` ends them at the end of the block.

    An error of the block is raised as it is; a nursery alone would put it into a group.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except BaseException as error:
            failure = error
        with trio.CancelScope(shield=True):
            await aclose()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame: a reference cycle


async def begin_or_leave() -> None:
    """Call this before a shielded scope in a task that `nursery.start` begins.

    If `start` was cancelled, it waits until the task ends by that cancellation. A task that is
    already behind its shield would never end. So it must end here.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
