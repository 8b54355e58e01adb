"""Listening for HTTP and WebSocket: sockets, TLS, checks of each connection, refusals.

A refusal is one HTTP response with a JSON-RPC error as its body. Then the connection closes, late
enough for the peer to read it.
"""

import contextlib
import errno
import http
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NoReturn, TypedDict

import trio

from streams import messages
from streams.errors import INTERNAL_ERROR, Refusal, refusal
from streams.exchange import Admit, Caller, Departure, Head, HttpError
from streams.forks import withhold
from streams.logs import Warnings, log
from streams.turns import TURN_UNITS, Turns
from transports.net.closing import drop_new_connections
from transports.net.origins import Origins, names_loopback
from transports.net.sockets import CLOSE_S, ServerStream, close_gracefully, keep_alive

# How many connections may be open, including those in a handshake. The next one gets a 503.
CONNECTIONS_MAX: Final = 10_000

# How many connections may wait to be accepted: a thousand clients may reconnect at once.
BACKLOG: Final = 4096

# 64 KiB cost half the throughput, 256 KiB a fifth. A larger buffer would let a stalled peer use
# more of the kernel's memory.
SEND_BUFFER_BYTES: Final = 512 * 1024

# How many connections are accepted before other tasks run. With 64, forty tools that began together
# made a server 30 MiB larger than when they began one after the other.
ACCEPTED_MAX: Final = 4

# File descriptors that connections leave free, for reads of the journal and for refusals.
DESCRIPTORS_KEPT: Final = 32

# How long to wait when the system has no free file descriptors or no memory for a connection.
SHORTAGE_S: Final = 0.1

HANDSHAKE_S: Final = 10.0

# How long a TCP handshake takes that has begun: one round trip.
ARRIVAL_S: Final = 0.1

_SOON: Final = ("Retry-After", "1")

_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

Contexts = ssl.SSLContext | Callable[[], ssl.SSLContext]
"""A TLS context, or a function that returns one for each handshake: certificates are renewed."""

OnConnection = Callable[[trio.Nursery, trio.SocketStream], Awaitable[object]]


class ListenOptions(TypedDict, total=False):
    """The options that `serve` has for HTTP and for WebSocket."""

    connections_max: int
    """How many connections may be open, including those in a handshake. The next one gets a 503."""

    gives_way: bool
    """Over HTTP: whether beyond that the connection which has waited longest for its peer is
    closed: for a request, or for room to write. So idle peers keep no others out. At twice as many
    the next one gets the 503."""

    per_principal_max: int | None
    """How many connections an authenticated caller may have; over HTTP, how many requests at once.
    """

    allowed_hosts: Collection[str] | None
    """Names that `Host` may have, besides those that `transports.net.origins` always allows. None:
    any name, or none, and any origin: the endpoint checks them."""

    allowed_origins: Collection[str]
    """Origins of web pages that may connect, likewise."""

    ssl_context: Contexts | None
    """With it, all connections must use TLS."""

    admit: Admit | None
    """Authenticates each request, before its body is read."""

    sockets: Sequence[socket.socket]
    """Sockets that listen already, to be used in place of the host and the port."""

    is_shared: bool
    """Other processes listen at `sockets`, too: what is not accepted here waits for them."""

    departure: Departure | None
    """Once it begins no connection is accepted, and new ones are refused. Open ones live on."""


