"""Retries of reads from a journal that is busy for a while."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from streams.errors import Unavailable
from streams.logs import log

BUSY_S: Final = 0.5  # before a journal that could not be read is read again

_T = TypeVar("_T")


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat `ask` until the journal can be read, and return its answer."""
    while True:
        try:
            return await ask()
        except Unavailable as trouble:
            log.info("the journal cannot be read; trying again", why=str(trouble))
        await trio.sleep(BUSY_S)
