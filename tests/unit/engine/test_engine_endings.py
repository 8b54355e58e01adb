"""The engine: how streams end, and what is let go when."""

import random

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.errors import Ended, Unavailable
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    Steps,
    flood,
    methods,
    named,
    open_house,
    reason,
    said,
)

MAX_S = 3600.0


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server("tested", resume_max_s=MAX_S, limits=Limits(resident_max=request.param))


async def test_ten_thousand_streams_are_abandoned_each_at_its_time(
    autojump_clock: MockClock,
) -> None:
    dice = random.Random(7)
    server = Server("tested", limits=Limits(streams_per_principal_max=10_000))

    async def wait(call: Call) -> None:
        await trio.sleep_forever()

    spread = 100
    for n in range(spread):
        server.tool(name=f"wait{n}", resume_max_s=100 + n)(wait)
    with structlog.testing.capture_logs():
        async with open_house(server) as house:
            talker, other = await house.dial(), await house.dial()
            kinds = [dice.randrange(spread) for _ in range(10_000)]
            for start in range(0, 10_000, 500):
                chosen = kinds[start : start + 500]
                calls = [
                    {"id": start + n, "method": "tools/call", "params": {"name": f"wait{kind}"}}
                    for n, kind in enumerate(chosen)
                ]
                await talker.say(*calls)
                for _ in chosen:
                    await talker.announced()
            talker.seen.clear()
            await talker.leave()
            left = trio.current_time()
            seen = []
            for at in (98.5, 120.5, 150.5, 199.5):
                await trio.sleep_until(left + at)
                streams = (
                    house.running.engine._streams.index
                )  # in memory; all evicted ones are tombstones
                seen.append(sum(s.state.is_tombstone for s in streams) + streams.evicted)
            assert seen[0] == 0
            assert abs(seen[1] - 2_100) < 250
            assert abs(seen[2] - 5_100) < 250
            assert seen[3] == 10_000
            assert (await other.request(1, "stream/poll/all"))["statuses"] == []


async def test_a_tombstone_is_forgotten_after_its_time(autojump_clock: MockClock) -> None:
    server = Server("tested", limits=Limits(tombstone_s=100))
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1)
        await trio.sleep(99)
        assert steps.was_cancelled
        assert reason(await talker.poll(2, stream)) == "cancelled"
        await trio.sleep(2)
        assert reason(await talker.poll(3, stream)) == "stream_not_found"
        assert await house.as_after_a_crash().claim() == []


async def test_cancelled_stops_the_work_and_is_not_answered(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1, reason="enough")
        await steps.is_over.wait()
        assert steps.was_cancelled
        assert reason(await talker.request(2, "stream/resume", **named(stream))) == "cancelled"
    assert [m["id"] for m in talker.seen if "id" in m] == [2]


async def test_cancelling_a_resume_only_detaches(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.announced()
        await second.tell("notifications/cancelled", requestId=2)
        steps.log("kept")
        steps.finish()
        await steps.is_over.wait()
        assert not steps.was_cancelled
        assert said(await second.resume(3, stream)) == ["kept"]


async def test_the_original_id_cancels_a_resumed_call(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.announced()
        await second.tell("notifications/cancelled", requestId=1)
        assert reason((await second.answer(2))["error"]) == "cancelled"
        await steps.is_over.wait()
        assert steps.was_cancelled


async def test_an_id_means_the_call_that_was_made_here(
    server: Server, autojump_clock: MockClock
) -> None:
    old, new = Steps(server, name="old"), Steps(server, name="new")
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial(POSITIONS)
        stream = await first.begin(1, "old")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.announced()
        await second.begin(1, "new")
        await second.tell("notifications/cancelled", requestId=1)
        await new.is_over.wait()
        assert new.was_cancelled
        assert not old.is_over.is_set()


async def test_a_handler_that_fails_while_it_is_cancelled_harms_nobody(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def messy() -> str:
        async def fail_late() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("while it was cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_late)
            await trio.sleep_forever()
        return "never"

    async with open_house(server) as house:
        for capabilities in (STREAMS, PLAIN):
            talker = await house.dial(capabilities)
            await talker.call(1, "messy")
            await wait_all_tasks_blocked()
            await talker.tell("notifications/cancelled", requestId=1)
            await trio.sleep(2)
            assert await talker.request(2, "ping") == {}


async def test_a_cancelled_handler_that_still_talks_harms_nobody(
    server: Server, autojump_clock: MockClock
) -> None:
    @server.tool
    async def stubborn(call: Call) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)
            await call.flush()
            await call.progress(1)
        return "too late"

    async with open_house(server) as house:
        for capabilities in (STREAMS, PLAIN):
            talker = await house.dial(capabilities)
            await talker.call(1, "stubborn", token="p")
            await wait_all_tasks_blocked()
            await talker.tell("notifications/cancelled", requestId=1)
            await trio.sleep(20)
            talker.seen.clear()
            assert await talker.request(2, "ping") == {}
            assert methods(talker.seen) in (["result"], ["notifications/stream/create", "result"])


async def test_a_shielded_sender_that_waits_for_room_hears_of_the_end(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", resume_max_s=MAX_S, limits=Limits(unsent_entries_max=3))
    heard: list[Exception] = []

    @server.tool
    async def send(call: Call) -> None:
        heard.append(await flood(call))

    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "send")
        await talker.leave()
        await trio.sleep(MAX_S + 1)
        assert [type(each) for each in heard] == [Ended]
        other = await house.dial()
        assert reason(await other.poll(2, stream)) == "abandoned"


async def test_no_shielded_handler_waits_for_a_server_that_has_shut_down(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", resume_max_s=MAX_S, limits=Limits(unsent_entries_max=3))
    heard: list[Exception] = []

    @server.tool(restart=True)
    async def save(call: Call) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)  # longer than a shutdown takes
                try:
                    await call.checkpoint(1)
                except Unavailable as error:
                    heard.append(error)

    @server.tool(restart=True)
    async def send(call: Call) -> None:
        heard.append(await flood(call))

    async with open_house(server) as house:
        for n, tool in enumerate(("save", "send")):
            talker = await house.dial()
            await talker.begin(n, tool)
            await talker.leave()
    assert [type(each) for each in heard] == [Unavailable] * 2
    assert [str(each) for each in heard] == [
        "The server has shut down: nothing more is stored."
    ] * 2
