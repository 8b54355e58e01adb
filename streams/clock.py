"""Wall time, for what must mean the same after a restart. Intervals are trio's."""

import time


def wall() -> float:
    """Seconds since 1970."""
    return time.time()
