"""Connections that may be slow, cut, half-open, or late: all within one process.

Each direction is a pipe of bytes on their way. A cut makes both pipes void: no byte arrives any
more, and each end notices the cut when it is told, which may be much later. Until then its writes
vanish, as long as the pipe has room.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

import trio

from streams.exchange import ClientChannel
from streams.messages import Incoming
from tests.simulation.weather import FOREVER, Weather
from tests.simulation.world import World
from transports.lines import LineChannel

CAPACITY_BYTES: Final = 16 * 1024
AGAIN_S: Final = 30.0  # in which a client is connected again


class Pipe(trio.abc.SendStream, trio.abc.ReceiveStream):
    """Bytes in one direction, each piece with the time at which it arrives."""

    def __init__(
        self, weather: Weather, capacity_bytes: int = CAPACITY_BYTES, client: str = ""
    ) -> None:
        self._weather = weather
        self._client = client
        self._capacity_bytes = capacity_bytes
        self._pieces: deque[tuple[float, bytes | trio.Event]] = deque()
        self.size = 0
        self._arrives_at = 0.0  # of the last piece: none overtakes another
        self._ends_at = FOREVER  # when its end arrives
        self._is_closed = False
        self.is_void = False
        self.is_broken_off = False  # told to its writer
        self.is_silent = False  # told to its reader
        self._changed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        sent = 0
        while True:
            if self._is_closed or self.is_broken_off:
                raise trio.BrokenResourceError("the other end is gone")
            room = min(self._capacity_bytes - self.size, len(data) - sent)
            if room > 0:
                self._put(bytes(data[sent : sent + room]))
                self.size += room
                sent += room
            if sent == len(data):
                return
            await self._changed.wait()

    @property
    def is_full(self) -> bool:
        """Whether a write must wait for a read."""
        return self.size >= self._capacity_bytes

    async def wait_send_all_might_not_block(self) -> None:
        while self.is_full and not (self._is_closed or self.is_broken_off):
            await self._changed.wait()

    def probe(self) -> trio.Event:
        """An event that is set once all earlier writes have been read."""
        seen = trio.Event()
        self._put(seen)
        return seen

    def _put(self, piece: bytes | trio.Event) -> None:
        if self.is_void:
            return
        arrives_at = trio.current_time() + self._weather.latency_s(self._client)
        self._arrives_at = max(self._arrives_at, arrives_at)
        self._pieces.append((self._arrives_at, piece))
        self._wake()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            if self.is_silent:
                raise trio.BrokenResourceError("the other end is gone")
            now = trio.current_time()
            if self._pieces and self._pieces[0][0] <= now:
                if data := self._take(now):
                    return data
                continue
            if self._ends_at <= now:
                return b""
            due = self._pieces[0][0] if self._pieces else self._ends_at
            with trio.move_on_at(due):
                await self._changed.wait()

    def _take(self, now: float) -> bytes:
        taken = bytearray()
        while self._pieces and self._pieces[0][0] <= now:
            _, piece = self._pieces.popleft()
            if isinstance(piece, trio.Event):
                piece.set()
            else:
                taken += piece
        self.size -= len(taken)
        self._wake()
        return bytes(taken)

    def blow(self, *, lose: bool) -> None:
        """Make the pipe void: no later write arrives; `lose` loses bytes on their way, too."""
        self.is_void = True
        self._ends_at = FOREVER
        if lose:
            self._pieces.clear()
        self._wake()

    def break_off(self) -> None:
        """Tell the writer that the pipe is broken."""
        self.is_broken_off = True
        self._wake()

    def silence(self) -> None:
        """Tell the reader that the pipe is broken."""
        self.is_silent = True
        self._wake()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self.is_void:
                arrives_at = trio.current_time() + self._weather.latency_s(self._client)
                self._ends_at = max(self._arrives_at, arrives_at)
            self._wake()
        await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class End(trio.abc.Stream):
    """One end of a connection. A close ends both directions: the other end is told."""

    def __init__(self, outgoing: Pipe, incoming: Pipe) -> None:
        self.outgoing = outgoing
        self.incoming = incoming

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.outgoing.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.outgoing.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self.incoming.receive_some(max_bytes)

    async def aclose(self) -> None:
        self.incoming.silence()
        if not self.incoming.is_void:
            self.incoming.break_off()
        await self.outgoing.aclose()

    def fail(self) -> None:
        """Tell this end that the connection is dead."""
        self.outgoing.break_off()
        self.incoming.silence()


class Witness(Protocol):
    """Sees the lines at the server's ends."""

    def heard(self, channel: "FarChannel", received: Sequence[Incoming]) -> None: ...

    def said(self, channel: "FarChannel", written: bytes) -> None: ...


