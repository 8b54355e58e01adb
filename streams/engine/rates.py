"""How often a principal may ask."""

import math
from typing import Final

import trio

from streams.errors import refusal

# What was not used for so long may be used at once: clients come in bursts.
BURST_S: Final = 10.0
KNOWN_MAX: Final = 10_000  # principals, beyond which those are forgotten who have asked for nothing


class Rates:
    """A budget of requests for each principal, which fills up again with time."""

    def __init__(self, per_s: float) -> None:
        """`per_s` 0 stands for no limit."""
        self._interval_s = 1 / per_s if per_s else 0.0
        # When each will have its whole budget again. (This is the virtual scheduling of ATM's
        # "generic cell rate algorithm": one number for each.)
        self._full_at: dict[str, float] = {}

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
            self._full_at = {who: at for who, at in self._full_at.items() if at > now}
