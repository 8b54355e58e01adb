"""A client's WebSocket: trio-websocket has the protocol, `Wire` moves the bytes.

trio-websocket's reader passes on one message at a time and waits until it is received. A queue
would be lost with a message above the limit. So pings, pongs and Close frames are handled only
while `receive` runs.
"""

import itertools
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_client_stream
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import BytesMessage, RejectConnection, RejectData, Request, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import RemoteProtocolError

from streams.errors import ServerRefused
from streams.exchange import Scopes
from streams.messages import MESSAGE_BYTES_MAX, Block, Incoming, TooLarge
from transports.lines import in_blocks, lines_of
from transports.net.dialing import (
    CONNECT_S,
    WEBSOCKET,
    Address,
    Headers,
    Token,
    authorization,
    bearer_for,
    check_headers,
    reach,
    too_late,
)
from transports.net.sockets import CLOSE_S, READ_BYTES, unsent_bytes
from transports.websocket.frames import (
    MCP,
    MCP_STREAMS,
    LineFraming,
    Oversize,
    WebSocketFraming,
    framing_of,
    packed,
)
from transports.websocket.sieve import Piece, Sieve, Slot
from transports.websocket.wire import Wire, open_wire

# A peer that answers no ping for so long counts as gone.
PING_S: Final = 60.0

# With these the server may accept the same request later, as with any 5xx.
_LATER: Final = (408, 425, 429)

# The size of a pong to one of our pings: header and payload. A server sends no mask.
_PONG_BYTES: Final = 2 + 8


@asynccontextmanager
async def connect(
    url: str,
    *,
    subprotocols: Sequence[str] = (MCP_STREAMS, MCP),
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    ssl_context: ssl.SSLContext | None = None,
    token: Token = None,
    headers: Headers = (),
) -> AsyncIterator["WebSocketChannel"]:
    """Open a WebSocket; leaving the block closes it, within a second. The handshake has `headers`
    besides its own.

    Raises `PermissionError` where the server refuses the `token`; another `OSError` for another
    refusal, or without an answer within 10 seconds; `ValueError` for an invalid `url`, or one where
    others could read the token.
    """
    address = Address(url, WEBSOCKET)
    bearer = bearer_for(address, token)
    check_headers(address, headers)
    deadline = trio.current_time() + CONNECT_S
    tcp, stream = await reach(address, ssl_context, deadline)
    # The limit depends on the subprotocol; during the handshake, the larger one applies.
    message_size_max = framing_of(MCP_STREAMS, message_bytes_max).message_size_max
    async with open_wire(stream) as (wire, nursery):
        connection = await _handshake(
            wire,
            nursery,
            address,
            subprotocols,
            headers=[*authorization(bearer), *headers],
            message_size_max=message_size_max,
            deadline=deadline,
        )
        channel = _channel(wire, connection, message_bytes_max, address, tcp)
        channel.message_size_max = message_size_max
        if isinstance(channel, BlockChannel):
            nursery.start_soon(channel.pass_on)
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
) -> "WebSocketChannel":
    principal = f"server({address.host}:{address.port})"
    framing = framing_of(connection.subprotocol, message_bytes_max)
    if isinstance(framing, LineFraming):
        return BlockChannel(wire, connection, framing, principal=principal, socket=socket)
    return WebSocketChannel(wire, connection, framing, principal=principal, socket=socket)


async def _handshake(
    stream: Wire,
    nursery: trio.Nursery,
    address: Address,
    subprotocols: Sequence[str],
    *,
    headers: Headers,
    message_size_max: int,
    deadline: float,
) -> WebSocketConnection:
    """Make the opening handshake. Raises `OSError` when it is refused, interrupted, or late."""
    with stream.until_ended(deadline):
        return await wrap_client_stream(
            nursery,
            cast(trio.SocketStream, stream),  # its documentation allows any stream
            address.host_header,
            address.target,
            subprotocols=subprotocols,
            extra_headers=[(n.encode(), v.encode()) for n, v in headers],
            message_queue_size=0,
            max_message_size=message_size_max,
            receive_buffer_size=READ_BYTES,
        )
    if stream.is_open:
        raise too_late(address)
    raise _refusal(address, stream) from stream.failure


