"""The engine: who is attached, what outlives what, and what is let go when."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.engine.committer import ACK_DELAY_S
from streams.keys import Keyring
from streams.limits import Limits
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    Steps,
    methods,
    named,
    open_house,
    reason,
    said,
    text_of,
    with_token,
)
from tests.rigs.troubled import Troubled

MAX_S = 3600.0


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server("tested", resume_max_s=MAX_S, limits=Limits(resident_max=request.param))


# Attaching


async def test_a_stream_is_announced_when_its_record_is_durable(
    server: Server, steps: Steps
) -> None:
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        journal.hold()
        await talker.call(1, "step")
        await talker.request(2, "ping")
        await wait_all_tasks_blocked()
        assert methods(talker.seen) == ["result"]
        journal.let_go()
        stream = await talker.announced()
        assert journal.commits[0][0].stream == stream["streamId"]


async def test_the_newest_connection_wins(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        first, second, third = [await house.dial() for _ in range(3)]
        stream = await first.begin(1, "step")
        await second.ask(2, "stream/resume", **named(stream))
        displaced = await first.answer(1)
        assert reason(displaced["error"]) == "superseded"
        await second.announced()
        await third.ask(3, "stream/resume", **named(stream))
        released = await second.answer(2)
        assert released["result"] == {"_meta": {"mcp-streams/ended": "superseded"}}
        steps.log("to the newest")
        steps.finish()
        await third.answer(3)
    assert said(third.seen) == ["to the newest"]
    assert said(first.seen + second.seen) == []


async def test_a_resume_over_the_same_connection_displaces_the_one_before(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial(POSITIONS)
        stream = await first.begin(1, "step")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.ask(3, "stream/resume", **named(stream))
        steps.finish()
        assert (await second.answer(2))["result"]["_meta"]["mcp-streams/ended"] == "superseded"
        assert (await second.answer(3))["result"]["_meta"]["mcp-streams/ended"] == "completed"


async def test_handlers_go_on_while_nobody_is_attached(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log("alone")
        steps.finish("alone too")
        await steps.is_over.wait()
        heard = await (await house.dial()).resume(2, stream)
    assert said(heard) == ["alone"]
    assert text_of(next(m for m in heard if m.get("id") == 1)) == "alone too"


async def test_what_was_not_announced_ends_with_its_connection(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.log("a")
        await talker.find(lambda m: said([m]))
        await talker.leave()
        assert steps.was_cancelled
        assert list(house.running.engine._streams.index) == []
        await trio.sleep(ACK_DELAY_S)  # a start forgets it as well
        assert await house.as_after_a_crash().claim() == []


async def test_max_0_is_not_announced_and_ends_with_its_connection(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", resume_max_s=0)
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        steps.log("a")
        assert methods([await talker.read()]) == ["notifications/message"]
        await talker.leave()
        assert steps.was_cancelled


async def test_a_plain_client_that_leaves_amid_a_commit_harms_nobody(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        plain, other = await house.dial(PLAIN), await house.dial()
        await plain.call(1, "step")
        await wait_all_tasks_blocked()
        journal.hold()
        steps.log("in the commit that is under way")
        await wait_all_tasks_blocked()
        steps.log("in the next one")
        await plain.leave()
        assert steps.was_cancelled
        journal.let_go()
        await trio.sleep(5)
        assert (await other.request(2, "ping")) == {}
        assert await journal.claim() == []


async def test_a_plain_client_that_leaves_after_an_answer_harms_nobody(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        plain, other = await house.dial(PLAIN), await house.dial()
        await plain.call(1, "step")
        steps.ask()
        asked = await plain.read()
        await plain.say({"id": asked["id"], "result": {}})
        await wait_all_tasks_blocked()
        await plain.leave()  # before the ack of the answer is due
        await trio.sleep(5)
        assert (await other.request(2, "ping")) == {}


async def test_what_was_not_announced_can_not_be_found(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        plain, other = await house.dial(PLAIN), await house.dial()
        await plain.call(1, "step")
        await plain.request(2, "ping")
        (stream,) = house.running.engine._streams.index
        assert (await other.request(3, "stream/poll/all"))["statuses"] == []
        assert reason(await other.poll(4, stream.id)) == "stream_not_found"
        steps.finish()
        assert text_of(await plain.answer(1)) == "done"


# Crash and restore


async def test_after_a_crash_calls_end_as_interrupted_and_numbers_go_on(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        steps.log("a", "b", "c")
        await talker.find(lambda m: said([m]) == ["b"])
        await talker.tell("notifications/stream/ack", **named(stream), seq=2)
        await trio.sleep(2)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        talker = await house.dial(POSITIONS, principal="another")
        status = await talker.poll(2, stream, **with_token(stream))
        assert (status["status"], status["hasError"]) == ("completed", True)
        gone = await talker.request(
            3, "stream/resume", **named(stream), **with_token(stream), after=1
        )
        assert (reason(gone), gone["data"]["earliestSeq"]) == ("messages_gone", 3)
        heard = await talker.resume(4, stream, **with_token(stream), after=2)
    positions = [m["params"] for m in heard if m.get("method") == "notifications/stream/position"]
    assert positions == [{**named(stream), "seq": 3, "count": 2}]
    assert said(heard) == ["c"]
    (final,) = [m for m in heard if m.get("id") == 1]
    assert (final["error"]["code"], reason(final["error"])) == (-32603, "interrupted")


async def test_after_a_crash_a_done_call_is_done(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.leave()
        steps.finish("before the crash")
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed) as house:
        heard = await (await house.dial()).resume(2, stream)
    assert text_of(next(m for m in heard if m.get("id") == 1)) == "before the crash"


async def test_after_a_restart_every_stream_has_its_full_max_again(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.leave()
        await trio.sleep(MAX_S - 10)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed) as house:
        first, second = await house.dial(), await house.dial()
        await trio.sleep(MAX_S - 1)
        assert (await first.poll(1, stream))["pendingMessages"]
        await trio.sleep(MAX_S + 1)
        assert reason(await second.poll(2, stream)) == "abandoned"


async def test_what_was_not_announced_does_not_survive_a_crash(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        await talker.request(2, "ping")
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed):
        await trio.sleep(1)
        assert await crashed.claim() == []


async def test_tombstones_survive_a_crash(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1)
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed) as house:
        assert reason(await (await house.dial()).poll(1, stream)) == "cancelled"
