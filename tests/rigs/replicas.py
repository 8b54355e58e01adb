"""Several replicas of a server in this process, on one store in memory, under any clock."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import trio

from streams import Server
from streams.backends import PatienceSettings
from streams.errors import StoreAway
from streams.journal.contract import Journal, News
from streams.keys import Keyring
from tests.rigs.server import STREAMS, House, Json, Steps, Talker
from tests.rigs.shared_memory import LEASE_S, SharedMemoryJournal, SharedStore
from tests.rigs.web import Browser

# After this time, each replica has noticed that another one is gone, and has taken over.
TAKEN_S: Final = 2 * LEASE_S
# A bound for a test that hangs, by a mock clock: beats of replicas take real time.
PATIENCE_S: Final = 30 * LEASE_S


class Reached:
    """The journal of one replica, and its way to the store, which a test may cut."""

    def __init__(self, inner: SharedMemoryJournal) -> None:
        self.inner = inner
        self._is_dead = False
        self._is_up = trio.Event()
        self._is_up.set()
        self._trouble = StoreAway
        self._listening = trio.CancelScope()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def ask(*given: Any, **how: Any) -> Any:
            await self._reach()
            return await found(*given, **how)

        return ask

    async def news(self) -> News:
        while True:
            await self._is_up.wait()
            with trio.CancelScope() as self._listening:
                return await self.inner.news()

    async def _reach(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._is_dead:
            await trio.sleep_forever()
        if not self._is_up.is_set():
            raise self._trouble("the store is away")

    def cut(self, trouble: type[StoreAway] = StoreAway) -> None:
        """The store is away for this replica."""
        self._is_up, self._trouble = trio.Event(), trouble
        self._listening.cancel()

    def mend(self) -> None:
        """The store is back. News may have been lost."""
        self._is_up.set()
        self.inner.lose_news()

    def die(self) -> None:
        """The process of this replica was killed: it does nothing more to the store."""
        self._is_dead = True
        self._listening.cancel()
        self._is_up = trio.Event()


class Replica(House):
    """One process. Its tools `step` and `again`, which may restart, follow the test's orders."""

    nursery: trio.Nursery

    def __init__(self, server: Server, reached: Reached, patience: PatienceSettings | None) -> None:
        self.server = server
        self._patience = patience
        self.steps = Steps(server)
        self.again = Steps(server, name="again", restart=True)
        self.reached = reached
        self.journal = cast(Journal, reached)
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self._is_to_stop = trio.Event()
        self._talkers: list[Talker] = []

    async def run(self, keyring: Keyring, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until `stop` or `kill`."""
        try:
            with self.scope:
                async with trio.open_nursery() as self.nursery:
                    opened = self.server.open(self.journal, keyring, patience=self._patience)
                    async with opened as self.running:
                        task_status.started()
                        await self._is_to_stop.wait()
                    self.nursery.cancel_scope.cancel()
        finally:
            self.is_over.set()

    async def dial(
        self, capabilities: Json = STREAMS, principal: str = "alice", *, capacity: int = 1 << 20
    ) -> Talker:
        talker = await super().dial(capabilities, principal, capacity=capacity)
        talker.patience_s = PATIENCE_S
        self._talkers.append(talker)
        return talker

    async def browse(self, capabilities: Json, session: str | None = None, **how: Any) -> Browser:
        """A client over HTTP, with a new session, or with one of another replica."""
        browser = Browser(self, self.nursery, session, **how)
        if session is None:
            await browser.greet(capabilities)
        return browser

    @property
    def name(self) -> str:
        """Its name among the replicas."""
        return self.reached.inner.replica

    @property
    def streams(self) -> list[str]:
        """The ids of the streams that it has in memory as their owner."""
        return [stream.id for stream in self.running.engine._streams.index]

    async def stop(self) -> None:
        """SIGTERM: the server shuts down."""
        self._is_to_stop.set()
        await self.is_over.wait()

    def kill(self) -> None:
        """SIGKILL: connections are cut, and the store hears nothing more of this process."""
        self.reached.die()
        for talker in self._talkers:
            talker.cable.cut()
        self.scope.cancel()


class Replicas:
    """All replicas on one store."""

    def __init__(self, nursery: trio.Nursery, make: Callable[[], Server]) -> None:
        self.store = SharedStore()
        self.keyring = Keyring.load(None)
        self._nursery = nursery
        self._make = make

    async def start(
        self,
        server: Server | None = None,
        keyring: Keyring | None = None,
        patience: PatienceSettings | None = None,
    ) -> Replica:
        """One more replica."""
        replica = Replica(server or self._make(), Reached(self.store.open()), patience)
        await self._nursery.start(replica.run, keyring or self.keyring)
        return replica

    async def two(self) -> tuple[Replica, Replica]:
        """Two replicas."""
        return await self.start(), await self.start()

    def owner_of(self, stream: str) -> str:
        """The replica that owns a stream."""
        return self.store.records[stream].owner

    def kill_store(self, *replicas: Replica) -> None:
        """The store is away for all of these."""
        for replica in replicas:
            replica.reached.cut()

    def start_store(self, *replicas: Replica) -> None:
        """The store is back."""
        for replica in replicas:
            replica.reached.mend()


@asynccontextmanager
async def open_replicas(make: Callable[[], Server]) -> AsyncIterator[Replicas]:
    """Replicas of the servers that `make` returns, for the length of a block."""
    async with trio.open_nursery() as nursery:
        yield Replicas(nursery, make)
        nursery.cancel_scope.cancel()