class Listener:
    """Listens at one address, and checks each connection."""

    def __init__(self, listeners: Sequence[trio.SocketListener], options: ListenOptions) -> None:
        self._listeners = listeners
        self.origins = _origins_for(
            listeners, options.get("allowed_hosts", ()), options.get("allowed_origins", ())
        )
        self._ssl_context = options.get("ssl_context")
        self._admit = options.get("admit")
        self.departure = options.get("departure")
        self._is_shared = options.get("is_shared", False)
        self._open = 0
        self._refusals = Warnings()
        self._handshakes = Turns()
        self._connections_max = options.get("connections_max", CONNECTIONS_MAX)
        self._gives_way = options.get("gives_way", False)
        self._per_principal_max = options.get("per_principal_max")
        self._of_principal: Counter[str] = Counter()
        descriptors_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._descriptors_max = descriptors_max - DESCRIPTORS_KEPT

    @property
    def port(self) -> int:
        return port_of(self._listeners)

    async def serve(self, serve_connection: OnConnection) -> NoReturn:
        """Run `serve_connection` for each connection and close that afterwards, until cancelled."""

        async def serve_counted(nursery: trio.Nursery, tcp: trio.SocketStream) -> None:
            self._open += 1
            try:
                await serve_connection(nursery, tcp)
            finally:
                self._open -= 1

        await serve_listeners(
            serve_counted, self._listeners, self.departure, is_shared=self._is_shared
        )

    @property
    def has_tls(self) -> bool:
        return self._ssl_context is not None

    async def secure(self, tcp: trio.SocketStream) -> ServerStream:
        """Return `tcp` itself, or TLS over it. The caller bounds the time of the handshake.

        TLS handshakes are done in turn. Raises `trio.BrokenResourceError`.
        """
        context = self._ssl_context
        if context is None:
            return tcp
        if not isinstance(context, ssl.SSLContext):
            context = context()
        await trio.lowlevel.wait_readable(tcp.socket)
        await self.turn()
        stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
        await stream.do_handshake()
        return stream

    async def turn(self) -> None:
        """Wait for the turn of a handshake that has come.

        It is as much work as some frames, and a thousand may come in the same moment.
        """
        if self._handshakes.spend(TURN_UNITS):
            await self._handshakes.wait()

    def check_room(
        self, tcp: trio.SocketStream, make_room: Callable[[], bool] = lambda: False
    ) -> None:
        """Raises `HttpError` for too many connections, `tcp` included, or too few free descriptors.

        With `gives_way` it calls `make_room` first, which closes another one, or returns False.
        The kernel always assigns the lowest free descriptor, so its number shows how many are used.
        """
        has_one_of_the_last = tcp.socket.fileno() >= self._descriptors_max
        is_full = self._open > self._connections_max
        if is_full and self._gives_way and self._open <= 2 * self._connections_max:
            is_full = not make_room()
        if is_full or has_one_of_the_last:
            full = "Too many connections are open: try again later."
            few = f"{DESCRIPTORS_KEPT} file descriptors are left"
            why = few if has_one_of_the_last else f"{self._connections_max} are open"
            self._refusals.warn("listening.no_room_for_connections", why=why)
            raise HttpError(503, Refusal(INTERNAL_ERROR, full))

    async def authenticate(self, head: Head) -> Caller | None:
        """Authenticate a request; None where the listener asks for no token. Raises `HttpError`."""
        return await self._admit(head) if self._admit is not None else None

    @contextlib.contextmanager
    def counted(self, caller: Caller | None) -> Iterator[None]:
        """Count a connection of this caller during the block. Raises `HttpError` for too many."""
        if caller is None:
            yield
            return
        principal, limit = caller.principal, self._per_principal_max
        if limit is not None and self._of_principal[principal] >= limit:
            raise HttpError(429, refusal("too_many_connections", limit=limit), [_SOON])
        self._of_principal[principal] += 1
        try:
            yield
        finally:
            self._of_principal[principal] -= 1
            if not self._of_principal[principal]:
                del self._of_principal[principal]


async def open_listener(host: str, port: int, options: ListenOptions) -> Listener:
    """Listen at every address of `host`, or at the sockets in the options.

    Raises `OSError` when an address cannot be bound.
    """
    taken = options.get("sockets", ())
    return Listener(_adopted(taken) if taken else await listen(host, port), options)


def _adopted(sockets: Sequence[socket.socket]) -> list[trio.SocketListener]:
    for each in sockets:
        each.setblocking(False)
    made = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in sockets]
    _set_options(made)
    return made


