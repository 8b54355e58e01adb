"""The wall clock is put forward or back, by hours or years, while a server runs or between runs.

No stream is given up early, and none is kept for ever.
"""

import time
from contextlib import closing
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.journal.records import Create, Evict, Outcome
from streams.journal.sqlite import SQLiteStore
from streams.journal.sqlite.store import LOOKED_AT_WITHIN_S
from streams.keys import Keyring
from streams.limits import DAY_S
from tests.rigs.evicting import MAX_S, evicted, idle, serving
from tests.rigs.server import PLAIN, STREAMS, Steps, open_house, reason
from tests.rigs.sqlite import append, record
from tests.rigs.web import Browser, browsing

HOURS_S = 5 * 3600.0
YEARS_S = 10 * 365 * DAY_S
STEPS = (HOURS_S, -HOURS_S, YEARS_S, -YEARS_S)
RESIDENT = (0, 100)  # the stream is evicted, or in memory


class Wall:
    """The one wall clock, which a test may put forward and back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.time
        monkeypatch.setattr("streams.clock.time.time", lambda: real() + self.ahead_s)

    def step(self, seconds: float) -> None:
        self.ahead_s += seconds


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


@pytest.mark.parametrize("step_s", STEPS)
@pytest.mark.parametrize("resident_max", RESIDENT)
async def test_a_step_while_it_runs_moves_no_deadline(
    wall: Wall, autojump_clock: MockClock, step_s: float, resident_max: int
) -> None:
    server, steps = serving(resident_max)
    async with open_house(server) as house:
        [stream] = await idle(house, steps)
        assert evicted(house) == (1 if resident_max == 0 else 0)
        wall.step(step_s)
        await trio.sleep(MAX_S - 10)
        other = await house.dial(STREAMS)
        assert (await other.poll(1, stream))["pendingMessages"]  # which counts as coming back
        wall.step(-2 * step_s)
        await trio.sleep(MAX_S - 10)
        assert (await other.poll(2, stream))["pendingMessages"]
        await trio.sleep(MAX_S + 10)
        assert reason(await other.poll(3, stream)) == "abandoned"


@pytest.mark.parametrize("step_s", STEPS)
async def test_a_running_call_is_not_given_up_by_a_step(
    wall: Wall, autojump_clock: MockClock, step_s: float
) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        talker = await house.dial(STREAMS)
        await talker.begin(1, "step")
        await talker.leave()
        wall.step(step_s)
        await trio.sleep(MAX_S - 10)
        assert not steps.was_cancelled
        await trio.sleep(20)
        assert steps.was_cancelled


@pytest.mark.parametrize("step_s", [HOURS_S, -HOURS_S, YEARS_S])
@pytest.mark.parametrize("resident_max", RESIDENT)
async def test_a_step_between_runs_makes_nothing_due_early_and_nothing_for_ever(
    wall: Wall, autojump_clock: MockClock, step_s: float, resident_max: int
) -> None:
    """After a restart every stream has its full `max`."""
    server, steps = serving(resident_max)
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        [stream] = await idle(house, steps)
        crashed = house.as_after_a_crash()
    wall.step(step_s)
    server, _ = serving(resident_max)
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        other = await house.dial(STREAMS)
        await trio.sleep(MAX_S - 10)
        assert (await other.poll(1, stream))["pendingMessages"]
        await trio.sleep(MAX_S + max(0.0, -step_s) + 10)
        assert reason(await other.poll(2, stream)) == "abandoned"


def test_a_clock_that_was_years_ahead_keeps_nothing_for_years(wall: Wall, tmp_path: Path) -> None:
    def due(opened: SQLiteStore) -> float:
        [found] = opened.lookups.due(limit=9)
        assert found.due_at is not None
        return found.due_at

    path = tmp_path / "journal.db"
    with closing(SQLiteStore(path)) as opened:
        end = append(1, 1)
        ended = type(end)(end.stream, 1, end.run, 0, 0, Outcome.COMPLETED, 1.0)
        rest = Evict("s", 1, time.time() + YEARS_S + 60)
        assert opened.commit([Create(record()), ended, rest]) == [None] * 3
        assert due(opened) > time.time() + YEARS_S
    with closing(SQLiteStore(path)) as opened:
        assert opened.claim() == []
        assert due(opened) <= time.time() + LOOKED_AT_WITHIN_S
    wall.step(-HOURS_S)
    before = time.time() + 60
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Evict("s", 2, before)])
        opened.claim()
        assert due(opened) == before


@pytest.mark.parametrize("step_s", [2 * DAY_S, -2 * DAY_S])
async def test_no_session_is_idle_because_of_a_step(
    wall: Wall, autojump_clock: MockClock, step_s: float
) -> None:
    server = Server("tested", resume_max_s=9 * DAY_S)
    steps = Steps(server)
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        await (await browser.call(1, "step")).hang_up()
        wall.step(step_s)
        await trio.sleep(DAY_S - 10)
        assert (await browser.post(2, "ping")).status == 200
        assert not steps.was_cancelled
        await trio.sleep(DAY_S + 10)
        assert (await browser.post(3, "ping")).status == 404


async def test_a_session_of_a_clock_that_was_ahead_ends_when_it_is_idle(
    wall: Wall, autojump_clock: MockClock
) -> None:
    server = Server("tested")
    async with open_house(server) as house, browsing(house, PLAIN) as browser:
        assert (await browser.post(1, "ping")).status == 200
        await wait_all_tasks_blocked()
        crashed, session = house.as_after_a_crash(), browser.session
    wall.step(-YEARS_S)
    async with open_house(server, journal=crashed) as house, trio.open_nursery() as nursery:
        await trio.sleep(DAY_S + 10)
        assert (await Browser(house, nursery, session).post(2, "ping")).status == 404
        nursery.cancel_scope.cancel()
