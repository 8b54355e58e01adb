"""The engine in bad times: shutdowns, peers that fall silent, journals that take nothing."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.engine.committer import ALONE_BYTES_MAX
from streams.engine.engine import SHUTDOWN_S
from streams.errors import Full, JournalError, JournalUnusable, Unavailable
from streams.messages import Run
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    House,
    Json,
    Steps,
    Talker,
    methods,
    named,
    open_house,
    reason,
    said,
    text_of,
)
from tests.rigs.troubled import Troubled
from transports.lines import LineChannel
from transports.memory import Cable


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_max_s=600)


async def test_a_tool_sends_on_while_its_last_batch_is_committed(
    server: Server, steps: Steps
) -> None:
    """As much again as the commit that is under way has, and no more."""
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        sent = 0

        async def flood(call: Call) -> None:
            nonlocal sent
            for _ in range(40):
                await call.log("info", "x" * (ALONE_BYTES_MAX // 10))
                sent += 1

        journal.hold()
        steps.do(flood)
        await wait_all_tasks_blocked()
        assert 18 <= sent <= 20
        journal.let_go()
        await wait_all_tasks_blocked()
        assert sent == 40


# Shutdown


async def test_a_shutdown_ends_calls_as_interrupted(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.log("before")
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await house.running.engine.shut_down()
        assert trio.current_time() - start <= 0.5
        heard = await talker.end()
        assert steps.was_cancelled
    assert methods(heard) == ["notifications/message", "error", "notifications/stream/end"]
    assert reason(heard[1]["error"]) == "interrupted"


async def test_who_is_told_to_stop_before_having_started_does(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """The journal takes nothing, and has a call that the last process left behind."""
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        left = Troubled()
        left.__dict__.update(house.as_after_a_crash().__dict__)
    left.hold()
    with trio.fail_after(SHUTDOWN_S + 1):
        with trio.move_on_after(0.5) as patience:
            async with open_house(server, journal=left):
                raise AssertionError("it waits for the journal first")
    assert patience.cancelled_caught


async def test_a_shutdown_takes_no_new_calls(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    async with open_house(server, journal=journal) as house, trio.open_nursery() as nursery:
        talker = await house.dial()
        await talker.begin(1, "step")
        journal.hold()
        nursery.start_soon(house.running.engine.shut_down)
        await wait_all_tasks_blocked()
        refused = await talker.request(2, "tools/call", name="step")
        assert refused["code"] == -32603
        assert "shutting down" in refused["message"]
        journal.let_go()


async def test_an_engine_that_is_cancelled_still_shuts_down_in_good_order(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    with trio.CancelScope() as scope:
        async with open_house(server, journal=journal) as house:
            talker = await house.dial()
            await talker.begin(1, "step")
            scope.cancel()
            await trio.sleep_forever()
    (record,) = await journal.claim()
    assert (record.last, record.last_error) == (1, 1)


async def test_a_resume_that_nobody_reads_is_released(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.announced()
        journal.hold()  # the final response cannot be stored in time
        await house.running.engine.shut_down()
        heard = await second.end()
        journal.let_go()
    assert heard[-1]["id"] == 2
    assert heard[-1]["result"] == {"_meta": {"mcp-streams/ended": "released"}}


async def test_a_shutdown_does_not_wait_for_a_peer_that_reads_nothing(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(capacity=1024)
        await talker.begin(1, "step")
        steps.log(*(str(n) for n in range(1_000)))
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await house.running.engine.shut_down()
        assert trio.current_time() - start <= SHUTDOWN_S


# Silence


class Pinged(LineChannel):
    """The far end of a cable whose peer may answer pings, as a WebSocket's does."""

    def __init__(self, cable: Cable) -> None:
        super().__init__(cable.far_end, principal="alice", unsent=cable.far_end.unsent_bytes)
        self.pongs = trio.Event()
        self.pinged = 0

    async def ping(self) -> bool:
        self.pinged += 1
        await self.pongs.wait()
        return True


async def pinged(house: House) -> tuple[Talker, Pinged]:
    cable = Cable(capacity=1 << 20)
    channel = Pinged(cable)
    return await house.connect(cable, channel), channel


