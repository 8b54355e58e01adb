"""One task that waits for all deadlines, however many there are.

A heap with lazy entries: a deadline that moves later costs nothing until the old one comes up,
which is what happens at every poll of an idle stream. Idle streams cost no task and no wake-up.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import trio


class Dated(Protocol):
    """Something that may have a deadline (trio's seconds)."""

    @property
    def deadline(self) -> float | None:
        """When it is due; None while it is not."""


T = TypeVar("T", bound=Dated)


class Deadlines(Generic[T]):
    """Calls `on_due` with each item when its deadline has passed."""

    def __init__(self, on_due: Callable[[T], None]) -> None:
        self._on_due = on_due
        self._heap: list[tuple[float, int, T]] = []
        self._watched: dict[T, float] = {}
        self._tiebreak = itertools.count()
        self._has_earlier = trio.Event()

    def watch(self, item: T) -> None:
        """Watch an item whose deadline is new or earlier; a later one is found by itself."""
        due = item.deadline
        if due is None or due >= self._watched.get(item, math.inf):
            return
        self._watched[item] = due
        heapq.heappush(self._heap, (due, next(self._tiebreak), item))
        if self._heap[0][2] is item:
            self._has_earlier.set()

    async def run(self) -> None:
        """Wait for deadlines for ever."""
        while True:
            with trio.move_on_at(self._heap[0][0] if self._heap else math.inf):
                await self._has_earlier.wait()
            self._has_earlier = trio.Event()
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                self._look_at(heapq.heappop(self._heap)[2], now)

    def _look_at(self, item: T, now: float) -> None:
        if self._watched.get(item, math.inf) <= now:
            del self._watched[item]
        due = item.deadline
        if due is not None and due <= now:
            self._on_due(item)
        else:
            self.watch(item)
