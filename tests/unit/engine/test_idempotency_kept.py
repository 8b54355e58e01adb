"""Idempotency keys: for how long they are good, at once, over crashes, and with pages."""

import copy

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits
from streams.errors import Full
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from tests.rigs.idempotency import LONG, SHORT, Rig, answered, call
from tests.rigs.pages import counting
from tests.rigs.server import (
    PLAIN,
    RESIDENT_MAX,
    STREAMS,
    House,
    Json,
    Talker,
    methods,
    next_of,
    open_house,
    page_text,
    reason,
    said,
    text_of,
)
from tests.rigs.troubled import Troubled
from tests.rigs.web import browsing


@pytest.fixture
def rig() -> Rig:
    return Rig()


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
        await wait_all_tasks_blocked()  # else its tool never starts
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


@pytest.mark.parametrize("resident_max", RESIDENT_MAX)
async def test_what_a_key_opens_to_anybody_outlives_its_session(
    autojump_clock: MockClock, resident_max: int
) -> None:
    rig = Rig(limits=Limits(resident_max=resident_max))
    async with open_house(rig.server) as house, browsing(house, PLAIN) as browser:
        keys = [f"{n}{LONG if n % 2 else SHORT}" for n in range(6)]
        for n, key in enumerate(keys):
            meta = {"mcp-streams/idempotencyKey": key}
            cut = await browser.post(n, "tools/call", name="step", arguments={}, _meta=meta)
            await cut.hang_up()
            rig.steps.finish(f"of {n}")
        await trio.sleep(20)
        await browser.fetch("DELETE")
        await trio.sleep(20)
        streams = house.running.engine._streams.index
        assert streams.evicted + len(list(streams)) == 3
        other = await house.dial(PLAIN, "conn(x)")
        for n in (1, 3, 5):
            assert page_text(await answered(other, n, keys[n])) == f"of {n}"
    assert rig.runs == 6


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
