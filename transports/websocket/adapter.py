"""WebSocket (RFC 6455): `serve` and `connect`, and the opening handshake between them.

A server speaks the protocol by itself (`transports.websocket.server`), a client by trio-websocket
over a stream of ours (`transports.websocket.wire`). Two subprotocols are known
(`transports.websocket.frames`), none is taken for `mcp`; extensions, and so compression, are never
agreed on.
"""

import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import trio
from trio_websocket import WebSocketConnection
from wsproto.frame_protocol import CloseReason

from streams.exchange import Admit, Caller, Channel, HttpError
from streams.keys import new_id
from streams.messages import MESSAGE_BYTES_MAX
from transports.net.dialing import WEBSOCKET, Address, Token, bearer_for, reach
from transports.net.listening import (
    CONNECTIONS_MAX,
    HANDSHAKE_S,
    Contexts,
    Room,
    listen,
    origins_for,
    port_of,
    secured,
    serve_listeners,
    turn_away,
)
from transports.net.origins import Origins
from transports.net.sockets import ServerStream
from transports.websocket.blocks import BlockChannel
from transports.websocket.client import WebSocketChannel
from transports.websocket.frames import MCP, MCP_STREAMS, framing_of
from transports.websocket.handshake import Opening, ask, parse_head, read_head
from transports.websocket.server import ServerWebSocket
from transports.websocket.wire import Wire, open_wire

Handler = Callable[[Channel], Awaitable[object]]


async def serve(
    handler: Handler,
    host: str,
    port: int,
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    connections_max: int = CONNECTIONS_MAX,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    ssl_context: Contexts | None = None,
    admit: Admit | None = None,
    per_principal_max: int | None = None,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen at every address of `host` and run `handler` for each connection, until cancelled.

    Reports the port, which matters for port 0. `transports.net.origins` says what the `allowed_…`
    add to. With `ssl_context`, over TLS only. `admit` says whose a connection is, which closes when
    that holds no longer; nobody whom it knows has more than `per_principal_max` of them. Raises
    `OSError` when the address cannot be had.
    """
    listeners = await listen(host, port)
    origins = origins_for(listeners, allowed_hosts, allowed_origins)
    room = Room(connections_max, per_principal_max)
    server = _Server(handler, message_bytes_max, room, origins, ssl_context, admit)
    task_status.started(port_of(listeners))
    await serve_listeners(server.welcome, listeners)


@dataclass(frozen=True, slots=True)
class _Server:
    """What the connections of one `serve` share."""

    handler: Handler
    message_bytes_max: int
    room: Room
    origins: Origins
    ssl_context: Contexts | None
    admit: Admit | None

    async def welcome(self, nursery: trio.Nursery, tcp: trio.SocketStream) -> None:
        """Serve one connection from its handshake to its end; the caller closes it."""
        self.room.open += 1
        try:
            with ExitStack() as holding:
                channel = None
                with trio.move_on_after(HANDSHAKE_S):
                    channel = await self._shake_hands(nursery, tcp, holding)
                if channel is not None:
                    await self._run(channel)
        finally:
            self.room.open -= 1

    async def _shake_hands(
        self, nursery: trio.Nursery, tcp: trio.SocketStream, holding: ExitStack
    ) -> ServerWebSocket | None:
        """An open WebSocket, if the request may come in."""
        stream: ServerStream = tcp
        try:
            stream = await secured(tcp, self.ssl_context)
            head, early = await read_head(stream)
            opening = parse_head(head)
            self._check_welcome(opening, tcp)
            caller = await self.admit(opening.head) if self.admit else None
            holding.enter_context(self.room.held_by(caller))
            subprotocol = _agreed(opening)
            await stream.send_all(opening.accept(subprotocol))
        except HttpError as refused:
            await turn_away(stream, refused)
            return None
        except (trio.BrokenResourceError, OSError):
            return None  # gone before it was in
        framing = framing_of(subprotocol, self.message_bytes_max)
        caller = caller or Caller(f"conn({new_id()})", lambda: math.inf)
        return ServerWebSocket(stream, framing, nursery, caller=caller, early=early)

    async def _run(self, channel: ServerWebSocket) -> None:
        code = CloseReason.INTERNAL_ERROR
        try:
            await self.handler(channel)
            code = CloseReason.NORMAL_CLOSURE
        finally:
            if trio.current_effective_deadline() == -math.inf:
                code = CloseReason.GOING_AWAY  # cancelled
            with trio.CancelScope(shield=True):
                await channel.aclose(code)

    def _check_welcome(self, opening: Opening, tcp: trio.SocketStream) -> None:
        """Raises `HttpError` for who may not come in, whoever it is."""
        if self.room.is_over_full(tcp):
            raise HttpError(503, "Too many connections are open: try again later.")
        if why := self.origins.why_refused(opening.host, opening.origins):
            raise HttpError(403, why)


def _agreed(opening: Opening) -> str | None:
    """The subprotocol to speak, or None where none was offered. Raises `HttpError`."""
    for subprotocol in (MCP_STREAMS, MCP):
        if subprotocol in opening.subprotocols:
            return subprotocol
    if opening.subprotocols:
        raise HttpError(400, f"Offer the subprotocol {MCP_STREAMS} or {MCP}, or none.")
    return None


@asynccontextmanager
async def connect(
    url: str,
    *,
    subprotocols: Sequence[str] = (MCP_STREAMS, MCP),
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    ssl_context: ssl.SSLContext | None = None,
    token: Token = None,
) -> AsyncIterator[WebSocketChannel]:
    """Open a WebSocket; leaving the block closes it, within a second.

    Raises `OSError` when nobody answers, or refuses, within 10 seconds (`PermissionError` where the
    server does not take the `token`); `ValueError` when `url` is none, or no place for a token.
    """
    address = Address(url, WEBSOCKET)
    bearer = bearer_for(address, token)
    deadline = trio.current_time() + HANDSHAKE_S
    tcp, stream = await reach(address, ssl_context, deadline)
    # What was agreed on decides what a message may be; until then the larger of the two.
    message_size_max = framing_of(MCP_STREAMS, message_bytes_max).message_size_max
    async with open_wire(stream) as (wire, nursery):
        connection = await ask(
            wire,
            nursery,
            address,
            subprotocols,
            token=bearer,
            message_size_max=message_size_max,
            deadline=deadline,
        )
        channel = _channel(wire, connection, message_bytes_max, address, tcp)
        try:
            yield channel
        finally:
            with trio.CancelScope(shield=True):
                await channel.aclose()


def _channel(
    wire: Wire,
    connection: WebSocketConnection,
    message_bytes_max: int,
    address: Address,
    socket: trio.SocketStream,
) -> WebSocketChannel:
    principal = f"server({address.host}:{address.port})"
    if connection.subprotocol == MCP_STREAMS:
        return BlockChannel(wire, connection, message_bytes_max, principal=principal, socket=socket)
    framing = framing_of(connection.subprotocol, message_bytes_max)
    return WebSocketChannel(wire, connection, framing, principal=principal, socket=socket)
