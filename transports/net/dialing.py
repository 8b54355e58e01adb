"""How a client connects: a URL taken apart, the token to show there, the connection as far as TLS.

A bearer token is as good as its owner. So it goes over TLS, or no further than this machine.
"""

import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from transports.net.origins import names_loopback
from transports.net.sockets import keep_alive

# How long a connection may take, to the end of a WebSocket's handshake.
CONNECT_S: Final = 10.0

# A network that was away has lost the first packet of a connection. TCP repeats it after 1, 3, 7
# and 15 s, so that a connection which is begun anew is there sooner.
AGAIN_S: Final = 2.0

_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")

Token = str | Callable[[], str] | None
"""A token, or what gives it whenever a connection is opened."""

ClientStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Scheme(msgspec.Struct, frozen=True):
    """What a URL begins with; with an s behind it, it is spoken over TLS."""

    plain: str
    name: str
    default_path: str


HTTP: Final = Scheme("http", "HTTP", "/mcp")
WEBSOCKET: Final = Scheme("ws", "WebSocket", "/")


class Address:
    """A URL of `scheme` taken apart. Raises `ValueError` with a sentence when it is none."""

    def __init__(self, url: str, scheme: Scheme) -> None:
        parts = urlsplit(url)
        plain, secure = scheme.plain, f"{scheme.plain}s"
        if parts.scheme not in (plain, secure) or not parts.hostname:
            raise ValueError(
                f"{url!r} is no {scheme.name} URL: write {plain}://HOST:PORT or {secure}://HOST"
            )
        if parts.username is not None:
            raise ValueError("a URL is no place for a password: leave out what is before the @")
        self.url = url
        self.is_tls = parts.scheme == secure
        self.host = parts.hostname
        self.port = parts.port or (443 if self.is_tls else 80)
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
    """Raises `ValueError` for what is no token, or where others could read it on its way."""
    if isinstance(token, str) and not _PRINTABLE.fullmatch(token):
        raise ValueError("a token is not empty, and of printable ASCII without blanks")
    if token is not None and not (address.is_tls or names_loopback(address.host)):
        raise ValueError(f"{address.url} is no place for a token, which others could read: use TLS")


def bearer_for(address: Address, token: Token) -> str | None:
    """The token to show at an address, if any.

    Raises `ValueError` as `check_place` does, or `OSError` where it cannot be had now.
    """
    check_place(address, token)
    if token is None:
        return None
    given = token if isinstance(token, str) else token()
    if not _PRINTABLE.fullmatch(given):  # it may be another one the next time
        raise ConnectionError(f"{address.url}: there is no token to show, or it is none")
    return given


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header that shows it, where there is one."""
    return [] if token is None else [("Authorization", f"Bearer {token}")]


async def reach(
    address: Address, ssl_context: ssl.SSLContext | None, deadline: float
) -> tuple[trio.SocketStream, ClientStream]:
    """Connect, as far as TLS: the TCP connection, and what to talk over.

    Raises `OSError` with a sentence, whatever goes wrong until `deadline`.
    """
    with trio.CancelScope(deadline=deadline):
        tcp = await _connect(address)
        try:
            keep_alive(tcp.socket)
            return tcp, await _secure(tcp, address, ssl_context) if address.is_tls else tcp
        except BaseException as error:
            await trio.aclose_forcefully(tcp)
            if not isinstance(error, trio.BrokenResourceError):
                raise
            why = error.__cause__ or "the server hung up during the handshake"
            raise ConnectionResetError(f"{address.url}: {why}") from error
    raise too_late(address)


async def _connect(address: Address) -> trio.SocketStream:
    """The first of several connections that are begun one after the other. Raises `OSError`."""
    found: list[trio.SocketStream] = []
    failures: list[OSError] = []

    async def begin(first: trio.CancelScope) -> None:
        try:
            tcp = await trio.open_tcp_stream(address.host, address.port)
        except OSError as error:
            failures.append(error)
        else:
            found.append(tcp)
        first.cancel()

    try:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(begin, nursery.cancel_scope)
                await trio.sleep(AGAIN_S)
    except BaseException:
        for each in found:
            await trio.aclose_forcefully(each)
        raise
    for late in found[1:]:
        await trio.aclose_forcefully(late)
    if not found:
        raise failures[0]
    return found[0]


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
    """A nursery whose tasks `aclose` ends, whatever becomes of the block.

    An error of the block is raised as it is, where a nursery alone would make a group of it.
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
            del failure  # it refers to this frame, and would keep it alive


async def begin_or_leave() -> None:
    """Ahead of a shielded scope of a task that `nursery.start` begins: leave if that was cancelled.

    Whoever calls `started` too late is not taken over by the nursery: `start` waits for it to be
    cancelled, and that nothing behind a shield ever is.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
