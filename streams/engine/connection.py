"""One connection as the engine sees it: what is on its way to the peer, and whether the peer lives.

A connection has one sender, whatever the number of streams on it. It takes the streams that have
something to read in turn, reads from the journal where each of them left off, and writes the lot at
once. Replay is following from far behind, live is following with nothing left to read: there is no
switch-over, so there is no gap.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from streams.engine.delivery import Delivery
from streams.engine.framing import NUMBERED, PLAIN, Framing
from streams.engine.proofs import Proofs
from streams.engine.separation import Separation
from streams.engine.session import Session
from streams.errors import Missing, Unavailable, refusal
from streams.exchange import Channel
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.limits import MIB
from streams.messages import Run
from streams.protocol import extension

# Of all runs in one write. The first is for a peer that may not read, which holds as much memory,
# the other for one that does: several runs cost little more than one.
RUNS_BYTES: Final = STORED_BYTES_MAX
RUNS_BYTES_MAX: Final = 4 * STORED_BYTES_MAX
PROMPT_S: Final = 0.1  # in which a write is out whose peer takes what it is given
KERNEL_BYTES: Final = 4 * MIB  # what the kernel takes for a peer that reads nothing
STREAM_BYTES_MIN: Final = 16 * 1024  # what a stream may have of a write when many are ready
# Replies that may wait for a peer that does not read; then it is not read either.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
OUTBOX_REPLIES_MAX: Final = 1_000  # they are framed in one go, in which nothing else runs: 1 ms
PING_EVERY_S: Final = 15.0
SILENCE_S: Final = 60.0  # neither a pong nor a write in this time: counts as detached
BUSY_S: Final = 0.05  # until a journal that could not be read is asked again
LOOK_EVERY_S: Final = 0.5  # whether anybody is left to read, once nothing more is received
SETTLE_S: Final = 1.0  # a ping asks about all that was written in about this time

CursorOf = Callable[[str], int | None]


def no_cursor(stream_id: str) -> int | None:
    """Where nothing but a request's own params says up to where the client has a stream."""
    return None


class _Write:
    """What goes out in one write, and what is to be noted once it is out."""

    __slots__ = ("lines", "runs", "size")

    def __init__(self, lines: list[bytes], size: int) -> None:
        self.lines = lines
        self.size = size
        self.runs: list[tuple[Delivery, int]] = []  # up to which seq they are in it

    def add(self, *lines: bytes) -> None:
        self.lines += filter(None, lines)
        self.size += sum(map(len, lines))


