"""Retries of reads from a journal that is busy for a while."""

import itertools
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from streams.clock import backoff_s
from streams.errors import JournalUnusable, Unavailable
from streams.logs import log

# Before a journal that could not be read is read again. A store that is away is not bothered by it:
# calls fail without it, until the next attempt to connect is due.
RETRY_FIRST_S: Final = 0.05
RETRY_LAST_S: Final = 0.2
# Lines that a store lacks are put back within a lease or two, or become lost for the next owner.
# Those that are missing for so many leases were deleted by another program.
MISSING_LEASES: Final = 3.0
# How long a server that starts waits for its store, which may be starting too, or reading its data.
START_S: Final = 30.0

_T = TypeVar("_T")


async def patiently(
    ask: Callable[[], Awaitable[_T]],
    *,
    for_s: float = math.inf,
    doing: str = "the journal cannot be read; trying again",
) -> _T:
    """Repeat `ask` until the journal can be read, and return its answer.

    The log says once what the server is `doing`. Raises `Unavailable` after `for_s` seconds.
    """
    give_up_at = trio.current_time() + for_s
    for failures in itertools.count():
        try:
            return await ask()
        except Unavailable as trouble:
            if trio.current_time() >= give_up_at:
                raise
            if not failures:
                log.info(doing, why=str(trouble))
        await trio.sleep(backoff_s(RETRY_FIRST_S, failures, RETRY_LAST_S))
    raise AssertionError("it ends with an answer")


async def surely(
    look_up: Callable[[], Awaitable[_T | None]], has_waited: Callable[[], Awaitable[bool]]
) -> _T | None:
    """Look something up; None only if no replica may put it back. `has_waited`: see `Others`."""
    found = await look_up()
    if found is None and await has_waited():
        found = await look_up()
    return found


async def at_start(ask: Callable[[], Awaitable[_T]]) -> _T:
    """As `patiently`, while a server starts. Raises `JournalUnusable` after `START_S`."""
    try:
        return await patiently(ask, for_s=START_S, doing="waiting for the store of the journal")
    except Unavailable as trouble:
        raise JournalUnusable(
            f"{trouble}; the server has waited for {START_S:g} s: start the store, or look at its "
            "log, or name another one with --journal."
        ) from trouble
