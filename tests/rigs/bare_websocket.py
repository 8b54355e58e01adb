"""WebSocket peers made of sockets and wsproto, without our client, and a server for them."""

import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
import trio.testing
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Request,
)

from streams.exchange import Channel, Handler
from streams.messages import Incoming
from tests.rigs.echo import LIMIT, echo
from transports import websocket
from transports.websocket.frames import MCP


async def open_bare_websocket(
    port: int, *subprotocols: str
) -> tuple[trio.SocketStream, Connection]:
    """A TCP connection past its handshake, with wsproto to speak over it."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    return stream, await shake_hands(stream, port, *subprotocols)


async def shake_hands(
    stream: trio.abc.Stream, port: int, *subprotocols: str, token: str | None = None
) -> Connection:
    """Open a WebSocket over this stream; returns wsproto's connection."""
    protocol = WSConnection(ConnectionType.CLIENT)
    request = Request(
        host=f"127.0.0.1:{port}",
        target="/",
        subprotocols=list(subprotocols),
        extra_headers=[] if token is None else [(b"Authorization", b"Bearer " + token.encode())],
    )
    await stream.send_all(protocol.send(request))
    while True:
        data = await stream.receive_some()
        assert data, "the server hung up during the handshake"
        protocol.receive_data(bytes(data))
        for event in protocol.events():
            assert isinstance(event, AcceptConnection), event
            assert event.subprotocol == (subprotocols[0] if subprotocols else None)
            assert protocol.connection is not None
            return protocol.connection


async def events_to_the_end(stream: trio.abc.Stream, connection: Connection) -> list[Event]:
    """All events from the far end until it hangs up."""
    events: list[Event] = []
    with contextlib.suppress(trio.BrokenResourceError):
        while data := await stream.receive_some():
            connection.receive_data(bytes(data))
            events += connection.events()
    return events


@asynccontextmanager
async def server(
    handler: Handler = echo, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[int]:
    settings = {"message_bytes_max": LIMIT, **settings}
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(websocket.serve, handler, host, 0, **settings))
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def bare(
    handler: Handler = echo, subprotocol: str = MCP, **settings: Any
) -> AsyncIterator[tuple[trio.SocketStream, Connection]]:
    async with server(handler, **settings) as port:
        stream, connection = await open_bare_websocket(port, subprotocol)
        async with stream:
            yield stream, connection


async def messages_of(
    stream: trio.SocketStream, connection: Connection, count: int
) -> list[Message[Any]]:
    """`count` whole frames with data in them."""
    found: list[Message[Any]] = []
    parts: Any = None
    while len(found) < count:
        connection.receive_data(bytes(await stream.receive_some()))
        for event in connection.events():
            assert isinstance(event, Message)
            parts = event.data if parts is None else parts + event.data
            if event.message_finished:
                found.append(type(event)(data=parts))
                parts = None
    return found


def close_code(events: list[Any]) -> int:
    (close,) = [event for event in events if isinstance(event, CloseConnection)]
    return int(close.code)


def frames_of(wire: bytes) -> list[tuple[int, bytes]]:
    """Opcode and payload of each frame that a server sent; fails on half a frame."""
    frames = []
    at = 0
    while at < len(wire):
        opcode, length = wire[at], wire[at + 1]
        start = at + 2
        if length == 126:
            (length,) = struct.unpack_from("!H", wire, start)
            start += 2
        elif length == 127:
            (length,) = struct.unpack_from("!Q", wire, start)
            start += 8
        at = start + length
        assert len(wire) >= at
        frames.append((opcode, wire[start:at]))
    return frames


@asynccontextmanager
async def listening(channel: Channel) -> AsyncIterator[list[Incoming]]:
    received: list[Incoming] = []

    async def listen() -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                received.extend(await channel.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        yield received
        nursery.cancel_scope.cancel()
