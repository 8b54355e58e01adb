"""One task that waits for all deadlines, however many there are.

The heap has lazy entries. A deadline that moves later, as at every poll of an idle stream, costs
nothing until the old one comes up. An idle stream costs no task and no wake-up. An item that is
forgotten is released at once; its entry stays in the heap until it is due, or until most entries
are stale.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import trio


class Dated(Protocol):
    """An item with a deadline, in trio's time."""

    @property
    def deadline(self) -> float | None:
        """The time when it is due; None while it has no deadline."""


T = TypeVar("T", bound=Dated)

ITEMS_AT_ONCE: Final = 100  # then other tasks have their turn
STALE_MAX: Final = 1_000  # entries of forgotten items that are not worth a clean-up


class Deadlines(Generic[T]):
    """Calls `on_due` with each item when its deadline has passed."""

    def __init__(self, on_due: Callable[[T], None]) -> None:
        self._on_due = on_due
        self._heap: list[tuple[float, int]] = []  # (when, number of the entry)
        self._items: dict[int, T] = {}  # by the numbers of the entries that are not stale
        self._watched: dict[T, tuple[float, int]] = {}
        self._numbers = itertools.count()
        self._has_earlier = trio.Event()

    def __len__(self) -> int:
        """The number of entries, stale ones included."""
        return len(self._heap)

    def watch(self, item: T) -> None:
        """Watch an item whose deadline is new or earlier. A later one needs no call."""
        due = item.deadline
        if due is None or due >= self._watched.get(item, (math.inf, 0))[0]:
            return
        self.forget(item)
        entry = (due, next(self._numbers))
        self._watched[item] = entry
        self._items[entry[1]] = item
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._has_earlier.set()

    def forget(self, item: T) -> None:
        """Stop watching an item, if it is watched."""
        if item in self._watched:
            del self._items[self._watched.pop(item)[1]]
        if len(self._heap) > 2 * len(self._items) + STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    async def run(self) -> None:
        """Wait for deadlines for ever."""
        while True:
            with trio.move_on_at(self._heap[0][0] if self._heap else math.inf):
                await self._has_earlier.wait()
            self._has_earlier = trio.Event()
            now = trio.current_time()
            for looked_at in itertools.count(1):
                if not (self._heap and self._heap[0][0] <= now):
                    break
                item = self._items.pop(heapq.heappop(self._heap)[1], None)
                if item is not None:
                    del self._watched[item]
                    self._look_at(item, now)
                if looked_at % ITEMS_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()

    def _look_at(self, item: T, now: float) -> None:
        due = item.deadline
        if due is not None and due <= now:
            self._on_due(item)
        else:
            self.watch(item)
