"""Calls with idempotency keys, which can be retried without being run twice.

A key leads to the stream of its call as a resume token does: by a name that only the keyring can
make. A key that leads nowhere begins a call. Other requests with the same key wait until the call
has begun.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import trio

from streams.engine.cache import Cache
from streams.engine.identity import scope_of
from streams.engine.stream import Stream
from streams.errors import StoreAway, Unavailable
from streams.exchange import authenticated
from streams.journal.contract import Journal
from streams.keys import Keyring
from streams.protocol.extension import Mark


class Called(msgspec.Struct, frozen=True):
    """The stream that a key leads to, if there is one. `mark` is for a call that begins."""

    stream: Stream | None
    mark: Mark


class KeyedCalls:
    """Finds the calls of one engine by their idempotency keys."""

    def __init__(
        self,
        cache: Cache,
        keyring: Keyring,
        journal: Journal,
        start_soon: Callable[..., None],
    ) -> None:
        """`start_soon` starts a task that ends with the engine."""
        self._cache = cache
        self._keyring = keyring
        self._journal = journal
        self._start_soon = start_soon
        self._turns: dict[bytes, trio.StrictFIFOLock] = {}  # of requests with the same key
        self._holders: dict[str, str] = {}  # the replica that has the turn in the journal, by mark

    @property
    def memory(self) -> str:
        """Identifies the servers that share this memory of keys: they have the same keyring."""
        return self._keyring.identity

    @asynccontextmanager
    async def looked_up(
        self, key: str, principal: str, *, is_once: bool = False
    ) -> AsyncIterator[Called]:
        """Look up a key. No other request with the same key proceeds during the block.

        A key that `is_once` was derived from the call by the server. It leads only to the calls of
        this principal. Raises `Unavailable`.
        """
        scope = principal if is_once else scope_of(key, principal)
        names = self._keyring.call_names(scope, key)
        mark = Mark(
            names[0].hex(), is_own=bool(scope) and not authenticated(principal), is_once=is_once
        )
        turn = self._turns.get(names[0])
        if turn is None:
            turn = self._turns[names[0]] = trio.StrictFIFOLock()
            turn.acquire_nowait()  # `acquire` would let all other tasks run before each new call
        else:
            await turn.acquire()
        try:
            async with AsyncExitStack() as held:
                await held.enter_async_context(self._journal.turn(names[0]))
                self._holders[mark.name] = self._journal.replica
                try:
                    yield Called(await self._find(names), mark)
                    # Another replica that looks it up next must find the call that was begun.
                    if (begun := self._unrecorded(names[0])) is not None:
                        await begun.recorded()
                finally:
                    if (begun := self._unrecorded(names[0])) is not None:  # its client has left
                        self._start_soon(_keep, held.pop_all(), begun)
        finally:
            self._holders.pop(mark.name, None)
            turn.release()
            if not turn.locked():  # else the next one has it
                del self._turns[names[0]]

    def check_turn(self, mark: Mark) -> None:
        """Raise `StoreAway` if the turn for a key was lost: another replica may begin the call."""
        if self._holders.get(mark.name) != self._journal.replica:
            raise StoreAway("another replica may have begun this call meanwhile")

    def _unrecorded(self, name: bytes) -> Stream | None:
        """The call that was begun with a key, if other replicas cannot find it yet."""
        begun = self._cache.begun(name) if self._journal.replica else None
        if begun is None or begun.is_recorded or begun.is_lost or begun.state.is_tombstone:
            return None
        return begun

    async def _find(self, names: Sequence[bytes]) -> Stream | None:
        for name in names:
            if stream := await self._cache.named(name):
                return await self._newest(name, stream)
        return None

    async def _newest(self, name: bytes, stream: Stream) -> Stream:
        """The call that has a key now. Another replica may have made it anew, which this one, with
        the former call in memory, has not heard of.
        """
        if self._journal.replica:
            newest = await self._journal.named(name, is_secret=True)
            if newest not in (None, stream.id):
                return await self._cache.find(str(newest)) or stream
        return stream


async def _keep(turn: AsyncExitStack, begun: Stream) -> None:
    """Keep the turn until the record of a call is durable."""
    async with turn:
        with suppress(Unavailable):  # the server has shut down
            await begun.recorded()
