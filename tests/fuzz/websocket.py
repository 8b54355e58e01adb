"""WebSockets from either side: our short parsers agree with wsproto."""

import contextlib
import math
import socket
from collections.abc import Iterable
from typing import Any

import trio
import trio.testing
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import CloseConnection, Event, Message, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError

from streams.exchange import Caller, HttpError
from streams.messages import Incoming
from tests.fuzz.pieces import ways_to_cut
from transports.websocket.frames import MCP, MCP_STREAMS, Oversize, framing_of
from transports.websocket.handshake import _any_opening, _plain_opening, parse_head
from transports.websocket.server import ServerWebSocket
from transports.websocket.sieve import Piece, Sieve

LIMIT = 60
# Headers of a request that wsproto does not pass on.
TAKEN_BY_WSPROTO = {
    "connection",
    "upgrade",
    "sec-websocket-version",
    "sec-websocket-protocol",
    "sec-websocket-extensions",
}
FOLLOWING = bytes(16)


def handshake(data: bytes) -> None:
    """The short parser of handshakes reads them as wsproto does, and refuses all others."""
    try:
        opening = parse_head(data)
    except HttpError as refused:
        assert 400 <= refused.status < 500
        return
    if (plain := _plain_opening(data)) is not None:
        assert plain == opening
        by_wsproto = _any_opening(data)
        told, others = plain.head.headers, by_wsproto.head.headers
        assert others.items() <= told.items()
        assert told.keys() - others.keys() <= TAKEN_BY_WSPROTO
        assert plain[1:] == (by_wsproto.origins, *by_wsproto[2:])
        assert (plain.head.method, plain.head.path) == ("GET", by_wsproto.head.path)
    answer = opening.accept(None)
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert answer.count(b"\r\n\r\n") == 1


def sieve(data: bytes) -> None:
    """A client gets the same messages with the sieve as without, wherever the bytes are cut.

    The bytes may end in half a header. The test completes it, because the sieve waits for that.
    """
    expected = _read([data[1:] + FOLLOWING], None)
    for pieces in ways_to_cut(data[:1].ljust(1) + data[1:] + FOLLOWING):
        assert _read(pieces, Sieve(LIMIT)) == expected


def _read(pieces: Iterable[bytes], sieve: Sieve | None) -> list[Any]:
    """Whole messages and control frames, in order, up to the end of the connection."""
    connection = Connection(ConnectionType.CLIENT)
    found: list[Any] = []
    parts: list[Any] = []
    taken = b""
    for piece in pieces:
        for each in [piece] if sieve is None else sieve.feed(piece):
            if isinstance(each, Piece):
                taken += each.data[each.start : each.end]
                if each.is_last:
                    found.append(taken)
                    taken = b""
            elif connection.state is ConnectionState.OPEN:
                _note(connection, each, found, parts)
            if found and found[-1] == "closed":
                return found
    return found


def _note(connection: Connection, data: bytes, found: list[Any], parts: list[Any]) -> None:
    connection.receive_data(data)
    for event in connection.events():
        if isinstance(event, Message):
            parts.append(event.data)
            if event.message_finished:
                found.append(("" if isinstance(event, TextMessage) else b"").join(parts))
                parts.clear()
        elif isinstance(event, CloseConnection):
            found += [event.code, "closed"]
            return
        else:
            found.append((type(event).__name__, bytes(getattr(event, "payload", b""))))


def _server(subprotocol: str) -> Any:
    def target(data: bytes) -> None:
        lines, code, pings = _expected(data[1:], subprotocol)
        for pieces in list(ways_to_cut(data))[::2]:  # a task switch for each byte takes long
            found, sent = trio.run(_serve, pieces, subprotocol)
            assert found == lines
            closes = [event.code for event in sent if isinstance(event, CloseConnection)]
            assert closes == ([] if code is None else [code])
            pongs = [
                bytes(getattr(event, "payload", b"")) for event in sent[: len(sent) - len(closes)]
            ]
            assert all(pong in pings for pong in pongs)
            assert not pings or pongs[-1:] == pings[-1:]

    return target


def _expected(data: bytes, subprotocol: str) -> tuple[list[Incoming], int | None, list[bytes]]:
    """The messages that a server must receive, the code it must close with, and the pings to
    answer.
    """
    connection, framing = Connection(ConnectionType.SERVER), framing_of(subprotocol, LIMIT)
    found: list[Incoming] = []
    pings: list[bytes] = []
    parts: list[Any] = []
    connection.receive_data(data)
    for event in connection.events():
        if isinstance(event, CloseConnection):
            return found, event.code, pings
        if isinstance(event, Ping):
            pings.append(bytes(event.payload))
        if not isinstance(event, Message):
            continue
        parts.append(event.data)
        if sum(map(len, parts)) > framing.message_size_max:
            return found, CloseReason.MESSAGE_TOO_BIG, pings
        if event.message_finished:
            whole = ("" if isinstance(event, TextMessage) else b"").join(parts)
            parts.clear()
            try:
                found += framing.feed(whole)
            except Oversize as oversize:
                return found + oversize.before, CloseReason.MESSAGE_TOO_BIG, pings
    return found, None, pings


async def _serve(pieces: list[bytes], subprotocol: str) -> tuple[list[Incoming], list[Event]]:
    """The messages that a server receives from these pieces, and its answers."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    found: list[Incoming] = []
    async with trio.open_nursery() as nursery:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        channel = ServerWebSocket(
            stream,
            framing_of(subprotocol, LIMIT),
            nursery,
            caller=Caller("", lambda: math.inf),
            early=b"",
        )

        async def receive() -> None:
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    found.extend(await channel.receive())

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as receiving:
                receiving.start_soon(receive)
                for piece in pieces:
                    ours.sendall(piece)
                    await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        sent = _sent_to(ours)
        ours.close()
        await channel.aclose()
    return found, sent


def _sent_to(client: socket.socket) -> list[Event]:
    connection = Connection(ConnectionType.CLIENT)
    with contextlib.suppress(BlockingIOError):
        while data := client.recv(1 << 16):
            with contextlib.suppress(LocalProtocolError):  # only the end follows
                connection.receive_data(data)
    return list(connection.events())


text_frames = _server(MCP)
line_frames = _server(MCP_STREAMS)
