"""Wall time, for times that must mean the same after a restart, and back-off.

Intervals are measured by trio's clock, except in threads.
"""

import time


def wall() -> float:
    """Seconds since 1970."""
    return time.time()


def steady() -> float:
    """Seconds by a clock that is never set: for a thread without trio."""
    return time.monotonic()


def backoff_s(first_s: float, failures: int, most_s: float) -> float:
    """The pause after `failures` failures in a row: it doubles each time, up to `most_s`."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)


def worked() -> float:
    """Seconds of a processor's time that this thread has had."""
    return time.thread_time()


def utc(at: float) -> str:
    """A wall time for people: `2026-11-23T21:07:05Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
