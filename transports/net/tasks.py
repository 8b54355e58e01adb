"""Tasks that run behind a channel for as long as it is open."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def tasks_until(aclose: Callable[[], Awaitable[object]]) -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks `aclose` ends, whatever becomes of the block.

    An error of the block is raised as it is, where a nursery alone would make a group of it.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except BaseException as error:
            failure = error
        with trio.CancelScope(shield=True):
            await aclose()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # it refers to this frame, and would keep it alive


async def begin_or_leave() -> None:
    """Ahead of a shielded scope of a task that `nursery.start` begins: leave if that was cancelled.

    Whoever calls `started` too late is not taken over by the nursery: `start` waits for it to be
    cancelled, and that nothing behind a shield ever is.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
