"""The lifespan of a server: its author's code before the first call and after the last one."""

import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from streams.errors import LifespanFailed
from streams.faults import kind_of, leaves_of, log_failure, text_of, told_of
from streams.logs import log

# For the code behind the `yield`, also where the server was cancelled. `mcp-streams serve` ends
# 4 s after a signal in any case, and most of that may be needed for the calls.
CLOSE_S: Final = 4.0

_T = TypeVar("_T")


@asynccontextmanager
async def entered(
    lifespan: Callable[[_T], AbstractAsyncContextManager[Any]] | None, server: _T
) -> AsyncIterator[Any]:
    """Be in the lifespan for the length of a block; yields what it yields.

    It is left whatever ends the block, and cannot hide an error of the block. Raises
    `LifespanFailed` where it fails itself.
    """
    if lifespan is None:
        yield None
        return
    failure: BaseException | None = None
    with trio.CancelScope() as scope:  # around all of it: scopes of the lifespan may stay open
        try:
            manager = lifespan(server)
            state = await manager.__aenter__()
        except Exception as error:
            raise LifespanFailed(
                f"The server's lifespan failed at its start: {_told(error)}."
            ) from error
        try:
            yield state
        except BaseException as error:
            failure = error
        scope.shield = True
        scope.deadline = trio.current_time() + CLOSE_S
        await _leave(manager, failure)
    if scope.cancelled_caught:
        log.warning("the server's lifespan took too long to end", limit_s=CLOSE_S)
    if failure is not None:
        raise failure


async def _leave(manager: AbstractAsyncContextManager[Any], failure: BaseException | None) -> None:
    try:
        if failure is None:
            await manager.__aexit__(None, None, None)
        else:
            await manager.__aexit__(type(failure), failure, failure.__traceback__)
    except Exception as error:
        if failure is None:
            text = f"The server's lifespan failed at its end: {_told(error)}."
            raise LifespanFailed(text) from error
        known = set(map(id, leaves_of(failure)))
        if not known.issuperset(map(id, leaves_of(error))):  # a nursery puts it into a group
            log_failure("the server's lifespan failed at its end", error)


def _told(error: BaseException) -> str:
    """The error with its class and its place in the author's code."""
    first = told_of(error)[0]
    frames = traceback.extract_tb(first.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{kind_of(first)}: {text_of(first)}{where}"
