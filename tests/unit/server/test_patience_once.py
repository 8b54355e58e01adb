"""Calls that run once, and calls whose clients cancel because of a timeout, with a mock clock."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.backends import PatienceSettings
from streams.engine.operations import Operations
from streams.errors import JournalError, Refusal, StoreAway
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change
from streams.keys import Keyring
from streams.server.patience import CALL
from tests.rigs.idempotency import Rig, answered
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    Json,
    Talker,
    flood,
    open_house,
    page_text,
    reason,
    text_of,
)
from tests.rigs.shared_memory import LEASE_S, SharedMemoryJournal
from tests.rigs.web import browsing

USER = "os(1000)"
ONCE = PatienceSettings(once=("st*",))
ALL = PatienceSettings(patience_s=2, once=("step",), keep_cancelled="timeout")
KEPT_ONCE = PatienceSettings(once=("step",), keep_cancelled="timeout")
KEEP = PatienceSettings(keep_cancelled="timeout")
TYPESCRIPT = "McpError: MCP error -32001: Request timed out"


@pytest.fixture(params=RESIDENT_MAX)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(limits=Limits(resident_max=request.param))


async def result_of(talker: Talker, id: int, **arguments: Any) -> Json:
    await talker.call(id, "step", **arguments)
    answer = await talker.answer(id)
    result: Json = answer["result"] if "result" in answer else answer["error"]
    return result


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS, POSITIONS])
async def test_the_same_call_joins_the_running_one_and_has_its_result_for_ten_minutes(
    rig: Rig, autojump_clock: MockClock, capabilities: Json
) -> None:
    async with open_house(rig.server, patience=ONCE) as house:
        first = await house.dial(capabilities, USER)
        await first.call(1, "step", n=1, text="a")
        await wait_all_tasks_blocked()
        second = await house.dial(capabilities, USER)
        await second.call(9, "step", text="a", n=1.0)
        await wait_all_tasks_blocked()
        rig.steps.finish("once")
        assert text_of(await second.answer(9)) == "once"
        for number in range(5):
            await trio.sleep(110)
            assert page_text(await result_of(second, number, text="a", n=1)) == "once"
        assert rig.runs == 1
        await trio.sleep(110)
        rig.steps.finish("twice")
        assert page_text(await result_of(second, 10, n=1, text="a")) == "twice"
        assert page_text(await result_of(second, 11, n=1, text="a")) == "twice"
        assert rig.runs == 2


async def test_another_call_or_another_principal_runs_by_itself(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ONCE) as house:
        for number, principal in enumerate([USER, "os(1001)", "session(a)", "conn(b)"]):
            talker = await house.dial(PLAIN, principal)
            for n in (1, 2):
                rig.steps.finish(f"{number} {n}")
                assert page_text(await result_of(talker, n, n=n)) == f"{number} {n}"
            assert page_text(await result_of(talker, 3, n=1)) == f"{number} 1"
    assert rig.runs == 8


async def test_a_tool_of_another_name_runs_as_often_as_it_is_called(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=PatienceSettings(once=("other", "?"))) as house:
        talker = await house.dial(PLAIN, USER)
        for number in (1, 2):
            rig.steps.finish(str(number))
            assert page_text(await result_of(talker, number)) == str(number)


@pytest.mark.parametrize("hint", ["readOnlyHint", "idempotentHint", "destructiveHint"])
@pytest.mark.parametrize("is_listed", [True, False])
async def test_hinted_tools_are_those_that_say_so(
    autojump_clock: MockClock, hint: str, is_listed: bool
) -> None:
    server, runs = Server("tested"), 0

    @server.tool(annotations={hint: True})
    async def work() -> int:
        nonlocal runs
        runs += 1
        return runs

    async with open_house(server, patience=PatienceSettings(once=("hinted",))) as house:
        talker = await house.dial(PLAIN, USER)
        if is_listed:
            await talker.request(0, "tools/list")
        for number in (1, 2):
            await talker.call(number, "work")
            await talker.answer(number)
    assert runs == (2 if hint == "destructiveHint" else 1)


async def test_an_error_that_was_told_may_be_tried_again(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        rig.steps.fail()
        assert (await result_of(talker, 1))["isError"] is True
        await talker.call(2, "step")  # the error was seen: this runs
        await talker.answer(2)  # the interim answer
        rig.steps.fail()
        await wait_all_tasks_blocked()
        failed = await result_of(talker, 3)  # nobody has seen this one
        assert failed["isError"] is True
        assert rig.runs == 2
        rig.steps.finish()
        assert page_text(await result_of(talker, 4)) == "done"
        assert rig.runs == 3


async def test_a_cancelled_call_runs_again(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=1, reason="the user pressed stop")
        await wait_all_tasks_blocked()
        assert rig.steps.was_cancelled
        rig.steps.finish()
        assert page_text(await result_of(talker, 2)) == "done"
        assert rig.runs == 2


async def test_an_interrupted_call_runs_again_and_a_finished_one_does_not(
    rig: Rig, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(rig.server, keyring=keyring, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        rig.steps.finish("first")
        await result_of(talker, 1, n=1)
        await talker.call(2, "step", n=2)
        await talker.answer(2)
        journal = house.as_after_a_crash()
    async with open_house(rig.server, journal=journal, keyring=keyring, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        assert page_text(await result_of(talker, 1, n=1)) == "first"
        rig.steps.finish("second")
        assert page_text(await result_of(talker, 2, n=2)) == "second"
    assert rig.runs == 3


async def test_a_key_of_the_client_s_own_is_what_counts(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        for number in range(2):
            rig.steps.finish(str(number))
            key = f"0123456789abcdef0123456789abcde{number}"
            assert page_text(await answered(talker, number, key)) == str(number)
    assert rig.runs == 2


# Cancelled by a timeout


@pytest.mark.parametrize(
    "told",
    [
        TYPESCRIPT,
        "McpError: MCP error -32001: Maximum total timeout exceeded",
        "SdkError: Request timed out",
        "timed out after 2.0s",
        "TimeoutError: The operation was aborted due to timeout",
        "context deadline exceeded",
        "Request timeout",
        "time-out",
    ],
)
def test_reasons_that_speak_of_a_timeout(told: str) -> None:
    assert KEEP.keeps(told)
    assert PatienceSettings(keep_cancelled="always").keeps(told)
    assert not PatienceSettings().keeps(told)


@pytest.mark.parametrize(
    "told",
    [None, "", 7, {}, ["timeout"], "AbortError: This operation was aborted", "caller cancelled",
     "User requested cancellation"],
)  # fmt: skip
def test_reasons_that_do_not(told: Any) -> None:
    assert not KEEP.keeps(told)
    assert PatienceSettings(keep_cancelled="always").keeps(told)
    assert not PatienceSettings().keeps(told)


async def test_a_host_times_out_calls_again_and_gets_the_one_result(
    rig: Rig, autojump_clock: MockClock
) -> None:
    settings = PatienceSettings(once=("step",), keep_cancelled="timeout")
    async with open_house(rig.server, patience=settings) as house:
        talker = await house.dial(PLAIN, USER)
        for number in range(3):
            await talker.call(number, "step")
            await trio.sleep(2)
            await talker.tell("notifications/cancelled", requestId=number, reason=TYPESCRIPT)
        await trio.sleep(600)
        rig.steps.finish()
        await wait_all_tasks_blocked()
        assert page_text(await result_of(talker, 5)) == "done"
        assert [message["id"] for message in talker.seen] == [5]
    assert rig.runs == 1


async def test_what_was_left_is_found_by_its_name(rig: Rig, autojump_clock: MockClock) -> None:
    settings = PatienceSettings(patience_s=50, keep_cancelled="timeout")
    async with open_house(rig.server, patience=settings) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await trio.sleep(2)
        await talker.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        await talker.call(2, "list_calls")
        (kept,) = (await talker.answer(2))["result"]["structuredContent"]["calls"]
        assert kept["state"] == "running"
        rig.steps.finish()
        await talker.call(3, "wait_for_call", call=kept["call"])
        assert text_of(await talker.answer(3)) == "done"


async def test_over_http_too(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=ALL) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        await trio.sleep(1)
        await browser.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        assert first.is_whole
        assert [message for _, message in first.events if message] == []
        assert (await browser.go_on(first.ids[-1])).status == 405  # its client wants it no more
        again = await browser.call(2, "step")
        await trio.sleep(0.1)
        rig.steps.finish()
        await wait_all_tasks_blocked()
        message = again.events[-1][1]
        assert message is not None
        assert (message["id"], text_of(message)) == (2, "done")
    assert rig.runs == 1


async def test_a_call_that_was_cut_is_left_too(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=ALL) as house, browsing(house, PLAIN) as browser:
        first = await browser.call(1, "step")
        await trio.sleep(1)
        await first.hang_up()
        await browser.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        rig.steps.finish()
        again = await browser.call(2, "step")
        assert text_of(again.events[-1][1] or {}) == "done"
    assert rig.runs == 1


async def test_a_repeated_request_whose_client_hangs_up_ends_no_progress_of_the_first(
    rig: Rig, autojump_clock: MockClock
) -> None:
    def progress(value: int) -> None:
        rig.steps.do(lambda call: call.progress(value))

    async with open_house(rig.server, patience=ONCE) as house, browsing(house, PLAIN) as browser:
        params = {"name": "step", "arguments": {}, "_meta": {"progressToken": "t"}}
        first = await browser.post(1, "tools/call", **params)
        progress(1)
        await trio.sleep(1)
        again = browser.ask(
            "POST", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        )
        again.cut()
        await trio.sleep(2)
        progress(2)
        await trio.sleep(1)
        told = [message["params"]["progress"] for _, message in first.events if message]
        assert told == [1, 2]


async def test_without_the_option_a_timeout_cancels(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=PatienceSettings(patience_s=9)) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        await wait_all_tasks_blocked()
        assert rig.steps.was_cancelled


async def test_a_call_that_nobody_can_find_goes_on_too(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=KEEP) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        await trio.sleep(3600)
        assert not rig.steps.is_over.is_set()
        rig.steps.finish()
        await wait_all_tasks_blocked()
        assert rig.steps.is_over.is_set()
        assert not rig.steps.was_cancelled


async def test_who_only_keeps_cancelled_calls_keeps_no_cut_ones(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=KEEP) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        await wait_all_tasks_blocked()
        await talker.leave()
        assert rig.steps.was_cancelled


async def test_a_client_that_can_resume_may_do_so_after_its_timeout(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=KEEP) as house:
        talker = await house.dial(STREAMS, USER)
        stream = await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        rig.steps.finish()
        messages = await talker.resume(2, stream)
        assert text_of(messages[-3]) == "done"


# Several clients of one call


@pytest.mark.parametrize("settings", [ONCE, ALL])
@pytest.mark.parametrize("is_one_host", [True, False])
async def test_every_client_of_a_call_gets_its_result(
    rig: Rig, autojump_clock: MockClock, settings: PatienceSettings, is_one_host: bool
) -> None:
    async with open_house(rig.server, patience=settings) as house:
        talkers = [await house.dial(PLAIN, USER) for _ in range(1 if is_one_host else 10)]
        calls_each = 10 // len(talkers)
        for talker in talkers:
            for number in range(calls_each):
                await talker.call(number, "step")
        await trio.sleep(1)
        rig.steps.finish()
        for talker in talkers:
            answers = {}
            while len(answers) < calls_each:
                answer = await talker.read()
                answers[answer["id"]] = text_of(answer)
            assert answers == dict.fromkeys(range(calls_each), "done")
    assert rig.runs == 1


async def test_with_patience_each_waits_for_as_long(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        first, second = [await house.dial(PLAIN, USER) for _ in range(2)]
        await first.call(1, "step")
        await trio.sleep(1)
        await second.call(1, "step")
        began = trio.current_time()
        codes = [(await each.answer(1))["result"]["_meta"][CALL] for each in (first, second)]
        assert trio.current_time() - began == pytest.approx(2, abs=0.1)
        rig.steps.finish()
        for talker, code in zip((second, first), codes, strict=True):  # of one principal
            await talker.call(2, "wait_for_call", call=code)
            assert text_of(await talker.answer(2)) == "done"
    assert rig.runs == 1


@pytest.mark.parametrize("who", ["first", "second", "both"])
@pytest.mark.parametrize("settings", [ONCE, ALL])
async def test_a_cancel_ends_the_wait_of_its_own_client(
    rig: Rig, autojump_clock: MockClock, settings: PatienceSettings, who: str
) -> None:
    async with open_house(rig.server, patience=settings) as house:
        talkers = {name: await house.dial(PLAIN, USER) for name in ("first", "second")}
        for talker in talkers.values():
            await talker.call(1, "step")
            await wait_all_tasks_blocked()
        for name in list(talkers) if who == "both" else [who]:
            assert not rig.steps.was_cancelled
            await talkers.pop(name).tell("notifications/cancelled", requestId=1, reason="the user")
            await wait_all_tasks_blocked()
        assert rig.steps.was_cancelled is (who == "both")
        rig.steps.finish()
        for talker in talkers.values():
            assert text_of(await talker.answer(1)) == "done"


async def test_what_one_client_was_promised_no_other_client_cancels(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        first, second = [await house.dial(PLAIN, USER) for _ in range(2)]
        await first.call(1, "step")
        code = (await first.answer(1))["result"]["_meta"][CALL]
        await second.call(1, "step")
        await wait_all_tasks_blocked()
        await second.tell("notifications/cancelled", requestId=1, reason="the user")
        await wait_all_tasks_blocked()
        assert not rig.steps.was_cancelled
        rig.steps.finish()
        await first.call(2, "wait_for_call", call=code)
        assert text_of(await first.answer(2)) == "done"


async def test_a_wait_for_a_call_that_its_own_client_cancelled_says_so(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ALL) as house:
        talker = await house.dial(PLAIN, USER)
        await talker.call(1, "step")
        code = (await talker.answer(1))["result"]["_meta"][CALL]
        await talker.call(2, "step")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=2, reason="the user")
        await wait_all_tasks_blocked()
        assert rig.steps.was_cancelled
        await talker.call(3, "wait_for_call", call=code)
        assert "was cancelled" in text_of(await talker.answer(3))
        stranger = await house.dial(PLAIN, "os(1001)")
        await stranger.call(3, "wait_for_call", call=code)
        assert "No call" in text_of(await stranger.answer(3))


async def test_the_error_of_a_call_is_that_of_all_who_wait(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool
    async def step() -> None:
        await trio.sleep(1)
        raise Refusal(-32050, "no such thing")

    async with open_house(server, patience=ONCE) as house:
        talkers = [await house.dial(PLAIN, USER) for _ in range(2)]
        for talker in talkers:
            await talker.call(1, "step")
        first, second = [await talker.answer(1) for talker in talkers]
        assert first == second


async def test_one_who_joins_gets_progress_and_the_questions_of_a_client_that_is_gone(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server, patience=ONCE) as house:
        first, second = [await house.dial(PLAIN, USER) for _ in range(2)]
        await first.call(1, "step")
        rig.steps.do(lambda call: call.progress(1, message="half"))
        await wait_all_tasks_blocked()
        await second.call(9, "step", token="t")
        told = await second.find(lambda m: m.get("method") == "notifications/progress")
        assert told["params"] == {"progressToken": "t", "progress": 1, "message": "half"}
        await first.tell("notifications/cancelled", requestId=1, reason="the user")
        rig.steps.ask()
        asked = await second.find(lambda m: m.get("method") == "elicitation/create")
        await second.say({"id": asked["id"], "result": {"action": "accept"}})
        rig.steps.finish()
        assert text_of(await second.answer(9)) == "done"
        assert rig.steps.answers == [{"action": "accept"}]


async def test_calls_that_are_cancelled_before_they_begin_are_not_kept(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")

    @server.tool
    async def step(n: int) -> None:
        await trio.sleep_forever()

    def call(id: int, n: int) -> Json:
        params = {"name": "step", "arguments": {"n": n}}
        return {"id": id, "method": "tools/call", "params": params}

    def cancel(id: int) -> Json:
        return {"method": "notifications/cancelled", "params": {"requestId": id}}

    async with open_house(server, patience=ONCE) as house:
        talker = await house.dial(PLAIN, USER)
        for n in range(10):
            one, two = 2 * n, 2 * n + 1
            await talker.say(call(one, n), call(two, n), cancel(two), cancel(one))
            await wait_all_tasks_blocked()
        assert len(house.running._backend._asked) <= 1  # type: ignore[attr-defined]


def failing(go: trio.Event) -> Server:
    """A server whose tool `step` sends too much, if it may go on, and then cleans up for long."""
    limits = Limits(unsent_entries_max=3)
    server = Server("tested", resume_min_s=0, announce_after_s=0, limits=limits)

    @server.tool(overflow="fail")
    async def step(call: Call) -> None:
        await go.wait()
        await flood(call)
        await trio.sleep(100)

    return server


async def test_a_call_that_failed_and_still_cleans_up_can_be_resumed(
    autojump_clock: MockClock,
) -> None:
    go = trio.Event()
    async with open_house(failing(go), patience=ONCE) as house:
        first = await house.dial(STREAMS, USER)
        stream = await first.begin(1, "step")
        second = await house.dial(STREAMS, USER)
        await second.call(2, "step")
        await wait_all_tasks_blocked()
        await first.leave()
        go.set()
        await trio.sleep(5)
        third = await house.dial(STREAMS, USER)
        await third.resume(3, stream)
        assert await third.request(4, "ping") == {}


async def test_a_tool_without_room_goes_on_when_its_call_is_made_again(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", limits=Limits(unsent_entries_max=3))
    has_left = trio.Event()

    @server.tool
    async def step(call: Call) -> str:
        await has_left.wait()
        for number in range(5):
            await call.log("info", number)
        return "done"

    async with open_house(server, patience=ONCE) as house:
        first = await house.dial(PLAIN, USER)
        await first.call(1, "step")
        await wait_all_tasks_blocked()
        await first.leave()
        has_left.set()
        await trio.sleep(1)
        second = await house.dial(PLAIN, USER)
        await second.call(2, "step")
        logged = [(await second.read())["params"]["data"] for _ in range(5)]
        assert logged == [0, 1, 2, 3, 4]
        assert page_text((await second.answer(2))["result"]) == "done"


async def called_at_two(replicas: Replicas) -> tuple[Replica, list[Talker]]:
    """A replica with a call, and the clients that made it: one there, then two at another one."""
    theirs, ours = [await replicas.start(patience=ONCE) for _ in range(2)]
    callers = [await replica.dial(PLAIN, USER) for replica in (theirs, ours, ours)]
    for caller in callers:
        await caller.call(1, "step")
        await trio.sleep(1)
    return theirs, callers


async def test_all_that_make_a_call_at_another_replica_get_its_result(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, callers = await called_at_two(replicas)
        theirs.steps.finish("once")
        for caller in callers[1:]:
            assert text_of(await caller.answer(1)) == "once"


async def test_all_that_make_a_call_at_another_replica_hear_of_its_end_when_its_owner_dies(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, callers = await called_at_two(replicas)
        theirs.kill()
        for caller in callers[1:]:
            assert reason((await caller.answer(1))["error"]) == "interrupted"


async def test_all_that_make_a_call_at_another_replica_get_its_result_after_an_outage(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away when they ask it for the result."""
    read = SharedMemoryJournal.read

    async def read_later(*given: Any, **how: Any) -> Any:
        if trio.current_time() < back_at:
            raise StoreAway("it is away")
        return await read(*given, **how)

    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, callers = await called_at_two(replicas)
        back_at = trio.current_time() + LEASE_S
        monkeypatch.setattr(SharedMemoryJournal, "read", read_later)
        theirs.steps.finish("once")
        for caller in callers[1:]:
            assert text_of(await caller.answer(1)) == "once"


