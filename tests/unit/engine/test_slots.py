"""Open nurseries that run one handler after the other."""

from collections.abc import Awaitable, Callable

import trio
import trio.testing

from streams.engine.slots import SLOTS_MAX, Slots


class Ran:
    """The handlers that ran in one slot, one after the other."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.slots = Slots(nursery)

    async def one(self, run: Callable[[], Awaitable[None]]) -> trio.CancelScope:
        """Run this to its end, and return its scope."""
        scope = self.slots.start(run)
        await trio.testing.wait_all_tasks_blocked()
        return scope


async def nothing() -> None:
    await trio.lowlevel.checkpoint()


async def test_one_handler_after_the_other_has_the_same_scope() -> None:
    async with trio.open_nursery() as nursery:
        ran = Ran(nursery)
        await ran.one(nothing)  # no nursery is open yet
        assert await ran.one(nothing) is await ran.one(nothing)
        nursery.cancel_scope.cancel()


async def test_a_cancelled_handler_takes_its_scope_with_it() -> None:
    async with trio.open_nursery() as nursery:
        ran = Ran(nursery)
        await ran.one(nothing)
        scope = await ran.one(trio.sleep_forever)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert await ran.one(nothing) is not scope
        assert not (await ran.one(trio.sleep_forever)).cancel_called
        nursery.cancel_scope.cancel()


async def test_a_scope_that_a_handler_leaves_open_does_not_reach_the_next_one() -> None:
    left, ended = trio.CancelScope(), []

    async def leave() -> None:
        left.__enter__()
        await nothing()

    async def next_one() -> None:
        left.cancel()
        await nothing()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        ran = Ran(nursery)
        await ran.one(nothing)
        assert await ran.one(leave) is await ran.one(next_one)
        assert ended
        nursery.cancel_scope.cancel()


async def test_more_handlers_at_once_have_scopes_of_their_own() -> None:
    async with trio.open_nursery() as nursery:
        ran = Ran(nursery)
        scopes = [await ran.one(trio.sleep_forever) for _ in range(2 * SLOTS_MAX)]
        assert len(set(map(id, scopes))) == len(scopes)
        nursery.cancel_scope.cancel()
