"""One connection as the engine sees it: what is on its way to the peer, and whether the peer lives.

A connection has one sender, whatever the number of streams on it. It takes the streams that have
something to read in turn, reads from the journal where each of them left off, and writes the lot at
once. Replay is following from far behind, live is following with nothing left to read: there is no
switch-over, so there is no gap.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio

from streams import extension
from streams.delivery import Delivery
from streams.errors import Unavailable
from streams.framing import NUMBERED, PLAIN, Framing
from streams.journal import Journal
from streams.messages import Channel, Run
from streams.session import Session
from streams.stream import Stream

WRITE_BYTES: Final = 256 * 1024  # more in one write gains nothing, and delays other streams
RUNS_BYTES_MAX: Final = WRITE_BYTES - 4096  # of them all, so that there is room for the headers
STREAM_BYTES_MIN: Final = 16 * 1024  # what a stream may have of a write when many are ready
# Replies that may wait for a peer that sends requests and does not read; then it is not read
# either.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
PING_EVERY_S: Final = 15.0
SILENCE_S: Final = 60.0  # neither a pong nor a write in this time: counts as detached
BUSY_S: Final = 0.05  # until a journal that could not be read is asked again
LOOK_EVERY_S: Final = 0.5  # whether anybody is left to read, once nothing more is received
SETTLE_S: Final = 1.0  # a ping asks about all that was written in about this time
# What was written, has left the kernel's queue, and is followed so much later by a sign of life,
# has arrived: the time is the one that the Streams page names.
BELIEF_S: Final = 120.0


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
        # What was written of streams whose client confirms nothing, and may be proved to be read.
        self.unproved: dict[Stream, int] = {}
        self._framing_given = framing
        self._journal = journal
        self._ready: dict[Delivery, None] = {}
        self._finishing: list[Delivery] = []  # all of it is in the write that is under way
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._has_work = trio.Event()
        self._moved = trio.Event()
        self._is_writing = False
        self._write_began_at = 0.0
        self._scope: trio.CancelScope | None = None
        self._is_hung_up = False
        self._seen_at = trio.current_time()
        self._is_silent = False
        # (when its queue was seen empty, what had been written by then), where nothing can be asked
        self._emptied: deque[tuple[float, dict[Stream, int]]] = deque()

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
        self._stir()

    async def has_room(self) -> None:
        """Wait until the peer has read enough of its replies to be given more."""
        while self._outbox_bytes > OUTBOX_BYTES_MAX:
            await self._moved.wait()

    async def drained(self) -> None:
        """Wait until all that is owed is written, or there is nobody to take it."""
        while self._is_owing:
            if not self.channel.is_writable():
                return
            with trio.move_on_after(LOOK_EVERY_S):
                await self._moved.wait()

    # While it lasts

    def run(self, nursery: trio.Nursery) -> None:
        """Send, and watch over the peer, in `nursery`: it is cancelled when the connection fails or
        is hung up.
        """
        self._live_in(nursery)
        nursery.start_soon(self._until_broken, self._send_forever)
        nursery.start_soon(self._until_broken, self._watch_forever)

    async def _until_broken(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.hang_up()  # the peer is gone, which is what connections are expected to do

    def _live_in(self, nursery: trio.Nursery) -> None:
        self._scope = nursery.cancel_scope
        if self._is_hung_up:
            self._scope.cancel()

    async def respond(self) -> None:
        """Send all that is owed, as the response to one request, and watch over the peer.

        Most of what is asked for again is there already, and is written before anything else has to
        be set up for it.
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
                    nursery.start_soon(self._watch_forever)
                    nursery.start_soon(self._hang_up_when_gone)
                    while self._is_owing:
                        await self._send_next()
                    nursery.cancel_scope.cancel()
            except* trio.BrokenResourceError:
                pass

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
        self.unproved.clear()
        self._emptied.clear()

    async def _send_forever(self) -> None:
        while True:
            await self._send_next()

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
            await self.channel.send(*write.lines)
            self._saw_life()
        self._is_writing = False
        self._note(write)

    async def _gather(self) -> _Write:
        write = _Write(self._outbox, self._outbox_bytes)
        self._outbox, self._outbox_bytes = [], 0
        share = max(STREAM_BYTES_MIN, RUNS_BYTES_MAX // max(1, len(self._ready)))
        while self._ready and write.size < RUNS_BYTES_MAX:
            delivery = next(iter(self._ready))
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
        run = None
        if delivery.position < state.durable:
            run = await self._journal.read(delivery.stream.id, delivery.position, bytes_max=share)
        if delivery.is_over or not delivery.may_open:
            return
        stop = delivery.stop
        if run is not None and stop is not None:
            run = run.until(stop)
        if not delivery.is_open:
            self._open(delivery, run, write)
        response = None
        if run is not None:
            response = self._hand_over(delivery, run, write)
        if stop is not None and delivery.position >= stop:
            self._conclude(delivery, response, write)
        elif delivery.position < state.durable:
            self._ready[delivery] = None

    def _open(self, delivery: Delivery, run: Run | None, write: _Write) -> None:
        delivery.is_open = True
        is_lone = run is not None and delivery.is_lone(run)
        write.add(self._framing.opening(delivery, is_lone=is_lone))
        write.runs.append((delivery, delivery.position))
        stream = delivery.stream
        if delivery.reply_id is None:
            is_told = bool(delivery.dialects) or self.has_event_ids
            stream.is_reachable = stream.record.is_announced and is_told

    def _hand_over(self, delivery: Delivery, run: Run, write: _Write) -> bytes | None:
        """Put the run into the write, but for a response at its end that is to be embedded."""
        stream = delivery.stream
        shown, response = delivery.shown(run)
        if shown.count:
            write.add(*self._framing.run(delivery, shown))
        write.runs.append((delivery, run.last))
        delivery.position = run.last
        # An ack of it may come before the write has returned.
        stream.wrote(run)
        stream.note_asked(self.session, run.last)
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
            if seq and delivery.stream.record.is_announced and self._may_prove:
                self.unproved[delivery.stream] = seq
            delivery.stream.notify()
        self._finish()
        self._stir()

    def _finish(self) -> None:
        finished, self._finishing = self._finishing, []
        for delivery in finished:
            delivery.drop()

    def _stir(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    # What comes back

    def heard(self) -> None:
        """The peer sent something."""
        now = trio.current_time()
        while self._emptied and now - self._emptied[0][0] > BELIEF_S:
            self._confirm_all(self._emptied.popleft()[1])
        self._saw_life()

    def _saw_life(self) -> None:
        self._seen_at = trio.current_time()
        if self._is_silent:
            self._is_silent = False
            for delivery in self.deliveries.values():
                delivery.stream.attach(delivery)

    def _confirm_all(self, marks: dict[Stream, int]) -> None:
        for stream, seq in marks.items():
            stream.deliver(seq)

    async def _watch_forever(self) -> None:
        while True:
            await trio.sleep(SETTLE_S if self.unproved else PING_EVERY_S)
            marks = dict(self.unproved)
            has_pong = None
            with trio.move_on_after(SILENCE_S):
                has_pong = await self.channel.ping()
            if has_pong:
                self._forget_marks(marks)
                self._confirm_all(marks)
                self.heard()
            elif has_pong is False:
                self._look_at_queue(marks)
            self._check_silence(is_asked=has_pong is None)

    @property
    def _may_prove(self) -> bool:
        """Whether signs of life on this connection tell what was read.

        A client with positions says so itself. An HTTP response is followed by none.
        """
        return not (self.session.settings.positions or self.is_response)

    def _look_at_queue(self, marks: dict[Stream, int]) -> None:
        if not marks or self.channel.unsent_bytes() != 0:
            return
        self._forget_marks(marks)
        now, emptied = trio.current_time(), self._emptied
        emptied.append((now, marks))
        # A peer that reads for days and says nothing: what is old enough to be believed is one.
        while len(emptied) > 1 and now - emptied[1][0] > BELIEF_S:
            _, older = emptied.popleft()
            seen_at, newer = emptied[0]
            emptied[0] = (seen_at, older | newer)

    def _forget_marks(self, marks: dict[Stream, int]) -> None:
        for stream, seq in marks.items():
            if self.unproved.get(stream) == seq:  # else more was written since
                del self.unproved[stream]

    def _check_silence(self, *, is_asked: bool) -> None:
        # A peer that was given nothing to take and asked nothing is not silent.
        since = self._seen_at if is_asked else max(self._seen_at, self._write_began_at)
        is_expected = is_asked or self._is_writing
        if is_expected and trio.current_time() - since >= SILENCE_S:
            self._is_silent = True
            for delivery in self.deliveries.values():
                delivery.stream.fall_silent(delivery)
