"""A drain: no new calls, time for those that run, and then a shutdown."""

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.engine.engine import SHUTDOWN_S
from tests.rigs.server import House, Steps, open_house, reason

GRACE_S = 30.0


@pytest.fixture
def server() -> Server:
    return Server("tested")


@pytest.fixture
def steps(server: Server) -> Steps:
    return Steps(server)


async def ended_after_s(house: House) -> float:
    began_at = trio.current_time()
    await house.running.drain(GRACE_S)
    return trio.current_time() - began_at


async def test_a_drain_waits_for_a_running_call_and_no_longer(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        talker = await house.dial()
        await talker.begin(1, "step")
        took_s: list[float] = []

        async def drain() -> None:
            took_s.append(await ended_after_s(house))

        nursery.start_soon(drain)
        await trio.sleep(GRACE_S / 3)
        steps.finish()
        answer = await talker.answer(1)
        assert answer["result"]["content"][0]["text"] == "done"
        await talker.end()
    assert GRACE_S / 3 <= took_s[0] <= GRACE_S / 3 + SHUTDOWN_S


async def test_a_call_that_is_too_slow_is_interrupted_after_the_grace(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        assert GRACE_S <= await ended_after_s(house) <= GRACE_S + SHUTDOWN_S
        answer = await talker.answer(1)
    assert reason(answer["error"]) == "interrupted"


async def test_a_call_that_a_restart_continues_is_not_waited_for(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")
    steps = Steps(server, restart=True)
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        assert await ended_after_s(house) <= SHUTDOWN_S
        journal = house.as_after_a_crash()
    assert steps.was_cancelled
    again = Steps(server := Server("tested"), restart=True)
    async with open_house(server, journal=journal):
        again.finish()
        await again.is_over.wait()


async def test_new_calls_are_refused_with_a_reason_and_a_time(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        talker = await house.dial()
        await talker.begin(1, "step")
        nursery.start_soon(house.running.drain, GRACE_S)
        await trio.sleep(0.1)
        refused = await talker.request(2, "tools/call", name="step")
        assert (reason(refused), refused["data"]["retryAfter"]) == ("draining", 0.5)
        assert "draining" in house.running.engine.unready
        steps.finish()


async def test_a_second_drain_may_only_end_the_first_one_earlier(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        talker = await house.dial()
        await talker.begin(1, "step")
        began_at = trio.current_time()
        nursery.start_soon(house.running.drain, GRACE_S)
        await trio.sleep(1)
        nursery.start_soon(house.running.drain, 10 * GRACE_S)
        await trio.sleep(1)
        await house.running.drain(0)
        assert trio.current_time() - began_at <= 2 + SHUTDOWN_S


@pytest.mark.parametrize("grace_s", [0.0, 0.1, GRACE_S])
async def test_no_grace_is_too_short_for_the_next_process_to_listen(
    server: Server, autojump_clock: MockClock, grace_s: float
) -> None:
    async with open_house(server) as house:
        engine, steps = house.running.engine, []

        async def hand_over(_: float) -> None:
            assert not engine.departure.has_begun
            await trio.sleep(0.5)
            steps.append(engine.is_closing)

        engine.before_departure = hand_over
        await house.running.drain(grace_s)
        assert steps == [False]
        assert engine.departure.has_begun


async def test_what_was_accepted_before_is_answered_first(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        departure = house.running.engine.departure
        departure.enter()
        nursery.start_soon(partial(house.running.drain, GRACE_S))
        await wait_all_tasks_blocked()
        assert departure.has_begun
        assert not house.running.engine.is_closing
        departure.leave()
        await house.running.engine.ended.wait()


async def test_a_request_that_never_comes_delays_a_drain_by_two_seconds(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        house.running.engine.departure.enter()
        assert 2 <= await ended_after_s(house) <= 2 + SHUTDOWN_S