async def test_a_pong_shows_that_what_was_written_before_it_has_arrived(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, channel = await pinged(house)
        stream = await talker.begin(1, "step")
        steps.log("before the ping")
        await talker.find(said_something)
        await trio.sleep(17)
        assert channel.pinged == 1
        steps.log("after the ping")
        await talker.find(said_something)
        assert (await talker.poll(2, stream))["pendingMessages"]
        channel.pongs.set()
        await wait_all_tasks_blocked()
        assert not (await talker.poll(3, stream, after=1)).get("code")
        gone = await talker.request(4, "stream/poll", **named(stream), after=0)
        assert gone["data"]["earliestSeq"] == 2  # the first, and only that
        await trio.sleep(20)
        assert not (await talker.poll(5, stream))["pendingMessages"]


def said_something(message: Json) -> bool:
    return bool(said([message]))


async def test_a_peer_that_is_silent_for_a_minute_counts_as_detached(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, _ = await pinged(house)
        other = await house.dial()
        stream = await talker.begin(1, "step")
        await trio.sleep(15 + 60 + 590)
        assert not steps.was_cancelled
        await trio.sleep(30)
        assert steps.was_cancelled
        assert reason(await other.poll(2, stream)) == "abandoned"
        assert reason((await talker.answer(1))["error"]) == "abandoned"


async def test_a_peer_that_shows_life_again_is_attached_again(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, _ = await pinged(house)
        await talker.begin(1, "step")
        await trio.sleep(15 + 60 + 300)
        assert await talker.request(2, "ping") == {}
        await trio.sleep(500)  # more than max after it fell silent
        assert not steps.was_cancelled
        steps.finish("still there")
        assert text_of(await talker.answer(1)) == "still there"


async def test_a_peer_that_takes_no_write_for_a_minute_counts_as_detached(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, other = await house.dial(capacity=512), await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("x" * 2_000)
        await trio.sleep(60 + 16 + 600 + 1)
        assert steps.was_cancelled
        assert reason(await other.poll(2, stream)) == "abandoned"


async def test_what_left_the_queue_is_believed_to_have_arrived_only_with_a_sign_of_life(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, other = await house.dial(), await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("a")
        await talker.find(said_something)
        await trio.sleep(86_000)  # time alone is no evidence
        assert (await other.poll(2, stream))["pendingMessages"]
        await talker.request(3, "ping")
        assert not (await other.poll(4, stream))["pendingMessages"]


async def test_what_is_in_the_queue_is_not_believed_to_have_arrived(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, other = await house.dial(), await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("a")
        for number in range(2, 12):
            await trio.sleep(100)
            await talker.ask(number, "ping")  # alive, and yet it reads nothing
        assert (await other.poll(2, stream))["pendingMessages"]


async def test_a_confirming_client_is_believed_nothing_but_its_acks(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, other = await house.dial(POSITIONS), await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("a", "b")
        await talker.find(lambda m: said([m]) == ["b"])
        await trio.sleep(300)
        await talker.request(2, "ping")
        await other.tell("notifications/stream/ack", **named(stream), seq=2)  # not its to give
        await talker.tell("notifications/stream/ack", **named(stream), seq=3)  # not written
        assert (await talker.poll(3, stream))["pendingMessages"]
        await talker.tell("notifications/stream/ack", **named(stream), seq=2)
        assert not (await talker.poll(4, stream))["pendingMessages"]


# A journal in trouble


@pytest.mark.parametrize("trouble", [Full("the disk is full"), Unavailable("busy")])
async def test_while_the_journal_takes_nothing_calls_wait_and_new_ones_are_refused(
    server: Server, steps: Steps, autojump_clock: MockClock, trouble: JournalError
) -> None:
    journal = Troubled()
    flushed: list[str] = []

    async def flush(call: Call) -> None:
        await call.flush()
        flushed.append("flushed")

    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        journal.trouble = trouble
        steps.log("a", "b")
        steps.do(flush)
        steps.log("c")
        await trio.sleep(100)
        assert flushed == []
        refused = await talker.request(2, "tools/call", name="step")
        assert refused["code"] == -32603
        assert str(trouble) in refused["message"]
        assert "try again later" in refused["message"]
        assert said(talker.seen) == []
        journal.trouble = None
        steps.finish()
        await talker.answer(1)
        assert said(talker.seen) == ["a", "b", "c"]
        assert flushed == ["flushed"]
        await talker.begin(3, "step")


async def test_a_journal_that_cannot_be_read_for_a_while_loses_nothing(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        journal.read_trouble = Unavailable("busy")
        steps.log("a", "b")
        steps.finish()
        await trio.sleep(10)
        assert await talker.request(2, "ping") == {}  # the rest goes on
        assert said(talker.seen) == []
        journal.read_trouble = None
        await talker.answer(1)
    assert said(talker.seen) == ["a", "b"]
    assert journal.refused < 250


async def test_messages_that_are_missing_end_the_engine_and_leave_no_gap(
    server: Server, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Troubled()

    async def nothing(*_: Any, **__: Any) -> list[Run]:
        await trio.lowlevel.checkpoint()
        return []

    with pytest.RaisesGroup(
        pytest.RaisesExc(JournalUnusable, match="lines 1 to 1 of a stream are missing"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with open_house(server, journal=journal) as house:
            talker = await house.dial()
            await talker.begin(1, "step")
            monkeypatch.setattr(journal, "read", nothing)
            steps.log("a")
            await trio.sleep_forever()


async def test_a_journal_that_failed_for_good_ends_the_engine(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    with pytest.raises(ExceptionGroup) as caught:
        await until_it_fails(server, steps, journal)
    assert caught.group_contains(JournalUnusable)
    assert not caught.group_contains(trio.Cancelled)


async def until_it_fails(server: Server, steps: Steps, journal: Troubled) -> None:
    with trio.fail_after(10):
        async with open_house(server, journal=journal) as house:
            talker = await house.dial()
            await talker.begin(1, "step")
            journal.trouble = JournalUnusable("the disk is gone")
            steps.log("lost")
            await trio.sleep_forever()


async def test_a_journal_that_can_never_be_read_ends_the_server(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    journal = Troubled()
    journal.read_trouble = JournalUnusable("it is corrupt")
    with pytest.raises(ExceptionGroup) as caught:
        await until_it_fails(server, steps, journal)
    assert caught.group_contains(JournalUnusable)
