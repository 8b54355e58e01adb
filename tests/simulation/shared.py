"""A journal that several replicas share, on a store that is far away, and fails in the ways of one.

The store may be cut off from one replica, stand still, restart, and come back without its last
changes. A request that gets no answer may have been carried out; one that a store got while it
stood still is carried out later, even if its sender is dead by then.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import trio

from streams.errors import JournalError, Unavailable
from streams.journal.contract import News, Shortage, Totals, Wanted
from streams.journal.records import Change, Outcome, Record, Restore
from streams.journal.sessions import Grant, SessionRecord
from streams.messages import Run
from tests.rigs.shared_memory import SharedMemoryJournal, SharedStore
from tests.simulation.ledger import Ledger
from tests.simulation.weather import Weather
from tests.simulation.world import World

TIMEOUT_S: Final = 1.0  # until a request without an answer is given up

_T = TypeVar("_T")


class FarStore:
    """The store, its troubles, and what it has acknowledged."""

    def __init__(self, world: World, weather: Weather, lease_s: float) -> None:
        self.shared = SharedStore(lease_s)
        self.ledger = Ledger(world)
        self._world = world
        self._weather = weather
        self._has_trouble = False  # of one kind at a time
        self._is_down = False
        self._is_still = False
        self._works = trio.Event()
        self._works.set()
        self._late: list[Callable[[], Awaitable[object]]] = []  # requests that it will carry out

    def open(self) -> "ReplicaJournal":
        """The journal of a new replica."""
        return ReplicaJournal(self, self.shared.open(), self._world, self._weather, self.ledger)

    async def stand_still(self, for_s: float) -> None:
        """Answer nothing for a while, then all that is still waited for."""
        if self._has_trouble:
            return
        self._has_trouble = self._is_still = True
        self._works = trio.Event()
        await trio.sleep(for_s)
        self._has_trouble = self._is_still = False
        late, self._late = self._late, []
        for act in late:
            with suppress(JournalError):  # no answer reaches its sender
                await act()
        self._works.set()

    async def restart(self, for_s: float, lost_s: float) -> None:
        """Be gone for a while, then back: without what it was given in the last `lost_s`."""
        if self._has_trouble:
            return
        self._has_trouble = True
        if lost_s:
            copy = self.shared.copy()
            await trio.sleep(lost_s)
        self._is_down, self._works = True, trio.Event()
        await trio.sleep(for_s)
        if lost_s:
            self.shared.go_back(copy)
            self.ledger.went_back(self.shared.records)
        self._has_trouble = self._is_down = False
        for journal in self.shared.listeners:
            journal.lose_news()
        self._works.set()

    async def reach(self, act: Callable[[], Awaitable[object]]) -> None:
        """Wait until the store takes a request. Raises `Unavailable` if it does not."""
        if self._is_down:
            await trio.sleep(self._weather.latency_s())
            raise Unavailable("the store is down")
        if self._is_still:
            with trio.move_on_after(TIMEOUT_S):
                await self._works.wait()
                return
            if self._is_still and self._world.chance.random() < 0.5:
                self._late.append(act)
            raise Unavailable("the store does not answer")

    async def works(self) -> None:
        """Wait until the store works."""
        await self._works.wait()

    @property
    def is_working(self) -> bool:
        return self._works.is_set()


class ReplicaJournal:
    """`streams.journal.contract.Journal`: the way of one replica to the store."""

    shortage: Shortage | None = None
    anonymous_shortage: Shortage | None = None

    def __init__(
        self,
        store: FarStore,
        inner: SharedMemoryJournal,
        world: World,
        weather: Weather,
        ledger: Ledger,
    ) -> None:
        self.inner = inner
        self.is_dead = False
        self.check: Callable[[], None] = lambda: None  # the rules to check at each commit
        self._store = store
        self._world = world
        self._weather = weather
        self._ledger = ledger
        self._is_cut = False
        self._changed: deque[str] = deque()  # of news, which are passed on one after the other
        self._listening = trio.CancelScope()

    @property
    def has_calls(self) -> bool:
        """Whether calls run at this replica."""
        owned = self._store.shared.owned_by(self.replica)
        return any(record.outcome is Outcome.LIVE for record in owned)

    def kill(self) -> None:
        """Mark the process that uses it as dead: no request returns any more."""
        self.is_dead = True
        self._store.shared.lose(self.inner)

    async def be_cut(self, for_s: float) -> None:
        """Be cut off from the store for a while."""
        self._is_cut = True
        self._listening.cancel()
        await trio.sleep(for_s)
        self._is_cut = False
        self.inner.lose_news()

    # The way to the store, and back

    async def _ask(self, act: Callable[[], Awaitable[_T]]) -> _T:
        await self._travel(act)
        answer = await act()
        await self._return()
        return answer

    async def _travel(self, act: Callable[[], Awaitable[object]]) -> None:
        await self._live()
        await self._take_time()
        await self._check_cut()
        await self._store.reach(act)
        await self._live()

    async def _return(self) -> None:
        await self._live()
        await self._take_time()
        await self._check_cut()
        if not self._store.is_working or self._weather.is_so(0.005):
            raise Unavailable("it is done, and nobody knows")

    async def _take_time(self) -> None:
        assert self._world.plan.sharing is not None
        chance, latency_s = self._world.chance, self._world.plan.sharing.latency_s
        if latency_s:
            await trio.sleep(chance.uniform(0, 2 * latency_s))
        if self._weather.is_so(0.1):
            await trio.sleep(chance.expovariate(50))
        await self._live()

    async def _live(self) -> None:
        if self.is_dead:
            await trio.sleep_forever()

    async def _check_cut(self) -> None:
        if self._is_cut:
            await trio.sleep(TIMEOUT_S)
            await self._live()
            raise Unavailable("the store cannot be reached")

    # Leases

    @property
    def replica(self) -> str:
        return self.inner.replica

    @property
    def lease_s(self) -> float:
        return self.inner.lease_s

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        async def claim() -> Sequence[Record]:
            records = await self.inner.claim(owner, wanted)
            for record in records:
                self._ledger.owned(record)
            return records

        return await self._ask(claim)

    async def take(self, stream: str) -> Record | None:
        async def take() -> Record | None:
            record = await self.inner.take(stream)
            if record is not None:
                self._ledger.owned(record)
            return record

        return await self._ask(take)

    async def owned(self, *, after: int, limit: int) -> Sequence[Record]:
        return await self._ask(partial(self.inner.owned, after=after, limit=limit))

    async def renew(self) -> Mapping[str, int] | None:
        async def renew() -> Mapping[str, int] | None:
            counts = await self.inner.renew()
            for record in self.inner.put_back:
                self._ledger.restored(Restore(record.fence, record), record)
            return counts

        return await self._ask(renew)

    async def running(self, replicas: Sequence[str]) -> Mapping[str, int]:
        return await self._ask(partial(self.inner.running, replicas))

    async def release(self) -> None:
        await self._ask(self.inner.release)

    # Streams and sessions

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await self._live()
        self._ledger.asked(changes)
        self.check()

        async def commit() -> Sequence[JournalError | None]:
            answers = await self.inner.commit(changes)
            accepted = [c for c, error in zip(changes, answers, strict=True) if error is None]
            for change in accepted:
                if isinstance(change, Restore):
                    self._ledger.restored(change, self._store.shared.records[change.stream])
                else:
                    self._ledger.done([change])
            return answers

        return await self._ask(commit)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        return await self._ask(partial(self.inner.read, stream, after, bytes_max=bytes_max))

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        return await self._ask(self.inner.sessions)

    async def session(self, key: str) -> SessionRecord | None:
        return await self._ask(partial(self.inner.session, key))

    async def count_sessions(self, principal: str | None = None) -> int:
        return await self._ask(partial(self.inner.count_sessions, principal))

    async def aclose(self) -> None:
        await self.inner.aclose()

    # Lookups

    async def totals(self) -> Totals:
        return await self._ask(self.inner.totals)

    async def find(self, stream: str) -> Record | None:
        return await self._ask(partial(self.inner.find, stream))

    async def principal_of(self, stream: str) -> str | None:
        return await self._ask(partial(self.inner.principal_of, stream))

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        return await self._ask(partial(self.inner.named, name, is_secret=is_secret))

    async def grants(self, stream: str) -> Sequence[Grant]:
        return await self._ask(partial(self.inner.grants, stream))

    async def listed(self, principal: str, **how: Any) -> Sequence[Record]:
        return await self._ask(partial(self.inner.listed, principal, **how))

    async def count(self, principal: str) -> int:
        return await self._ask(partial(self.inner.count, principal))

    async def due(self, **how: Any) -> Sequence[Record]:
        return await self._ask(partial(self.inner.due, **how))

    # News

    async def follow(self, stream: str) -> Record | None:
        return await self._ask(partial(self.inner.follow, stream))

    def expect(self, stream: str, after: int, *, bytes_max: int) -> None:
        pass

    async def unfollow(self, stream: str) -> None:
        await self._ask(partial(self.inner.unfollow, stream))

    async def post(self, stream: str, *bodies: bytes, is_kept: bool = True) -> bool:
        return await self._ask(partial(self.inner.post, stream, *self._sent(bodies, is_kept)))

    async def send(self, replica: str, stream: str, *bodies: bytes, is_kept: bool = True) -> None:
        await self._ask(partial(self.inner.send, replica, stream, *self._sent(bodies, is_kept)))

    def _sent(self, bodies: Sequence[bytes], is_kept: bool) -> Sequence[bytes]:
        """The posts that arrive: one that is not kept may be lost."""
        return [body for body in bodies if is_kept or not self._weather.is_so(0.05)]

    async def news(self) -> News:
        while not self._changed:
            await self._live()
            await self._check_cut()
            await self._store.works()
            with trio.CancelScope() as self._listening:
                news = await self.inner.news()
                await self._live()
                # A set has another order in each process, and a seed has one history.
                self._changed.extend(sorted(news.changed))
                return News(frozenset(), news.posts, news.is_all, news.released)
        return News(frozenset({self._changed.popleft()}))

    def turn(self, name: bytes) -> AbstractAsyncContextManager[None]:
        return self._turn(name)

    @asynccontextmanager
    async def _turn(self, name: bytes) -> AsyncIterator[None]:
        await self._live()
        await self._check_cut()
        async with self.inner.turn(name):
            yield
