"""Asking a journal that may be busy."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from streams.errors import Unavailable
from streams.logs import log

BUSY_S: Final = 0.5  # until a journal that could not be read is asked again

_T = TypeVar("_T")


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """What the journal answers, however long it takes until it does."""
    while True:
        try:
            return await ask()
        except Unavailable as trouble:
            log.info("the journal cannot be read; trying again", why=str(trouble))
        await trio.sleep(BUSY_S)
