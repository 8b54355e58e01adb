"""Idempotency keys: a call that is made again is found, and not run twice."""

import copy
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.errors import Full
from streams.keys import Keyring
from streams.memory import MemoryJournal
from tests.house import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    House,
    Json,
    Steps,
    Talker,
    methods,
    named,
    next_of,
    open_house,
    page_text,
    reason,
    said,
    text_of,
)
from tests.page_rig import counting
from tests.troubled import Troubled

LONG: Final = "0123456789abcdef0123456789abcdef"
SHORT: Final = "a key"
CREATE: Final = "notifications/stream/create"
USED: Final = "This idempotencyKey was used for another call: use a new one."


class Rig:
    """A server with a tool that counts its runs and then does what it is told."""

    def __init__(self, **settings: Any) -> None:
        self.server = Server("tested", **({"resume_min_s": 0, "resume_max_s": 600} | settings))
        self.runs = 0
        self.steps = Steps(self.server, name="unused")
        self.server.tool(name="step")(self.step)

    async def step(self, call: Call, n: int = 0, text: str = "") -> str:
        self.runs += 1
        return await self.steps.step(call)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def call(
    talker: Talker, id: int | str, key: Any = LONG, *, name: str = "step", **more: Any
) -> None:
    """Make a call with a key; `more` are further params."""
    meta = {"mcp-streams/idempotencyKey": key} | more.pop("_meta", {})
    await talker.ask(id, "tools/call", name=name, _meta=meta, **({"arguments": {}} | more))


async def answered(talker: Talker, id: int | str, key: Any = LONG, **more: Any) -> Json:
    """Make a call with a key; its result, or the error."""
    await call(talker, id, key, **more)
    answer = await talker.answer(id)
    result: Json = answer["result"] if "result" in answer else answer["error"]
    return result


# The same call


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        (SHORT, "os(0)", "os(0)"),
        (SHORT, "bearer(a, b)", "bearer(a, b)"),
        (SHORT, "session(k)", "session(k)"),
        (LONG, "os(0)", "os(0)"),
        (LONG, "conn(x)", "conn(y)"),
        (LONG, "session(k)", "conn(x)"),
    ],
)
async def test_a_call_that_is_made_again_is_not_run_again(
    rig: Rig, autojump_clock: MockClock, key: str, first: str, second: str
) -> None:
    async with open_house(rig.server) as house:
        cut = await house.dial(STREAMS, first)
        await call(cut, 1, key)
        stream = await cut.announced()
        rig.steps.log("before")
        await cut.leave()
        again = await house.dial(STREAMS, second)
        await call(again, 1, key)
        assert await again.announced() == stream
        rig.steps.log("after")
        rig.steps.finish()
        assert text_of(await again.answer(1)) == "done"
        assert said(again.seen) == ["before", "after"]
    assert rig.runs == 1


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        (SHORT, "conn(x)", "conn(y)"),
        (SHORT, "session(x)", "session(y)"),
        (SHORT, "os(0)", "os(1)"),
        (LONG, "os(0)", "os(1)"),
        (LONG, "bearer(a, b)", "bearer(a, c)"),
        (LONG, "bearer(a, b)", "conn(x)"),
        (LONG, "conn(x)", "os(0)"),
    ],
)
async def test_the_same_key_of_somebody_else_is_another_one(
    rig: Rig, autojump_clock: MockClock, key: str, first: str, second: str
) -> None:
    async with open_house(rig.server) as house:
        one, other = await house.dial(STREAMS, first), await house.dial(STREAMS, second)
        await call(one, 1, key)
        await call(other, 1, key)
        streams = [(await talker.announced())["streamId"] for talker in (one, other)]
        assert len(set(streams)) == rig.runs == 2


