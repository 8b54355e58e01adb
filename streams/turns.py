"""Turns of connections, so that a busy connection does not delay the others.

Bytes are no measure of work: 64 KiB may be one message, or ten thousand frames of 20 µs each. So a
connection counts units (frames, messages, requests, reads), and lets others run after `TURN_UNITS`
of them. With that alone, ten busy connections would have ten turns between two turns of a quiet
one. So a connection that has used up its free units joins the queue of busy connections. Two
connections of the queue have their turns at a time, and all connections outside the queue have a
turn before the next two.

A large message counts as many units. But its parsing, and the decoding of its arguments, are pieces
of work that nothing can interrupt. `LargeWork` does such pieces one at a time, with a pause after
each, in which all other connections are served: the longer a piece, the longer the pause.
"""

import math
from collections.abc import Callable
from typing import Final, TypeVar

import trio

from streams.clock import worked

# A frame takes 20 µs, a message 20 to 150, and so does a short call over HTTP. A turn ends with a
# write of all that it answered, so shorter turns make more writes of less.
TURN_UNITS: Final = 8
# The most that one short request takes: its head and its body may come in two reads. A client that
# sends more at a time can do so in each pass of trio's loop, so it does not rest.
REST_UNITS: Final = 3
# Units that a connection may use without joining the queue: more than usual clients need.
FREE_PER_S: Final = 200.0
FREE_UNITS: Final = 32.0
# Busy connections that have their turns at a time. With one, the last of 32 clients of short calls
# waits twice as long; with four, a ping beside ten flooding clients does.
BUSY_AT_ONCE: Final = 2
# A message counts one more unit for so many bytes. Their decoding takes up to 0.3 ms.
UNIT_BYTES: Final = 8 * 1024

# A message of this size or more is `LargeWork`. A smaller one takes up to 2 ms.
LARGE_BYTES: Final = 64 * 1024
# The pause after such a piece of work is so many times as long as the piece took. So large messages
# together get a seventeenth of the processor. A piece usually takes 1 to 3 ms.
PAUSE_TIMES: Final = 16
# The pause grows with the square of a piece that takes longer than this, since others wait for the
# whole piece: after 1 ms the pause is 16 ms, after 4 ms it is 256. 4 MiB of numbers take up to 20
# ms, as many empty objects as a message may have up to 70.
PIECE_S: Final = 0.001
PAUSE_S_MAX: Final = 2.0
# A principal counts as active for so long after a message that is not large.
ACTIVE_S: Final = 1.0

_T = TypeVar("_T")

_queue: Final = trio.lowlevel.RunVar[trio.Semaphore]("the queue of the busy connections")
_large: Final = trio.lowlevel.RunVar["LargeWork"]("the work on large messages")


class Turns:
    """The turns of one connection."""

    __slots__ = ("_counted_at", "_free", "_used")

    def __init__(self) -> None:
        self._free = 0.0  # to be earned: otherwise a client that reconnects gets them each time
        self._counted_at = trio.current_time()
        self._used = 0

    def spend(self, units: int = 1) -> bool:
        """Count units. Returns True once the turn is over: then `wait` before the next unit."""
        self._used += units
        return self._used >= TURN_UNITS

    def rest(self) -> None:
        """The client has its answers, so the connection waits for what it sends next.

        That ends the turn where it was one short request. All others run meanwhile: such a client
        has one request in each pass of trio's loop. To let two such clients pass at a time would
        cost a seventh of a short call over HTTP.
        """
        if self._used <= REST_UNITS:
            self._used = 0

    async def wait(self) -> None:
        """Let other connections run, and busy ones only if they came to the queue before."""
        now = trio.current_time()
        earned = (now - self._counted_at) * FREE_PER_S
        self._free = min(FREE_UNITS, self._free + earned) - self._used
        self._counted_at, self._used = now, 0
        if self._free >= 0:
            await trio.lowlevel.checkpoint()
            return
        self._free = 0.0
        async with busy():  # acquiring lets all other tasks run at least once
            pass


def busy() -> trio.Semaphore:
    """The queue of the busy connections. It hands each turn to the connection that came first."""
    try:
        return _queue.get()
    except LookupError:
        _queue.set(trio.Semaphore(BUSY_AT_ONCE, max_value=BUSY_AT_ONCE))
        return _queue.get()


def units_of(message: bytes) -> int:
    """The work of a message in units."""
    return 1 + len(message) // UNIT_BYTES


class LargeWork:
    """Does pieces of work on large messages, one at a time, with pauses.

    A pause is made only while another principal is active: a lone client does not wait.
    """

    def __init__(self, clock: Callable[[], float] = worked) -> None:
        """`clock` measures a piece of work, without the time of other processes."""
        self._clock = clock
        self._turn = trio.StrictFIFOLock()
        self._pause_until = -math.inf
        # The newest two active principals.
        self._newest, self._newest_at = "", -math.inf
        self._other_at = -math.inf

    def note(self, principal: str, now: float) -> None:
        """Take note that this principal sent a message that is not large."""
        if principal != self._newest:
            self._newest, self._other_at = principal, self._newest_at
        self._newest_at = now

    async def do(self, principal: str, work: Callable[[], _T]) -> _T:
        """Run `work` for this principal when it is its turn; return or raise as `work` does."""
        async with self._turn:
            if self._is_other_active(principal):
                await trio.sleep_until(self._pause_until)
            began = self._clock()
            try:
                found = work()
            finally:
                self._pause_until = trio.current_time() + pause_after(self._clock() - began)
        await trio.lowlevel.checkpoint()  # the caller's next step is work as well
        return found

    def _is_other_active(self, principal: str) -> bool:
        at = self._other_at if principal == self._newest else self._newest_at
        return trio.current_time() - at < ACTIVE_S


def pause_after(took_s: float) -> float:
    """The pause after a piece of work that took so many seconds."""
    return min(PAUSE_S_MAX, took_s * PAUSE_TIMES * max(1.0, took_s / PIECE_S))


def large_work() -> LargeWork:
    """The `LargeWork` of this run of trio."""
    try:
        return _large.get()
    except LookupError:
        _large.set(LargeWork())
        return _large.get()


async def work_on(message: bytes, principal: str, work: Callable[[], _T]) -> _T:
    """Do one piece of work on a message. Work on a large message waits for its turn."""
    if len(message) < LARGE_BYTES:
        return work()
    return await large_work().do(principal, work)


class RateLimit:
    """A token bucket: `most` units may come at once, and `per_s` per second in the long run."""

    __slots__ = ("_counted_at", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float) -> None:
        self._left = self._most = most
        self._per_s = per_s
        self._counted_at = trio.current_time()

    def spend(self, earned: float = 0.0) -> bool:
        """Take one unit, after adding what it has `earned`. False where no unit is left."""
        now = trio.current_time()
        earned += (now - self._counted_at) * self._per_s
        self._counted_at = now
        self._left = min(self._most, self._left + earned)
        if self._left < 1:
            return False
        self._left -= 1
        return True
