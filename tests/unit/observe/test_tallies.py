"""Calls, commits and lags are counted as they happen, and a peer cannot make labels."""

from collections import Counter

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.engine.events import Events
from streams.journal.records import Append, Outcome
from streams.messages import Run
from streams.observe.tallies import (
    NAME_LETTERS_MAX,
    NAMES_MAX,
    OTHER,
    SAMPLE_S_MAX,
    Histogram,
    Names,
    Tallies,
)
from tests.rigs.server import PLAIN, POSITIONS, House, Steps, named, open_house

MAX_S = 600.0


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


@pytest.fixture
def tallies() -> Tallies:
    return Tallies()


def listening(tallies: Tallies) -> Events:
    events = Events()
    tallies.listen_to(events)
    return events


def test_a_value_counts_in_the_first_bucket_that_it_is_not_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.cumulative == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert (histogram.count, histogram.total) == (4, 6.0)


def highest(histogram: Histogram) -> float:
    """The bound of the highest value."""
    return next(bound for bound, count in histogram.cumulative if count == histogram.count)


def test_a_name_that_a_client_invents_is_no_label() -> None:
    names = Names(are_ours=False)
    assert names.label("invented", has_succeeded=False) == OTHER
    assert names.label("real", has_succeeded=True) == "real"
    assert names.label("real", has_succeeded=False) == "real"


def test_names_are_few_and_short() -> None:
    names = Names(are_ours=True)
    assert len(names.label("x" * 5000, has_succeeded=True)) == NAME_LETTERS_MAX
    labels = {names.label(f"tool {n}", has_succeeded=True) for n in range(2 * NAMES_MAX)}
    assert len(labels) == NAMES_MAX
    assert OTHER in labels


async def test_a_call_is_counted_by_its_tool_and_outcome(server: Server, tallies: Tallies) -> None:
    steps = Steps(server)
    async with open_house(server, events=listening(tallies)) as house:
        talker = await house.dial(PLAIN)
        for number, end in enumerate((steps.finish, steps.fail)):
            await talker.call(number, "step")
            end()
            await talker.answer(number)
    assert tallies.calls_begun == 2
    assert tallies.calls == Counter({("step", "completed"): 1, ("step", "tool_error"): 1})
    assert tallies.durations["step"].count == 2


async def test_a_resume_counts_with_its_result_and_what_it_replays(
    server: Server, tallies: Tallies
) -> None:
    steps = Steps(server)
    async with open_house(server, events=listening(tallies)) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        await talker.leave()
        steps.log("one", "two")
        await wait_all_tasks_blocked()
        again = await house.dial(POSITIONS)
        await again.request(3, "stream/resume", **named("nothing"))
        await again.ask(2, "stream/resume", **named(stream), after=0)
        steps.finish()
        await again.answer(1)
        await again.leave()
    assert tallies.resumes == Counter({"resumed": 1, "stream_not_found": 1})
    assert (tallies.detached, tallies.sent, tallies.replayed) == (1, 3, 2)


async def test_abandoned_calls_and_results_are_counted(
    server: Server, tallies: Tallies, autojump_clock: MockClock
) -> None:
    steps = Steps(server)
    async with open_house(server, events=listening(tallies)) as house:
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        await talker.begin(2, "step")
        await talker.leave()
        steps.finish()  # one of them has a result that no client fetches
        await trio.sleep(2 * MAX_S)
    assert tallies.abandoned == 2
    assert tallies.calls["step", Outcome.ABANDONED.value] == 1


async def test_an_interrupted_call_is_told_apart(server: Server, tallies: Tallies) -> None:
    Steps(server)
    async with open_house(server, events=listening(tallies)) as house:
        await (await house.dial()).begin(1, "step")
    assert tallies.calls == Counter({("step", "interrupted"): 1})


async def test_a_commit_is_counted_with_its_messages_and_bytes(tallies: Tallies) -> None:
    run = Run(1, 3, b"{}\n" * 3)
    changes = [
        Append(each, 1, run, last_request=0, last_error=0, outcome=Outcome.LIVE, ended_at=None)
        for each in ("one", "two")
    ]
    tallies.committed(0.002, changes)
    tallies.committed(0.002, [])  # acks alone are no messages
    assert (tallies.batches.total, tallies.batches.count) == (6, 1)
    assert (tallies.committed_bytes, tallies.commits.count) == (18, 2)


async def measured(house: House, tallies: Tallies, nursery: trio.Nursery) -> None:
    tallies.measure(house.running.engine)
    nursery.start_soon(tallies.run)
    await wait_all_tasks_blocked()


async def test_a_delivery_is_timed_from_its_commit_until_it_is_written(
    server: Server, tallies: Tallies
) -> None:
    steps = Steps(server)
    async with open_house(server) as house, trio.open_nursery() as nursery:
        await measured(house, tallies, nursery)
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        steps.log("one")
        await talker.find(lambda m: m.get("params", {}).get("data") == "one")
        await wait_all_tasks_blocked()
        assert tallies.delivery_lags.count == 1
        assert tallies.commits.count >= 1
        nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_read_shows_as_lag(
    server: Server, tallies: Tallies, autojump_clock: MockClock
) -> None:
    steps = Steps(server)
    async with open_house(server) as house, trio.open_nursery() as nursery:
        await measured(house, tallies, nursery)
        talker = await house.dial(POSITIONS, capacity=4096)
        await talker.begin(1, "step")
        steps.log("x" * 10_000, "y" * 10_000)
        await trio.sleep(2 * SAMPLE_S_MAX)
        assert highest(tallies.delivery_lags) == SAMPLE_S_MAX
        nursery.cancel_scope.cancel()


async def test_a_task_that_blocks_the_loop_shows_as_lag(
    tallies: Tallies, mock_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tallies.run)
        await wait_all_tasks_blocked()
        mock_clock.jump(3.0)
        await wait_all_tasks_blocked()
        assert tallies.loop_lags.cumulative[-1][1] == 1
        assert highest(tallies.loop_lags) == 5.0
        nursery.cancel_scope.cancel()
