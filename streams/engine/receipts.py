"""Evidence that a peer has read what was written to it, and the two users of that evidence.

A pong is evidence, if its ping was sent after the write. On a transport without pings, the
kernel's queue shows how much the peer has taken. `Receipts` count messages as delivered on this
evidence, for a client that sends no acks. `Separation` holds a response back until the progress
ahead of it was read.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from streams.engine.stream import Stream
from streams.exchange import Channel
from streams.messages import Run

# A write has arrived if it has left the kernel's queue and a sign of life of the peer follows at
# least this much later. The Streams proposal names this time.
BELIEF_S: Final = 120.0

# Of each stream, the number of the delivery that was written last, and up to which seq. A stream
# that has a newer delivery by now takes no receipt for this one.
Marks = dict[Stream, tuple[int, int]]


class Receipts:
    """Of one connection: what was written, and is not yet known to have been read."""

    def __init__(self) -> None:
        self._unread: Marks = {}
        self._emptied: deque[tuple[float, Marks]] = deque()  # when the queue was seen empty
        self._is_needed: trio.Event | None = None

    async def needed(self) -> None:
        """Wait until something was written that is not known to have been read."""
        if not self._unread:
            self._is_needed = trio.Event()
            await self._is_needed.wait()

    @property
    def marks(self) -> Marks:
        """Everything that was written and has not been seen to leave the kernel's queue."""
        return dict(self._unread)

    def wrote(self, stream: Stream, delivery_number: int, seq: int) -> None:
        """A delivery was written up to `seq`."""
        self._unread[stream] = (delivery_number, seq)
        stream.witness = self.may_confirm
        if self._is_needed is not None:
            self._is_needed.set()

    def may_confirm(self, stream: Stream) -> bool:
        """Whether a sign of life may yet show that what was written of a stream was read."""
        return stream in self._unread or any(stream in marks for _, marks in self._emptied)

    def read(self, marks: Marks) -> None:
        """The peer has read everything up to `marks`."""
        self._forget(marks)
        _deliver(marks)

    def left(self, marks: Marks) -> None:
        """Everything up to `marks` has left the kernel's queue."""
        self._forget(marks)
        now, emptied = trio.current_time(), self._emptied
        emptied.append((now, marks))
        # A peer may read for days and send nothing. One entry is enough for all that is old enough
        # to be believed at the next sign of life.
        while len(emptied) > 1 and now - emptied[1][0] > BELIEF_S:
            _, older = emptied.popleft()
            seen_at, newer = emptied[0]
            emptied[0] = (seen_at, older | newer)

    def heard(self) -> None:
        """The peer sent something."""
        while self._emptied and trio.current_time() - self._emptied[0][0] > BELIEF_S:
            _deliver(self._emptied.popleft()[1])

    def clear(self) -> None:
        """The connection is over: there will be no more evidence."""
        self._unread.clear()
        self._emptied.clear()

    def _forget(self, marks: Marks) -> None:
        for stream, mark in marks.items():
            if self._unread.get(stream) == mark:  # else more was written since
                del self._unread[stream]


def _deliver(marks: Marks) -> None:
    for stream, mark in marks.items():
        stream.prove(*mark)


# The official TypeScript SDK hands a notification on in a microtask and a response at once, and
# with the response it forgets the call's progress handler. Node.js runs microtasks between two
# reads, not between two messages of one read. So progress that shares a read with the response is
# lost, and the last progress nearly always does. A separate write does not help, since the reader
# joins all that waits for it. So the server holds a response until the client's program has read
# the progress ahead:
#
# - WebSocket: until the pong to a ping that was sent after the progress. No frame that is sent then
#   can share a read with it, however busy the machine.
# - stdio: until the kernel's queue shows that the progress was read, and `PAUSE_S` more for that
#   read to return. This sees one reader: a program in between that passes lines on may join them.
#
# Only that response waits. Replies, other streams and the messages ahead of it go out as ever, and
# nothing waits for clients with positions, for calls without progress, or over HTTP.

