"""What the listeners that speak HTTP have in common: the door, and how somebody is turned away.

A refusal is one HTTP response with a JSON-RPC error in it, and then the end of the connection, slow
enough for the peer to read it.
"""

import contextlib
import errno
import http
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Final, NoReturn

import trio

from streams import messages
from streams.errors import INVALID_REQUEST, Refusal, refusal
from streams.exchange import Admit, Caller, Denied, Head
from streams.forks import withhold
from streams.logs import log
from streams.messages import RequestId
from streams.turns import FREE_UNITS, TURN_UNITS, Turns
from transports.lines import CLOSE_S
from transports.origins import Origins, names_loopback

# How many connections may be open, handshakes included; whoever comes after them gets a 503.
CONNECTIONS_MAX: Final = 10_000

# A thousand clients that come back at once must not find the door shut.
BACKLOG: Final = 4096

# Half the throughput is lost at 64 KiB, a fifth at 256; with more, a stalled reader costs more of
# the kernel's memory.
SEND_BUFFER_BYTES: Final = 512 * 1024

# How long the kernel goes on about bytes that nobody acknowledges, or no window is opened for.
USER_TIMEOUT_MS: Final = 180_000

# How many are accepted before others run. With 64, forty tools that began together left a server
# 30 MiB larger than when they began in turn.
ACCEPTED_MAX: Final = 4

# One read of what is thrown away at the end of a connection, and the pause after it. A refused body
# of 4 MiB is read in 0.2 s: some clients look for the answer only then. A client that floods a
# connection after its end is read at 25 MB/s at most.
DISCARDED_BYTES: Final = 256 * 1024
DISCARD_PAUSE_S: Final = 0.01
# What such a read counts as in `Turns`: the second one joins the queue of the busy connections.
DISCARD_UNITS: Final = int(FREE_UNITS)

# File descriptors that are left for what is no connection, as a look into the journal, and for who
# is turned away.
DESCRIPTORS_KEPT: Final = 32

# How long to wait for file descriptors, or memory of the kernel's, where there are none.
SHORTAGE_S: Final = 0.1

HANDSHAKE_S: Final = 10.0

_discarded: Final = bytearray(DISCARDED_BYTES)  # one for all connections: nothing is read from it

_SOON: Final = (b"Retry-After", b"1")

_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

Contexts = ssl.SSLContext | Callable[[], ssl.SSLContext]
"""The context of TLS, or a function that gives it for each handshake: certificates are renewed."""

TLSStream = trio.SSLStream[trio.SocketStream]
ServerStream = trio.SocketStream | TLSStream

Welcome = Callable[[trio.Nursery, trio.SocketStream], Awaitable[object]]


class Room:
    """How many connections are open at one listener, and whether there is room for one more; of
    those whose callers are known also how many each of them has.
    """

    def __init__(self, connections_max: int, per_principal_max: int | None = None) -> None:
        self.open = 0
        self._connections_max = connections_max
        self._per_principal_max = per_principal_max
        self._of_principal: Counter[str] = Counter()
        descriptors_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._descriptors_max = descriptors_max - DESCRIPTORS_KEPT

    def is_over_full(self, tcp: trio.SocketStream) -> bool:
        """Whether `tcp`, which counts as open already, is one too many, or has one of the last file
        descriptors: the kernel gives the lowest that is free.
        """
        has_one_of_the_last = tcp.socket.fileno() >= self._descriptors_max
        return self.open > self._connections_max or has_one_of_the_last

    @contextlib.contextmanager
    def held_by(self, caller: Caller | None) -> Iterator[None]:
        """Room for one more that this caller has. Raises `Refused` where it has too many."""
        if caller is None:
            yield
            return
        principal, limit = caller.principal, self._per_principal_max
        if limit is not None and self._of_principal[principal] >= limit:
            raise Refused(429, refusal("too_many_connections", limit=limit), [_SOON])
        self._of_principal[principal] += 1
        try:
            yield
        finally:
            self._of_principal[principal] -= 1
            if not self._of_principal[principal]:
                del self._of_principal[principal]


