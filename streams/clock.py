"""Wall time, for what must mean the same after a restart. Intervals are trio's, save threads."""

import time


def wall() -> float:
    """Seconds since 1970."""
    return time.time()


def steady() -> float:
    """Seconds since some moment, whatever is done to the clock: for a thread without trio."""
    return time.monotonic()


def backoff_s(first_s: float, failures: int, most_s: float) -> float:
    """How long to wait after so many failures: twice as long each time, at most `most_s`."""
    return min(first_s * 2.0 ** min(failures, 30), most_s)


def worked() -> float:
    """Seconds of a processor's time that this thread has had."""
    return time.thread_time()