class FarChannel(LineChannel):
    """The server's end, with a witness; it `pings` as a WebSocket does, or not at all."""

    def __init__(self, end: End, *, principal: str, pings: bool) -> None:
        super().__init__(
            end,
            principal=principal,
            unsent=lambda: end.outgoing.size,
            has_reader=lambda: not end.outgoing.is_broken_off,
        )
        self._end = end
        self._pings = pings
        self.witness: Witness | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its server may write to it."""
        pipe = self._end.outgoing
        return self.is_writable() and self.witness is not None and not pipe.is_full

    async def receive(self) -> Sequence[Incoming]:
        received = await super().receive()
        if self.witness is not None:
            self.witness.heard(self, received)
        return received

    async def send(self, *lines: bytes) -> None:
        if self.witness is not None:
            self.witness.said(self, b"".join(lines))
        await super().send(*lines)

    async def ping(self) -> bool:
        if not self._pings:
            return await super().ping()
        await self._end.outgoing.probe().wait()
        await self._end.incoming.probe().wait()
        return True


class Cable:
    """A connection: `near` is the client's end, `far` the server's."""

    def __init__(
        self,
        weather: Weather,
        *,
        principal: str,
        pings: bool,
        capacity_bytes: int,
        client: str = "",
    ) -> None:
        self.client = client
        up, down = Pipe(weather, client=client), Pipe(weather, capacity_bytes, client)
        self.near_end, self.far_end = End(up, down), End(down, up)
        self.near = LineChannel(self.near_end, principal=principal)
        self.far = FarChannel(self.far_end, principal=principal, pings=pings)

    def blow(self, *, lose: bool) -> None:
        """Cut both directions: no later write arrives."""
        self.near_end.outgoing.blow(lose=lose)
        self.far_end.outgoing.blow(lose=lose)


class Network:
    """Connects clients with the current server; `run` it."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world = world
        self._weather = weather
        self._nursery: trio.Nursery
        self.accept: Callable[[Cable], None] | None = None  # the server's, while one is up
        self.cables: dict[Cable, str] = {}  # and their client's name

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Decide when connections are cut, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def dialer(
        self, owner: str, principal: str, *, pings: bool
    ) -> Callable[..., AbstractAsyncContextManager[ClientChannel]]:
        """A dialer for the client of this name."""

        @asynccontextmanager
        async def dial(capacity_bytes: int = CAPACITY_BYTES) -> AsyncIterator[ClientChannel]:
            await trio.sleep(self._weather.latency_s(owner))
            if self.accept is None:
                await trio.sleep(self._weather.notice_s())
                raise ConnectionRefusedError("nobody listens")
            whose = principal or f"conn({self._world.chance.getrandbits(64)})"
            cable = Cable(
                self._weather,
                principal=whose,
                pings=pings,
                capacity_bytes=capacity_bytes,
                client=owner,
            )
            self.cables[cable] = owner
            self._nursery.start_soon(self._arrive, cable)
            self._nursery.start_soon(self._fare, cable)
            try:
                yield cable.near
            finally:
                self.cables.pop(cable, None)
                with trio.CancelScope(shield=True):
                    await cable.near.aclose()

        return dial

    async def _arrive(self, cable: Cable) -> None:
        """A connection that was opened later may arrive earlier."""
        await trio.sleep(self._weather.latency_s(cable.client))
        if self.accept is None:
            cable.blow(lose=True)
            cable.near_end.fail()
        else:
            self.accept(cable)

    async def _fare(self, cable: Cable) -> None:
        await trio.sleep(self._weather.cut_in_s())
        if cable not in self.cables:
            return
        self._world.counts["cuts"] += 1
        near_s, far_s = self._weather.notice_s(), self._weather.notice_s()
        lose = self._weather.is_so(0.7)
        self._world.note("network", f"cut {self.cables[cable]}: {near_s:.1f} {far_s:.1f} {lose}")
        self.cut(cable, near_s, far_s, lose=lose)

    def cut_channel(self, far: object) -> None:
        """Cut the connection with this end at the server, if it is open."""
        for cable in [cable for cable in self.cables if cable.far is far]:
            near_s, far_s = self._weather.notice_s(), self._weather.notice_s()
            self.cut(cable, near_s, far_s, lose=self._weather.is_so(0.7))

    def cut(self, cable: Cable, near_s: float, far_s: float, *, lose: bool) -> None:
        """Cut a connection; each end is told after so many seconds."""
        self._world.disturb(near_s + far_s + AGAIN_S, cable.client)
        cable.blow(lose=lose)
        for end, notice_s in ((cable.near_end, near_s), (cable.far_end, far_s)):
            if notice_s == 0:
                end.fail()
            else:
                self._nursery.start_soon(_fail_later, end, notice_s)

    def lose_client(self, owner: str) -> None:
        """Cut off a dead client: no message from it arrives any more."""
        for cable in [cable for cable, whose in self.cables.items() if whose == owner]:
            del self.cables[cable]
            self.cut(cable, 0.0, self._weather.notice_s(), lose=self._weather.is_so(0.5))

    def lose_server(self) -> None:
        """Cut off the dead server."""
        self.accept = None
        for cable in list(self.cables):
            self.lose(cable)

    def lose(self, cable: Cable) -> None:
        """Cut a connection of a dead server."""
        cable.far.witness = None  # a dead server's errors do not matter
        self.cut(cable, self._weather.notice_s(), 0.0, lose=self._weather.is_so(0.5))


async def _fail_later(end: End, notice_s: float) -> None:
    await trio.sleep(notice_s)
    end.fail()
