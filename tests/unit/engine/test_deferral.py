"""The deferral of records: what a call leaves in the journal, by what it sends and when."""

import weakref
from collections.abc import AsyncIterator, Sequence

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.journal.records import Append, Change, Create, Forget
from streams.journal.sessions import SaveSession
from streams.limits import Limits
from streams.server.tools import ToolAnnotations
from tests.rigs.idempotency import Rig, answered, call
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    STREAMS,
    House,
    Json,
    Steps,
    methods,
    open_house,
    reason,
    text_of,
)
from tests.rigs.troubled import Troubled
from tests.rigs.web import BOTH, JSON, LINES, browsing

CLIENTS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(STREAMS, id="streams"),
    pytest.param(REQUESTS, id="requests"),
    pytest.param(POSITIONS, id="positions"),
]
HINTS: list[ToolAnnotations] = [{"readOnlyHint": True}, {"idempotentHint": True}]


@pytest.fixture
def server() -> Server:
    server = Server("tested", resume_min_s=0, resume_max_s=600)

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def fail() -> None:
        raise ValueError("as it should")

    return server


@pytest.fixture
def journal() -> Troubled:
    return Troubled()


def stored(journal: Troubled) -> list[Change]:
    """All changes of streams that were committed."""
    changes = [change for commit in journal.commits for change in commit]
    return [change for change in changes if not isinstance(change, SaveSession)]


def kinds(changes: Sequence[Change]) -> list[type]:
    return [type(change) for change in changes]


def assert_nothing_is_left(house: House, journal: Troubled) -> None:
    """Check that neither the journal nor the memory knows of any stream."""
    assert stored(journal) == []
    assert list(house.running.engine._streams.index) == []


