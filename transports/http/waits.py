"""For how long the server waits for requests, and for the rest of them, over all connections.

A deadline moves several times with each request, and trio would enter it into a heap each time.
Here it costs the move in a queue. Waits for the same phase have the same length, so in each queue
the first one is due first, and one task watches them all.
"""

from collections.abc import Iterable
from itertools import takewhile
from typing import Final, NoReturn

import trio

from transports.http.requests import Phase

# How long the next part of a request may take, after the previous part has ended. Clients and
# proxies keep idle connections for about 60 s; the server must not close first. A body of 4 MiB in
# 30 s needs 1.1 Mbit/s.
PATIENCE_S: Final = {Phase.NOTHING: 75.0, Phase.HEAD: 10.0, Phase.BODY: 30.0}
_SHORTEST_S: Final = min(PATIENCE_S.values())


class Wait:
    """The wait of one connection: for one request after the other."""

    __slots__ = ("due_at", "is_over", "phase", "scope")

    def __init__(self) -> None:
        self.phase = Phase.HEAD
        self.due_at = 0.0  # in trio's time
        self.scope = trio.CancelScope()  # around all requests of the connection
        self.is_over = False  # given up: too late for a request


class Waits:
    """The waits of all connections. `run` it in a task of its own."""

    def __init__(self) -> None:
        self._queues: dict[Phase, dict[Wait, None]] = {phase: {} for phase in Phase}
        self._all: dict[Wait, None] = {}  # in the order in which they began

    def begin(self, wait: Wait, phase: Phase) -> None:
        """Wait for a request that has come as far as `phase`."""
        self._queues[wait.phase].pop(wait, None)
        wait.phase, wait.due_at = phase, trio.current_time() + PATIENCE_S[phase]
        self._queues[phase][wait] = None
        self._all[wait] = None  # where it waits already, its place stays

    def end(self, wait: Wait) -> None:
        """The request has come, or the connection has ended."""
        self._queues[wait.phase].pop(wait, None)
        self._all.pop(wait, None)

    def heard(self, wait: Wait) -> None:
        """Some bytes have come: the connection is not idle any more."""
        self._queues[Phase.NOTHING].pop(wait, None)

    def end_idle(self) -> None:
        """Give up those that wait for a next request."""
        for wait in list(self._queues[Phase.NOTHING]):
            self._give_up(wait)

    def end_longest(self) -> bool:
        """Give up the wait that began first; False without one."""
        for wait in self._all:
            self._give_up(wait)
            return True
        return False

    def _give_up(self, wait: Wait) -> None:
        self.end(wait)
        wait.is_over = True
        wait.scope.cancel()

    async def run(self) -> NoReturn:
        """Give up those that are due, for ever."""
        while True:
            now = trio.current_time()
            next_at = now + _SHORTEST_S  # no wait that begins from now on is due before
            for queue in self._queues.values():
                for wait in _due(queue, now):
                    self._give_up(wait)
                if (first := next(iter(queue), None)) is not None:
                    next_at = min(next_at, first.due_at)
            await trio.sleep_until(next_at)


def _due(queue: Iterable[Wait], now: float) -> list[Wait]:
    return list(takewhile(lambda each: each.due_at <= now, queue))