def _refusal(address: Address, stream: Wire) -> OSError:
    """The error for a failed handshake, with the text of the server's response.

    trio-websocket has that text only where the response has a Content-Length.
    """
    if not stream.answer:
        return ConnectionResetError(f"{address.url}: the server hung up during the handshake")
    protocol = WSConnection(ConnectionType.CLIENT)
    protocol.send(Request(host=address.host_header, target=address.target))
    body = b""
    rejected: RejectConnection | None = None
    try:
        protocol.receive_data(stream.answer)
    except (RemoteProtocolError, ValueError) as error:
        return ServerRefused(f"{address.url} does not speak WebSocket: {error}")
    for event in protocol.events():
        if isinstance(event, RejectConnection):
            rejected = event
        elif isinstance(event, RejectData):
            body += event.data
    if rejected is None:
        return ConnectionResetError(f"{address.url}: the server hung up during the handshake")
    status = rejected.status_code
    why = f"{address.url}: HTTP {status}{_reason(body)}"
    if status == 401:
        return PermissionError(why)
    if status in _LATER or status >= 500:
        return ConnectionRefusedError(why)
    if status != 403:
        over_http = address.url.replace("ws", "http", 1)
        why = f"{why.removesuffix('.')} (no WebSocket; an MCP server over HTTP? Dial {over_http})"
    return ServerRefused(why)


def _reason(body: bytes) -> str:
    """The message in the body of a refusal: that of a JSON-RPC error, or the text, but no HTML."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        said = body.decode(errors="replace").strip()
        if said.startswith("<"):  # a page of a proxy
            return ""
    return f": {said[:200]}" if said else ""


class WebSocketChannel:
    """A `ClientChannel` over an open WebSocket."""

    def __init__(
        self,
        wire: Wire,
        connection: WebSocketConnection,
        framing: WebSocketFraming,
        *,
        principal: str,
        socket: trio.SocketStream,
    ) -> None:
        self._wire = wire
        self._connection = connection
        self._framing = framing
        self._principal = principal
        self._socket = socket
        self._frames = Connection(ConnectionType.CLIENT)
        self._ping_numbers = itertools.count(1)
        self._is_over = False  # nothing more is received
        self._is_closed = False
        self.message_size_max = framing.message_size_max  # as trio-websocket was told
        wire.opened(connection, framing.unclaimed_bytes_max)

    @property
    def principal(self) -> str:
        return self._principal

    @property
    def scopes(self) -> Scopes:
        return None  # the peer is the server

    async def receive(self) -> Sequence[Incoming]:
        while not self._is_over:
            try:
                frame = await self._connection.get_message()
            except ConnectionClosed:
                self._is_over = True
                self._wire.end()
                break
            self._wire.claim()
            if (found := self._take(frame)) and not self._is_closed:
                return found
        raise trio.EndOfChannel

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        return in_blocks(await self.receive())

    @property
    def has_refused_length(self) -> bool:
        """See `streams.exchange.has_refused_length`."""
        closed = self._connection.closed
        if closed is None or closed.code != CloseReason.MESSAGE_TOO_BIG:
            return False
        # trio-websocket keeps its own refusal of a message in the same place.
        own = f"Exceeded maximum message size: {self.message_size_max} bytes"
        return closed.reason != own

    def _take(self, frame: str | bytes) -> list[Incoming]:
        try:
            return self._framing.feed(frame)
        except Oversize as oversize:
            self._is_over = True
            self._wire.fail(CloseReason.MESSAGE_TOO_BIG, str(oversize))
            return oversize.before

    async def send(self, *lines: bytes) -> None:
        try:
            for frame in packed(lines):
                for message in self._framing.messages(frame):
                    self._put(message)
                await self._wire.flush()
        except trio.BrokenResourceError:
            raise trio.BrokenResourceError("the peer is gone, or the WebSocket closing") from None
        except BaseException:
            self._wire.cut_short()  # perhaps some of the lines were sent
            raise

    def _put(self, message: bytes | str) -> None:
        """Store the frame of a message, without the locks of trio-websocket.

        Neither it nor its wsproto keeps state of such frames: they are unfragmented, and no
        extension was agreed on. Raises `trio.BrokenResourceError` after a Close frame.
        """
        if self._connection.closed is not None:
            raise trio.BrokenResourceError("the WebSocket is closed")
        event: TextMessage | BytesMessage = (
            TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message)
        )
        self._wire.put(self._frames.send(event))

    async def ping(self) -> bool:
        """See `Channel`; also False when no pong comes within `PING_S`. `receive` must run.

        Raises `trio.BrokenResourceError` when the connection ends first.
        """
        payload = next(self._ping_numbers).to_bytes(8, "big")
        with self._wire.until_ended(trio.current_time() + PING_S) as waiting:
            try:
                await self._connection.ping(payload)
            except ConnectionClosed:
                raise trio.BrokenResourceError("the peer is gone") from None
            self._wire.claim(_PONG_BYTES)
            return True
        if waiting.deadline <= trio.current_time() and self._wire.is_open:
            return False
        raise trio.BrokenResourceError("the peer is gone")

    def is_writable(self) -> bool:
        return self._connection.closed is None and self._wire.is_open and not self._is_closed

    def unsent_bytes(self) -> int | None:
        return unsent_bytes(self._socket.socket.fileno())

    async def aclose(self, code: int = CloseReason.NORMAL_CLOSURE) -> None:
        """Send a Close frame and wait for the peer's; hang up after a second in any case."""
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        try:
            with trio.move_on_after(CLOSE_S):
                await self._close_handshake(code)
        finally:
            with trio.CancelScope(shield=True):  # takes no time
                await self._wire.hang_up()

    async def _close_handshake(self, code: int) -> None:
        try:
            with self._wire.until_ended():
                await self._connection.aclose(code)
            await self._wire.close_gracefully()
        except trio.BrokenResourceError:
            return  # the peer did not wait for our Close frame