def _set_options(listeners: Iterable[trio.SocketListener]) -> None:
    """Set the options that accepted connections inherit."""
    for listener in listeners:
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if listener.socket.family != socket.AF_UNIX:
            keep_alive(listener.socket)


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Listen at every address of `host`, all at the same port; 0 picks a free one.

    Raises `OSError` when an address cannot be bound.
    """
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    if port == 0:
        # Each address got a port of its own: the others move to that of the first.
        port = listeners[0].socket.getsockname()[1]
        others = [listener.socket.getsockname()[0] for listener in listeners[1:]]
        for listener in listeners[1:]:
            await listener.aclose()
        del listeners[1:]
        try:
            for address in others:
                listeners += await trio.open_tcp_listeners(port, host=address, backlog=BACKLOG)
        except OSError:
            for listener in listeners:
                await listener.aclose()
            raise
    _set_options(listeners)
    return listeners


async def serve_listeners(
    serve_connection: OnConnection,
    listeners: Sequence[trio.SocketListener],
    departure: Departure | None = None,
    *,
    is_shared: bool = False,
) -> NoReturn:
    """Run `serve_connection` for each connection and close that afterwards, until cancelled; then
    close the listeners. With a `departure` the listeners are closed once that begins.

    While the system has no free file descriptors, new connections wait in the kernel's queue. No
    connection is refused, and one warning is logged.
    """
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(_accept_from, listener, serve_connection, nursery)
            if departure is not None:
                await _depart(departure, listeners, is_shared=is_shared)
                accepting.cancel_scope.cancel()
        if departure is not None:
            await trio.lowlevel.checkpoint()  # what was accepted last has begun
            departure.leave()
        await trio.sleep_forever()
    raise AssertionError("listeners end by cancellation only")


async def _depart(
    departure: Departure, listeners: Sequence[trio.SocketListener], *, is_shared: bool
) -> None:
    """Wait until the listeners can be closed without the loss of a connection.

    The kernel resets the connections that a closed listener has not accepted, and their first
    requests are lost. So it drops attempts to connect first, and all handshakes that have begun
    come to their end. A peer whose attempt was dropped tries again, and is refused then.
    """
    departure.enter()
    await departure.begun()
    if not is_shared and drop_new_connections(each.socket for each in listeners):
        await trio.sleep(ARRIVAL_S)


async def _accept_from(
    listener: trio.SocketListener, serve_connection: OnConnection, nursery: trio.Nursery
) -> None:
    withhold(listener.socket)
    arrivals = Turns()
    async with listener:
        is_short = False
        while True:
            await trio.lowlevel.wait_readable(listener.socket)
            if arrivals.spend(TURN_UNITS):
                await arrivals.wait()
            try:
                for connection in _accepted(listener.socket):
                    is_short = False
                    nursery.start_soon(_serve, connection, serve_connection, nursery)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                if not is_short:
                    log.warning("listening.no_room_for_connections", why=str(error))
                is_short = True
                await trio.sleep(SHORTAGE_S)


def _accepted(listener: trio.socket.SocketType) -> Iterator[trio.SocketStream]:
    """Accept the connections that wait, up to `ACCEPTED_MAX`. Raises `OSError` for a shortage."""
    accepting = socket.socket(fileno=listener.fileno())  # of the standard library: does not wait
    try:
        for _ in range(ACCEPTED_MAX):
            try:
                connection, _ = accepting.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            withhold(stream.socket)
            yield stream
    finally:
        accepting.detach()


async def _serve(
    connection: trio.SocketStream, serve_connection: OnConnection, nursery: trio.Nursery
) -> None:
    try:
        await serve_connection(nursery, connection)
    finally:
        connection.socket.close()


def port_of(listeners: Sequence[trio.SocketListener]) -> int:
    """The port; 0 of a Unix socket."""
    address = listeners[0].socket.getsockname()
    return address[1] if isinstance(address, tuple) else 0


def _origins_for(
    listeners: Sequence[trio.SocketListener],
    hosts: Collection[str] | None,
    origins: Collection[str],
) -> Origins:
    """The checks of `Host` and `Origin` for `listeners`, which allow `hosts` and `origins`."""
    names = [listener.socket.getsockname() for listener in listeners]
    return Origins(
        # A Unix socket's address is its path: only this machine can connect to it.
        is_loopback=all(isinstance(name, str) or names_loopback(name[0]) for name in names),
        hosts=frozenset(name.lower() for name in hosts or ()),
        origins=frozenset(name.lower() for name in origins),
        takes_any_host=hosts is None,
    )


def _response(refused: HttpError) -> bytes:
    phrase = http.HTTPStatus(refused.status).phrase
    body = messages.error(refused.request_id, refused.refusal)
    fields = [
        *refused.headers,
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    lines = [f"HTTP/1.1 {refused.status} {phrase}", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def refuse(stream: ServerStream, refused: HttpError) -> None:
    """Send the refusal and end the connection, within a second; the caller closes it."""
    with trio.move_on_after(CLOSE_S):
        try:
            await stream.send_all(_response(refused))
        except trio.BrokenResourceError:
            return  # the peer did not wait for the response
        await close_gracefully(stream)
