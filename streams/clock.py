"""Wall time, for times that must mean the same after a restart, durations in words, and back-off.

Intervals are measured by trio's clock, except in threads.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

EXACT_S: Final = 0.05  # how long an answer of a store may take that tells the time

_stores: Final[list["StoreClock"]] = []


def wall() -> float:
    """Seconds since 1970: by the clock of the store that this process uses, if it uses one."""
    return steady() + _stores[-1].ahead_s if _stores else time.time()


class StoreClock:
    """The clock of a store, by which all its replicas tell the time until `close`.

    The clocks of their machines may differ, and may be set.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0  # of `steady`

    def tells(self, now: float, asked_at: float) -> None:
        """The store has answered that it is `now`. It was asked at a time of `steady`."""
        took_s = steady() - asked_at
        is_first = self not in _stores
        if took_s <= EXACT_S or is_first:
            self.ahead_s = now - asked_at - took_s / 2
        if is_first:
            _stores.append(self)

    def close(self) -> None:
        """Tell the time by this machine's clock again, or that of a store opened before."""
        if self in _stores:
            _stores.remove(self)


class WallAhead:
    """How much wall time is ahead of another clock, in seconds.

    It stays the same when this machine's clock is set, so that no deadline moves. The clock of a
    store is followed, since the other replicas follow it too.
    """

    def __init__(self, of: Callable[[], float]) -> None:
        self._of = of
        self._at_start = wall() - of()

    def __call__(self) -> float:
        return wall() - self._of() if _stores else self._at_start


def utc(at: float) -> str:
    """A time of `wall`, as ISO 8601 with milliseconds, in UTC."""
    whole, ms = divmod(int(at * 1000), 1000)
    return f"{_utc(whole)}.{ms:03d}Z"


def lasting(seconds: float) -> str:
    """A duration in its two largest units: 3m 20s. `page.js` does the same."""
    left = max(0, int(seconds))
    found: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, size)
        if count or (unit == "s" and not found):
            found.append(f"{count}{unit}")
    return " ".join(found[:2])


@lru_cache(maxsize=2)  # a log writes many lines in the same second
def _utc(whole: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))


def steady() -> float:
    """Seconds by a clock that is never set: for a thread without trio."""
    return time.monotonic()


def backoff_s(first_s: float, failures: int, most_s: float) -> float:
    """The pause after `failures` failures in a row: it doubles each time, up to `most_s`."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)


def worked() -> float:
    """Seconds of a processor's time that this thread has had."""
    return time.thread_time()
