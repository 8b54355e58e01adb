"""`mcp-streams.v1` from the client's side: what comes is taken in blocks, past trio-websocket."""

from collections.abc import Sequence

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection
from wsproto.frame_protocol import CloseReason

from streams.messages import Block, Incoming, TooLarge
from transports.lines import LineSplitter, in_blocks, lines_of
from transports.websocket.client import WebSocketChannel
from transports.websocket.frames import LineFraming
from transports.websocket.sieve import Piece, Sieve, Slot
from transports.websocket.wire import Wire


class BlockChannel(WebSocketChannel):
    """An open WebSocket to a server that speaks `mcp-streams.v1`."""

    def __init__(
        self,
        wire: Wire,
        connection: WebSocketConnection,
        message_bytes_max: int,
        *,
        principal: str,
        socket: trio.SocketStream,
    ) -> None:
        framing = LineFraming(message_bytes_max)
        super().__init__(wire, connection, framing, principal=principal, socket=socket)
        self._splitter = LineSplitter(message_bytes_max)
        self._slot = Slot()
        wire.take_out(Sieve(framing.message_size_max), self._slot)

    async def receive(self) -> Sequence[Incoming]:
        return lines_of(await self.receive_blocks())

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._is_over:
            pieces = self._slot.take() or await self._next()
            if not pieces:
                continue
            self._wire.claim()
            if (found := self._blocks(pieces)) and not self._is_closed:
                return found
        raise trio.EndOfChannel

    async def _next(self) -> Sequence[Piece]:
        """What trio-websocket hands over, unless pieces come or nothing will."""
        # What is in the slot came before anything that its reader still holds.
        with self._slot.until_put():
            try:
                message = await self._connection.get_message()
            except ConnectionClosed:
                self._is_over = True
                self._wire.end()
                return ()
            data = message.encode() if isinstance(message, str) else message
            return [Piece(data, 0, len(data), is_last=True)]
        return ()

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
