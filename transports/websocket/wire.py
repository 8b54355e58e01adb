"""The stream beneath trio-websocket, with which a WebSocket keeps the promises of a `Channel`.

trio-websocket writes and reads through whatever `trio.abc.Stream` it is given, one event a
`send_all`. This one makes up for what its public API leaves open (0.12.2):

- It answers pings from its reader, which would wait behind a peer that does not read. So `send_all`
  only puts by; `flush` writes, many frames at once, and control frames have a task for it.
- It hangs up on a violation without a Close frame: that is written here, with the code it found.
- It goes on waiting for pongs, handshakes and Close frames when the connection is gone:
  `until_ended` stops whoever waits, and a reader that it lost to its own error ends the connection.
- It keeps any number of empty fragments, so what it may read without making a message is bounded.
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
from transports.net.sockets import linger, send_pieces
from transports.websocket.sieve import Piece, Sieve, Slot, until_left

# What is kept of the answer to a client's handshake, for its error message.
ANSWER_BYTES_MAX: Final = 16 * 1024

# First bytes of frames; no HTTP message begins with one.
_DATA: Final = (0x81, 0x82)
_CLOSE: Final = 0x88
_PONG: Final = 0x8A

_MASK_BYTES: Final = 4

# What one read asks for once payload is taken out: a server in full flow keeps as much ready, and
# to hand over what one read brings costs the same, however much it is.
BULK_BYTES: Final = 1024 * 1024


class Wire(trio.abc.Stream):
    """One TCP or TLS connection. Somebody must `run` it until `hang_up`."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.answer = b""  # how the peer's answer to our handshake begins
        self.failure: BaseExceptionGroup[Exception] | None = None  # why trio-websocket gave up
        self._stream = stream
        self._connection: WebSocketConnection | None = None
        self._sieve: Sieve | None = None
        self._slot: Slot
        self._sieved: Iterator[Piece | bytes] = iter(())
        self._unclaimed_bytes = self._unclaimed_bytes_max = 0
        self._pending: list[bytes] = []
        # Of several pings only the last needs an answer (RFC 6455, 5.5.3), so a flood of them takes
        # no memory.
        self._pong = b""
        self._control = trio.Event()  # something is pending that nobody else flushes
        self._writing = trio.StrictFIFOLock()
        self._waiting: set[trio.CancelScope] = set()
        self._has_ended = False
        self._is_closing = False
        self._is_broken = False
        self._tasks = trio.CancelScope(shield=True)
        self._has_stopped = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Hold the nursery for trio-websocket's reader, and write what it owes.

        Shielded, since a farewell needs both; `hang_up` is their end in any case.
        """
        try:
            await begin_or_leave()
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_control)
                    task_status.started(nursery)
        except* (ProtocolError, h11.ProtocolError, HandshakeError, ValueError) as failures:
            # A peer can bring the reader to it: with a ping that crosses our Close frame, with
            # headers that are not ASCII, with an answer that is no HTTP.
            self.failure = failures
        finally:
            self.end()
            self._has_stopped.set()

    def opened(self, connection: WebSocketConnection, unclaimed_bytes_max: int) -> None:
        """From here on `connection` is open, and may read so much without making a message."""
        self._connection = connection
        self.answer = b""
        self._unclaimed_bytes_max = unclaimed_bytes_max

    def divert(self, sieve: Sieve, slot: Slot) -> None:
        """From here on `slot` is given what `sieve` takes out of what is read."""
        self._sieve, self._slot = sieve, slot

    def claim(self, count: int | None = None) -> None:
        """So many of the bytes that were read are accounted for; all of them by default."""
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
        self._look_for_a_violation()
        if self._has_ended:
            raise trio.ClosedResourceError
        return await self._read(max_bytes) if self._sieve is None else await self._rest(self._sieve)

    async def aclose(self) -> None:
        """Only `hang_up` closes: there may be a Close frame to write yet."""
        self.end()
        await trio.lowlevel.checkpoint()

    # -- reading

    async def _rest(self, sieve: Sieve) -> bytes:
        """What the sieve leaves of what is read; nothing at the end."""
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
            self.fail(CloseReason.MESSAGE_TOO_BIG, "too much that is no message")
            raise trio.ClosedResourceError
        return data

    def _look_for_a_violation(self) -> None:
        """trio-websocket notes our own Close as 1000, a cut as 1006, and answers the peer's."""
        closed = self._connection.closed if self._connection else None
        if closed is not None and closed.code not in (
            CloseReason.NORMAL_CLOSURE,
            CloseReason.ABNORMAL_CLOSURE,
        ):
            self.fail(closed.code, closed.reason or "")

    # -- writing

    def put(self, data: bytes) -> None:
        """Whole frames, to be written with the next `flush`.

        Raises `trio.BrokenResourceError` where nothing may follow any more.
        """
        if self._is_broken or self._is_closing:
            raise trio.BrokenResourceError("the WebSocket is closing")
        if data[0] == _PONG:
            self._pong = data
            self.claim(len(data) - _MASK_BYTES)  # a server's ping has none
        elif data[0] == _CLOSE:
            self._pending += [self._pong, data]
            self._pong = b""
            self._is_closing = True
        else:
            self._pending.append(data)
        if data[0] not in _DATA:
            self._control.set()

    def fail(self, code: int, reason: str) -> None:
        """The peer broke the rules: tell it why, if nothing else was said; no more is read."""
        if not (self._is_closing or self._is_broken):
            assert self._connection is not None  # there are no rules to break before
            farewell = CloseConnection(code=code, reason=reason)
            self.put(Connection(ConnectionType.CLIENT).send(farewell))
        self.end()

    def cut_short(self) -> None:
        """Nothing may follow what has been put but a Close frame, which says whose fault it is."""
        self._look_for_a_violation()
        self.fail(CloseReason.GOING_AWAY, "interrupted")

    async def flush(self) -> None:
        """Write all that is pending; when this returns it is the operating system's.

        Cancelled half-way, it tears the connection: after half a frame nothing can be said.
        Raises `trio.BrokenResourceError` when the peer is gone.
        """
        async with self._writing:
            if self._is_broken:
                raise trio.BrokenResourceError("the peer is gone")
            await trio.lowlevel.checkpoint_if_cancelled()  # no frame is begun that cannot be ended
            frames = [*self._pending, self._pong]
            self._pending.clear()
            self._pong = b""
            try:
                if any(frames):
                    await send_pieces(self._stream, frames)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.break_off()
                raise trio.BrokenResourceError("the peer is gone") from None
            except BaseException:
                self.break_off()
                await trio.aclose_forcefully(self._stream)
                raise

    async def _write_control(self) -> None:
        while True:
            await self._control.wait()
            self._control = trio.Event()
            try:
                await self.flush()
            except trio.BrokenResourceError:
                return  # whoever reads will see it

    # -- the end

    @contextlib.contextmanager
    def until_ended(self, deadline: float = float("inf")) -> Iterator[trio.CancelScope]:
        """Cancel the block once nothing more is to come from the peer, or at `deadline`."""
        with trio.CancelScope(deadline=deadline) as scope:
            if self._has_ended:
                scope.cancel()
            self._waiting.add(scope)
            try:
                yield scope
            finally:
                self._waiting.discard(scope)

    def end(self) -> None:
        """Nothing more is to come from the peer: let everybody who waits for it see that."""
        self._has_ended = True
        for scope in self._waiting:
            scope.cancel()

    def break_off(self) -> None:
        """Nothing goes either way any more."""
        self._is_broken = True
        self.end()

    async def close_gracefully(self) -> None:
        """Write what is pending, and hear the peer out; to be bounded by the caller."""
        self._look_for_a_violation()  # which the reader may not have come to
        await self.flush()
        self._tasks.cancel()
        await self._has_stopped.wait()
        await linger(self._stream)

    async def hang_up(self) -> None:
        """Close at once."""
        self.break_off()
        self._tasks.cancel()
        await trio.aclose_forcefully(self._stream)


@asynccontextmanager
async def open_wire(stream: trio.abc.Stream) -> AsyncIterator[tuple[Wire, trio.Nursery]]:
    """Run a `Wire` over `stream`, with the nursery for its trio-websocket; closes it at the end."""
    wire = Wire(stream)
    async with tasks_until(wire.hang_up) as nursery:
        yield wire, await nursery.start(wire.run)