async def test_a_call_at_another_replica_whose_end_is_not_known_here_yet_gives_its_result(
    autojump_clock: MockClock,
) -> None:
    """Its owner tells how many messages it has before the journal tells that it has ended."""
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, ours = [await replicas.start(patience=KEPT_ONCE) for _ in range(2)]
        first, second = [await replica.dial(PLAIN, USER) for replica in (theirs, ours)]
        await first.call(1, "step")
        await trio.sleep(1)
        await second.call(1, "step")
        await trio.sleep(1)
        await second.tell("notifications/cancelled", requestId=1, reason=TYPESCRIPT)
        take = ours.reached.inner.take

        async def take_and_let_end(stream: str) -> Any:
            taken = await take(stream)
            theirs.steps.finish("once")
            await trio.sleep(0.1)
            return taken

        ours.reached.inner.take = take_and_let_end  # type: ignore[method-assign]
        ours.reached.inner.hear = lambda _: None  # type: ignore[method-assign]
        third = await ours.dial(PLAIN, USER)
        assert page_text(await result_of(third, 1)) == "once"


async def test_a_call_at_another_replica_is_followed_on_after_its_only_client_here_has_left(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, callers = await called_at_two(replicas)
        callers[1].cable.cut()
        await trio.sleep(3 * LEASE_S)
        theirs.steps.finish("once")
        assert text_of(await callers[2].answer(1)) == "once"


async def test_a_failed_call_that_was_made_anew_elsewhere_is_to_be_made_again_here(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits for it asks the store for its error when that is gone."""
    response_of = Operations.response_of

    async def ask_late(*given: Any) -> Any:
        await callers[0].call(2, "step")
        await trio.sleep(LEASE_S)
        return await response_of(*given)

    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, callers = await called_at_two(replicas)
        monkeypatch.setattr(Operations, "response_of", ask_late)
        theirs.steps.fail()
        error = (await callers[2].answer(1))["error"]
        assert reason(error) == "stream_not_found"
        assert error["message"].endswith("make the call again.")


async def test_a_call_that_was_made_anew_elsewhere_is_joined_where_the_former_one_is_in_memory(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, heir, ours = [await replicas.start(patience=ONCE) for _ in range(3)]
        await (await theirs.dial(PLAIN, USER)).call(1, "step")
        await trio.sleep(1)
        theirs.kill()
        await trio.sleep(3 * LEASE_S)
        if not heir.streams:
            heir, ours = ours, heir
        heir.running.engine._streams.replace = lambda _: None  # type: ignore[method-assign]
        ours.steps.finish("anew")
        heir.steps.finish("twice")
        for replica in (ours, heir):
            result = await result_of(await replica.dial(PLAIN, USER), 1)
            assert page_text(result) == "anew"


async def test_a_call_that_was_made_anew_has_its_key_though_the_former_one_is_evicted_later(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: Server("tested")) as replicas:
        theirs, heir = [await replicas.start(patience=ONCE) for _ in range(2)]
        await (await theirs.dial(PLAIN, USER)).call(1, "step")
        await trio.sleep(1)
        theirs.kill()
        await trio.sleep(3 * LEASE_S)
        streams = heir.running.engine._streams
        streams.replace = lambda _: None  # type: ignore[method-assign]
        [former] = streams.index
        eviction = streams.cache.eviction(former)
        assert eviction is not None
        for result in ("anew", "twice"):
            replica = await replicas.start(patience=ONCE)
            replica.steps.finish(result)
            talker = await replica.dial(PLAIN, USER)
            assert page_text(await result_of(talker, 1)) == "anew"
            await heir.reached.commit([eviction])


@pytest.mark.parametrize("takes_s", [0.5, 5])
async def test_a_failed_call_is_not_run_again_before_its_client_has_an_answer(
    autojump_clock: MockClock, takes_s: float
) -> None:
    """The journal takes its time for the error, and the same call is made meanwhile."""
    go, journal = trio.Event(), MemoryJournal()
    commit = journal.commit

    async def commit_late(changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await trio.sleep(takes_s)
        return await commit(changes)

    async with open_house(failing(go), patience=ONCE, journal=journal) as house:
        first, second = await house.dial(PLAIN, USER), await house.dial(PLAIN, USER)
        await first.call(1, "step")
        await trio.sleep(2 * takes_s)
        journal.commit = commit_late  # type: ignore[method-assign]
        go.set()
        await wait_all_tasks_blocked()
        await second.call(2, "step")
        told = (await first.answer(1))["error"]
        is_late = takes_s > 1
        assert (reason(told) == "superseded") is is_late
        assert "error" in await second.answer(2)


async def test_a_call_that_failed_while_it_is_followed_tells_its_error_to_all(
    autojump_clock: MockClock,
) -> None:
    go = trio.Event()
    async with open_house(failing(go), patience=ONCE) as house:
        first, second = await house.dial(PLAIN, USER), await house.dial(PLAIN, USER)
        await first.call(1, "step")
        await wait_all_tasks_blocked()
        await second.call(2, "step")
        await wait_all_tasks_blocked()
        go.set()
        assert (await second.answer(2))["error"] == (await first.answer(1))["error"]
