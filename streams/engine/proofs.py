"""What proves that a client which confirms nothing has read what was written to it.

A pong does, to a ping that was sent afterwards. Where nothing can be asked, a sign of life does
that comes long after the kernel's queue was seen empty.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from streams.engine.delivery import Delivery
    from streams.engine.stream import Stream

# What was written, has left the kernel's queue, and is followed so much later by a sign of life,
# has arrived: the time is the one that the Streams page names.
BELIEF_S: Final = 120.0

# Of each stream, the number of the delivery that was written last, and up to which seq. A stream
# that has a newer delivery by now takes no proof of this one.
Marks = dict["Stream", tuple[int, int]]


class Proofs:
    """Of one connection: what is yet to be proved."""

    def __init__(self) -> None:
        self._unproved: Marks = {}
        self._emptied: deque[tuple[float, Marks]] = deque()  # when the queue was seen empty
        self._is_needed = trio.Event()

    async def needed(self) -> None:
        """Wait until something was written that is yet to be proved."""
        if not self._unproved:
            self._is_needed = trio.Event()
            await self._is_needed.wait()

    @property
    def marks(self) -> Marks:
        """What was written until now, and nothing has been seen of since."""
        return dict(self._unproved)

    def wrote(self, delivery: "Delivery", seq: int) -> None:
        """A delivery was written up to `seq`."""
        stream = delivery.stream
        self._unproved[stream] = (delivery.number, seq)
        stream.witness = self
        self._is_needed.set()

    def may_prove(self, stream: "Stream") -> bool:
        """Whether a sign of life may yet tell that what was written of a stream was read."""
        return stream in self._unproved or any(stream in marks for _, marks in self._emptied)

    def read(self, marks: Marks) -> None:
        """The peer has read everything up to `marks`."""
        self._forget(marks)
        _deliver(marks)

    def left(self, marks: Marks) -> None:
        """Everything up to `marks` has left the kernel's queue."""
        self._forget(marks)
        now, emptied = trio.current_time(), self._emptied
        emptied.append((now, marks))
        # A peer that reads for days and says nothing: what is old enough to be believed is one.
        while len(emptied) > 1 and now - emptied[1][0] > BELIEF_S:
            _, older = emptied.popleft()
            seen_at, newer = emptied[0]
            emptied[0] = (seen_at, older | newer)

    def heard(self) -> None:
        """The peer sent something."""
        now = trio.current_time()
        while self._emptied and now - self._emptied[0][0] > BELIEF_S:
            _deliver(self._emptied.popleft()[1])

    def clear(self) -> None:
        """Nothing more will be proved."""
        self._unproved.clear()
        self._emptied.clear()

    def _forget(self, marks: Marks) -> None:
        for stream, mark in marks.items():
            if self._unproved.get(stream) == mark:  # else more was written since
                del self._unproved[stream]


def _deliver(marks: Marks) -> None:
    for stream, mark in marks.items():
        stream.prove(*mark)
