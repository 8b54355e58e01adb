"""Turns of connections, so that a busy one does not hold up the others.

Bytes are no measure of work: 64 KiB may be one message, or ten thousand frames of 20 µs each. So a
connection counts units (frames, messages, requests, reads), and lets others run after `TURN_UNITS`
of them. With that alone, ten busy connections would have ten turns between two turns of another
one. So a connection that has used up its free units joins a queue of all busy connections. One of
the queue has a turn at a time, and all connections outside it have a turn before the next one.

A large message counts as many units, but to parse it, or to decode its arguments, is one piece of
work that nothing interrupts. Such pieces are done one at a time (`LargeWork`), with a pause after
each, in which all others are served: the longer a piece, the rarer it is.
"""

import math
from collections.abc import Callable
from typing import Final, TypeVar

import trio

from streams.clock import worked

# A frame takes 25 µs, a message 50 to 300, a request over HTTP as much as some of them.
TURN_UNITS: Final = 4
# Units that a connection has without joining the queue: more than clients at work need.
FREE_PER_S: Final = 100.0
FREE_UNITS: Final = 16.0
# Bytes of a message that count as one unit more. To decode them takes up to 0.6 ms.
UNIT_BYTES: Final = 16 * 1024

# From this size on a message is worked on as `LargeWork`. Less takes up to 2 ms.
LARGE_BYTES: Final = 64 * 1024
# The pause after such a piece of work, in times of what it took: all of them together have a
# seventeenth of the processor. A large message takes 1 to 3 ms for each piece.
PAUSE_TIMES: Final = 16
# A piece that takes n times as long as this is followed by n times as many pauses, since others
# wait for the whole of it: 4 ms are worked once in 260. 4 MiB of numbers take up to 20 ms, as many
# empty objects as a message may have up to 70.
PIECE_S: Final = 0.001
PAUSE_S_MAX: Final = 2.0
# A principal is active for so long after a message that is not large.
ACTIVE_S: Final = 1.0

_T = TypeVar("_T")

_queue: Final = trio.lowlevel.RunVar[trio.StrictFIFOLock]("the queue of the busy connections")
_large: Final = trio.lowlevel.RunVar["LargeWork"]("the work on large messages")


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


class LargeWork:
    """Work on large messages, in pieces that nothing interrupts: one at a time, with pauses.

    There is a pause only while another principal is active. A client that is alone with its large
    messages does not wait.
    """

    def __init__(self, clock: Callable[[], float] = worked) -> None:
        """`clock` says how long a piece took: what else the machine does meanwhile is no work."""
        self._clock = clock
        self._turn = trio.StrictFIFOLock()
        self._pause_until = -math.inf
        # The two principals that were active last.
        self._newest, self._newest_at = "", -math.inf
        self._other_at = -math.inf

    def note(self, principal: str) -> None:
        """A message of this principal has come that is not large."""
        if principal != self._newest:
            self._newest, self._other_at = principal, self._newest_at
        self._newest_at = trio.current_time()

    async def do(self, principal: str, work: Callable[[], _T]) -> _T:
        """Do one piece of work for this principal when it is its turn; raises what that raises."""
        async with self._turn:
            if self._is_other_active(principal):
                await trio.sleep_until(self._pause_until)
            began = self._clock()
            try:
                found = work()
            finally:
                self._pause_until = trio.current_time() + pause_after(self._clock() - began)
        await trio.lowlevel.checkpoint()  # what follows is another piece
        return found

    async def do_sized(self, size: int, principal: str, work: Callable[[], _T]) -> _T:
        """The same for work on so many bytes, which is done at once where they are few."""
        return work() if size < LARGE_BYTES else await self.do(principal, work)

    def _is_other_active(self, principal: str) -> bool:
        at = self._other_at if principal == self._newest else self._newest_at
        return trio.current_time() - at < ACTIVE_S


def pause_after(took_s: float) -> float:
    """How many seconds after a piece of work that took so many the next one may begin."""
    return min(PAUSE_S_MAX, took_s * PAUSE_TIMES * max(1.0, took_s / PIECE_S))


def large_work() -> LargeWork:
    """The one of this run of trio."""
    try:
        return _large.get()
    except LookupError:
        _large.set(LargeWork())
        return _large.get()


class RateLimit:
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
