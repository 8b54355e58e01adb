"""One task that waits for all deadlines."""

import gc
import math
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from streams.engine.deadlines import ITEMS_AT_ONCE, STALE_MAX, Deadlines


class Item:
    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline


class Due:
    """Items that were due, and when."""

    def __init__(self) -> None:
        self.items: list[tuple[float, Item]] = []
        self.deadlines = Deadlines[Item](self._is_due)

    def _is_due(self, item: Item) -> None:
        self.items.append((trio.current_time(), item))


@asynccontextmanager
async def waiting() -> AsyncIterator[Due]:
    due = Due()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(due.deadlines.run)
        yield due
        nursery.cancel_scope.cancel()


class Steps(trio.abc.Instrument):
    """Counts how often any task was run."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_each_is_due_at_its_time(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    times = [7.0, 3.0, 5.0, 3.0]
    async with waiting() as due:
        for time in times:
            due.deadlines.watch(Item(start + time))
        await trio.sleep(10)
        assert [round(when - start, 3) for when, _ in due.items] == sorted(times)


async def test_what_has_no_deadline_is_never_due(autojump_clock: MockClock) -> None:
    async with waiting() as due:
        due.deadlines.watch(Item(None))
        await trio.sleep(80_000)
        assert due.items == []


async def test_a_deadline_that_moved_later_is_found_by_itself(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    async with waiting() as due:
        item = Item(start + 10)
        due.deadlines.watch(item)
        for _ in range(5):
            await trio.sleep(8)
            item.deadline = trio.current_time() + 10
        await trio.sleep(100)
        assert [round(when - start, 3) for when, _ in due.items] == [50.0]


async def test_an_earlier_deadline_is_kept_when_told(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    async with waiting() as due:
        item = Item(start + 100)
        due.deadlines.watch(item)
        await trio.sleep(1)
        item.deadline = start + 5
        due.deadlines.watch(item)
        await trio.sleep(500)
        assert [round(when - start, 3) for when, _ in due.items][:1] == [5.0]


async def test_a_deadline_that_went_away_is_no_deadline(autojump_clock: MockClock) -> None:
    async with waiting() as due:
        item = Item(trio.current_time() + 10)
        due.deadlines.watch(item)
        item.deadline = None
        await trio.sleep(100)
        assert due.items == []


async def test_ten_thousand_deadlines_cost_a_wake_up_each_at_most(
    autojump_clock: MockClock,
) -> None:
    dice = random.Random(4)
    async with waiting() as due:
        start, steps = trio.current_time(), Steps()
        items = [Item(start + dice.uniform(1, 1_000)) for _ in range(10_000)]
        for item in items:
            due.deadlines.watch(item)
        trio.lowlevel.add_instrument(steps)
        for _ in range(99):
            await trio.sleep(0.01)
            for item in items:  # everybody polls, again and again
                due.deadlines.watch(item)
        assert steps.count < 250  # ours are 99 of them
        await trio.sleep(1_000)
        trio.lowlevel.remove_instrument(steps)
        assert len(due.items) == 10_000
        assert steps.count <= 10_000 + 300


async def test_those_that_are_due_together_let_others_in_now_and_then(
    autojump_clock: MockClock,
) -> None:
    async with waiting() as due:
        start, steps = trio.current_time(), Steps()
        for _ in range(10_000):
            due.deadlines.watch(Item(start + 10))
        await trio.sleep(1)
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(100)
        trio.lowlevel.remove_instrument(steps)
        assert len(due.items) == 10_000
        assert 10_000 / ITEMS_AT_ONCE <= steps.count <= 10_000 / ITEMS_AT_ONCE + 4


async def test_what_is_forgotten_is_not_due_and_not_kept(autojump_clock: MockClock) -> None:
    async with waiting() as due:
        item = Item(trio.current_time() + 10)
        due.deadlines.watch(item)
        due.deadlines.forget(item)
        due.deadlines.forget(item)
        alive = weakref.ref(item)
        del item
        gc.collect()
        assert alive() is None
        await trio.sleep(100)
        assert due.items == []


async def test_what_is_forgotten_leaves_little_behind() -> None:
    due = Due()
    last = Item(math.inf)
    for n in range(10 * STALE_MAX):
        item = Item(1e9 + n)
        due.deadlines.watch(item)
        due.deadlines.forget(item)
    due.deadlines.watch(last)
    assert len(due.deadlines) <= STALE_MAX + 1
