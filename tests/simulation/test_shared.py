"""The simulated store and its replicas fail as they should."""

import random

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from streams.errors import Fenced, Unavailable
from streams.journal.records import Create
from tests.rigs.journals import append, applied, record
from tests.rigs.shared_memory import SKIPPED, SharedStore
from tests.simulation.pauses import Pauses, context_of
from tests.simulation.plan import Plan, Sharing, shared_plan_of
from tests.simulation.shared import TIMEOUT_S, FarStore
from tests.simulation.weather import Weather
from tests.simulation.world import World

STREAM = replace(
    record(),
    origin=b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"arguments":{"job":"c0"}}}',
)


def plan() -> Plan:
    drawn = shared_plan_of(random.Random(0), 0)
    assert drawn.sharing is not None
    return replace(drawn, sharing=replace(drawn.sharing, latency_s=0.0, lease_s=2.0))


@pytest.fixture
async def store() -> FarStore:
    world = World(plan(), random.Random(0), is_traced=False)
    world.is_calm = True  # but for what the test does
    return FarStore(world, Weather(world), lease_s=2.0)


async def test_a_request_to_a_store_that_stands_still_may_be_carried_out_late(
    store: FarStore, autojump_clock: MockClock
) -> None:
    journal = store.open()
    outcomes = set()
    for n in range(8):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.stand_still, 2 * TIMEOUT_S)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Unavailable):
                await journal.commit([Create(replace(STREAM, stream=f"s{n}"))])
        outcomes.add(await journal.find(f"s{n}") is not None)
    assert outcomes == {True, False}


async def test_a_replica_that_is_cut_off_reaches_nothing_and_hears_of_all_later(
    store: FarStore, autojump_clock: MockClock
) -> None:
    one, two = store.open(), store.open()
    await applied(one, Create(STREAM))
    await two.follow("s")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(two.be_cut, 10.0)
        await trio.testing.wait_all_tasks_blocked()
        await applied(one, append(1, 1))
        with pytest.raises(Unavailable):
            await two.renew()
        with pytest.raises(Unavailable):
            await two.news()
    assert (await two.news()).is_all


async def test_a_store_that_goes_back_has_lost_what_came_last(
    store: FarStore, autojump_clock: MockClock
) -> None:
    one = store.open()
    await applied(one, Create(STREAM), append(1, 2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.restart, 1.0, 1.0)
        await trio.sleep(0.5)
        await applied(one, append(3, 3))
    found = await one.find("s")
    assert found is not None
    assert found.last == 2
    assert store.ledger.known["s"].last == 2
    assert store.ledger.known["s"].job.has_lost


async def test_an_heir_uses_no_number_again_that_the_store_may_have_lost(
    autojump_clock: MockClock,
) -> None:
    store = SharedStore()
    one, two, three = store.open(), store.open(), store.open()
    await applied(one, Create(record("a")), Create(record("b")), append(1, 2, stream="b"))
    copy = store.copy()
    await applied(one, append(3, 4, stream="b"))
    store.go_back(copy)
    claimed = [*await two.claim(one.replica), *await two.claim(one.replica)]
    assert [(r.last, r.lost) for r in claimed] == [
        (SKIPPED, (1, SKIPPED)),
        (SKIPPED + 2, (3, SKIPPED + 2)),
    ]
    again = await three.claim(two.replica)
    assert [(r.last, r.lost) for r in again] == [(r.last, r.lost) for r in claimed]


async def test_an_owner_that_lives_uses_its_own_numbers(autojump_clock: MockClock) -> None:
    store = SharedStore()
    one, two = store.open(), store.open()
    await applied(one, Create(record()))
    store.go_back(store.copy())
    await applied(one, append(1, 2))
    [claimed] = await two.claim(one.replica)
    assert (claimed.last, claimed.lost) == (2, None)
    [answer] = await one.commit([append(3, 3)])
    assert isinstance(answer, Fenced)


def test_no_task_of_a_paused_process_runs() -> None:
    pauses = Pauses()
    steps: list[tuple[str, float]] = []

    async def step(name: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat, name)

    async def beat(name: str) -> None:
        for _ in range(4):
            await trio.sleep(1)
            steps.append((name, trio.current_time()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            context_of("one").run(nursery.start_soon, step, "one")
            context_of("two").run(nursery.start_soon, step, "two")
            await trio.sleep(1.5)
            pauses.pause("one")
            await trio.sleep(6)
            pauses.go_on("one")

    trio.run(main, clock=MockClock(autojump_threshold=0), instruments=[pauses])
    assert [at for name, at in steps if name == "one"] == [1.0, 7.5, 8.5, 9.5]
    assert [at for name, at in steps if name == "two"] == [1.0, 2.0, 3.0, 4.0]


def test_each_seed_has_faults_of_its_own() -> None:
    kinds = [field for field in Sharing.__struct_fields__ if field.endswith("every_s")]
    drawn = [shared_plan_of(random.Random(seed), seed).sharing for seed in range(100)]
    for kind in kinds:
        assert {getattr(sharing, kind) < 1e9 for sharing in drawn} == {True, False}