async def test_the_newest_wins_and_the_one_before_is_told(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        one, other = await house.dial(STREAMS, "os(0)"), await house.dial(STREAMS, "os(0)")
        await call(one, "a")
        await one.announced()
        await call(other, "a")
        await other.announced()
        assert reason((await one.answer("a"))["error"]) == "superseded"
        rig.steps.finish()
        assert text_of(await other.answer("a")) == "done"
        assert await one.request("p", "ping") == {}
    assert rig.runs == 1


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_the_result_of_a_finished_call_is_given_again(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max))
    async with open_house(rig.server) as house:
        cut = await house.dial(POSITIONS, "os(0)")
        await call(cut, 1, SHORT)
        await cut.leave()
        rig.steps.finish("found")
        await trio.sleep(20)
        assert house.running.engine._streams.at_rest == (resident_max == 0)
        for _ in range(2):
            again = await house.dial(POSITIONS, "os(0)")
            assert page_text(await answered(again, 1, SHORT)) == "found"
            await again.leave()
    assert rig.runs == 1


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_what_was_delivered_is_neither_run_nor_given_again(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max))
    async with open_house(rig.server) as house:
        talker = await house.dial(POSITIONS, "os(0)")
        await call(talker, 1)
        stream = await talker.announced()
        rig.steps.log("one")
        rig.steps.finish()
        await talker.answer(1)
        await talker.tell("notifications/stream/ack", **named(stream), seq=2)
        await trio.sleep(20)
        refused = await answered(talker, 2)
        assert refused["code"] == -32602
        assert refused["data"] == {"reason": "messages_gone", "earliestSeq": 3}
        assert "was delivered already" in refused["message"]
    assert rig.runs == 1


