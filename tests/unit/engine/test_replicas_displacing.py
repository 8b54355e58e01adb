"""The newest connection wins at any replica. Event ids, pages, tokens and keys lead there."""

import math
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.backends import PatienceSettings
from streams.engine import posts
from streams.engine.connection import Session
from streams.engine.stream import Stream
from streams.exchange import Caller
from streams.journal.records import Outcome, Record
from streams.journal.sessions import Grant
from streams.keys import Keyring
from streams.messages import Run
from tests.rigs import idempotency
from tests.rigs.pages import counting
from tests.rigs.replicas import TAKEN_S, Replica, Replicas, open_replicas
from tests.rigs.server import (
    EXTENDED,
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    Talker,
    is_last,
    named,
    next_of,
    page_text,
    reason,
    requested,
    said,
    text_of,
)
from tests.rigs.shared_memory import LEASE_S
from tests.rigs.web import EVENTS, logged

MAX_S = 600.0
ALICE = Caller("alice", lambda: math.inf)
COMPLETED = {"_meta": {"mcp-streams/ended": "completed"}}
SUPERSEDED = {"_meta": {"mcp-streams/ended": "superseded"}}


def make() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


def attachments_held(replica: Replica) -> trio.Event:
    """Owners do not hear of deliveries at this replica before the event is set."""
    may_go = trio.Event()

    async def post(stream: str, *bodies: bytes, **how: Any) -> bool:
        if any(isinstance(posts.decode(body), posts.Attach) for body in bodies):
            await may_go.wait()
        return await replica.reached.inner.post(stream, *bodies, **how)

    replica.reached.post = post
    return may_go


# Displacing