class BlockChannel(WebSocketChannel):
    """The same for `mcp-streams.v1`: frames are received in blocks, past trio-websocket."""

    def __init__(
        self,
        wire: Wire,
        connection: WebSocketConnection,
        framing: LineFraming,
        *,
        principal: str,
        socket: trio.SocketStream,
    ) -> None:
        super().__init__(wire, connection, framing, principal=principal, socket=socket)
        self._splitter = framing.splitter
        self._slot = Slot()
        wire.divert(Sieve(framing.message_size_max), self._slot)

    async def receive(self) -> Sequence[Incoming]:
        return lines_of(await self.receive_blocks())

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._is_over:
            pieces = await self._slot.take()
            if not pieces:
                self._is_over = True
                self._wire.end()
                break
            self._wire.claim()
            if (found := self._blocks(pieces)) and not self._is_closed:
                return found
        raise trio.EndOfChannel

    async def pass_on(self) -> None:
        """Put the messages that trio-websocket reads into the slot.

        They come after all pieces of the sieve: it takes none out behind the first such message.
        """
        try:
            while True:
                message = await self._connection.get_message()
                data = message.encode() if isinstance(message, str) else message
                await self._slot.put([Piece(data, 0, len(data), is_last=True)])
        except ConnectionClosed:
            pass  # the usual end
        finally:
            self._slot.end()

    def _blocks(self, pieces: Sequence[Piece]) -> list[Block | TooLarge]:
        found: list[Block | TooLarge] = []
        for piece in pieces:
            found += self._splitter.blocks(piece.data, piece.start, piece.end)
            if piece.is_last:
                found += in_blocks(self._splitter.flush())
        if self._splitter.refused:
            self._is_over = True
            self._wire.fail(CloseReason.MESSAGE_TOO_BIG, "a message above the limit")
            first = next(place for place, each in enumerate(found) if isinstance(each, TooLarge))
            del found[first:]
        return found

    async def aclose(self, code: int = CloseReason.NORMAL_CLOSURE) -> None:
        self._slot.close()
        await super().aclose(code)
