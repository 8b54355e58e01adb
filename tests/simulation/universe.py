"""One seed from its beginning to its end: servers and clients that die, and the rules that must
hold.
"""

import math
import random
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import trio
from trio.testing import MockClock

from streams.engine.engine import Engine
from streams.errors import first_of
from streams.journal.sqlite.checkpoints import Checkpoints
from tests.simulation.callers import Caller, Process
from tests.simulation.lives import KEYRING, Life, check_marks, check_memory, excuse
from tests.simulation.network import Cable, Network
from tests.simulation.pauses import Pauses
from tests.simulation.plain import PlainCaller
from tests.simulation.plan import FAULTS, Fate, plan_of, shared_plan_of
from tests.simulation.replicas import Replicas
from tests.simulation.short import ShortCaller
from tests.simulation.storage import MortalJournal, Store
from tests.simulation.tools import make_server
from tests.simulation.weather import Weather
from tests.simulation.witness import Witness
from tests.simulation.world import Job, World

CALM_S = 1_500.0  # in which all jobs are done, once no fault occurs any more
SETTLE_S = 15.0
ROUNDS_MAX = 10_000  # of trio's loop, without any time passing
SHM = Path("/dev/shm")
EPOCH = 1_700_000_000.0


class Deadlock(Exception):
    """All tasks wait, and no event will ever come."""


class Watchdog(trio.abc.Instrument):
    """Notices a busy loop: tasks run, and no time passes."""

    def __init__(self, world: World, clock: MockClock) -> None:
        self._world = world
        self._clock = clock
        self._now = 0.0
        self._rounds = 0

    def before_io_wait(self, timeout: float) -> None:
        now = self._clock.current_time()
        self._rounds = self._rounds + 1 if now == self._now else 0
        self._now = now
        if self._rounds == ROUNDS_MAX:
            self._world.violate("tasks run, and no time passes")


class Report(msgspec.Struct, frozen=True):
    """The result of one seed."""

    seed: int
    virtual_s: float
    counts: dict[str, int]
    violations: list[str]
    digest: int
    trace: list[str]


def simulate(seed: int, *, is_shared: bool = False, is_traced: bool = False) -> Report:
    """Run one seed: the same history each time. With `is_shared` there are several replicas."""
    chance = random.Random(seed)
    plan = shared_plan_of(chance, seed) if is_shared else plan_of(chance, seed)
    return live_through(World(plan, chance, is_traced=is_traced), _live)


def live_through(world: World, live: Callable[[World, Path, Pauses], Awaitable[None]]) -> Report:
    """Run one world from its beginning to its end, in virtual time."""
    seed = world.plan.seed
    folder = str(SHM) if SHM.is_dir() else None
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=folder) as directory,
    ):
        clock = MockClock(autojump_threshold=0)
        decide_everything(patch, clock, seed)
        # A client handles all that its pongs confirm at once, instead of some lines at a time.
        patch.setattr("transports.lines.LINES_MAX", math.inf)
        for limit in ("RUNS_BYTES", "RUNS_BYTES_MAX", "STREAM_BYTES_MIN"):
            if world.plan.read_bytes:
                patch.setattr(f"streams.engine.connection.{limit}", world.plan.read_bytes)
        try:
            pauses = Pauses()
            instruments = [Watchdog(world, clock), pauses]
            given = live, world, Path(directory), pauses
            trio.run(_lived, *given, clock=clock, instruments=instruments)
        except trio.TrioInternalError as error:
            world.violations.append(str(error.__cause__))
    return Report(
        seed, world.lasted_s, dict(world.counts), world.violations, world.digest, list(world.trace)
    )


def decide_everything(patch: pytest.MonkeyPatch, clock: MockClock, seed: int) -> None:
    """Let the seed decide all other random choices: the order of tasks, ids, jitter, wall time."""
    dice = random.Random(f"ids of {seed}")
    patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio._core._run._r.seed(seed)
    random.seed(seed)
    secrets: Any = SimpleNamespace(
        token_urlsafe=lambda size: dice.randbytes(size).hex()[: size * 4 // 3 + 1],
        token_bytes=dice.randbytes,
    )
    patch.setattr("streams.keys.secrets", secrets)
    patch.setattr("streams.keys._random_key", lambda: dice.randbytes(32))  # replicas share by ids
    times: Any = SimpleNamespace(
        time=lambda: EPOCH + clock.current_time(), monotonic=clock.current_time
    )
    patch.setattr("streams.clock.time", times)
    patch.setattr("streams.journal.sqlite.checkpoints.Checkpoints.committed", _copy_at_once)
    jump = MockClock._autojump

    def jump_or_say_so(clock: MockClock) -> None:
        if trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf:
            raise Deadlock("everybody waits, and nothing will ever happen")
        jump(clock)

    patch.setattr(MockClock, "_autojump", jump_or_say_so)
    structlog.configure(processors=[_drop])


def _copy_at_once(checkpoints: Checkpoints) -> None:
    """In place of the thread that copies the WAL: how a commit is made depends on how far it is."""
    if checkpoints._has_enough():
        checkpoints._copy(checkpoints._copier)


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


async def _lived(
    live: Callable[[World, Path, Pauses], Awaitable[None]],
    world: World,
    folder: Path,
    pauses: Pauses,
) -> None:
    try:
        await live(world, folder, pauses)
    except Exception as error:  # any error is reported with its seed
        world.violate(f"{type(first_of(error)).__name__}: {first_of(error)}")
        world.error = first_of(error)
    world.lasted_s = trio.current_time()


async def _live(world: World, folder: Path, pauses: Pauses) -> None:
    weather = Weather(world)
    network = Network(world, weather)
    servers: Servers | Replicas
    if world.plan.sharing is None:
        servers = Servers(world, weather, network, Store(world, weather, folder))
    else:
        servers = Replicas(world, weather, network, world.plan.sharing, pauses)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_when_broken, world, nursery.cancel_scope)
        await nursery.start(network.run)
        nursery.start_soon(servers.run)
        nursery.start_soon(servers.watch)
        processes = [
            Process(f"p{n}", world, weather, network, world.chance.choice(("os(0)", "")))
            for n in range(world.plan.processes)
        ]
        for process in processes:
            nursery.start_soon(process.run)
        for job in world.jobs.values():
            if job.part.fate is not None and job.part.fate.what in FAULTS:
                nursery.start_soon(servers.befall, job, job.part.fate)
            if job.part.is_short and job.part.is_plain:
                nursery.start_soon(ShortCaller(job, world, weather, network, servers.ledger).run)
            elif job.part.is_plain:
                nursery.start_soon(PlainCaller(job, world, weather, network, servers.ledger).run)
            else:
                nursery.start_soon(Caller(job, world, weather, processes).run)
        await _see_it_through(world)
        await servers.check_at_the_end()
        nursery.cancel_scope.cancel()


