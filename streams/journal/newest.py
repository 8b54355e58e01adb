"""The runs that were written last, in memory, up to a number of bytes.

A connection that follows a stream wants them next, and so does a client that comes back after a
short cut. To read them from a file takes as long as to send them, and a store answers only after a
round trip.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from streams.messages import Run

# Each takes some 500 bytes besides its lines, which is little if all of them have 16 KiB.
RUNS_MAX: Final = 4096

_last = attrgetter("last")


class NewestRuns:
    """See the module. Only the writer may use it, except that readers may call `after`."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_left = bytes_max
        self._runs: dict[str, list[Run]] = {}  # of each stream; only ever added to, or replaced
        self._order: deque[tuple[str, int]] = deque()  # stream and last seq, the oldest first

    def after(self, stream: str, seq: int, beyond: Sequence[Run] = ()) -> Sequence[Run]:
        """The runs of a stream that reach beyond `seq`, then those of `beyond` that follow them;
        none if there are older ones elsewhere that reach beyond `seq`, or if no run does.
        """
        runs = self._runs.get(stream)
        if not runs or runs[0].seq > seq + 1:
            return ()
        runs = runs[bisect_right(runs, seq, key=_last) :]
        return [*runs, *(run for run in beyond if run.last > runs[-1].last)] if runs else ()

    def add(self, stream: str, runs: Sequence[Run]) -> None:
        """Keep these runs, which follow each other, and drop the oldest of all streams.

        If they do not follow those of the stream that are kept, they replace them.
        """
        if not runs:
            return  # all lines of the stream were acked: nothing would ever drop an empty list
        kept = self._runs.setdefault(stream, [])
        if kept and kept[-1].last + 1 != runs[0].seq:
            self.drop(stream)
            kept = self._runs[stream] = []
        kept.extend(runs)
        self._order.extend((stream, run.last) for run in runs)
        self._bytes_left -= sum(len(run.body) for run in runs)
        while self._bytes_left < 0 or len(self._order) > RUNS_MAX:
            self.drop(*self._order.popleft())

    def drop(self, stream: str, last: float = math.inf) -> None:
        """Drop the runs of a stream that end at `last` or before; without `last`, all."""
        runs = self._runs.get(stream, [])
        dropped = bisect_right(runs, last, key=_last)
        if not dropped:
            return
        self._bytes_left += sum(len(run.body) for run in runs[:dropped])
        if dropped < len(runs):
            self._runs[stream] = runs[dropped:]
        else:
            del self._runs[stream]