async def test_a_resume_elsewhere_displaces_the_call_at_its_owner(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial()
    stream = await first.begin(1, "step")
    second = await ours.dial()
    await second.ask(2, "stream/resume", **named(stream))
    assert reason((await first.answer(1))["error"]) == "superseded"
    theirs.steps.log("to the newest")
    theirs.steps.finish()
    await second.answer(2)
    assert (said(second.seen), said(first.seen)) == (["to the newest"], [])


async def test_a_resume_at_the_owner_displaces_the_one_elsewhere(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial()
    stream = await first.begin(1, "step")
    second = await ours.dial()
    await second.ask(2, "stream/resume", **named(stream))
    await second.announced()
    third = await theirs.dial()
    await third.ask(3, "stream/resume", **named(stream))
    assert (await second.answer(2))["result"] == SUPERSEDED
    theirs.steps.log("to the newest")
    theirs.steps.finish()
    await third.answer(3)
    assert (said(third.seen), said(second.seen)) == (["to the newest"], [])


async def test_what_is_confirmed_while_a_client_comes_back_elsewhere_is_not_gone_for_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its earlier connection confirms messages after the owner was asked how far it is."""
    ours, theirs = await replicas.two()
    first = await ours.dial(POSITIONS)
    stream = await first.begin(1, "step")
    ours.steps.log("a", "b", "c")
    await first.find(lambda m: said([m]) == ["c"])
    is_confirmed = attachments_held(theirs)
    second = await theirs.dial(POSITIONS)
    await second.ask(2, "stream/resume", **named(stream))
    await wait_all_tasks_blocked()
    await first.tell("notifications/stream/ack", streamId=stream["streamId"], seq=2)
    while replicas.store.records[stream["streamId"]].acked < 2:
        await trio.sleep(0.01)
    is_confirmed.set()
    refused = (await second.answer(2))["error"]
    assert (reason(refused), said(second.seen)) == ("unavailable", [])
    await second.ask(3, "stream/resume", **named(stream))
    await second.find(lambda m: said([m]) == ["c"])
    assert said(second.seen) == ["c"]


async def test_a_delivery_that_the_owner_hears_of_late_displaces_no_newer_one(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """A follower gives a client all of an ended stream before its owner knows of that client."""
    ours, theirs = await replicas.two()
    first = await ours.dial()
    stream = await first.begin(1, "step")
    first.cable.cut()
    texts = [f"{n} " + "x" * 100_000 for n in range(20)]
    ours.steps.log(*texts)
    ours.steps.finish()
    await wait_all_tasks_blocked()
    is_heard = attachments_held(theirs)
    second = await theirs.dial()
    await second.ask(2, "stream/resume", **named(stream))
    assert text_of(await second.answer(1)) == "done"
    third = await ours.dial(capacity=200)  # it does not read yet
    await third.ask(3, "stream/resume", **named(stream))
    await wait_all_tasks_blocked()
    is_heard.set()
    await wait_all_tasks_blocked()
    assert text_of(await third.answer(1)) == "done"
    assert (await third.answer(3))["result"] == COMPLETED
    assert said(third.seen) == texts


async def test_a_resume_at_a_third_replica_displaces_the_one_at_the_second(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    third = await replicas.start()
    stream = await (await theirs.dial()).begin(1, "step")
    followers = [await ours.dial(), await third.dial()]
    for follower in followers:
        await follower.ask(2, "stream/resume", **named(stream))
        await follower.announced()
    assert (await followers[0].answer(2))["result"] == SUPERSEDED
    theirs.steps.finish()
    assert "result" in await followers[1].answer(1)


async def test_resumes_at_one_follower_displace_each_other(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial()).begin(1, "step")
    first, second = await ours.dial(), await ours.dial()
    await first.ask(2, "stream/resume", **named(stream))
    await first.announced()
    await second.ask(2, "stream/resume", **named(stream))
    assert (await first.answer(2))["result"] == SUPERSEDED
    theirs.steps.finish("only once")
    assert text_of(await second.answer(1)) == "only once"


async def test_a_client_that_comes_back_elsewhere_under_the_same_id_is_told_nothing(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its first response ends without a word: the client has asked again, and waits there."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    first = await browser.call(1, "step")
    before = first.body
    second = await (await ours.browse(PLAIN, browser.session)).go_on(first.ids[0])
    assert (first.is_whole, first.body) == (True, before)
    theirs.steps.finish()
    await wait_all_tasks_blocked()
    assert text_of(second.events[-1][1] or {}) == "done"


async def test_a_follower_that_left_may_come_back_to_the_owner(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its stream is detached at the owner, and expires there in time."""
    ours, theirs = await replicas.two()
    first = await theirs.dial()
    stream = await first.begin(1, "step")
    second = await ours.dial()
    await second.ask(2, "stream/resume", **named(stream))
    await second.announced()
    await trio.sleep(MAX_S + 1)
    assert not theirs.steps.was_cancelled, "a client is attached elsewhere"
    await second.leave()
    await trio.sleep(MAX_S - 10)
    assert not theirs.steps.was_cancelled
    third = await theirs.dial()
    await third.ask(3, "stream/resume", **named(stream))
    await third.announced()
    await third.leave()
    await trio.sleep(MAX_S + 1)
    assert theirs.steps.was_cancelled
    refused = await (await ours.dial()).request(4, "stream/resume", **named(stream))
    assert reason(refused) == "abandoned"


async def test_an_abandoned_stream_is_refused_to_the_client_that_follows_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Cancelled at its owner while a client is attached elsewhere."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(EXTENDED)
    call = await browser.call(1, "step")
    stream = call.events[1][1]["params"]["stream"]  # type: ignore[index]
    talker = await ours.dial()
    await talker.ask(
        2, "stream/resume", streamId=stream["streamId"], resumeToken=stream["resumeToken"]
    )
    await talker.announced()
    await browser.tell("notifications/cancelled", requestId=1)
    assert reason((await talker.answer(2))["error"]) == "cancelled"


# Event ids


async def test_a_response_goes_on_at_another_replica_behind_the_last_event(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    first = await browser.call(1, "step")
    theirs.steps.log("a", "b")
    await wait_all_tasks_blocked()
    await first.hang_up()
    elsewhere = await ours.browse(PLAIN, browser.session)
    second = await elsewhere.go_on(first.ids[1])
    theirs.steps.finish()
    await wait_all_tasks_blocked()
    assert second.ids == [first.ids[1], *first.ids[2:], first.ids[0][:-1] + "3"]
    assert logged(second) == ["b"]
    assert text_of(second.events[-1][1] or {}) == "done"
    third = await browser.go_on(second.ids[-1])
    assert third.status == 405, "nothing is left"


@pytest.mark.parametrize("first_at", ["the owner", "elsewhere"])
@pytest.mark.parametrize("newest_at", ["the owner", "elsewhere"])
@pytest.mark.parametrize("waits_s", [0.0, 0.05, 0.3])
async def test_of_two_gets_of_a_response_the_older_one_ends_in_silence(
    replicas: Replicas, autojump_clock: MockClock, first_at: str, newest_at: str, waits_s: float
) -> None:
    """An SDK takes an error there for the answer to its call.

    The older one may have `waits_s` for the store, while the newest one has not.
    """
    await trio.sleep(1)
    owner, other = await replicas.two()
    places = {"the owner": owner, "elsewhere": other}
    browser = await owner.browse(PLAIN)
    call = await browser.call(1, "step")
    await call.hang_up()
    inner = places[first_at].reached.inner
    find, lookups = inner.grants, count()

    async def grants(stream: str) -> Sequence[Grant]:
        if next(lookups) == 0:
            await trio.sleep(waits_s)
        return await find(stream)

    inner.grants = grants  # type: ignore[method-assign]
    gets = []
    for place in first_at, newest_at:
        client = await places[place].browse(PLAIN, browser.session)
        gets.append(client.ask("GET", accept=EVENTS, last_event_id=call.ids[0]))
        await trio.sleep(0.01)
    await trio.sleep(0.5)
    owner.steps.finish()
    await trio.sleep(0.5)
    assert all(get.is_whole for get in gets)
    told = [message for get in gets for _, message in get.events if message]
    assert [text_of(message) for message in told] == ["done"]


async def test_a_resume_that_is_overtaken_under_its_own_id_ends_in_silence(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    await trio.sleep(1)
    owner = await replicas.start()
    browser = await owner.browse(REQUESTS)
    call = await browser.call(7, "step")
    token = call.events[1][1]["params"]["resumeToken"]  # type: ignore[index]
    await call.hang_up()
    find, lookups = owner.running.engine.operations.find, count()

    async def find_late(session: Session, intent: Any) -> Stream:
        if next(lookups) == 0:
            await trio.sleep(0.3)
        return await find(session, intent)

    owner.running.engine.operations.find = find_late  # type: ignore[method-assign]
    resumes = []
    for _ in range(2):
        asked = {"id": 7, "method": RESUME_REQUEST, "params": {"resumeToken": token}}
        resumes.append(browser.ask("POST", {"jsonrpc": "2.0"} | asked))
        await trio.sleep(0.01)
    await trio.sleep(0.5)
    owner.steps.finish()
    await wait_all_tasks_blocked()
    assert all(each.is_whole for each in resumes)
    told = [message for each in resumes for _, message in each.events if message]
    assert [text_of(message) for message in told if "id" in message] == ["done"]


async def test_a_resumes_own_response_goes_on_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its grant was made at a follower, and is found at the owner."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(EXTENDED)
    first = await browser.call(1, "step")
    stream = first.events[1][1]["params"]["stream"]  # type: ignore[index]
    elsewhere = await ours.browse(EXTENDED, browser.session)
    second = await elsewhere.post(2, "stream/resume", streamId=stream["streamId"])
    theirs.steps.log("a")
    await wait_all_tasks_blocked()
    assert logged(second) == ["a"]
    await second.hang_up()
    third = await browser.go_on(second.ids[-1])
    theirs.steps.finish()
    await wait_all_tasks_blocked()
    reply = third.events[-1][1]
    assert reply is not None
    assert reply["id"] == 2
    assert text_of(reply["result"]["_meta"]["mcp-streams/response"]) == "done"


async def test_any_session_of_an_authenticated_caller_may_continue_a_response_elsewhere(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """As after a restart: which session began the call is not known there."""
    ours, theirs = await replicas.two()
    first = await (await theirs.browse(PLAIN, caller=ALICE)).call(1, "step")
    theirs.steps.log("a")
    await wait_all_tasks_blocked()
    await first.hang_up()
    stranger = await ours.browse(PLAIN, caller=Caller("bob", lambda: math.inf))
    assert (await stranger.go_on(first.ids[0])).status == 400
    second = await (await ours.browse(PLAIN, caller=ALICE)).go_on(first.ids[0])
    assert logged(second) == ["a"]


async def test_a_session_forgets_the_streams_that_it_has_followed(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    first = await browser.call(1, "step")
    second = await (await ours.browse(PLAIN, browser.session)).go_on(first.ids[0])
    theirs.steps.finish()
    await wait_all_tasks_blocked()
    assert second.is_whole
    (session,) = ours.running.engine.sessions
    assert len(session.streams) == 1
    await trio.sleep(3 * LEASE_S)
    assert session.streams == {}


async def test_another_sessions_event_ids_lead_nowhere_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await (await theirs.browse(PLAIN)).call(1, "step")
    assert (await (await ours.browse(PLAIN)).go_on(first.ids[0])).status == 400


# Pages


async def test_pages_go_on_at_another_replica(autojump_clock: MockClock) -> None:
    async with open_replicas(counting) as replicas:
        ours, theirs = await replicas.two()
        first, second = await theirs.dial(PLAIN), await ours.dial(PLAIN)
        token = next_of(await first.page(1, "count", to=4))
        page = await second.page(2, "count", token, to=4)
        assert (page_text(page), said(second.seen)) == ("2", [2])
        assert await second.page(3, "count", token, to=4) == page, "the same page twice"
        third = await first.page(4, "count", next_of(page), to=4)
        assert page_text(third) == "3"
        assert reason(await second.page(5, "count", token, to=4)) == "invalid_token"
        last = await second.page(6, "count", next_of(third), to=4)
        assert is_last(last)
        assert (await first.page(7, "count", "A" * 80, to=4))["code"] == -32602


# Resume tokens, keys and waits


async def test_a_response_that_is_read_before_its_record_has_the_id_of_the_resume(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await replicas.two()
    _, policy = await requested(theirs)
    talker = await ours.dial(REQUESTS)
    await talker.ask(3, RESUME_REQUEST, **policy)
    await wait_all_tasks_blocked(0.1)
    inner, [record] = ours.reached.inner, replicas.store.records.values()
    read, follow, is_read = inner.read, inner.follow, trio.Event()

    async def follow_late(stream: str) -> Record | None:
        await is_read.wait()
        return await follow(stream)

    async def read_late(stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        monkeypatch.setattr(inner, "follow", follow_late)
        theirs.steps.finish("at the end")
        while replicas.store.records[record.stream].outcome is Outcome.LIVE:
            await trio.sleep(0.1)
        runs = await read(stream, after, bytes_max=bytes_max)
        is_read.set()
        return runs

    monkeypatch.setattr(inner, "read", read_late)
    theirs.steps.log("before")
    assert text_of(await talker.answer(3)) == "at the end"


async def test_a_resume_token_leads_to_another_replicas_stream(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, policy = await requested(theirs)
    talker = await ours.dial(REQUESTS, principal="bob")
    refused = await talker.request(2, RESUME_REQUEST, resumeToken=policy["resumeToken"][:-2] + "AA")
    assert refused["code"] == -32602
    await first.leave()
    theirs.steps.finish("for the token")
    await talker.ask(3, RESUME_REQUEST, **policy)
    assert text_of(await talker.answer(3)) == "for the token"


async def test_replicas_with_other_keys_know_no_token_of_each_other(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    theirs = await replicas.start()
    newer, older = b"n" * 32, b"o" * 32
    ours = await replicas.start(keyring=Keyring([newer]))
    _, policy = await requested(theirs)
    talker = await ours.dial(REQUESTS, principal="bob")
    assert (await talker.request(2, RESUME_REQUEST, **policy))["code"] == -32602
    # While the keys are changed, tokens of either key are known to both.
    both = await replicas.start(keyring=Keyring([older, newer]))
    _, policy = await requested(ours)
    changed = await both.dial(REQUESTS, principal="bob")
    ours.steps.finish("under the newer key")
    await changed.ask(3, RESUME_REQUEST, **policy)
    assert text_of(await changed.answer(3)) == "under the newer key"


async def test_a_key_leads_to_the_call_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, second = await theirs.dial(), await ours.dial()
    await idempotency.call(first, 1)
    await first.announced()
    await idempotency.call(second, 7)
    theirs.steps.finish("run once")
    assert text_of(await second.answer(7)) == "run once"
    other = await idempotency.answered(second, 8, arguments={"other": 1})
    assert other["code"] == -32602, "a key stands for one call"


async def test_a_call_is_waited_for_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It detaches from its client at one replica, and another one has the client that waits."""
    patient = PatienceSettings(patience_s=2)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "step")
    interim = (await first.answer(1))["result"]
    code = interim["_meta"]["mcp-streams/call"]
    await second.call(2, "wait_for_call", call=code)
    theirs.steps.log("while it waits")
    await second.find(lambda m: said([m]) == ["while it waits"])
    theirs.steps.finish("fetched elsewhere")
    assert text_of(await second.answer(2)) == "fetched elsewhere"
    await trio.sleep(2 * LEASE_S)
    await first.call(3, "wait_for_call", call=code)
    assert text_of(await first.answer(3)) == "fetched elsewhere", "the response stays"


async def test_a_call_that_ended_at_another_replica_is_not_run_again(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    once = PatienceSettings(once=("step",))
    theirs, ours = [await replicas.start(patience=once) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "step")
    theirs.steps.finish("run once")
    assert text_of(await first.answer(1)) == "run once"
    await second.call(2, "step")
    assert text_of(await second.answer(2)) == "run once"
    assert ours.streams == []


async def test_patience_ends_a_wait_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Each request has patience of its own, whichever replica it came to."""
    patient = PatienceSettings(patience_s=2)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "step")
    code = (await first.answer(1))["result"]["_meta"]["mcp-streams/call"]
    for request_id in 2, 3:
        before = trio.current_time()
        await second.call(request_id, "wait_for_call", call=code)
        interim = (await second.answer(request_id))["result"]
        assert interim["_meta"]["mcp-streams/call"] == code
        assert 2 <= trio.current_time() - before < 2 + LEASE_S
    await second.call(4, "wait_for_call", call=code)
    theirs.steps.finish("fetched in the end")
    assert text_of(await second.answer(4)) == "fetched in the end"


async def test_patience_ends_a_wait_for_a_call_whose_replica_has_died(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    patient = PatienceSettings(patience_s=LEASE_S / 4)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "step")
    code = (await first.answer(1))["result"]["_meta"]["mcp-streams/call"]
    theirs.kill()
    before = trio.current_time()
    await second.call(1, "wait_for_call", call=code)
    interim = (await second.answer(1))["result"]
    assert interim["_meta"]["mcp-streams/call"] == code
    assert "does not answer now" in interim["content"][0]["text"]
    assert trio.current_time() - before < LEASE_S / 2
    await trio.sleep(TAKEN_S)
    await second.call(2, "wait_for_call", call=code)
    assert reason((await second.answer(2))["error"]) == "interrupted"


async def test_a_wait_that_begins_while_the_call_changes_its_owner_is_told_to_come_again(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = PatienceSettings(patience_s=20)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "again")
    code = (await first.answer(1))["result"]["_meta"]["mcp-streams/call"]
    theirs.again.log("unheard")
    await trio.sleep(1)
    read = ours.reached.inner.read

    async def read_late(*given: Any, **how: Any) -> Any:
        await trio.sleep(TAKEN_S)
        return await read(*given, **how)

    monkeypatch.setattr(ours.reached.inner, "read", read_late)
    await second.call(2, "wait_for_call", call=code)
    await wait_all_tasks_blocked()
    theirs.kill()
    refused = (await second.answer(2))["error"]
    assert reason(refused) == "unavailable", "the stream that it has found hears no news any more"
    monkeypatch.undo()
    ours.again.log("unheard")
    ours.again.finish("fetched in the end")
    await second.call(3, "wait_for_call", call=code)
    assert text_of(await second.answer(3)) == "fetched in the end"


async def test_a_client_that_resumes_a_patient_call_elsewhere_gets_no_interim_answer(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    patient = PatienceSettings(patience_s=2)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(), await ours.dial()
    stream = await first.begin(1, "step")
    await second.ask(2, "stream/resume", **named(stream), after=0)
    await trio.sleep(3)
    theirs.steps.finish("no interim answer")
    assert text_of(await second.answer(1)) == "no interim answer"


@pytest.mark.parametrize("is_newest_at_owner", [True, False])
async def test_an_attachment_that_the_owner_hears_of_late_ends_no_newer_one(
    replicas: Replicas, autojump_clock: MockClock, *, is_newest_at_owner: bool
) -> None:
    """Its client has received something there, and has come back elsewhere after that."""
    owner, other = await replicas.two()
    third = await replicas.start()
    first = await owner.dial()
    stream = await first.begin(1, "step")
    first.cable.cut()
    owner.steps.log("for each")
    await wait_all_tasks_blocked()
    is_heard = attachments_held(other)
    second = await other.dial()
    await second.ask(2, "stream/resume", **named(stream))
    await second.find(lambda m: said([m]) == ["for each"])
    await trio.sleep(0.01)
    newest = await (owner if is_newest_at_owner else third).dial()
    await newest.ask(3, "stream/resume", **named(stream))
    await newest.find(lambda m: said([m]) == ["for each"])
    await wait_all_tasks_blocked()
    is_heard.set()
    assert (await second.answer(2))["result"] == SUPERSEDED
    owner.steps.finish("to the newest")
    assert text_of(await newest.answer(1)) == "to the newest"


async def test_progress_that_no_client_waits_for_gets_no_number(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """A client elsewhere has got an interim answer, and waits no longer."""
    patient = PatienceSettings(patience_s=2)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(PLAIN, "os(7)"), await ours.dial(PLAIN, "os(7)")
    await first.call(1, "step", token="first")
    code = (await first.answer(1))["result"]["_meta"]["mcp-streams/call"]
    await second.call(2, "wait_for_call", token="second", call=code)
    await wait_all_tasks_blocked()
    theirs.steps.do(lambda call: call.progress(1, 2))
    told = await second.find(lambda m: m.get("method") == "notifications/progress")
    assert told["params"]["progressToken"] == "second"
    assert "_meta" in (await second.answer(2))["result"]
    await wait_all_tasks_blocked()
    (before,) = replicas.store.records.values()
    theirs.steps.do(lambda call: call.progress(2, 2))
    await trio.sleep(1)
    (after,) = replicas.store.records.values()
    assert after.last == before.last


async def test_a_response_that_was_waited_for_elsewhere_stays_when_it_was_confirmed(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    patient = PatienceSettings(patience_s=60)
    theirs, ours = [await replicas.start(patience=patient) for _ in range(2)]
    first, second = await theirs.dial(POSITIONS, "os(7)"), await ours.dial(POSITIONS, "os(7)")
    stream = await first.begin(1, "step")
    await first.leave()
    await second.call(2, "list_calls")
    (listed,) = (await second.answer(2))["result"]["structuredContent"]["calls"]
    await second.call(3, "wait_for_call", call=listed["call"])
    await wait_all_tasks_blocked()
    theirs.steps.finish("to be kept")
    assert text_of(await second.answer(3)) == "to be kept"
    await second.tell("notifications/stream/ack", **named(stream), seq=1)
    await trio.sleep(2 * LEASE_S)
    await second.call(4, "wait_for_call", call=listed["call"])
    assert text_of(await second.answer(4)) == "to be kept"


PLACES = ["one", "owner and other", "other and owner", "other", "others"]


async def waiting_at(replicas: Replicas, places: str) -> tuple[Replica, list[Talker], str]:
    """A running call of `step` at its owner, which no client waits for, two clients, its name."""
    patient = PatienceSettings(patience_s=60)
    owner, other, third = [await replicas.start(patience=patient) for _ in range(3)]
    at = {
        "one": (owner, owner),
        "owner and other": (owner, other),
        "other and owner": (other, owner),
        "other": (other, other),
        "others": (other, third),
    }[places]
    first = await owner.dial(POSITIONS, "os(7)")
    await first.begin(1, "step")
    await first.leave()
    clients = [await each.dial(PLAIN, "os(7)") for each in at]
    await clients[0].call(0, "list_calls")
    (listed,) = (await clients[0].answer(0))["result"]["structuredContent"]["calls"]
    return owner, clients, listed["call"]


@pytest.mark.parametrize("gap_s", [0.0, 0.5])
@pytest.mark.parametrize("places", PLACES)
async def test_a_client_that_waits_is_told_that_another_one_waits_too(
    replicas: Replicas, autojump_clock: MockClock, places: str, gap_s: float
) -> None:
    """It gets an interim answer, as in one process, and no error."""
    owner, clients, name = await waiting_at(replicas, places)
    for client in clients:
        await client.call(2, "wait_for_call", call=name)
        await trio.sleep(gap_s)
    await trio.sleep(0.5)
    owner.steps.finish("for the newest")
    answers = [(await client.answer(2))["result"] for client in clients]
    told = sorted(answers, key=lambda answer: "_meta" in answer)
    assert text_of({"result": told[0]}) == "for the newest"
    assert told[1]["_meta"]["mcp-streams/call"] == name
    if gap_s:
        assert told == answers[::-1]
    await clients[0].call(3, "wait_for_call", call=name)
    assert text_of(await clients[0].answer(3)) == "for the newest"


@pytest.mark.parametrize("is_first_waiting", [True, False])
@pytest.mark.parametrize("places", PLACES)
async def test_two_clients_that_wait_for_an_ended_call_both_get_its_result(
    replicas: Replicas, autojump_clock: MockClock, places: str, *, is_first_waiting: bool
) -> None:
    owner, clients, name = await waiting_at(replicas, places)
    if is_first_waiting:
        await clients[0].call(2, "wait_for_call", call=name)
        await trio.sleep(0.5)
    result = "for both" * 100_000
    owner.steps.finish(result)
    await owner.running.engine._committer.settled()
    for client in clients[is_first_waiting:]:
        await client.call(2, "wait_for_call", call=name)
    assert [text_of(await client.answer(2)) for client in clients] == [result, result]


@pytest.mark.parametrize("waits_at", ["one", "other"])
async def test_a_client_waits_no_longer_than_it_has_said(
    replicas: Replicas, autojump_clock: MockClock, waits_at: str
) -> None:
    _, clients, name = await waiting_at(replicas, waits_at)
    began_at = trio.current_time()
    await clients[0].call(2, "wait_for_call", call=name, wait_s=3)
    assert (await clients[0].answer(2))["result"]["_meta"]["mcp-streams/call"] == name
    assert 3 <= trio.current_time() - began_at < 3 + LEASE_S


async def test_a_client_that_waits_elsewhere_displaces_none_that_is_told_all_of_the_call(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    owner, other = [await replicas.start(patience=PatienceSettings(patience_s=60)) for _ in "12"]
    first, second = await owner.dial(POSITIONS, "os(7)"), await other.dial(PLAIN, "os(7)")
    await first.begin(1, "step")
    await second.call(0, "list_calls")
    (listed,) = (await second.answer(0))["result"]["structuredContent"]["calls"]
    await second.call(2, "wait_for_call", call=listed["call"])
    assert "Another client" in text_of(await second.answer(2))
    owner.steps.finish("to the first")
    assert text_of(await first.answer(1)) == "to the first"
    await first.leave()
    await trio.sleep(1)
    await second.call(3, "wait_for_call", call=listed["call"])
    assert text_of(await second.answer(3)) == "to the first"


async def test_one_client_waits_twice_at_two_replicas(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """One of its requests gets an interim answer, and the other one the result."""
    owner, other, third = [
        await replicas.start(patience=PatienceSettings(patience_s=60)) for _ in range(3)
    ]
    first = await owner.browse(PLAIN)
    await (await first.call(1, "step")).hang_up()
    (listed,) = (await first.call(2, "list_calls")).json["result"]["structuredContent"]["calls"]
    waits = []
    for number, replica in enumerate([other, third], 3):
        browser = await replica.browse(PLAIN, first.session)
        waits.append(await browser.call(number, "wait_for_call", call=listed["call"]))
        await trio.sleep(0.5)
    owner.steps.finish("to the newest")
    await trio.sleep(0.5)
    answers = [(wait.events[-1][1] or {})["result"] for wait in waits]
    assert answers[0]["_meta"]["mcp-streams/call"] == listed["call"]
    assert text_of({"result": answers[1]}) == "to the newest"
