"""Journals that are slow, full for a while, and lose with their server all that is not durable.

`Store` outlives servers: each server opens a journal of its own from it, as a new process would.
"""

import copy
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio

from streams.errors import Full, JournalError, Unavailable
from streams.journal.alone import Alone
from streams.journal.contract import Journal, Shortage, Totals, Wanted
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change, Record
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite import SQLiteJournal, SQLiteStore
from streams.messages import Run
from tests.simulation.ledger import Ledger
from tests.simulation.weather import Weather
from tests.simulation.world import World

_T = TypeVar("_T")


class Inline:
    """Replaces the journal's thread: a mock clock would not wait for one."""

    is_idle = True

    async def run(self, job: Callable[[], _T]) -> _T:
        await trio.lowlevel.checkpoint()
        return job()


class MortalJournal(Alone):
    """A journal as one server sees it. Once the server is killed no request returns any more."""

    def __init__(self, inner: Journal, world: World, weather: Weather, ledger: Ledger) -> None:
        self.inner = inner
        self._world = world
        self._weather = weather
        self._ledger = ledger
        self.is_dead = False
        self.check: Callable[[], None] = lambda: None  # the rules to check at each commit
        self.in_flight: Sequence[Change] = ()  # they may or may not be durable
        self._trouble_at = trio.current_time() + weather.trouble_in_s()
        self._trouble_until = 0.0

    def kill(self) -> None:
        """Mark the process that uses it as dead."""
        self.is_dead = True

    def trouble(self) -> None:
        """Take nothing for a while, from now on."""
        self._trouble_at = trio.current_time()

    @property
    def shortage(self) -> Shortage | None:
        return self.inner.shortage

    @property
    def anonymous_shortage(self) -> Shortage | None:
        return self.inner.anonymous_shortage

    async def _live(self) -> None:
        if self.is_dead:
            await trio.sleep_forever()

    def _check_trouble(self) -> None:
        now, chance = trio.current_time(), self._world.chance
        if now >= self._trouble_at:
            self._trouble_until = now + chance.uniform(0.1, 15)
            self._trouble_at = self._trouble_until + self._weather.trouble_in_s()
            self._world.counts["troubles"] += 1
            self._world.note("journal", f"takes nothing for {self._trouble_until - now:.1f} s")
        if now < self._trouble_until:
            raise (Full if chance.random() < 0.5 else Unavailable)("as the weather will have it")

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await self._live()
        self._ledger.asked(changes)
        self.check()
        if self._weather.is_so(0.2):
            await trio.sleep(self._world.chance.expovariate(20))
        await self._live()
        self._check_trouble()
        self.in_flight = changes
        answers = await self.inner.commit(changes)
        await self._live()
        if self._weather.is_so(0.1):
            await trio.sleep(self._world.chance.expovariate(20))
            await self._live()
        self.in_flight = ()
        self._ledger.done([c for c, error in zip(changes, answers, strict=True) if error is None])
        if self._weather.is_so(0.01):
            raise Unavailable("it is durable, and nobody knows")
        return answers

    async def _ask(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        await self._live()
        self._check_trouble()
        answer = await ask()
        await self._live()
        return answer

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        await self._live()
        return await self.inner.claim(owner, wanted)

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        await self._live()
        return await self.inner.sessions()

    async def totals(self) -> Totals:
        await self._live()
        return await self.inner.totals()

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        runs = await self._ask(lambda: self.inner.read(stream, after, bytes_max=bytes_max))
        if runs and self.in_flight and self._ledger.is_news(stream, runs[-1].last):
            self._ledger.done(self.in_flight)  # it is durable before the server is told so
        return runs

    async def find(self, stream: str) -> Record | None:
        return await self._ask(lambda: self.inner.find(stream))

    async def principal_of(self, stream: str) -> str | None:
        return await self._ask(lambda: self.inner.principal_of(stream))

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        return await self._ask(lambda: self.inner.named(name, is_secret=is_secret))

    async def grants(self, stream: str) -> Sequence[Grant]:
        return await self._ask(lambda: self.inner.grants(stream))

    async def listed(self, principal: str, **how: Any) -> Sequence[Record]:
        return await self._ask(lambda: self.inner.listed(principal, **how))

    async def count(self, principal: str) -> int:
        return await self._ask(lambda: self.inner.count(principal))

    async def due(self, **how: Any) -> Sequence[Record]:
        return await self._ask(lambda: self.inner.due(**how))

    async def aclose(self) -> None:
        await self.inner.aclose()


class Store:
    """The durable state, from one server to the next."""

    def __init__(self, world: World, weather: Weather, folder: Path) -> None:
        self._world = world
        self._weather = weather
        self._folder = folder
        self._generation = 0
        self._memory = MemoryJournal()
        self._open: dict[MortalJournal, SQLiteStore] = {}
        self.ledger = Ledger(world)
        self._in_flight: Sequence[Change] = ()

    async def open(self) -> MortalJournal:
        """A journal for a new server; the ledger checks it first."""
        inner: Journal = self._memory
        store = None
        if self._world.plan.journal == "file":
            store = SQLiteStore(self._path, durability="process", budget=self._world.plan.budget)
            inner = SQLiteJournal(store, Inline())  # type: ignore[arg-type]
        await self.ledger.check(inner, self._in_flight)
        self._in_flight = ()
        journal = MortalJournal(inner, self._world, self._weather, self.ledger)
        if store is not None:
            self._open[journal] = store
        return journal

    @property
    def _path(self) -> Path:
        return self._folder / f"journal-{self._generation}"

    def crash(self, journal: MortalJournal) -> None:
        """Freeze the durable state: a dead server's writes no longer count."""
        journal.kill()
        self._in_flight = journal.in_flight
        if self._world.plan.journal == "memory":
            self._memory = copy.deepcopy(self._memory)
            return
        dead = self._path
        self._generation += 1
        for suffix in ("", "-wal"):
            shutil.copy(f"{dead}{suffix}", f"{self._path}{suffix}")

    def close(self, journal: MortalJournal) -> None:
        """Let a server's file go, once it has stopped or is dead."""
        if not journal.is_dead:
            self._in_flight = journal.in_flight
        store = self._open.pop(journal, None)
        if store is not None:
            store.close()