async def end_when_broken(world: World, scope: trio.CancelScope) -> None:
    await world.is_broken.wait()
    scope.cancel()


async def _see_it_through(world: World) -> None:
    await trio.sleep(world.plan.chaos_s)
    world.is_calm = True
    world.note("weather", "is calm from now on")
    with trio.move_on_after(CALM_S):
        for job in world.jobs.values():
            await job.is_settled.wait()
        await trio.sleep(SETTLE_S)
        return
    waiting = [job.key for job in world.jobs.values() if not job.is_settled.is_set()]
    world.violate(f"after {CALM_S} s of calm these are not done: {', '.join(waiting)}")


class Servers:
    """One server after the other, on the state that the one before has left."""

    def __init__(self, world: World, weather: Weather, network: Network, store: Store) -> None:
        self._world = world
        self._weather = weather
        self._network = network
        self._store = store
        self.ledger = store.ledger
        self._witness = Witness(world, store.ledger, KEYRING)
        self._journal: MortalJournal | None = None
        self._engine: Engine | None = None
        self._doom = trio.Event()  # set where the server is to end now
        self._is_to_stop = False

    async def run(self) -> None:
        """Start, die or stop, and start again."""
        async with trio.open_nursery() as nursery:
            while True:
                journal, life = await self._store.open(), Life()
                self._journal = journal
                nursery.start_soon(self._serve, journal, life)
                self._doom, self._is_to_stop = trio.Event(), self._world.chance.random() > 0.75
                with trio.move_on_after(self._weather.crash_in_s()):
                    await self._doom.wait()
                self._journal = None
                if self._is_to_stop:
                    await self._stop(life)
                else:
                    self._crash(journal, life)
                await trio.sleep(self._world.chance.choice((0.0, 1.0, 15.0)))

    async def befall(self, job: Job, fate: Fate) -> None:
        """Make something fail at a moment of a short call."""
        await job.fate_is_due.wait()
        await trio.sleep(fate.after_s)
        if self._world.is_calm or self._journal is None:
            return
        self._world.note("fate", f"{fate.what}, {fate.after_s:.4f} s after {job.key} {fate.moment}")
        self._world.counts[f"fates: {fate.what}"] += 1
        match fate.what:
            case "crash" | "stop":
                self._is_to_stop = fate.what == "stop"
                self._doom.set()
            case "cut":
                self._network.cut_channel(job.channel)
            case "full":
                self._journal.trouble()

    async def check_at_the_end(self) -> None:
        """Check that no stream is left in memory that the journal does not have."""
        assert self._engine is not None
        check_memory(self._world, self.ledger, self._engine)
        await trio.lowlevel.checkpoint()

    async def watch(self) -> None:
        """Check now and then that displaced readers were told."""
        while True:
            await trio.sleep(30)
            self._witness.check()

    def _crash(self, journal: MortalJournal, life: Life) -> None:
        self._world.note("server", f"dies, {len(journal.in_flight)} changes in flight")
        self._world.counts["crashes"] += 1
        excuse(self._world, self._store.ledger)
        life.is_dead = True
        self._store.crash(journal)
        self._network.lose_server()
        life.over()
        life.scope.cancel()

    async def _stop(self, life: Life) -> None:
        self._world.note("server", "stops")
        self._world.counts["stops"] += 1
        excuse(self._world, self._store.ledger)
        life.over()
        await life.is_gone.wait()

    async def _serve(self, journal: MortalJournal, life: Life) -> None:
        try:
            with life.scope:
                await self._work(journal, life)
        except Exception:
            if not life.is_dead:  # a dead server's errors do not matter
                raise
        finally:
            self._store.close(journal)
            life.is_gone.set()

    async def _work(self, journal: MortalJournal, life: Life) -> None:
        server = make_server(self._world, life)
        async with trio.open_nursery() as nursery:
            async with server.open(journal, KEYRING) as running:
                self._world.note("server", "is up")
                self._engine = running.engine

                def accept(cable: Cable) -> None:
                    cable.far.witness = self._witness
                    nursery.start_soon(running.serve, cable.far)

                self._network.accept = accept
                journal.check = partial(check_marks, self._world, running.engine)
                await life.is_over.wait()
                self._network.accept = None
            nursery.cancel_scope.cancel()
