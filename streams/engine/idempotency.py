"""Calls that may be made again without being run twice: by their idempotency keys.

A key leads to a call's stream as its resume token does, by a name that only who has the journal's
keys can work out. Where it leads nowhere a call begins, and nobody who brings the same key
meanwhile is told anything before it has.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import trio

from streams.engine.cache import Resting
from streams.engine.identity import scope_of
from streams.engine.stream import Stream
from streams.exchange import authenticated
from streams.keys import Keyring
from streams.protocol.extension import Mark


class Called(msgspec.Struct, frozen=True):
    """What a key has led to. `mark` is for the call that is begun with it where that is nothing."""

    stream: Stream | None
    mark: Mark


class KeyedCalls:
    """The calls of an engine, as their keys lead to them."""

    def __init__(self, resting: Resting, keyring: Keyring) -> None:
        self._resting = resting
        self._keyring = keyring
        self._turns: dict[bytes, trio.StrictFIFOLock] = {}  # of who looks, or begins a call

    @property
    def memory(self) -> str:
        """What tells the memory in which keys are looked up from any other server's."""
        return self._keyring.identity

    @asynccontextmanager
    async def looked_up(self, key: str, principal: str) -> AsyncIterator[Called]:
        """What was called with this key; nobody else is told of it in the block.

        Raises `Unavailable`.
        """
        scope = scope_of(key, principal)
        names = self._keyring.call_names(scope, key)
        mark = Mark(names[0].hex(), is_own=bool(scope) and not authenticated(principal))
        async with self._turn(names[0]):
            yield Called(await self._find(names), mark)

    async def _find(self, names: Sequence[bytes]) -> Stream | None:
        for name in names:
            if stream := await self._resting.named(name):
                return stream
        return None

    @asynccontextmanager
    async def _turn(self, name: bytes) -> AsyncIterator[None]:
        turn = self._turns.setdefault(name, trio.StrictFIFOLock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked():  # else the next one has it
                self._turns.pop(name, None)