async def test_only_what_is_not_delivered_comes_again(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(POSITIONS, "os(0)")
        await call(talker, 1)
        stream = await talker.announced()
        rig.steps.log("one", "two")
        await talker.find(lambda m: m.get("params", {}).get("data") == "two")
        await talker.tell("notifications/stream/ack", **named(stream), seq=1)
        await wait_all_tasks_blocked()
        rig.steps.finish()
        again = await house.dial(POSITIONS, "os(0)")
        assert page_text(await answered(again, 1)) == "done"
        assert CREATE not in methods(again.seen)
        assert said(again.seen) == ["two"]
        assert again.seen[0]["params"]["seq"] == 2


async def test_a_cancelled_call_is_told_to_be_cancelled(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(STREAMS, "os(0)")
        await call(talker, 1)
        await talker.announced()
        await talker.tell("notifications/cancelled", requestId=1)
        assert reason(await answered(talker, 2)) == "cancelled"
    assert rig.runs == 1


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_an_abandoned_call_is_told_to_be_abandoned_while_that_is_remembered(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max, tombstone_s=1_000))
    async with open_house(rig.server) as house:
        cut = await house.dial(STREAMS, "os(0)")
        await call(cut, 1)
        await cut.announced()
        await cut.leave()
        await trio.sleep(700)
        assert rig.steps.was_cancelled
        for number in range(2):
            talker = await house.dial(STREAMS, "os(0)")
            assert reason(await answered(talker, number)) == "abandoned"
            await trio.sleep(400)
        await trio.sleep(200)
        await call(talker, 9)
        await talker.announced()
    assert rig.runs == 2


async def test_who_cancels_a_call_that_was_made_again_stops_its_work(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        await call(await house.dial(STREAMS, "conn(x)"), 1)
        other = await house.dial(STREAMS, "conn(y)")
        await call(other, 2)
        await wait_all_tasks_blocked()
        await other.tell("notifications/cancelled", requestId=2)
        await wait_all_tasks_blocked()
        assert rig.steps.was_cancelled


async def test_what_is_asked_is_asked_again_and_may_be_answered(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        one, other = await house.dial(STREAMS, "conn(x)"), await house.dial(STREAMS, "conn(y)")
        await call(one, 1)
        rig.steps.ask()
        asked = await one.find(lambda m: m.get("method") == "elicitation/create")
        await call(other, 1)
        assert await other.find(lambda m: m.get("method") == "elicitation/create") == asked
        await other.say({"id": asked["id"], "result": {"action": "decline"}})
        rig.steps.finish()
        assert text_of(await other.answer(1)) == "done"
    assert rig.steps.answers == [{"action": "decline"}]


# Under which id


async def test_under_another_id_everything_comes_but_the_announcement(
    rig: Rig, autojump_clock: MockClock
) -> None:
    """Which would be about an id that stands for something else there, or for nothing."""
    async with open_house(rig.server) as house:
        await call(await house.dial(STREAMS, "os(0)"), 1)
        other = await house.dial(STREAMS, "os(0)")
        await call(other, "1")
        rig.steps.log("one")
        rig.steps.finish()
        assert text_of(await other.answer("1")) == "done"
        assert methods(other.seen) == ["notifications/message", "result"]


async def test_progress_is_reported_as_the_newest_has_asked_for_it(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async def report(running: Call) -> None:
        await running.progress(1)

    async with open_house(rig.server) as house:
        one, other = await house.dial(STREAMS, "os(0)"), await house.dial(STREAMS, "os(0)")
        await call(one, 1, _meta={"progressToken": "a"})
        await one.announced()
        await call(other, 2, _meta={"progressToken": "b"})
        await wait_all_tasks_blocked()
        rig.steps.do(report)
        rig.steps.finish()
        await other.answer(2)
        (progress,) = [m for m in other.seen if m.get("method") == "notifications/progress"]
        assert progress["params"]["progressToken"] == "b"


# Another call

SAME: Final[dict[str, Json]] = {
    "as it was": {"arguments": {"n": 1, "text": "x"}},
    "in another order": {"arguments": {"text": "x", "n": 1}},
    "written otherwise": {"arguments": {"n": 1.0, "text": "x"}},
    "with other meta": {"arguments": {"n": 1, "text": "x"}, "_meta": {"other": 5}},
}
OTHER: Final[dict[str, Json]] = {
    "other arguments": {"arguments": {"n": 2, "text": "x"}},
    "fewer arguments": {"arguments": {"n": 1}},
    "bad arguments": {"arguments": {"n": "one"}},
    "no arguments": {"arguments": None},
    "another tool": {"name": "unused", "arguments": {"n": 1, "text": "x"}},
    "no tool at all": {"name": "none", "arguments": {"n": 1, "text": "x"}},
}


@pytest.mark.parametrize("again", SAME.values(), ids=SAME)
async def test_a_call_is_the_same_by_what_it_says(
    rig: Rig, autojump_clock: MockClock, again: Json
) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(PLAIN, "os(0)")
        await call(talker, 1, arguments={"n": 1, "text": "x"})
        rig.steps.finish()
        await talker.answer(1)
        assert page_text(await answered(talker, 2, **again)) == "done"
    assert rig.runs == 1


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
async def test_a_key_that_was_used_for_another_call_is_refused(
    rig: Rig, autojump_clock: MockClock, other: Json
) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(STREAMS, "os(0)")
        await call(talker, 1, arguments={"n": 1, "text": "x"})
        await talker.announced()
        refused = await answered(talker, 2, **other)
        assert (refused["code"], refused["message"]) == (-32602, USED)
        rig.steps.finish()  # and nobody was displaced
        assert text_of(await talker.answer(1)) == "done"
    assert rig.runs == 1


@pytest.mark.parametrize("key", ["", "x" * 201, 5, None, ["a key"], {"a": "key"}, True])
async def test_what_is_no_key_is_refused(rig: Rig, autojump_clock: MockClock, key: Any) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial()
        refused = await answered(talker, 1, key)
        assert refused["code"] == -32602
        assert "must be a string of 1 to 200 characters" in refused["message"]
        await call(talker, 2, "é" * 200)
        await talker.announced()
    assert rig.runs == 1


async def test_a_call_that_could_not_begin_leaves_its_key_free(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(PLAIN, "os(0)")
        assert (await answered(talker, 1, arguments={"n": "one"}))["isError"]
        assert (await answered(talker, 2, name="none"))["code"] == -32602
        rig.steps.finish()
        assert page_text(await answered(talker, 3)) == "done"


# How long it is kept


async def test_a_plain_client_can_come_back_by_its_key(rig: Rig, autojump_clock: MockClock) -> None:
    async with open_house(rig.server) as house:
        cut = await house.dial(PLAIN, "conn(x)")
        await call(cut, 1)
        await cut.leave()
        await trio.sleep(590)
        again = await house.dial(PLAIN, "conn(y)")
        await call(again, 1)
        rig.steps.finish()
        assert text_of(await again.answer(1)) == "done"
        assert methods(again.seen) == ["result"]
        await again.leave()
        await trio.sleep(601)
        last = await house.dial(PLAIN, "conn(z)")
        assert reason(await answered(last, 1)) == "abandoned"
    assert rig.runs == 1


@pytest.mark.parametrize("principal", ["conn(x)", "session(k)"])
async def test_a_short_key_of_an_anonymous_client_keeps_no_work_going(
    rig: Rig, autojump_clock: MockClock, principal: str
) -> None:
    async with open_house(rig.server) as house:
        cut = await house.dial(PLAIN, principal)
        await call(cut, 1, SHORT)
        await cut.leave()
        assert rig.steps.was_cancelled
        again = await house.dial(PLAIN, principal)  # as only a session can be again
        assert reason(await answered(again, 1, SHORT)) == "cancelled"
    assert rig.runs == 1


async def test_a_call_that_is_done_is_known_by_a_short_key_too(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with open_house(rig.server) as house:
        talker = await house.dial(PLAIN, "conn(x)")
        rig.steps.finish("once")
        for number in range(3):
            assert page_text(await answered(talker, number, SHORT)) == "once"
    assert rig.runs == 1


async def test_what_ends_with_its_connection_is_not_run_again_either(
    autojump_clock: MockClock,
) -> None:
    rig = Rig(resume_max_s=0)
    async with open_house(rig.server) as house:
        cut = await house.dial(STREAMS, "os(0)")
        await call(cut, 1)
        await wait_all_tasks_blocked()
        other = await house.dial(STREAMS, "os(0)")
        await call(other, 1)
        rig.steps.log("one")
        await other.find(lambda m: m.get("method") == "notifications/message")
        assert methods(other.seen) == ["notifications/message"]
        await other.leave()
        assert rig.steps.was_cancelled
        again = await house.dial(STREAMS, "os(0)")
        assert reason(await answered(again, 1)) == "abandoned"
    assert rig.runs == 1


async def test_who_makes_a_call_again_too_early_is_told_so_where_that_is_enforced(
    autojump_clock: MockClock,
) -> None:
    rig = Rig(resume_min_s=5, enforce_min=True)
    async with open_house(rig.server) as house:
        cut = await house.dial(STREAMS, "os(0)")
        await call(cut, 1)
        await cut.announced()
        await cut.leave()
        again = await house.dial(STREAMS, "os(0)")
        refused = await answered(again, 1)
        assert refused["data"] == {"reason": "too_early", "retryAfter": 4}
        await trio.sleep(4)
        await call(again, 1)
        await again.announced()


# At once


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_a_hundred_at_once_over_one_connection_are_one_run(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max))
    async with open_house(rig.server) as house:
        talker = await house.dial(PLAIN, "conn(x)")
        meta = {"mcp-streams/idempotencyKey": LONG}
        params = {"name": "step", "arguments": {}, "_meta": meta}
        calls = [{"id": n, "method": "tools/call", "params": params} for n in range(100)]
        await talker.say(*calls)
        await wait_all_tasks_blocked()
        rig.steps.finish()
        answers = [await talker.read() for _ in range(100)]
        assert sorted(answer["id"] for answer in answers) == list(range(100))
        assert_one_has_it(answers)
    assert rig.runs == 1


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_a_hundred_at_once_over_as_many_connections_are_one_run(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max))
    answers: list[Json] = []

    async def ask(talker: Talker) -> None:
        await call(talker, 1)
        answers.append(await talker.answer(1))

    journal = Troubled()
    async with open_house(rig.server, journal=journal) as house:
        await fill(house, rig)  # the journal is asked, and not memory alone
        talkers = [await house.dial(PLAIN, f"conn({n})") for n in range(100)]
        async with trio.open_nursery() as nursery:
            journal.hold()
            for talker in talkers:
                nursery.start_soon(ask, talker)
            await wait_all_tasks_blocked()
            rig.steps.finish()
            journal.let_go()
        assert_one_has_it(answers)
        assert not house.running.engine.keyed._turns
    assert rig.runs == 2


async def fill(house: House, rig: Rig) -> None:
    talker = await house.dial(STREAMS, "os(7)")
    await call(talker, 1, "another key")
    rig.steps.finish()
    await talker.answer(1)
    await talker.leave()
    await trio.sleep(20)


def assert_one_has_it(answers: list[Json]) -> None:
    results = [text_of(answer) for answer in answers if "result" in answer]
    errors = [reason(answer["error"]) for answer in answers if "error" in answer]
    assert results == ["done"]
    assert errors == ["superseded"] * (len(answers) - 1)


# Over crashes


async def test_a_call_is_found_after_a_crash(rig: Rig, autojump_clock: MockClock) -> None:
    keyring = Keyring.load(None)
    async with open_house(rig.server, keyring=keyring) as house:
        cut = await house.dial(PLAIN, "conn(x)")
        await call(cut, 1)
        rig.steps.log("one")
        await trio.sleep(1)
        journal = house.as_after_a_crash()
    async with open_house(rig.server, journal=journal, keyring=keyring) as house:
        again = await house.dial(PLAIN, "conn(y)")
        assert reason(await answered(again, 1)) == "interrupted"
        assert said(again.seen) == ["one"]
    assert rig.runs == 1


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_a_result_is_found_after_a_crash_and_under_older_keys(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig, old, new = Rig(limits=Limits(resident_max=resident_max)), b"o" * 32, b"n" * 32
    async with open_house(rig.server, keyring=Keyring([old])) as house:
        cut = await house.dial(PLAIN, "conn(x)")
        await call(cut, 1)
        rig.steps.finish("kept")
        await trio.sleep(1)
        await cut.leave()
        await trio.sleep(600 - 5)
        journal = house.as_after_a_crash()
    for keyring in (Keyring([new, old]), Keyring([old])):
        kept = copy.deepcopy(journal)
        async with open_house(rig.server, journal=kept, keyring=keyring) as house:
            again = await house.dial(PLAIN, "conn(y)")
            assert page_text(await answered(again, 1)) == "kept"
    assert rig.runs == 1


async def test_nothing_runs_before_a_crash_can_be_survived(
    rig: Rig, autojump_clock: MockClock
) -> None:
    journal, keyring = Troubled(), Keyring.load(None)
    async with open_house(rig.server, journal=journal, keyring=keyring) as house:
        journal.trouble = Full("no room")
        cut = await house.dial(PLAIN, "conn(x)")
        await call(cut, 1)
        await trio.sleep(5)
        assert rig.runs == 0
        crashed = copy.deepcopy(journal)
        journal.trouble = None
        await trio.sleep(5)
        assert rig.runs == 1
    crashed.trouble = None
    async with open_house(rig.server, journal=crashed, keyring=keyring) as house:
        again = await house.dial(PLAIN, "conn(y)")
        rig.steps.finish()
        assert page_text(await answered(again, 1)) == "done"


async def test_a_copy_of_the_journal_has_no_key(rig: Rig, autojump_clock: MockClock) -> None:
    journal = MemoryJournal()
    async with open_house(rig.server, journal=journal, keyring=Keyring([b"k" * 32])) as house:
        talker = await house.dial(STREAMS, "conn(x)")
        await call(talker, 1, LONG, _meta={"other": [1]}, arguments={"text": "kept"})
        await talker.announced()
        (record,) = await house.as_after_a_crash().claim()
    assert LONG.encode() not in record.origin
    assert b'"other":[1]' in record.origin
    assert b'"text":"kept"' in record.origin
    assert LONG not in repr(vars(journal))


# With pages


async def test_the_first_page_is_given_again_until_its_token_was_used(
    autojump_clock: MockClock,
) -> None:
    async with open_house(counting()) as house:
        talker = await house.dial(PLAIN, "conn(x)")
        first = await answered(talker, 1, name="count")
        await talker.leave()
        other = await house.dial(PLAIN, "conn(y)")
        assert await answered(other, 1, name="count") == first
        token = next_of(first)
        # With a token, which makes a call repeatable by itself, a key has nothing to say.
        second = await answered(other, 2, name="count", resumeToken=token)
        assert page_text(second) == "2"
        assert reason(await answered(other, 3, name="count")) == "messages_gone"