# As `messages.notification` writes it. In a text the quotes would be escaped. Where the data of
# another message contains it, the response waits without need, and nothing else happens.
PROGRESS: Final = b'"method":"notifications/progress"'

# Less than 0.1 ms pass between the kernel giving out a byte and the return of the read. The rest is
# for a reader that loses its processor there.
PAUSE_S: Final = 0.001
LOOK_S: Final = 0.001  # until the queue is looked at again; doubled each time
LOOK_S_MAX: Final = 0.05

# A client may be busy for seconds, and then cannot use the response either. The limit is for peers
# that answer no ping: the first response waits so long, later ones do not wait.
PATIENCE_S: Final = 5.0
HURRY_S: Final = 0.2  # the same at a shutdown, which writes for 0.5 s and then hangs up


class Separated(Protocol):
    """A delivery, as `Separation` sees it."""

    has_progress: bool  # has gone out, and the response must not share a read with it
    is_held: bool  # all is written but the response, which waits

    def wake(self) -> None:
        """There may be something to write."""


class Separation:
    """Keeps responses out of the reads that bring the progress ahead of them, on one connection."""

    def __init__(self, channel: Channel, nursery: trio.Nursery) -> None:
        """Responses wait in tasks of `nursery`."""
        self._channel = channel
        self._nursery = nursery
        self._written_bytes = 0
        self._gathered: list[Separated] = []  # what goes ahead of the response is not written yet
        self._held: list[Separated] = []  # it is written
        self._patience: trio.CancelScope | None = None  # of the responses that wait now
        self._patience_s = PATIENCE_S
        self._is_asking = False
        self._is_deaf = False  # the peer has not answered in time, and has not since

    def hold(self, delivery: Separated, runs: Sequence[Run], *, is_last: bool) -> Sequence[Run]:
        """The part of `runs` to write now: all, or all but the response.

        `is_last`: the response ends the runs.
        """
        ahead = runs
        if is_last:
            rest, _ = runs[-1].without_last()
            ahead = [*runs[:-1], rest] if rest.count else runs[:-1]
        if not delivery.has_progress:
            # The response is not searched: its own content would hold it again after each release.
            delivery.has_progress = any(PROGRESS in run.body for run in ahead)
        if ahead is runs or self._is_deaf or not delivery.has_progress:
            return runs
        delivery.is_held = True
        self._gathered.append(delivery)
        return ahead

    def wrote(self, size: int) -> None:
        """A write is out, with all that goes ahead of the responses held since the last one."""
        self._written_bytes += size
        self._held += self._gathered
        self._gathered.clear()
        if self._held and not self._is_asking:
            self._is_asking = True
            self._nursery.start_soon(self._release)

    def hurry(self) -> None:
        """The server shuts down: no response waits longer than `HURRY_S` from here on."""
        self._patience_s = HURRY_S
        if self._patience is not None:
            deadline = trio.current_time() + HURRY_S
            self._patience.deadline = min(self._patience.deadline, deadline)

    async def _release(self) -> None:
        while self._held:
            held, self._held = self._held, []
            if not self._is_deaf:
                taken = trio.Event()
                self._nursery.start_soon(self._ask, taken)
                with trio.move_on_after(self._patience_s) as self._patience:
                    await taken.wait()
                self._is_deaf = not taken.is_set()
            for delivery in held:
                delivery.is_held = delivery.has_progress = False
                delivery.wake()
        self._is_asking = False

    async def _ask(self, taken: trio.Event) -> None:
        """Set `taken` once the client's program has read all that was written until now.

        Never cancelled by impatience, since a ping that is cut short would end the connection.
        """
        written = self._written_bytes
        try:
            if not await self._channel.ping():
                await self._wait_until_read(written)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the sender finds out as well, when it writes what was held
        self._is_deaf = False
        taken.set()

    async def _wait_until_read(self, written: int) -> None:
        look_s = LOOK_S
        # Bytes that other streams have written since may still be in the queue.
        while self._written_bytes - (self._channel.unsent_bytes() or 0) < written:
            await trio.sleep(look_s)
            look_s = min(2 * look_s, LOOK_S_MAX)
        await trio.sleep(PAUSE_S)
