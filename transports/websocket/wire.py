"""The stream below trio-websocket, so that a client's WebSocket keeps the contract of a `Channel`.

trio-websocket reads from and writes to any `trio.abc.Stream`, one `send_all` for each event. This
stream adds what trio-websocket 0.12.2 lacks:

- trio-websocket answers pings in its reader, which would then wait for a peer that does not read.
  So `send_all` only stores frames. `flush` writes them, many at once; a task writes control frames.
- On a violation, it hangs up without a Close frame. That is written here, with the right code.
- It waits for pongs, handshakes and Close frames even after the connection has ended. `until_ended`
  cancels these waits. An error in its reader ends the connection.
- It keeps any number of empty fragments. So the bytes that it may read without completing a message
  are bounded.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import h11
import trio
from trio_websocket import HandshakeError, WebSocketConnection
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError

from transports.net.dialing import begin_or_leave, tasks_until
from transports.net.sockets import close_at_once, linger, send_pieces
from transports.websocket.sieve import Piece, Sieve, Slot, until_left

# How much of the response to the handshake is kept, for an error message.
ANSWER_BYTES_MAX: Final = 16 * 1024

# First bytes of frames; no HTTP message begins with one.
_DATA: Final = (0x81, 0x82)
_CLOSE: Final = 0x88
_PONG: Final = 0x8A

_MASK_BYTES: Final = 4

# The size of a read while payload is taken out. A busy server has as much ready, and the cost of
# passing on the bytes of one read does not depend on its size.
BULK_BYTES: Final = 1024 * 1024


class Wire(trio.abc.Stream):
    """One TCP or TLS connection. A task must `run` it until `hang_up`."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.answer = b""  # the start of the peer's response to the handshake
        self.failure: BaseExceptionGroup[Exception] | None = None  # an error of the reader
        self._stream = stream
        self._connection: WebSocketConnection | None = None
        self._sieve: Sieve | None = None
        self._slot: Slot
        self._sieved: Iterator[Piece | bytes] = iter(())
        self._unclaimed_bytes = self._unclaimed_bytes_max = 0
        self._pending: list[bytes] = []
        # Of several pings only the last needs an answer (RFC 6455, 5.5.3), so a flood of pings uses
        # no memory.
        self._pong = b""
        self._control = trio.Event()  # a control frame is pending
        self._writing = trio.StrictFIFOLock()
        self._waiting: set[trio.CancelScope] = set()
        self._has_ended = False
        self._is_closing = False
        self._is_broken = False
        self._tasks = trio.CancelScope(shield=True)
        self._has_stopped = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Run trio-websocket's reader, and the task that writes control frames.

        Both are shielded, because the closing handshake needs them; `hang_up` always ends them.
        """
        try:
            await begin_or_leave()
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_control)
                    task_status.started(nursery)
        except* (ProtocolError, h11.ProtocolError, HandshakeError, ValueError) as failures:
            # A peer can cause these errors of the reader: by a ping that crosses our Close frame,
            # by headers that are not ASCII, by a response that is not HTTP.
            self.failure = failures
        finally:
            self.end()
            self._has_stopped.set()

    def opened(self, connection: WebSocketConnection, unclaimed_bytes_max: int) -> None:
        """`connection` is open, and may read so many bytes without completing a message."""
        self._connection = connection
        self.answer = b""
        self._unclaimed_bytes_max = unclaimed_bytes_max

    def divert(self, sieve: Sieve, slot: Slot) -> None:
        """From now on, put the payload that `sieve` takes out into `slot`."""
        self._sieve, self._slot = sieve, slot

    def claim(self, count: int | None = None) -> None:
        """So many of the bytes that were read belong to messages; all of them by default."""
        self._unclaimed_bytes = 0 if count is None else max(0, self._unclaimed_bytes - count)

    @property
    def is_open(self) -> bool:
        return not (self._has_ended or self._is_closing or self._is_broken)

    # -- for trio-websocket

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.put(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()  # it never blocks

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self._check_violation()
        if self._has_ended:
            raise trio.ClosedResourceError
        if self._sieve is None:
            data = await self._read(max_bytes)
            if self._sieve is None:
                return data
            self._sieved = self._sieve.feed(data)  # it was set during the read
        return await self._read_past_sieve(self._sieve)

    async def aclose(self) -> None:
        """Only `hang_up` closes: a Close frame may still have to be written."""
        self.end()
        await trio.lowlevel.checkpoint()

    # -- reading

    async def _read_past_sieve(self, sieve: Sieve) -> bytes:
        """The next bytes that the sieve leaves to trio-websocket; empty at the end."""
        while True:
            taken, left = until_left(self._sieved)
            if taken:
                await self._slot.put(taken)
            if left:
                return left
            data = await self._read(BULK_BYTES)
            if not data:
                return data
            self._sieved = sieve.feed(data)

    async def _read(self, max_bytes: int | None) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.end()
            raise
        if not data:
            self.end()
        if self._connection is None:
            self.answer += data[: ANSWER_BYTES_MAX - len(self.answer)]
            return data
        self._unclaimed_bytes += len(data)
        if self._unclaimed_bytes > self._unclaimed_bytes_max:
            self.fail(CloseReason.MESSAGE_TOO_BIG, "too many bytes without a message")
            raise trio.ClosedResourceError
        return data

    def _check_violation(self) -> None:
        """Send the Close frame for a violation that trio-websocket has found.

        It reports our own Close frame as 1000 and a cut as 1006, and answers the peer's Close frame
        itself.
        """
        closed = self._connection.closed if self._connection else None
        if closed is not None and closed.code not in (
            CloseReason.NORMAL_CLOSURE,
            CloseReason.ABNORMAL_CLOSURE,
        ):
            self.fail(closed.code, closed.reason or "")

    # -- writing

    def put(self, data: bytes) -> None:
        """Store whole frames, for the next `flush`.

        Raises `trio.BrokenResourceError` after a Close frame, or when the connection is broken.
        """
        if self._is_broken or self._is_closing:
            raise trio.BrokenResourceError("the WebSocket is closing")
        if data[0] == _PONG:
            self._pong = data
            self.claim(len(data) - _MASK_BYTES)  # the size of the ping: a server sends no mask
        elif data[0] == _CLOSE:
            self._pending += [self._pong, data]
            self._pong = b""
            self._is_closing = True
        else:
            self._pending.append(data)
        if data[0] not in _DATA:
            self._control.set()

    def fail(self, code: int, reason: str) -> None:
        """Answer a violation by a Close frame, unless one was sent; read no more."""
        if not (self._is_closing or self._is_broken):
            assert self._connection is not None  # violations come after the handshake
            close = CloseConnection(code=code, reason=reason)
            self.put(Connection(ConnectionType.CLIENT).send(close))
        self.end()

    def cut_short(self) -> None:
        """Send no more than a Close frame, since a `send` was interrupted."""
        self._check_violation()
        self.fail(CloseReason.GOING_AWAY, "interrupted")

    async def flush(self) -> None:
        """Write all pending frames; on return the kernel has all of them.

        Cancelled half-way, it breaks the connection: no frame can follow half a frame. Raises
        `trio.BrokenResourceError` when the peer is gone.
        """
        if self._writing.locked():
            await self._writing.acquire()
        else:
            self._writing.acquire_nowait()  # the write below is a checkpoint
        try:
            if self._is_broken:
                raise trio.BrokenResourceError("the peer is gone")
            await trio.lowlevel.checkpoint_if_cancelled()  # before the first byte of a frame
            frames = [frame for frame in (*self._pending, self._pong) if frame]
            self._pending.clear()
            self._pong = b""
            try:
                if frames:
                    await send_pieces(self._stream, frames)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.break_off()
                raise trio.BrokenResourceError("the peer is gone") from None
            except BaseException:
                self.break_off()
                await close_at_once(self._stream)
                raise
        finally:
            self._writing.release()

    async def _write_control(self) -> None:
        while True:
            await self._control.wait()
            self._control = trio.Event()
            try:
                await self.flush()
            except trio.BrokenResourceError:
                return  # the reader notices it

    # -- the end

    @contextlib.contextmanager
    def until_ended(self, deadline: float = float("inf")) -> Iterator[trio.CancelScope]:
        """Cancel the block once the peer can send no more, or at `deadline`."""
        with trio.CancelScope(deadline=deadline) as scope:
            if self._has_ended:
                scope.cancel()
            self._waiting.add(scope)
            try:
                yield scope
            finally:
                self._waiting.discard(scope)

    def end(self) -> None:
        """The peer can send no more: cancel the blocks of `until_ended`."""
        self._has_ended = True
        for scope in self._waiting:
            scope.cancel()

    def break_off(self) -> None:
        """Send and receive no more."""
        self._is_broken = True
        self.end()

    async def close_gracefully(self) -> None:
        """Write pending frames, and read to the end of the peer's; the caller bounds the time."""
        self._check_violation()  # the reader may not have done so yet
        await self.flush()
        self._tasks.cancel()
        await self._has_stopped.wait()
        await linger(self._stream)

    async def hang_up(self) -> None:
        """Close at once."""
        self.break_off()
        self._tasks.cancel()
        await close_at_once(self._stream)


@asynccontextmanager
async def open_wire(stream: trio.abc.Stream) -> AsyncIterator[tuple[Wire, trio.Nursery]]:
    """Run a `Wire` over `stream`; yield it, and the nursery for trio-websocket. Closes `stream`."""
    wire = Wire(stream)
    async with tasks_until(wire.hang_up) as nursery:
        yield wire, await nursery.start(wire.run)
