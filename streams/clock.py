"""Wall time, for times that must mean the same after a restart, durations in words, and back-off.

Intervals are measured by trio's clock, except in threads.
"""

import time
from functools import lru_cache


def wall() -> float:
    """Seconds since 1970."""
    return time.time()


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
