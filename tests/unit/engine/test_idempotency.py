"""Idempotency keys: a call that is made again is found, and not run twice."""

from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits
from tests.rigs.idempotency import LONG, SHORT, Rig, answered, call
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    Json,
    methods,
    named,
    open_house,
    page_text,
    reason,
    said,
    text_of,
)

CREATE: Final = "notifications/stream/create"
USED: Final = "This idempotencyKey was used for another call: use a new one."


@pytest.fixture
def rig() -> Rig:
    return Rig()


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


@pytest.mark.parametrize("principal", ["conn(x)", "session(k)", "os(0)"])
@pytest.mark.parametrize("key", [SHORT, LONG])
@pytest.mark.parametrize("again", [1, 2])
async def test_a_call_goes_on_that_is_made_again_over_the_same_connection(
    rig: Rig, autojump_clock: MockClock, principal: str, key: str, again: int
) -> None:
    """Also where nothing but this connection leads to its stream, which is never without one."""
    async with open_house(rig.server) as house:
        talker = await house.dial(PLAIN, principal)
        await call(talker, 1, key)
        await wait_all_tasks_blocked()
        await call(talker, again, key)
        await wait_all_tasks_blocked()
        rig.steps.finish()
        if again != 1:
            assert reason((await talker.answer(1))["error"]) == "superseded"
        assert text_of(await talker.answer(again)) == "done"
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
        assert house.running.engine._streams.index.evicted == (resident_max == 0)
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
