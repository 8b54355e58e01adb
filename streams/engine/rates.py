"""A limit on the requests of each principal."""

import math
from typing import Final

import trio

from streams.errors import refusal

# Bursts of up to this many seconds' worth of requests are allowed, since clients come in bursts.
BURST_S: Final = 10.0
KNOWN_MAX: Final = 10_000  # principals; above that those with a whole budget are forgotten


class Rates:
    """A budget of requests for each principal, which fills up again with time."""

    def __init__(self, per_s: float) -> None:
        """`per_s` is the number of requests per second in the long run; 0 for no limit."""
        self._interval_s = self._alone_s = 1 / per_s if per_s else 0.0
        # For each principal the time at which its budget will be whole again. (This is the virtual
        # scheduling of ATM's "generic cell rate algorithm", which needs one number for each.)
        self._full_at: dict[str, float] = {}

    def divide(self, replicas: int) -> None:
        """So many replicas share the budgets: each has its part."""
        self._interval_s = self._alone_s * replicas

    def check(self, principal: str) -> None:
        """Take a request from the budget. Raises `Refusal` where nothing is left."""
        if not self._interval_s:
            return
        now = trio.current_time()
        full_at = max(now, self._full_at.get(principal, now)) + self._interval_s
        wait_s = full_at - now - max(BURST_S, self._interval_s)
        if wait_s > 0:
            raise refusal("too_many_requests", retryAfter=math.ceil(wait_s))
        self._full_at[principal] = full_at
        if len(self._full_at) > KNOWN_MAX:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
