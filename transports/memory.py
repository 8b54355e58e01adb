"""Channels within one process, for tests: bounded as real ones are, and easily cut.

The framing is that of stdio (`transports.lines`), over pipes of a fixed size. So a peer that does
not read makes `send` wait, and a cut loses the bytes in flight, even in the middle of a message.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from streams.exchange import ClientChannel, Handler
from streams.messages import MESSAGE_BYTES_MAX
from transports.lines import LineChannel

# The size of a pipe in Linux.
CAPACITY_BYTES: Final = 64 * 1024


class _Pipe(trio.abc.SendStream, trio.abc.ReceiveStream):
    """Bytes in one direction, at most `capacity` of them in flight."""

    def __init__(self, capacity: int) -> None:
        self.in_flight = bytearray()
        self.until_cut: int | None = None  # so many bytes arrive before the cable is cut
        self.cable: Cable | None = None
        self._capacity = capacity
        self._is_ended = False  # the writer has closed; bytes in flight still arrive
        self.is_broken = False
        self._changed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        sent = 0
        while True:
            if self._is_ended or self.is_broken:
                raise trio.BrokenResourceError("the other end is gone")
            room = min(self._capacity - len(self.in_flight), len(data) - sent)
            self.in_flight += data[sent : sent + room]
            sent += room
            if room:
                self._wake()
            if sent == len(data):
                return
            await self._changed.wait()

    async def wait_send_all_might_not_block(self) -> None:
        while len(self.in_flight) == self._capacity and not (self._is_ended or self.is_broken):
            await self._changed.wait()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while not (self.in_flight or self._is_ended or self.is_broken):
            await self._changed.wait()
        if self.is_broken:
            raise trio.BrokenResourceError("the other end is gone")
        passing = [len(self.in_flight)]
        passing += [limit for limit in (max_bytes, self.until_cut) if limit is not None]
        taken = bytes(self.in_flight[: min(passing)])
        del self.in_flight[: len(taken)]
        self._count(len(taken))
        self._wake()
        return taken

    def _count(self, passed: int) -> None:
        if self.until_cut is None:
            return
        self.until_cut -= passed
        if self.until_cut == 0 and self.cable is not None:
            self.cable.cut()

    def end(self) -> None:
        """End the output; bytes in flight still arrive."""
        self._is_ended = True
        self._wake()

    def break_off(self) -> None:
        """Discard the bytes in flight; reads and writes fail from now on."""
        self.is_broken = True
        self.in_flight.clear()
        self._wake()

    async def aclose(self) -> None:
        self.end()
        await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class _End(trio.abc.HalfCloseableStream):
    """One end of a cable. Closing it ends its output; writes of the other end then fail."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._outgoing.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._outgoing.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._outgoing.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._incoming.receive_some(max_bytes)

    def unsent_bytes(self) -> int:
        return len(self._outgoing.in_flight)

    def has_reader(self) -> bool:
        return not self._outgoing.is_broken

    async def aclose(self) -> None:
        self._incoming.break_off()
        await self._outgoing.aclose()


class Cable:
    """Two joined channels: `near` for the client, `far` for the server."""

    near: LineChannel
    far: LineChannel

    def __init__(
        self,
        *,
        capacity: int = CAPACITY_BYTES,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        principal: str = "memory",
    ) -> None:
        self._up, self._down = _Pipe(capacity), _Pipe(capacity)
        self._up.cable = self._down.cable = self
        self.near_end = _End(self._up, self._down)
        self.far_end = _End(self._down, self._up)
        self.near, self.far = (
            LineChannel(
                end,
                principal=principal,
                transport="memory",
                message_bytes_max=message_bytes_max,
                unsent=end.unsent_bytes,
                has_reader=end.has_reader,
            )
            for end in (self.near_end, self.far_end)
        )

    def cut(self) -> None:
        """Cut the connection now: the bytes in flight are lost, both ways."""
        self._up.break_off()
        self._down.break_off()

    def cut_after(self, *, to_near: int | None = None, to_far: int | None = None) -> None:
        """Cut the connection once so many more bytes have arrived at that end.

        Raises `ValueError` unless the numbers are positive.
        """
        if any(count is not None and count < 1 for count in (to_near, to_far)):
            raise ValueError("a positive number of bytes, or `cut()` to cut it now")
        self._down.until_cut = to_near
        self._up.until_cut = to_far


class MemoryServer:
    """`serve` and `connect`, joined by this object instead of an address; `connect` is a `Dialer`.

    `cables` are the connections that `connect` has opened, newest last, for a test to cut.
    """

    def __init__(
        self,
        *,
        capacity: int = CAPACITY_BYTES,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        principal: str = "memory",
    ) -> None:
        self._capacity = capacity
        self._message_bytes_max = message_bytes_max
        self._principal = principal
        self._accept: Callable[[Cable], None] | None = None
        self.cables: list[Cable] = []

    async def serve(
        self, handler: Handler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run `handler` for each connection, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._accept = lambda cable: nursery.start_soon(_run, handler, cable.far)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._accept = None

    def open_cable(self) -> Cable:
        """Open a connection; the caller closes or cuts its near end.

        Raises `ConnectionRefusedError` while `serve` does not run.
        """
        if self._accept is None:
            raise ConnectionRefusedError("no server runs on this memory transport")
        cable = Cable(
            capacity=self._capacity,
            message_bytes_max=self._message_bytes_max,
            principal=self._principal,
        )
        self._accept(cable)
        return cable

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientChannel]:
        """Open a connection. Raises `ConnectionRefusedError` while `serve` does not run."""
        await trio.lowlevel.checkpoint()
        cable = self.open_cable()
        self.cables.append(cable)
        try:
            yield cable.near
        finally:
            self.cables.remove(cable)
            with trio.CancelScope(shield=True):
                await cable.near.aclose()


async def _run(handler: Handler, channel: LineChannel) -> None:
    try:
        await handler(channel)
    finally:
        with trio.CancelScope(shield=True):
            await channel.aclose()
