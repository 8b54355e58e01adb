"""Several replicas behind a balancer, on one store: each dies, stops, stands still, or is cut off
from the store, at any time; and so does the store.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from streams import Server
from streams.backends import PatienceSettings
from streams.engine.engine import Engine
from streams.errors import JournalUnusable, first_of
from tests.simulation.lives import KEYRING, Life, check_marks, check_memory, excuse
from tests.simulation.network import Cable, FarChannel, Network
from tests.simulation.pauses import Pauses, context_of
from tests.simulation.plan import Fate, Sharing
from tests.simulation.shared import FarStore, ReplicaJournal
from tests.simulation.tools import make_server
from tests.simulation.weather import Weather
from tests.simulation.witness import Claim, Witness
from tests.simulation.world import Job, World

PAUSES: Final = (0.5, 3.0, 3.0)  # leases that a replica stands still
CUTS: Final = (0.3, 1.0, 3.0)  # leases that a replica is cut off from the store
STILL: Final = (0.2, 1.0, 4.0)  # leases that the store does not answer
OUTAGES_S: Final = (0.1, 1.0, 10.0)  # that a restart of the store takes
EFFECT_S: Final = 45.0  # that a fault has effects, and three leases: servers start again
FORGOTTEN_S: Final = 1.0  # of changes, which a store may lose in a crash
BEHIND_S: Final = (0.0, 0.5, 3.0)  # by which a server is behind that a failover promotes


class SharedWitness(Witness):
    """A witness that does not know in which order requests at several replicas reach the owner."""

    def _serve(self, key: str, channel: FarChannel) -> bool:
        waiting = [c for c in self._claims.get(key, ()) if c.channel is channel]
        is_asked = self._world.expect(waiting, f"{key} is sent to a reader that never asked")
        if is_asked:
            self._served[key] = waiting[-1]
        return is_asked

    def _check_displaced(self, claim: Claim | None, key: str) -> None:
        """The newest is the one that reached the owner last."""
        others = [each for each in self._claims.get(key, ()) if each is not claim]
        self._world.expect(others, f"{key}: told `superseded` without another reader")


class Replica:
    """One process, from its start to its end."""

    def __init__(self, name: str, journal: ReplicaJournal) -> None:
        self.name = name
        self.journal = journal
        self.life = Life(is_replica=True)
        self.engine: Engine | None = None  # once it is up
        self.accept: Callable[[Cable], None] | None = None  # while it is up
        self.cables: list[Cable] = []
        self.is_paused = False
        self.doom = trio.Event()  # it is to end now
        self.is_to_stop = False


class Replicas:
    """All replicas, and their troubles."""

    def __init__(
        self,
        world: World,
        weather: Weather,
        network: Network,
        sharing: Sharing,
        pauses: Pauses,
        patience: PatienceSettings | None = None,
    ) -> None:
        self._world = world
        self._weather = weather
        self._network = network
        self._sharing = sharing
        self._pauses = pauses
        self._patience = patience
        self._store = FarStore(world, weather, sharing.lease_s)
        self.ledger = self._store.ledger
        self._witness = self._make_witness()
        self._live: list[Replica] = []
        self._nursery: trio.Nursery

    def _make_witness(self) -> SharedWitness:
        return SharedWitness(self._world, self.ledger, KEYRING)

    def _make_server(self, life: Life) -> Server:
        return make_server(self._world, life)

    def _check(self, engine: Engine) -> None:
        """Check what must hold at each commit."""
        check_marks(self._world, engine)

    # Lives

    async def run(self) -> None:
        """Run all replicas, and let faults occur."""
        sharing = self._sharing
        faults: Sequence[tuple[float, Callable[[], Awaitable[None]]]] = (
            (sharing.kill_every_s, partial(self._end_one, is_to_stop=False)),
            (sharing.stop_every_s, partial(self._end_one, is_to_stop=True)),
            (sharing.pause_every_s, self._pause_one),
            (sharing.cut_every_s, self._cut_one_off),
            (sharing.still_every_s, self._stand_still),
            (sharing.restart_every_s, self._restart_store),
            (sharing.failover_every_s, self._fail_over),
        )
        async with trio.open_nursery() as self._nursery:
            for n in range(sharing.replicas):
                self._nursery.start_soon(self._run_one, f"server {n}")
            for every_s, fault in faults:
                self._nursery.start_soon(self._let_occur, every_s, fault)

    async def _run_one(self, name: str) -> None:
        """Start, die or stop, and start again."""
        while True:
            replica = Replica(name, self._store.open())
            self._live.append(replica)
            context_of(replica).run(self._nursery.start_soon, self._serve, replica)
            await replica.doom.wait()
            self._live.remove(replica)
            self._excuse(replica)
            if replica.is_to_stop:
                await self._stop(replica)
            else:
                self._kill(replica)
            self._share_network()
            pause_s = self._world.chance.choice((0.0, 1.0, 15.0))
            await trio.sleep(0.0 if self._world.is_calm else pause_s)

    async def _stop(self, replica: Replica) -> None:
        self._world.note(replica.name, "stops")
        self._world.counts["stops"] += 1
        replica.life.over()
        await replica.life.is_gone.wait()

    def _kill(self, replica: Replica) -> None:
        self._world.note(replica.name, "dies")
        self._world.counts["crashes"] += 1
        replica.accept = None
        replica.life.is_dead = True
        replica.journal.kill()
        self.ledger.lost_server()
        for cable in replica.cables:
            self._network.lose(cable)
        replica.life.over()
        replica.life.scope.cancel()

    async def _serve(self, replica: Replica) -> None:
        try:
            with replica.life.scope:
                await self._work(replica)
        except Exception as error:
            could_not_start = replica.engine is None and isinstance(
                first_of(error), JournalUnusable
            )
            if not (replica.life.is_dead or could_not_start):
                raise  # else the errors of a dead server, or of one that is started again
        finally:
            replica.accept = None
            self._share_network()
            replica.life.is_gone.set()
            replica.doom.set()

    async def _work(self, replica: Replica) -> None:
        server = self._make_server(replica.life)
        context = context_of(replica)
        async with trio.open_nursery() as nursery:
            async with server.open(replica.journal, KEYRING, patience=self._patience) as running:
                self._world.note(replica.name, f"is up as {replica.journal.replica}")
                replica.engine = running.engine

                def accept(cable: Cable) -> None:
                    cable.far.witness = self._witness
                    replica.cables.append(cable)
                    context.run(nursery.start_soon, running.serve, cable.far)

                replica.accept = accept
                replica.journal.check = partial(self._check, running.engine)
                self._share_network()
                await replica.life.is_over.wait()
                replica.accept = None
                self._share_network()
            nursery.cancel_scope.cancel()

    # The balancer

    def _share_network(self) -> None:
        """Clients reach any replica that is up."""
        is_any_up = any(replica.accept is not None for replica in self._live)
        self._network.accept = self._accept if is_any_up else None

    def _accept(self, cable: Cable) -> None:
        up = [replica for replica in self._live if replica.accept is not None]
        replica = self._world.chance.choice(up)
        assert replica.accept is not None
        replica.accept(cable)

    # Faults

    async def _let_occur(self, every_s: float, fault: Callable[[], Awaitable[None]]) -> None:
        while True:
            await trio.sleep(self._world.chance.expovariate(1 / every_s))
            if self._world.is_calm:
                return
            await self._disturbing(fault)

    async def _disturbing(self, fault: Callable[[], Awaitable[None]]) -> None:
        self._world.faults += 1
        await fault()
        self._world.faults -= 1
        self._world.disturb(EFFECT_S + 3 * self._sharing.lease_s)

    def _any(self) -> Replica:
        return self._world.chance.choice(self._live)

    def _excuse(self, replica: Replica) -> None:
        """The calls of a replica may end as interrupted, if others may take them over."""
        name, records = replica.journal.replica, self._store.shared.records

        def is_there(job: Job) -> bool:
            record = records.get(job.stream or "")
            return record is None or record.owner in (name, "")

        excuse(self._world, self.ledger, is_there)

    async def _end_one(self, *, is_to_stop: bool) -> None:
        if self._live:
            self._end(self._any(), is_to_stop=is_to_stop)

    def _end(self, replica: Replica, *, is_to_stop: bool) -> None:
        if is_to_stop and replica.is_paused:
            return
        self._go_on(replica)
        replica.is_to_stop = is_to_stop
        replica.doom.set()

    async def _pause_one(self) -> None:
        if not self._live:
            return
        replica, leases = self._any(), self._world.chance.choice(PAUSES)
        self._world.note(replica.name, f"stands still for {leases} leases")
        self._world.counts["pauses"] += 1
        if leases >= 1:
            self._excuse(replica)
        replica.is_paused = True
        self._pauses.pause(replica)
        try:
            await trio.sleep(leases * self._sharing.lease_s)
        finally:  # even a cancelled task ends only once it runs
            self._go_on(replica)
        if leases >= 1:
            self._excuse(replica)

    def _go_on(self, replica: Replica) -> None:
        if replica.is_paused:
            replica.is_paused = False
            self._pauses.go_on(replica)

    async def _cut_one_off(self) -> None:
        if not self._live:
            return
        replica, leases = self._any(), self._world.chance.choice(CUTS)
        self._world.note(replica.name, f"is cut off from the store for {leases} leases")
        self._world.counts["cut off"] += 1
        if leases >= 1:
            self._excuse(replica)
        await replica.journal.be_cut(leases * self._sharing.lease_s)
        self._excuse(replica)

    async def _stand_still(self) -> None:
        for_s = self._world.chance.choice(STILL) * self._sharing.lease_s
        self._world.note("store", f"answers nothing for {for_s} s")
        self._world.counts["store still"] += 1
        await self._store.stand_still(for_s)

    async def _restart_store(self) -> None:
        for_s = self._world.chance.choice(OUTAGES_S)
        lost_s = FORGOTTEN_S if self._sharing.is_forgetful else 0.0
        await self._take_down("restarts", for_s, lost_s)

    async def _fail_over(self) -> None:
        lost_s = self._world.chance.choice(BEHIND_S) if self._sharing.is_forgetful else 0.0
        await self._take_down("fails over", self._world.chance.uniform(0.1, 5.0), lost_s)

    async def _take_down(self, what: str, for_s: float, lost_s: float) -> None:
        self._world.note("store", f"{what} in {for_s:.1f} s, and loses {lost_s} s")
        self._world.counts[f"store {what}"] += 1
        await self._store.restart(for_s, lost_s)
        if lost_s:
            excuse(self._world, self.ledger)

    async def befall(self, job: Job, fate: Fate) -> None:
        """Make something fail at a moment of a short call."""
        await job.fate_is_due.wait()
        await trio.sleep(fate.after_s)
        if self._world.is_calm or not self._live:
            return
        await self._disturbing(partial(self._let_happen, job, fate))

    async def _let_happen(self, job: Job, fate: Fate) -> None:
        self._world.note("fate", f"{fate.what}, {fate.after_s:.4f} s after {job.key} {fate.moment}")
        self._world.counts[f"fates: {fate.what}"] += 1
        serving = [r for r in self._live if any(c.far is job.channel for c in r.cables)]
        replica = (*serving, self._any())[0]
        match fate.what:
            case "crash" | "stop":
                self._end(replica, is_to_stop=fate.what == "stop")
            case "cut":
                self._network.cut_channel(job.channel)
            case "full":
                await replica.journal.be_cut(
                    self._world.chance.uniform(0.1, 0.3) * self._sharing.lease_s
                )

    # Rules

    async def watch(self) -> None:
        """Check now and then that displaced readers were told."""
        while True:
            await trio.sleep(30)
            self._witness.check()

    async def check_at_the_end(self) -> None:
        """Check what is in memory, and what is in the store."""
        for replica in self._live:
            if replica.engine is not None:
                check_memory(self._world, self.ledger, replica.engine)
        await self.ledger.check(self._store.shared.kept, ())
