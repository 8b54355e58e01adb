"""A `Channel` over an open WebSocket: trio-websocket speaks the protocol, `Wire` moves the bytes.

Its reader hands over one message at a time and waits until somebody takes it (a queue would be
thrown away by a message above the limit, with what came whole before it). So pings, pongs and Close
frames are seen only while somebody receives.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection
from wsproto.frame_protocol import CloseReason

from streams.exchange import Scopes
from streams.messages import Block, Incoming, TooLarge
from transports.lines import in_blocks
from transports.net.sockets import CLOSE_S, unsent_bytes
from transports.websocket.frames import Framing, Oversize, packed
from transports.websocket.wire import Wire

# After this long a peer that answers no ping counts as detached.
PING_S: Final = 60.0

# A pong to one of our pings: header and payload (a client's mask is not worth telling them apart).
_PONG_BYTES: Final = 2 + 8


class WebSocketChannel:
    """An open WebSocket."""

    def __init__(
        self,
        wire: Wire,
        connection: WebSocketConnection,
        framing: Framing,
        *,
        principal: str,
        socket: trio.SocketStream,
    ) -> None:
        self._wire = wire
        self._connection = connection
        self._framing = framing
        self._principal = principal
        self._socket = socket
        self._ping_numbers = itertools.count(1)
        self._is_over = False  # nothing more is received
        self._is_closed = False
        wire.guard(connection, framing.unclaimed_bytes_max)

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
                await self._framing.put(frame, self._connection)
                await self._wire.flush()
        except (ConnectionClosed, trio.BrokenResourceError):
            raise trio.BrokenResourceError("the peer is gone, or the WebSocket closing") from None
        except BaseException:
            self._wire.cut_short()  # perhaps some of the lines are out
            raise

    async def ping(self) -> bool:
        """False as well when no pong came within `PING_S`; somebody must be receiving meanwhile.

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
                await self._farewell(code)
        finally:
            with trio.CancelScope(shield=True):  # takes no time
                await self._wire.hang_up()

    async def _farewell(self, code: int) -> None:
        try:
            with self._wire.until_ended():
                await self._connection.aclose(code)
            await self._wire.part()
        except trio.BrokenResourceError:
            return  # the peer did not wait for it
