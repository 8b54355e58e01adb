"""Retries of reads from a journal that is busy for a while."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from streams.clock import backoff_s
from streams.errors import Unavailable
from streams.logs import log

# Before a journal that could not be read is read again. A store that is away is not bothered by it:
# calls fail without it, until the next attempt to connect is due.
RETRY_FIRST_S: Final = 0.05
RETRY_LAST_S: Final = 0.2

_T = TypeVar("_T")


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat `ask` until the journal can be read, and return its answer."""
    for failures in itertools.count():
        try:
            return await ask()
        except Unavailable as trouble:
            if not failures:
                log.info("the journal cannot be read; trying again", why=str(trouble))
        await trio.sleep(backoff_s(RETRY_FIRST_S, failures, RETRY_LAST_S))
    raise AssertionError("it ends with an answer")
