"""One connection as the engine sees it: what is on its way to the peer, and whether the peer lives.

A connection has one sender, whatever the number of streams on it. It takes the streams that have
something to read in turn, reads from the journal where each of them left off, and writes the lot at
once. Replay is following from far behind, live is following with nothing left to read: there is no
switch-over, so there is no gap.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import structlog
import trio

from streams import dialects, messages
from streams.dialects import Dialect, Settings
from streams.errors import Refusal, Unavailable, refusal
from streams.journal import Journal
from streams.messages import Channel, RequestId, Run
from streams.stream import Stream

log = structlog.get_logger()

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


class Delivery:
    """One stream on its way over one connection."""

    __slots__ = (
        "connection",
        "dialects",
        "is_over",
        "position",
        "preamble",
        "reply_id",
        "stream",
        "written",
    )

    def __init__(
        self,
        stream: Stream,
        connection: "Connection",
        *,
        after: int,
        preamble: Sequence[bytes],
        speaks: tuple[Dialect, ...],
        reply_id: RequestId | None = None,
    ) -> None:
        self.stream = stream
        self.connection = connection
        self.position = after  # handed to the sender
        self.written = after
        self.preamble = b"".join(preamble)
        self.dialects = speaks
        self.reply_id = reply_id  # of the resume; None for the originating request's own delivery
        self.is_over = False

    @property
    def taken_ids(self) -> set[RequestId]:
        """The request ids that stand for something else on this connection until this is over."""
        taken: set[RequestId] = set()
        if self.reply_id is not None:
            taken.add(self.reply_id)
        if self.reply_id is None or not self.connection.settings.positions:
            taken.add(self.stream.request_id)
        return taken

    def coda(self) -> bytes:
        """What follows the final response."""
        lines = [dialect.end(self.stream.id) for dialect in self.dialects]
        if self.reply_id is not None:
            lines.append(dialects.resumed(self.reply_id, "completed"))
        return b"".join(lines)

    def end(self, reason: str) -> None:
        """Let go of the stream and tell the client why: `superseded` or `released`."""
        if self.reply_id is not None:
            self._close(dialects.resumed(self.reply_id, reason))
        elif reason == "superseded":
            self._close(messages.error(self.stream.request_id, refusal(reason)))
        else:
            self._close(b"")

    def fail(self, refused: Refusal) -> None:
        """Let go of the stream with an error for whoever waits for it."""
        waiting = self.stream.request_id if self.reply_id is None else self.reply_id
        self._close(messages.error(waiting, refused))

    def let_go(self) -> bool:
        """Let the client come back for this stream when it likes; False where that would cost
        others.

        A resume can be told so; an original call is let go with its whole connection.
        """
        if self.reply_id is not None:
            self.end("released")
            return True
        everyone = self.connection.deliveries.values()
        if not all(delivery.stream.record.is_announced for delivery in everyone):
            return False
        self.connection.hang_up()
        return True

    def drop(self) -> None:
        """Let go of the stream and say nothing."""
        self._close(b"")

    def _close(self, farewell: bytes) -> None:
        if not self.is_over:
            self.connection.forget(self)
            if farewell:
                self.connection.reply(farewell)
        self.stream.detach(self)


class _Write:
    """What goes out in one write, and what is to be noted once it is out."""

    __slots__ = ("lines", "runs", "size")

    def __init__(self, lines: list[bytes], size: int) -> None:
        self.lines = lines
        self.size = size
        self.runs: list[tuple[Delivery, int]] = []  # up to which seq they are in it

    def add(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)


class Connection:
    """Everything that is on its way to one peer. `run` it for as long as the connection lasts."""

    def __init__(self, channel: Channel, journal: Journal) -> None:
        self.channel = channel
        self.principal = channel.principal
        self.settings = Settings()
        self.deliveries: dict[str, Delivery] = {}
        self.taken: set[RequestId] = set()
        self.unconfirmed: dict[Stream, int] = {}  # what was written of announced streams
        self._journal = journal
        self._ready: dict[Delivery, None] = {}
        self._finishing: list[Delivery] = []  # all of it is in the write that is under way
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._has_work = trio.Event()
        self._moved = trio.Event()
        self._is_writing = False
        self._write_began_at = 0.0
        self._scope = trio.CancelScope()
        self._seen_at = trio.current_time()
        self._is_silent = False
        # (when its queue was seen empty, what had been written by then), where nothing can be asked
        self._emptied: deque[tuple[float, dict[Stream, int]]] = deque()

    # What goes out

    def reply(self, line: bytes) -> None:
        """Send a line that belongs to no stream."""
        self._outbox.append(line)
        self._outbox_bytes += len(line)
        self._has_work.set()

    def attach(self, delivery: Delivery) -> None:
        """Deliver a stream from now on."""
        self.deliveries[delivery.stream.id] = delivery
        self.taken |= delivery.taken_ids
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
        self.taken -= delivery.taken_ids
        self._ready.pop(delivery, None)
        self._stir()

    async def has_room(self) -> None:
        """Wait until the peer has read enough of its replies to be given more."""
        while self._outbox_bytes > OUTBOX_BYTES_MAX:
            await self._moved.wait()

    async def drained(self) -> None:
        """Wait until all that is owed is written, or there is nobody to take it."""
        while self.deliveries or self._outbox or self._is_writing:
            if not self.channel.is_writable():
                return
            with trio.move_on_after(LOOK_EVERY_S):
                await self._moved.wait()

    # While it lasts

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send, and watch over the peer, until the connection fails or is hung up."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_forever)
                    nursery.start_soon(self._watch_forever)
                    task_status.started()
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the peer is gone, which is what connections are expected to do

    def hang_up(self) -> None:
        """Close the connection."""
        self._scope.cancel()

    def close(self) -> None:
        """The connection is over: nobody follows its streams any more."""
        for delivery in list(self.deliveries.values()):
            delivery.drop()
        self._finish()
        self.unconfirmed.clear()
        self._emptied.clear()

    async def _send_forever(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            while self._outbox or self._ready:
                self._is_writing = True
                self._write_began_at = trio.current_time()
                write = await self._gather()
                if write.lines:
                    await self.channel.send(b"".join(write.lines))
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
        stream = delivery.stream
        if delivery.preamble and stream.is_recorded:
            write.add(delivery.preamble)
            delivery.preamble = b""
        run = None
        if delivery.position < stream.state.durable:
            run = await self._journal.read(stream.id, delivery.position, bytes_max=share)
        if delivery.is_over:
            return
        if run is not None:
            if self.settings.positions:
                write.add(dialects.position(stream.id, run))
            write.add(run.body)
            write.runs.append((delivery, run.last))
            self._hand_over(delivery, run)
        if stream.state.is_finished(delivery.position):
            write.add(delivery.coda())
            self._finishing.append(delivery)
            self.forget(delivery)
        elif delivery.position < stream.state.durable:
            self._ready[delivery] = None

    def _hand_over(self, delivery: Delivery, run: Run) -> None:
        """The run goes into the next write; an ack of it may come before that has returned."""
        delivery.position = run.last
        if self.settings.positions:
            self.unconfirmed[delivery.stream] = run.last
        delivery.stream.wrote(run)
        delivery.stream.note_asked(self, run.last)

    def _note(self, write: _Write) -> None:
        """The write is out. Only now may a pong be taken for a proof that it was read."""
        for delivery, seq in write.runs:
            delivery.written = seq
            if delivery.stream.record.is_announced and not self.settings.positions:
                self.unconfirmed[delivery.stream] = seq
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

    def confirm(self, stream: Stream, seq: int) -> bool:
        """An ack of a client that counts; False where it is not for this connection to give."""
        follower = stream.delivery
        is_ours = follower is None or follower.connection is self
        is_written = seq <= self.unconfirmed.get(stream, -1)
        if not (self.settings.positions and is_ours and is_written):
            return False
        stream.deliver(seq)
        if stream.state.is_drained:
            self.unconfirmed.pop(stream, None)
        return True

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
            await trio.sleep(SETTLE_S if self._wants_proof else PING_EVERY_S)
            marks = {} if self.settings.positions else dict(self.unconfirmed)
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
    def _wants_proof(self) -> bool:
        return bool(self.unconfirmed) and not self.settings.positions

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
            if self.unconfirmed.get(stream) == seq:  # else more was written since
                del self.unconfirmed[stream]

    def _check_silence(self, *, is_asked: bool) -> None:
        # A peer that was given nothing to take and asked nothing is not silent.
        since = self._seen_at if is_asked else max(self._seen_at, self._write_began_at)
        is_expected = is_asked or self._is_writing
        if is_expected and trio.current_time() - since >= SILENCE_S:
            self._is_silent = True
            for delivery in self.deliveries.values():
                delivery.stream.fall_silent(delivery)