class Refused(Exception):
    """A request that ends with an HTTP error and the end of its connection.

    `why` is one sentence that says what to do next, or the JSON-RPC error that has it.
    """

    def __init__(
        self, status: int, why: str | Refusal, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(why)
        self.status = status
        self.refusal = Refusal(INVALID_REQUEST, why) if isinstance(why, str) else why
        self.headers = headers
        self.request_id: RequestId | None = None  # of a request that was read before it was refused

    def response(self) -> bytes:
        phrase = http.HTTPStatus(self.status).phrase
        body = messages.error(self.request_id, self.refusal)
        fields = [
            *self.headers,
            (b"Content-Type", b"application/json"),
            (b"Content-Length", str(len(body)).encode()),
            (b"Connection", b"close"),
        ]
        lines = [f"HTTP/1.1 {self.status} {phrase}".encode()]
        lines += [name + b": " + value for name, value in fields]
        return b"\r\n".join([*lines, b"", body])


# -- the door


async def admitted(admit: Admit | None, head: Head) -> Caller | None:
    """Who is at the door, where anybody asks. Raises `Refused`."""
    if admit is None:
        return None
    try:
        return await admit(head)
    except Denied as denied:
        raise refused_as(denied) from None


def refused_as(denied: Denied) -> Refused:
    """The same, as a response that ends the connection."""
    headers = [(name.encode(), value.encode()) for name, value in denied.headers]
    return Refused(denied.status, denied.refused, headers)


async def secured(tcp: trio.SocketStream, context: Contexts | None) -> ServerStream:
    """`tcp` itself, or TLS over it; whoever calls bounds the time that a handshake takes.

    Raises `trio.BrokenResourceError`.
    """
    if context is None:
        return tcp
    if not isinstance(context, ssl.SSLContext):
        context = context()
    stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
    await stream.do_handshake()
    return stream


def tcp_of(stream: ServerStream) -> trio.SocketStream:
    """The connection below."""
    return stream if isinstance(stream, trio.SocketStream) else stream.transport_stream


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Listen at every address of `host`, at one and the same port; 0 picks a free one.

    Raises `OSError` when an address cannot be had.
    """
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    if port == 0:
        # Each address was given a port of its own: the others move to that of the first.
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
    for listener in listeners:
        # What is accepted inherits all of it.
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        keep_alive(listener.socket)
    return listeners


async def serve_listeners(welcome: Welcome, listeners: Sequence[trio.SocketListener]) -> NoReturn:
    """Run `welcome` for each connection, in a nursery that it is given, and close that afterwards;
    until cancelled, and then close the listeners.

    Where there are no file descriptors left, connections wait in the kernel's queue until there
    are: nobody is refused, and nothing ends. That is logged once until it is over.
    """
    arrivals = Turns()

    async def welcome_in_turn(nursery: trio.Nursery, connection: trio.SocketStream) -> None:
        # A handshake is as much work as some frames, and may be the next flood.
        if arrivals.spend(TURN_UNITS):
            await arrivals.wait()
        await welcome(nursery, connection)

    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(_accept_from, listener, welcome_in_turn, nursery)
    raise AssertionError("the listeners are there until they are cancelled")


async def _accept_from(
    listener: trio.SocketListener, welcome: Welcome, nursery: trio.Nursery
) -> None:
    withhold(listener.socket)
    async with listener:
        is_short = False
        while True:
            await trio.lowlevel.wait_readable(listener.socket)
            try:
                for connection in _accepted(listener.socket):
                    is_short = False
                    nursery.start_soon(_serve, connection, welcome, nursery)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                if not is_short:
                    log.warning("listening.no_room_for_connections", why=str(error))
                is_short = True
                await trio.sleep(SHORTAGE_S)


def _accepted(listener: trio.socket.SocketType) -> Iterator[trio.SocketStream]:
    """Who waits at the door, up to `ACCEPTED_MAX` of them. Raises `OSError` for a shortage."""
    door = socket.socket(fileno=listener.fileno())
    try:
        for _ in range(ACCEPTED_MAX):
            try:
                connection, _ = door.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            withhold(stream.socket)
            yield stream
    finally:
        door.detach()


async def _serve(connection: trio.SocketStream, welcome: Welcome, nursery: trio.Nursery) -> None:
    try:
        await welcome(nursery, connection)
    finally:
        connection.socket.close()


def port_of(listeners: Sequence[trio.SocketListener]) -> int:
    port: int = listeners[0].socket.getsockname()[1]
    return port


def origins_for(
    listeners: Sequence[trio.SocketListener], hosts: Collection[str], origins: Collection[str]
) -> Origins:
    """Who may come in through `listeners`: `hosts` and `origins` besides what goes unsaid."""
    names = [listener.socket.getsockname()[0] for listener in listeners]
    return Origins(
        is_loopback=all(names_loopback(name) for name in names),
        hosts=frozenset(name.lower() for name in hosts),
        origins=frozenset(name.lower() for name in origins),
    )


def keep_alive(tcp: trio.socket.SocketType) -> None:
    """Notice a peer that vanished without a word. Raises `OSError` when it is gone already."""
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def receive_some(connection: ServerStream, bytes_max: int) -> bytes:
    """What comes next, as from the stream's own method, at a fraction of what that costs TCP.

    Raises `trio.BrokenResourceError`, or `trio.ClosedResourceError` where another task closes.
    """
    if not isinstance(connection, trio.SocketStream):
        return bytes(await connection.receive_some(bytes_max))
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        data = _received(connection, bytes_max)
        if data is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return data
        while data is None:
            await trio.lowlevel.wait_readable(connection.socket)
            data = _received(connection, bytes_max)
    except OSError as error:
        raise trio.BrokenResourceError("the peer is gone") from error
    return data


def _received(connection: trio.SocketStream, bytes_max: int) -> bytes | None:
    try:
        return os.read(connection.socket.fileno(), bytes_max)
    except BlockingIOError:
        return None


# -- the end


async def turn_away(stream: ServerStream, refused: Refused) -> None:
    """Send the refusal and end the connection, within a second; the caller closes."""
    with trio.move_on_after(CLOSE_S):
        try:
            await stream.send_all(refused.response())
        except trio.BrokenResourceError:
            return  # it did not wait for the answer
        await part(stream)


async def part(stream: ServerStream) -> None:
    """Say that nothing follows, and hear the peer out; to be bounded by the caller."""
    if isinstance(stream, trio.SocketStream):
        await linger(stream)
        return
    tcp = stream.transport_stream
    # Without the farewell of TLS, a body that ends with the connection looks cut off. A peer that
    # talks on, or has hung up, is TCP's business alone.
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.unwrap()
    await linger(tcp)


async def linger(stream: trio.abc.Stream) -> None:
    """End our output and read on to the end of the peer's; to be bounded by the caller.

    To close with bytes unread makes the kernel send a reset, which can overtake our last words. A
    peer that goes on sending is read at a low rate, and in turn with the other busy connections.
    """
    turns = Turns()
    try:
        if isinstance(stream, trio.SocketStream):
            stream.socket.shutdown(socket.SHUT_WR)
            while await _discard_some(stream):
                await trio.sleep(DISCARD_PAUSE_S)
                turns.spend(DISCARD_UNITS)
                await turns.wait()
            return
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        while await stream.receive_some(DISCARDED_BYTES):
            await trio.sleep(DISCARD_PAUSE_S)
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        return  # the peer was faster


async def _discard_some(connection: trio.SocketStream) -> int:
    """Wait for bytes and throw them away; 0 at the end of them. Raises `OSError`."""
    while True:
        await trio.lowlevel.wait_readable(connection.socket)
        with contextlib.suppress(BlockingIOError):
            return os.readv(connection.socket.fileno(), [_discarded])
