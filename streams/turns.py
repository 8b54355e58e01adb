"""Turns of connections, so that a busy one does not hold up the others.

Bytes are no measure of work: 64 KiB may be one message, or ten thousand frames of 20 µs each. So a
connection counts units (frames, messages, requests, reads), and lets others run after `TURN_UNITS`
of them. With that alone, ten busy connections would have ten turns between two turns of another
one. So a connection that has used up its free units joins a queue of all busy connections. One of
the queue has a turn at a time, and all connections outside it have a turn before the next one.
"""

from typing import Final

import trio

# A frame takes 25 µs, a message 50 to 300, a request over HTTP as much as some of them.
TURN_UNITS: Final = 4
# Units that a connection has without joining the queue: more than clients at work need.
FREE_PER_S: Final = 100.0
FREE_UNITS: Final = 16.0

_queue: Final = trio.lowlevel.RunVar[trio.StrictFIFOLock]("the queue of the busy connections")


class Turns:
    """Those of one connection."""

    __slots__ = ("_counted_at", "_free", "_used")

    def __init__(self) -> None:
        self._free = FREE_UNITS
        self._counted_at = trio.current_time()
        self._used = 0

    def spend(self, units: int = 1) -> bool:
        """Count some units. Once this is true, `wait` before the next one."""
        self._used += units
        return self._used >= TURN_UNITS

    async def wait(self) -> None:
        """Let others run, and among the busy connections each that came before this one."""
        now = trio.current_time()
        earned = (now - self._counted_at) * FREE_PER_S
        self._free = min(FREE_UNITS, self._free + earned) - self._used
        self._counted_at, self._used = now, 0
        if self._free >= 0:
            await trio.lowlevel.checkpoint()
            return
        self._free = 0.0
        async with _busy():  # to acquire it takes a turn of the scheduler at least
            pass


def _busy() -> trio.StrictFIFOLock:
    try:
        return _queue.get()
    except LookupError:
        _queue.set(trio.StrictFIFOLock())
        return _queue.get()


class Budget:
    """Units that may come at once, and per second in the long run."""

    __slots__ = ("_counted_at", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float) -> None:
        self._left = self._most = most
        self._per_s = per_s
        self._counted_at = trio.current_time()

    def spend(self, earned: float = 0.0) -> bool:
        """Take a unit, which has `earned` so much; whether there was one left."""
        now = trio.current_time()
        earned += (now - self._counted_at) * self._per_s
        self._counted_at = now
        self._left = min(self._most, self._left + earned)
        if self._left < 1:
            return False
        self._left -= 1
        return True
