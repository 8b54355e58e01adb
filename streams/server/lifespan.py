"""The lifespan of a server: its author's code before the first call and after the last one."""

import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from streams.errors import LifespanFailed
from streams.faults import (
    is_failure,
    is_kind,
    kind_of,
    leaves_of,
    let_pass,
    let_signal_pass,
    log_failure,
    text_of,
    told_of,
)
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
    `LifespanFailed` where it fails itself, `SystemExit` included, and where it cancels the block.
    """
    if lifespan is None:
        yield None
        return
    failure: BaseException | None = None
    with trio.CancelScope() as scope:  # around all of it: scopes of the lifespan may stay open
        try:
            manager = lifespan(server)
            state = await manager.__aenter__()
        except BaseException as error:
            await let_pass(error)
            raise LifespanFailed(
                f"The server's lifespan failed at its start: {_told(error)}."
            ) from error
        try:
            yield state
        except BaseException as error:
            failure = error
        scope.shield = True
        scope.deadline = trio.current_time() + CLOSE_S
        trouble = await _leave(manager, failure)
    if scope.cancelled_caught:
        log.warning("the server's lifespan took too long to end", limit_s=CLOSE_S)
        trouble = None
    if failure is None:
        if trouble is not None:
            text = f"The server's lifespan failed at its end: {_told(trouble)}."
            raise LifespanFailed(text) from trouble
        return
    if not is_failure(failure) or not _is_cancellation(failure):
        if trouble is not None:
            log_failure("the server's lifespan failed at its end", trouble)
        raise failure
    # A scope of the lifespan's own has cancelled the block: mostly, a task in its nursery failed.
    why = "cancelled the server" if trouble is None else f"failed: {_told(trouble)}"
    raise LifespanFailed(f"The server's lifespan has {why}.") from trouble


async def _leave(
    manager: AbstractAsyncContextManager[Any], failure: BaseException | None
) -> BaseException | None:
    """Leave the lifespan; returns the error of its own, if it has one."""
    try:
        if failure is None:
            await manager.__aexit__(None, None, None)
        else:
            await manager.__aexit__(type(failure), failure, failure.__traceback__)
    except BaseException as error:
        let_signal_pass(error)
        if _is_cancellation(error):
            await trio.lowlevel.checkpoint_if_cancelled()
        known = set() if failure is None else set(map(id, leaves_of(failure)))
        own = [leaf for leaf in leaves_of(error) if not is_kind(leaf, trio.Cancelled)]
        if not known.issuperset(map(id, own)):  # a nursery puts an error into a group
            return error
    return None


def _is_cancellation(error: BaseException) -> bool:
    return all(is_kind(leaf, trio.Cancelled) for leaf in leaves_of(error))


def _told(error: BaseException) -> str:
    """The error with its class and its place in the author's code."""
    first = told_of(error)[0]
    frames = traceback.extract_tb(first.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    kind, text = kind_of(first), text_of(first)
    return f"{text if text.startswith(kind) else f'{kind}: {text}'}{where}"