@pytest.mark.parametrize("capabilities", CLIENTS)
@pytest.mark.parametrize("tool", ["echo", "fail"])
async def test_a_call_that_ends_at_once_has_a_plain_response_and_leaves_nothing(
    server: Server, journal: Troubled, capabilities: Json, tool: str, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(capabilities)
        await talker.call(1, tool, **({"text": "hello"} if tool == "echo" else {}))
        answer = await talker.answer(1)
        assert text_of(answer) == ("hello" if tool == "echo" else "as it should")
        await trio.sleep(60)
        assert methods(talker.seen) == ["result"]
        assert_nothing_is_left(house, journal)


@pytest.mark.parametrize("accept", [BOTH, JSON, f"{JSON}, {LINES}"])
async def test_over_http_it_is_one_response_without_event_ids(
    server: Server, journal: Troubled, accept: str, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house, browsing(house, PLAIN) as browser:
        answer = await browser.call(1, "echo", accept=accept, text="hello")
        assert answer.is_whole
        assert (answer.type == LINES) == (LINES in accept)
        assert text_of(answer.json) == "hello"
        await trio.sleep(60)
        assert_nothing_is_left(house, journal)


async def test_a_call_that_takes_longer_is_stored_then_announced(
    server: Server, steps: Steps, journal: Troubled, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(POSITIONS)
        began_at = trio.current_time()
        stream = await talker.begin(1, "step")
        assert 0.005 <= trio.current_time() - began_at <= 0.011
        assert [change.stream for change in stored(journal)] == [stream["streamId"]]
        steps.finish()
        await talker.answer(1)
        assert kinds(stored(journal))[:2] == [Create, Append]


async def test_nothing_is_held_of_a_call_that_has_ended(
    server: Server, journal: Troubled, mock_clock: MockClock
) -> None:
    """Not even until its deferral would be over: the memory is used for the next call."""
    may_end = trio.Event()

    @server.tool
    async def wait() -> None:
        await may_end.wait()

    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.call(1, "wait")
        await wait_all_tasks_blocked()
        [is_held] = map(weakref.ref, house.running.engine._streams.index)
        may_end.set()
        await talker.answer(1)
        await wait_all_tasks_blocked()
        assert is_held() is None


async def test_a_message_before_the_result_is_stored_with_the_record_and_comes_behind_it(
    server: Server, steps: Steps, journal: Troubled
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(POSITIONS)
        steps.log("on the way")
        steps.finish()
        await talker.call(1, "step")
        await talker.answer(1)
        assert methods(talker.seen)[:3] == [
            "notifications/stream/create",
            "notifications/stream/position",
            "notifications/message",
        ]
        assert kinds(journal.commits[0]) == [Create, Append]


async def test_a_stream_makes_room_for_the_next_one_in_the_commit_of_its_record(
    journal: Troubled,
) -> None:
    """Otherwise its first message waits for two commits."""
    server = Server("tested", resume_min_s=0, limits=Limits(streams_per_principal_max=1))

    @server.tool
    async def talk(call: Call) -> None:
        await call.log("info", "on the way")

    async with open_house(server, journal=journal) as house:
        talker = await house.dial(STREAMS)
        for number in range(20):  # trio may run the committer first, or the tool
            await talker.call(number, "talk")
            await talker.answer(number)
        first, *others = (kinds(commit) for commit in journal.commits)
        assert first == [Create, Append]
        assert others == [[Forget, Create, Append]] * 19


async def test_a_flush_stores_the_record(server: Server, steps: Steps, journal: Troubled) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        steps.do(lambda call: call.flush())
        await talker.begin(1, "step")
        assert kinds(stored(journal)) == [Create]


async def test_a_call_with_pages_is_stored_at_once(journal: Troubled) -> None:
    server = Server("tested")

    @server.tool(pages=True)
    async def turn() -> AsyncIterator[str]:
        yield "the only page"

    async with open_house(server, journal=journal) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "turn")
        assert text_of(await talker.answer(1)) == "the only page"
        assert kinds(stored(journal))[:2] == [Create, Append]


async def test_every_call_is_stored_if_nothing_may_be_deferred(journal: Troubled) -> None:
    server = Server("tested", announce_after_s=0)
    server.tool(name="echo")(lambda: "hello")
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.begin(1, "echo")
        await talker.answer(1)
        assert kinds(stored(journal)) == [Create, Append]


async def test_a_client_that_was_lost_before_finds_its_call_by_a_poll(
    server: Server, steps: Steps, journal: Troubled, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        first, second = await house.dial(), await house.dial()
        await first.call(1, "step")
        await first.channel.aclose()
        await wait_all_tasks_blocked()
        steps.finish("for later")
        listed = await second.request(2, "stream/poll/all")
        [status] = listed["statuses"]
        found = await second.resume(3, status["streamId"])
    assert [text_of(m) for m in found if m.get("id") == 1] == ["for later"]


async def test_a_client_that_can_never_come_back_costs_nothing_however_long_its_call(
    server: Server, steps: Steps, journal: Troubled, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        await trio.sleep(3600)
        steps.finish()
        await talker.answer(1)
        assert_nothing_is_left(house, journal)
        await talker.call(2, "step")
        await talker.leave()
        assert steps.was_cancelled
        assert_nothing_is_left(house, journal)


async def test_a_poll_of_all_tells_of_durable_streams_alone(
    server: Server, steps: Steps, journal: Troubled, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        journal.hold()
        await talker.call(1, "step")
        assert (await talker.request(2, "stream/poll/all"))["statuses"] == []
        journal.let_go()
        [status] = (await talker.request(3, "stream/poll/all"))["statuses"]
        assert status["streamId"] in {change.stream for change in stored(journal)}


async def test_a_cancel_before_that_ends_the_call_without_a_response(
    server: Server, steps: Steps, journal: Troubled, autojump_clock: MockClock
) -> None:
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=1)
        await talker.request(2, "ping")
        await steps.is_over.wait()
        await trio.sleep(1)
        assert steps.was_cancelled
        assert "error" not in methods(talker.seen)


@pytest.mark.parametrize("is_suspended", [False, True])
async def test_a_shutdown_before_that_tells_the_client(
    journal: Troubled, is_suspended: bool
) -> None:
    server = Server("tested", resume_min_s=0)
    steps = Steps(server, restart=is_suspended)
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.running.engine.shut_down)
            if is_suspended:  # it is restarted by the next server, so the client is told how
                assert (await talker.announced())["streamId"]
                assert kinds(stored(journal))[0] is Create
            else:
                assert reason((await talker.answer(1))["error"]) == "interrupted"
                assert stored(journal) == []
    assert steps.was_cancelled


# Idempotency keys


async def test_a_call_with_a_key_is_durable_before_its_tool_starts(journal: Troubled) -> None:
    rig = Rig()
    async with open_house(rig.server, journal=journal) as house:
        talker = await house.dial()
        journal.hold()
        await call(talker, 1)
        await wait_all_tasks_blocked()
        assert rig.runs == 0
        journal.let_go()
        rig.steps.finish()
        await talker.answer(1)
        assert kinds(stored(journal))[:2] == [Create, Append]


async def test_a_call_that_is_cancelled_before_it_is_durable_never_runs(journal: Troubled) -> None:
    """Else its tool would do something, and again for a retry after a crash."""
    rig = Rig()
    async with open_house(rig.server, journal=journal) as house:
        talker = await house.dial()
        await call(talker, 1)
        await talker.tell("notifications/cancelled", requestId=1)
        await talker.request(2, "ping")
        await wait_all_tasks_blocked()
        assert rig.runs == 0


@pytest.mark.parametrize("hints", HINTS)
async def test_a_tool_that_may_run_twice_waits_for_nothing_and_leaves_nothing(
    journal: Troubled, hints: ToolAnnotations
) -> None:
    rig = Rig()
    rig.server.tool(name="look", annotations=hints)(rig.step)
    async with open_house(rig.server, journal=journal) as house:
        talker = await house.dial()
        journal.hold()
        for run in (1, 2):  # nothing is known of the key after the response
            rig.steps.finish(f"run {run}")
            found = await answered(talker, run, name="look")
            assert found["content"][0]["text"] == f"run {run}"
        assert rig.runs == 2
        assert_nothing_is_left(house, journal)


async def test_a_key_that_is_sent_twice_at_once_is_one_run_of_such_a_tool_too() -> None:
    rig = Rig()
    rig.server.tool(name="look", annotations={"readOnlyHint": True})(rig.step)
    async with open_house(rig.server) as house:
        talker, other = await house.dial(), await house.dial()
        await call(talker, 1, name="look")
        await wait_all_tasks_blocked()  # else the other one may come first
        await call(other, 2, name="look")
        assert reason((await talker.answer(1))["error"]) == "superseded"
        rig.steps.finish("once")
        assert text_of(await other.answer(2)) == "once"
        assert rig.runs == 1