class Connection:
    """Everything that is on its way to one peer. `run` it, or `respond` once."""

    def __init__(
        self,
        channel: Channel,
        journal: Journal,
        session: Session | None = None,
        *,
        framing: Framing | None = None,
        cursor_of: CursorOf = no_cursor,
    ) -> None:
        """With a `session` this is the response to one of its requests, `framing` what it is
        written in, and `cursor_of` what the request's headers say of a stream.
        """
        self.channel = channel
        self.session = session or Session(channel.principal)
        self.is_response = session is not None
        self.cursor_of = cursor_of
        self.deliveries: dict[str, Delivery] = {}
        self._framing_given = framing
        self._journal = journal
        self._ready: dict[Delivery, None] = {}
        self._finishing: list[Delivery] = []  # all of it is in the write that is under way
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._has_work = trio.Event()
        self._moved = trio.lowlevel.ParkingLot()  # who waits for a write to be out
        self._is_writing = False
        self._write_began_at = 0.0
        self._prompt_bytes = 0  # were out in time, one write after the other
        self._scope: trio.CancelScope | None = None
        self._is_hung_up = False
        self._has_written = False
        self._seen_at = trio.current_time()
        self._is_silent = False
        self._proofs = Proofs()
        self.separation = Separation(channel)

    @property
    def embeds_responses(self) -> bool:
        """Whether a resume's reply has the final response in it, instead of following it."""
        has_room = self.session.settings.replay_response and self._framing.announces
        return self.is_response and not has_room

    @property
    def has_event_ids(self) -> bool:
        """Whether whoever reads this can come back for what follows, announced or not."""
        return self._framing.has_ids

    @property
    def _framing(self) -> Framing:
        if self._framing_given is not None:
            return self._framing_given
        return NUMBERED if self.session.settings.positions else PLAIN

    # What goes out

    def reply(self, line: bytes) -> None:
        """Send a line that belongs to no stream."""
        framed = self._framing.line(line)
        self._outbox.append(framed)
        self._outbox_bytes += len(framed)
        self._has_work.set()

    def attach(self, delivery: Delivery) -> None:
        """Deliver a stream from now on."""
        self.deliveries[delivery.stream.id] = delivery
        self.session.attach(delivery)
        self._framing.attached(delivery)
        if not self._framing.announces:
            delivery.preamble, delivery.dialects = (), ()
        delivery.stream.attach(delivery)
        self.wake(delivery)

    def wake(self, delivery: Delivery) -> None:
        """There may be something to read for this delivery."""
        if not delivery.is_over:
            self._ready[delivery] = None
            self._has_work.set()

    def forget(self, delivery: Delivery) -> None:
        """Stop delivering; what is being written is written."""
        delivery.is_over = True
        self.deliveries.pop(delivery.stream.id, None)
        self.session.detach(delivery)
        self._ready.pop(delivery, None)
        self._has_work.set()  # for who waits until nothing is owed
        self._moved.unpark_all()

    async def has_room(self) -> None:
        """Wait until the peer has read enough of its replies to be given more."""
        while self._outbox_bytes > OUTBOX_BYTES_MAX or len(self._outbox) > OUTBOX_REPLIES_MAX:
            await self._moved.park()

    async def drained(self) -> None:
        """Wait until all that is owed is written, or there is nobody to take it."""
        while self._is_owing:
            if not self.channel.is_writable():
                return
            with trio.move_on_after(LOOK_EVERY_S):
                await self._moved.park()

    # While it lasts

    def run(self, nursery: trio.Nursery) -> None:
        """Send and watch over the peer in `nursery`; a failure or `hang_up` cancels that."""
        self._live_in(nursery)
        self.separation.begin(nursery)
        nursery.start_soon(self._repeat, self._send_next)
        nursery.start_soon(self._repeat, self._watch)

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                await step()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.hang_up()  # the peer is gone, which is what connections are expected to do

    def _live_in(self, nursery: trio.Nursery) -> None:
        self._scope = nursery.cancel_scope
        if self._is_hung_up:
            self._scope.cancel()

    async def respond(self) -> None:
        """Send all that is owed, as the response to one request, and watch over the peer.

        Most of what is asked for again is there already: it is written before all else is set up.
        """
        try:
            if self.channel.unsent_bytes() == 0:  # the write will not wait for the peer
                await self._send_once()
        except trio.BrokenResourceError:
            return
        if self._is_owing:
            try:
                async with trio.open_nursery() as nursery:
                    self._live_in(nursery)
                    nursery.start_soon(self._repeat, self._watch)
                    nursery.start_soon(self._hang_up_when_gone)
                    while self._is_owing:
                        await self._send_next()
                    nursery.cancel_scope.cancel()
            except* trio.BrokenResourceError:
                pass
        if not (self._has_written or self._is_hung_up or self._framing.is_json):
            # Its delivery was dropped without a word: cancelled, or asked for again elsewhere under
            # the same id. MCP has no response to that, and HTTP has to have one: an empty one.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.channel.send(b"")

    async def _hang_up_when_gone(self) -> None:
        with suppress(trio.EndOfChannel):
            await self.channel.receive()
        self.hang_up()

    @property
    def _is_owing(self) -> bool:
        return bool(self.deliveries or self._outbox or self._is_writing)

    def hang_up(self) -> None:
        """Close the connection."""
        self._is_hung_up = True
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        """The connection is over: nobody follows its streams any more."""
        for delivery in list(self.deliveries.values()):
            delivery.drop()
        self._finish()
        self._proofs.clear()

    async def _send_next(self) -> None:
        """Wait until there may be something to send, and send all that is ready."""
        await self._has_work.wait()
        self._has_work = trio.Event()
        while self._outbox or self._ready:
            await self._send_once()

    async def _send_once(self) -> None:
        self._is_writing = True
        self._write_began_at = trio.current_time()
        write = await self._gather()
        if write.lines:
            self._has_written = True
            await self.channel.send(*write.lines)
            self._saw_life()
            is_prompt = self._seen_at - self._write_began_at < PROMPT_S
            self._prompt_bytes = self._prompt_bytes + write.size if is_prompt else 0
        self._is_writing = False
        self._note(write)

    async def _gather(self) -> _Write:
        write = _Write(self._outbox, self._outbox_bytes)
        self._outbox, self._outbox_bytes = [], 0
        bytes_max = RUNS_BYTES_MAX if self._prompt_bytes > KERNEL_BYTES else RUNS_BYTES
        share = max(STREAM_BYTES_MIN, bytes_max // max(1, len(self._ready)))
        for delivery in list(self._ready):
            if write.size >= bytes_max:
                break
            if delivery not in self._ready:
                continue  # it was forgotten meanwhile
            del self._ready[delivery]
            try:
                await self._read(delivery, write, share)
            except Unavailable:
                await trio.sleep(BUSY_S)
                self.wake(delivery)
                break  # what has been gathered must not wait for it
        return write

    async def _read(self, delivery: Delivery, write: _Write, share: int) -> None:
        state = delivery.stream.state
        runs = await self._read_runs(delivery, share)
        if delivery.is_over or delivery.is_held or not delivery.may_open:
            return
        stop = delivery.stop
        if stop is not None:
            runs = [run.until(stop) for run in runs if run.seq <= stop]
        runs = self.separation.hold(delivery, runs)
        if not delivery.is_open:
            self._open(delivery, runs, write)
        response = None
        if runs:
            response = self._hand_over(delivery, runs, write)
        if stop is not None and delivery.position >= stop:
            self._conclude(delivery, response, write)
        elif delivery.position < state.durable and not delivery.is_held:
            self._ready[delivery] = None

    async def _read_runs(self, delivery: Delivery, share: int) -> Sequence[Run]:
        """What follows the delivery's position. It is all there: `delivered` never passes the
        position of the attached delivery, and the journal keeps what is above `delivered`.

        A delivery that ends meanwhile may find a gap, since a newer one lets go of messages. So may
        one that stands below `delivered` against that rule: its client is told, and no other.
        """
        state, position = delivery.stream.state, delivery.position
        if position >= state.durable:
            return ()
        runs: Sequence[Run] = ()
        try:
            runs = await self._journal.read(delivery.stream.id, position, bytes_max=share)
        except Missing:
            if not delivery.is_over and position >= state.delivered:
                raise
        if not delivery.is_over and position < state.delivered:
            delivery.fail(refusal("messages_gone", earliestSeq=state.delivered + 1))
        if not (runs or delivery.is_over):
            raise Missing(position + 1, state.durable)
        return runs

    def _open(self, delivery: Delivery, runs: Sequence[Run], write: _Write) -> None:
        delivery.is_open = True
        is_lone = bool(runs) and delivery.is_lone(runs[0])
        write.add(self._framing.opening(delivery, is_lone=is_lone))
        write.runs.append((delivery, delivery.position))
        stream = delivery.stream
        if delivery.reply_id is None:
            is_told = bool(delivery.dialects) or self.has_event_ids
            is_reachable = is_told or stream.is_open_to_key
            stream.is_reachable = stream.record.is_announced and is_reachable

    def _hand_over(self, delivery: Delivery, runs: Sequence[Run], write: _Write) -> bytes | None:
        """Put the runs into the write, but for a response at their end that is to be embedded."""
        stream, last = delivery.stream, runs[-1].last
        shown, response = delivery.shown(runs[-1])
        for run in (*runs[:-1], shown):
            if run.count:
                write.add(*self._framing.run(delivery, run))
        write.runs.append((delivery, last))
        delivery.position = last
        # An ack of it may come before the write has returned.
        stream.wrote(runs)
        stream.asking.note(self.session, last)
        return response

    def _conclude(self, delivery: Delivery, response: bytes | None, write: _Write) -> None:
        for line in delivery.farewells():
            write.add(self._framing.line(line))
        if delivery.replays:
            reply = extension.resumed(delivery.waiting_id, "completed", response)
            write.add(self._framing.reply(delivery, reply))
        self._finishing.append(delivery)
        self.forget(delivery)

    def _note(self, write: _Write) -> None:
        """The write is out. Only now may a pong be taken for a proof that it was read."""
        for delivery, seq in write.runs:
            delivery.written = seq
            stream = delivery.stream
            is_provable = self._may_prove and stream.record.is_announced
            if seq and is_provable and stream.is_newest(delivery.number):
                self._proofs.wrote(delivery, seq)
            stream.notify()
        self.separation.wrote(write.size)
        self._finish()
        self._moved.unpark_all()

    def _finish(self) -> None:
        finished, self._finishing = self._finishing, []
        for delivery in finished:
            delivery.drop()

    # What comes back

    def heard(self) -> None:
        """The peer sent something."""
        self._proofs.heard()
        self._saw_life()

    def _saw_life(self) -> None:
        self._seen_at = trio.current_time()
        if self._is_silent:
            self._is_silent = False
            for delivery in self.deliveries.values():
                delivery.stream.attach(delivery)

    async def _watch(self) -> None:
        with trio.move_on_after(PING_EVERY_S):
            await self._proofs.needed()
            await trio.sleep(SETTLE_S)
        marks = self._proofs.marks
        has_pong = None
        with trio.move_on_after(SILENCE_S):
            has_pong = await self.channel.ping()
        if has_pong:
            self._proofs.read(marks)
            self.heard()
        elif has_pong is False and marks and self.channel.unsent_bytes() == 0:
            self._proofs.left(marks)
        self._check_silence(is_asked=has_pong is None)

    @property
    def _may_prove(self) -> bool:
        # A client with positions says so itself, and an HTTP response is followed by none.
        return not (self.session.settings.positions or self.is_response)

    def _check_silence(self, *, is_asked: bool) -> None:
        # A peer that was given nothing to take and asked nothing is not silent.
        since = self._seen_at if is_asked else max(self._seen_at, self._write_began_at)
        is_expected = is_asked or self._is_writing
        if is_expected and trio.current_time() - since >= SILENCE_S:
            self._is_silent = True
            for delivery in self.deliveries.values():
                delivery.stream.fall_silent(delivery)
