"""Sessions over HTTP at any replica, what they are told, and limits that all replicas share."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.exchange import Caller
from streams.messages import Message
from streams.server.http.endpoint import HELD_S
from tests.rigs import idempotency
from tests.rigs.replicas import TAKEN_S, Replica, Replicas, open_replicas
from tests.rigs.server import (
    EXTENDED,
    PLAIN,
    POSITIONS,
    STREAMS,
    Json,
    Talker,
    named,
    reason,
    text_of,
)
from tests.rigs.shared_memory import LEASE_S
from tests.rigs.web import EVENTS, JSON, Answer, Browser, logged

UPDATED = "notifications/resources/updated"
TOOLS_CHANGED = "notifications/tools/list_changed"


def make(**limits: Any) -> Server:
    server = Server("tested", resume_min_s=0, announce_after_s=0, limits=Limits(**limits))

    @server.resource("x:{name}")
    async def resource(name: str) -> str:
        return name

    @server.tool(pages=True)
    async def count() -> AsyncIterator[str]:
        for number in range(5):
            yield str(number)

    return server


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


def delay(replica: Replica, request: str, by_s: float) -> None:
    """Let a kind of request to the store take longer from now on."""
    inner = replica.reached.inner
    ask = getattr(inner, request)

    async def ask_later(*what: Any) -> Any:
        await trio.sleep(by_s)
        return await ask(*what)

    setattr(inner, request, ask_later)


async def elsewhere(replica: Replica, browser: Browser) -> Browser:
    """The same client at another replica."""
    return await replica.browse({}, browser.session, caller=browser.caller)


async def listening(browser: Browser) -> Answer:
    """Its standing stream."""
    return await browser.fetch("GET", accept=EVENTS)


def notices(answer: Answer) -> list[Json]:
    return [message for _, message in answer.events if message]


# Sessions


async def test_a_change_of_a_session_counts_before_replicas_hear_of_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    first, second = await replicas.two()
    await trio.sleep(LEASE_S)  # each has seen the other
    browser = await first.browse(STREAMS)
    used = await elsewhere(second, browser)
    assert (await used.post(1, "ping")).status == 200

    async def send(*_: object, **how: object) -> bool:
        return True  # and nothing arrives

    first.reached.send = send
    assert (await browser.post(2, "logging/setLevel", level="error")).status == 200
    assert (await used.post(3, "ping")).status == 200
    assert [session.level for session in second.running.engine.sessions] == ["error"]


async def test_an_ended_session_is_unknown_before_replicas_hear_of_its_end(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """MCP: "after which it MUST respond to requests containing that session ID with HTTP 404"."""
    first, second = await replicas.two()
    await trio.sleep(LEASE_S)  # each has seen the other
    browser = await first.browse(STREAMS)
    used = await elsewhere(second, browser)
    assert (await used.post(1, "ping")).status == 200

    async def send(*_: object, **how: object) -> bool:
        return True  # and nothing arrives

    first.reached.send = send
    assert (await browser.fetch("DELETE")).status == 200
    assert (await used.post(2, "ping")).status == 404


async def test_a_session_is_begun_used_and_ended_at_three_replicas(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    first, second, third = [await replicas.start() for _ in range(3)]
    browser = await first.browse(STREAMS)
    used = await elsewhere(second, browser)
    answer = await used.call(1, "step", JSON)
    second.steps.finish("here")
    await wait_all_tasks_blocked()
    assert text_of(answer.json) == "here"
    assert (await (await elsewhere(third, browser)).fetch("DELETE")).status == 200
    for replica in first, second, third:
        gone = await (await elsewhere(replica, browser)).post(2, "ping")
        assert (gone.status, gone.json["error"]["message"]) == (
            404,
            "Unknown session: initialize again.",
        )
    assert await replicas.store.kept.count_sessions() == 0


async def test_a_session_that_is_ended_twice_at_once_ends_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    replica = await replicas.start()
    browser = await replica.browse(PLAIN)
    await browser.call(1, "step")
    answers = [browser.ask("DELETE") for _ in range(2)]
    await wait_all_tasks_blocked()
    assert [answer.status for answer in answers] == [200, 200]
    assert replica.streams == []
    assert (await browser.post(2, "ping")).status == 404


async def test_the_end_of_a_session_ends_its_responses_at_other_replicas(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    call, standing = await browser.call(1, "step"), await listening(browser)
    assert (await (await elsewhere(ours, browser)).fetch("DELETE")).status == 200
    await wait_all_tasks_blocked()
    assert call.is_whole
    assert standing.is_whole
    await trio.sleep(LEASE_S)
    assert list(theirs.running.engine.sessions) == []


async def test_the_end_of_a_session_cancels_its_calls_at_other_replicas(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN, caller=Caller("alice", lambda: math.inf))
    await browser.call(1, "step")
    assert (await (await elsewhere(ours, browser)).fetch("DELETE")).status == 200
    await wait_all_tasks_blocked()
    assert theirs.steps.was_cancelled


async def test_pages_outlive_their_session_at_every_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    page = (await browser.call(1, "count")).events[-1][1]["result"]
    assert (await (await elsewhere(ours, browser)).fetch("DELETE")).status == 200
    await trio.sleep(LEASE_S)
    another = await ours.browse(PLAIN)
    second = await another.call(1, "count", resumeToken=page["nextResumeToken"])
    assert text_of(second.events[-1][1]) == "1"


async def test_another_caller_has_no_session_of_this_one_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    stranger = await ours.browse(PLAIN, "A" * len(browser.session or ""))
    assert (await stranger.post(1, "ping")).status == 404


async def test_the_log_level_that_is_set_at_one_replica_holds_at_all(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """For a call that runs where its client is not, and for one that another replica runs."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(EXTENDED)
    there = await browser.call(1, "step")
    stream = there.events[1][1]["params"]["stream"]  # type: ignore[index]
    here = await elsewhere(ours, browser)
    theirs.steps.log("heard")
    await wait_all_tasks_blocked()
    await here.post(2, "logging/setLevel", level="warning")
    theirs.steps.log("not heard")
    await wait_all_tasks_blocked()
    assert logged(there) == ["heard"]
    followed = await here.post(3, "stream/resume", streamId=stream["streamId"])
    assert logged(followed) == ["heard"], "it was not confirmed"
    theirs.steps.log("nor this")
    await wait_all_tasks_blocked()
    await browser.post(4, "logging/setLevel", level="debug")
    theirs.steps.log("this again")
    await wait_all_tasks_blocked()
    assert logged(followed) == ["heard", "this again"]


@pytest.mark.parametrize("is_stored_before", [True, False])
async def test_a_level_that_is_set_meanwhile_is_not_taken_back(
    replicas: Replicas, autojump_clock: MockClock, *, is_stored_before: bool
) -> None:
    """Another request of the session has read the former level from the journal."""
    first, _ = await replicas.two()
    await trio.sleep(LEASE_S)
    browser = await first.browse(EXTENDED)
    inner, may_commit, may_read = first.reached.inner, trio.Event(), trio.Event()

    async def commit(changes: Any) -> Any:
        await may_commit.wait()
        return await inner.commit(changes)

    async def session(key: str) -> Any:
        found = await inner.session(key)
        await may_read.wait()
        return found

    first.reached.commit = commit
    setting = await browser.post(1, "logging/setLevel", level="error")
    first.reached.session = session
    pinged = await browser.post(2, "ping")
    for event in (may_commit, may_read) if is_stored_before else (may_read, may_commit):
        event.set()
        await wait_all_tasks_blocked()
    assert (setting.status, pinged.status) == (200, 200)
    (held,) = first.running.engine.sessions
    assert held.level == "error"


async def test_the_log_level_of_a_connection_holds_for_the_stream_of_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial()).begin(1, "step")
    talker = await ours.dial(POSITIONS)
    await talker.ask(2, "stream/resume", **named(stream), after=0)
    await talker.announced()
    await talker.request(3, "logging/setLevel", level="error")
    await wait_all_tasks_blocked()
    theirs.steps.log("not heard")
    theirs.steps.finish()
    await talker.answer(1)
    assert "not heard" not in str(talker.seen)


async def test_the_id_of_a_request_is_in_use_at_its_replica_alone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """A cancel ends the request at the replica that it comes to, or else at the others."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    await browser.call(1, "step")
    again = await browser.call(1, "step")
    assert "in use" in again.json["error"]["message"]
    here = await elsewhere(ours, browser)
    await here.call(1, "step")
    await here.tell("notifications/cancelled", requestId=1)
    assert (ours.steps.was_cancelled, theirs.steps.was_cancelled) == (True, False)
    await here.tell("notifications/cancelled", requestId=1)
    assert theirs.steps.was_cancelled


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_response_that_has_ended_at_one_replica_is_continued_at_none(
    replicas: Replicas, autojump_clock: MockClock, *, is_cancelled: bool
) -> None:
    """Else the client that was displaced, or has cancelled, would displace the newer one."""
    first, second, third = [await replicas.start() for _ in range(3)]
    browser = await first.browse(EXTENDED)
    call = await browser.call(1, "step")
    stream = named(call.events[1][1]["params"]["stream"])  # type: ignore[index]
    if is_cancelled:
        response = await browser.post(2, "stream/resume", **stream, after=0)
        await (await elsewhere(second, browser)).tell("notifications/cancelled", requestId=2)
    else:
        response = call
    newer = await second.dial()
    await newer.ask(3, "stream/resume", **stream, after=0)
    await newer.announced()
    await wait_all_tasks_blocked()
    late = await (await elsewhere(third, browser)).fetch(
        "GET", accept=EVENTS, last_event_id=response.ids[-1]
    )
    if is_cancelled:
        assert late.status == 405
    else:
        assert reason(late.events[-1][1]["error"]) == "superseded"  # type: ignore[index]
    first.steps.finish("for the newer one")
    assert text_of(await newer.answer(1)) == "for the newer one"


# Notices


async def test_a_notification_reaches_the_clients_of_all_replicas(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talkers = [await ours.dial(PLAIN), await theirs.dial(PLAIN)]
    standing = await listening(await theirs.browse(PLAIN))
    await ours.running.notify_all("acme/news", {"n": 1})
    for talker in talkers:
        assert (await talker.read())["params"] == {"n": 1}
    await wait_all_tasks_blocked()
    assert [m["method"] for m in notices(standing)] == ["acme/news"]


async def test_clients_of_all_replicas_are_told_that_a_list_has_changed(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talker = await theirs.dial(PLAIN)

    @ours.server.tool
    async def new() -> str:
        return ""

    assert (await talker.read())["method"] == TOOLS_CHANGED


async def test_subscribers_of_all_replicas_hear_of_a_change(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talkers = [await replica.dial(PLAIN) for replica in (ours, theirs)]
    for talker in talkers:
        await talker.request(1, "resources/subscribe", uri="x:1")
    other = await theirs.dial(PLAIN)
    await other.request(1, "resources/subscribe", uri="x:2")
    await ours.server.resource_updated("x:1")
    for talker in talkers:
        told = await talker.read()
        assert (told["method"], told["params"]) == (UPDATED, {"uri": "x:1"})
    other.seen.clear()
    assert await other.request(2, "ping") == {}
    assert len(other.seen) == 1


@pytest.mark.parametrize("is_told_here", [True, False])
async def test_a_client_that_goes_on_listening_elsewhere_hears_that_a_list_has_changed(
    replicas: Replicas, autojump_clock: MockClock, *, is_told_here: bool
) -> None:
    """The session is unknown there until then, and so was told nothing."""
    first, second = await replicas.two()
    browser = await first.browse(PLAIN)
    standing = await listening(browser)
    first.server.remove_tool("again")
    await wait_all_tasks_blocked()
    assert [m["method"] for m in notices(standing)] == [TOOLS_CHANGED]
    await standing.hang_up()
    (second if is_told_here else first).server.remove_tool("step")
    await wait_all_tasks_blocked()
    there = await (await elsewhere(second, browser)).go_on(standing.ids[-1])
    assert [m["method"] for m in notices(there)] == [TOOLS_CHANGED]


async def test_the_newest_standing_stream_of_a_session_wins_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """MCP: a message is sent on one of the streams of a client, and not on several."""
    first, second = await replicas.two()
    browser = await first.browse(PLAIN)
    used = await elsewhere(second, browser)
    streams = []
    for place in browser, used, browser, used:
        streams.append(await listening(place))
        await wait_all_tasks_blocked()
        assert [each.is_whole for each in streams] == [True] * (len(streams) - 1) + [False]
        await trio.sleep(LEASE_S)
    await first.running.notify_all("acme/news", {"n": 1})
    await wait_all_tasks_blocked()
    assert [len(notices(each)) for each in streams] == [0, 0, 0, 1]


async def test_a_request_that_belongs_to_no_call_is_answered_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    first, second = await replicas.two()
    browser = await first.browse(PLAIN)
    standing = await listening(browser)
    stranger = await second.browse(PLAIN)
    [session] = first.running.engine.clients()
    answers = list[Message]()

    async def ask() -> None:
        answers.append(await session.ask("roots/list", {}))

    first.nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    [asked] = notices(standing)
    said = {"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": []}}
    await stranger.fetch("POST", said)
    await wait_all_tasks_blocked()
    assert not answers
    assert (await (await elsewhere(second, browser)).fetch("POST", said)).status == 202
    await wait_all_tasks_blocked()
    assert [each.id for each in answers] == [asked["id"]]


async def test_a_standing_stream_is_not_ended_by_an_older_one_that_is_heard_of_late(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    first, second = await replicas.two()
    browser = await first.browse(PLAIN)
    may_send = trio.Event()

    async def send(*given: Any, **how: Any) -> None:
        await may_send.wait()
        await first.reached.inner.send(*given, **how)

    first.reached.send = send
    older = await listening(browser)
    await trio.sleep(0.01)
    newer = await listening(await elsewhere(second, browser))
    await trio.sleep(0.01)
    may_send.set()
    await wait_all_tasks_blocked()
    assert (older.is_whole, newer.is_whole) == (True, False)


async def test_a_standing_stream_has_the_changes_that_were_subscribed_to_elsewhere(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Subscribed at one replica, changed at another one, listening at a third, which reads the
    subscriptions slowly.
    """
    first, second, third = [await replicas.start() for _ in range(3)]
    browser = await third.browse(PLAIN)
    standing = await listening(browser)
    delay(third, "session", 0.1)
    await (await elsewhere(first, browser)).post(1, "resources/subscribe", uri="x:1")
    await second.server.resource_updated("x:1")
    await second.server.resource_updated("x:2")
    await trio.sleep(1)
    assert [m["params"] for m in notices(standing)] == [{"uri": "x:1"}]
    await (await elsewhere(second, browser)).post(2, "resources/unsubscribe", uri="x:1")
    await first.server.resource_updated("x:1")
    await trio.sleep(1)
    assert len(notices(standing)) == 1


async def test_the_newest_change_of_a_resource_waits_while_the_store_is_away(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talker = await theirs.dial(PLAIN)
    await talker.request(1, "resources/subscribe", uri="x:1")
    ours.reached.cut()
    for n in range(3_000):
        await ours.running.notify_all("acme/news", {"n": n})
    for _ in range(3_000):
        await ours.server.resource_updated("x:1")
    replica = ours.running.engine._replicas
    assert replica is not None
    assert len(replica.outbox._notices) <= 1_500
    ours.reached.mend()
    told = await talker.find(lambda m: m.get("method") == UPDATED)
    assert told["params"] == {"uri": "x:1"}
    others = [m["params"]["n"] for m in talker.seen if m.get("method") == "acme/news"]
    assert others[-1] == 2_999
    assert others == sorted(others)
    await wait_all_tasks_blocked()
    talker.seen.clear()
    assert await talker.request(2, "ping") == {}
    assert len(talker.seen) == 1, "it is told once"


# Keys


async def test_a_key_that_is_raced_at_two_replicas_runs_its_tool_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    running = [await replicas.start() for _ in range(3)]
    talkers = [await replica.dial() for replica in running for _ in range(2)]
    async with trio.open_nursery() as nursery:
        for number, talker in enumerate(talkers):
            nursery.start_soon(idempotency.call, talker, number)
    await wait_all_tasks_blocked()
    (runner,) = [replica for replica in running if replica.running.running_tools]
    runner.steps.finish("run once")
    results = []
    with trio.move_on_after(TAKEN_S):
        async with trio.open_nursery() as nursery:
            for number, talker in enumerate(talkers):

                async def wait(talker: Talker = talker, number: int = number) -> None:
                    answer = await talker.answer(number)
                    results.append(answer)

                nursery.start_soon(wait)
    texts = [text_of(answer) for answer in results if "result" in answer]
    reasons = {reason(answer["error"]) for answer in results if "error" in answer}
    assert (texts, reasons) == (["run once"], {"superseded"}), "the newest delivery wins"


async def test_a_key_is_free_again_once_the_replica_that_looked_it_up_is_dead(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    journal = theirs.reached.inner
    async with journal.turn(b"held"):
        theirs.kill()
        began = trio.current_time()
        async with ours.reached.inner.turn(b"held"):
            assert trio.current_time() - began <= LEASE_S + 0.1


async def test_a_key_is_free_again_once_its_replica_has_lost_the_call_before_it_was_stored(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = await replicas.two()
    browser = await ours.browse(PLAIN)
    await trio.sleep(LEASE_S)
    engine = ours.running.engine
    begin = engine.begin

    def begin_and_cut(*given: Any, **how: Any) -> None:
        begin(*given, **how)
        ours.reached.cut()

    async def call(number: int) -> Answer:
        meta = {"mcp-streams/idempotencyKey": idempotency.LONG}
        return await browser.post(number, "tools/call", name="step", arguments={}, _meta=meta)

    monkeypatch.setattr(engine, "begin", begin_and_cut)
    first = await call(1)
    monkeypatch.undo()
    await trio.sleep(TAKEN_S)
    ours.reached.mend()
    await trio.sleep(LEASE_S)
    assert first.status == 503, "the call was not begun, and may be sent again"
    ours.steps.finish("run once")
    second = await call(2)
    await trio.sleep(1)
    assert text_of(second.events[-1][1] or {}) == "run once"


async def test_a_call_runs_once_whose_client_goes_elsewhere_before_it_is_stored(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, second = await ours.dial(PLAIN), await theirs.dial(PLAIN)
    delay(ours, "commit", 1.0)
    await idempotency.call(first, 1)
    await trio.sleep(0.1)
    ours.running.engine.hang_up()
    await trio.sleep(0.1)
    theirs.steps.finish("run twice")
    await idempotency.call(second, 1)
    await trio.sleep(2)
    ours.steps.finish("run once")
    assert text_of(await second.answer(1)) == "run once"


async def test_a_call_whose_turn_was_lost_before_it_is_stored_does_not_run(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The store was away for all replicas, for longer than a turn lasts."""
    ours, theirs = await replicas.two()
    first, second = await ours.dial(PLAIN), await theirs.dial(PLAIN)
    delay(ours, "commit", 1.0)
    ours.steps.finish("run twice")
    theirs.steps.finish("run once")
    await idempotency.call(first, 1)
    await trio.sleep(0.1)
    replicas.store.turns.clear()
    assert text_of({"result": await idempotency.answered(second, 1)}) == "run once"
    with pytest.raises(trio.EndOfChannel):
        await first.answer(1)
    again = await ours.dial(PLAIN)
    assert text_of({"result": await idempotency.answered(again, 1)}) == "run once"


# Limits


async def test_streams_of_a_principal_are_counted_over_all_replicas(
    autojump_clock: MockClock,
) -> None:
    """But for those that another replica has begun within the last second."""
    async with open_replicas(lambda: make(streams_per_principal_max=4)) as replicas:
        ours, theirs = await replicas.two()
        first, second = await ours.dial(), await theirs.dial()
        for number in range(2):
            await first.begin(number, "step")
            await second.begin(number, "step")
            await trio.sleep(1.1)
        for talker in first, second:
            refused = await talker.request(9, "tools/call", name="step", arguments={})
            assert reason(refused) == "too_many_streams"
        await (await theirs.dial(principal="bob")).begin(1, "step")
        await first.tell("notifications/cancelled", requestId=0)
        await trio.sleep(1.1)
        await second.begin(10, "step")


async def test_requests_of_a_principal_are_shared_out_over_the_replicas(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: make(requests_per_principal_max=1)) as replicas:
        ours, theirs = await replicas.two()
        await trio.sleep(LEASE_S)
        talkers = [await ours.dial(principal="alice"), await theirs.dial(principal="alice")]
        await trio.sleep(100)
        served = 0
        for talker in talkers:
            for number in range(20):
                served += await talker.request(number, "ping") == {}
        assert 9 <= served <= 11, "ten seconds' worth in all"
        theirs.kill()
        await trio.sleep(100)
        served = sum([await talkers[0].request(n, "ping") == {} for n in range(30, 50)])
        assert 9 <= served <= 11, "all of it, once the other one is gone"


@pytest.mark.parametrize(("size", "is_refused"), [(4_000, False), (6_000, True)])
async def test_undelivered_bytes_of_a_principal_are_shared_out_over_the_replicas(
    autojump_clock: MockClock, *, size: int, is_refused: bool
) -> None:
    """Of two replicas each allows the half. The other one's share comes with its end."""
    async with open_replicas(lambda: make(bytes_per_principal_max=10_000)) as replicas:
        ours, theirs = await replicas.two()
        await trio.sleep(LEASE_S)
        first = await ours.dial()
        await first.begin(1, "step")
        await first.leave()
        ours.steps.log("x" * size)
        await trio.sleep(2)
        talker = await ours.dial()
        await talker.call(2, "again")
        told = await talker.read()
        assert ("error" in told) == is_refused
        if is_refused:
            assert (reason(told["error"]), told["error"]["data"]["limit"]) == (
                "too_many_bytes",
                5_000,
            )
        await theirs.stop()
        await trio.sleep(TAKEN_S)
        await talker.begin(3, "again")


async def test_sessions_of_a_principal_are_counted_over_all_replicas(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: make(sessions_max=2)) as replicas:
        ours, theirs = await replicas.two()
        await ours.browse(PLAIN)
        browser = await theirs.browse(PLAIN)
        for replica in ours, theirs:
            hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
            refused = await Browser(replica, replica.nursery).post(1, "initialize", **hello)
            assert refused.status == 503
            assert "Too many sessions" in refused.json["error"]["message"]
        await (await elsewhere(ours, browser)).fetch("DELETE")
        await theirs.browse(PLAIN)


# The store is away


@pytest.mark.parametrize("is_known", [True, False])
async def test_every_http_verb_is_refused_with_advice_while_the_store_is_away(
    replicas: Replicas,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    *,
    is_known: bool,
) -> None:
    """`is_known`: a commit has failed before."""
    ours, theirs = await replicas.two()
    browser, other = await ours.browse(PLAIN), await theirs.browse(PLAIN)
    call = await browser.call(1, "step")
    ours.reached.cut()
    if is_known:
        ours.steps.log("not committed yet")
        await trio.sleep(LEASE_S / 4)
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
    unknown = await elsewhere(ours, other)
    answers = {
        "delete": await browser.fetch("DELETE"),
        "delete elsewhere": await unknown.fetch("DELETE"),
        "initialize": await Browser(ours, ours.nursery).post(1, "initialize", **hello),
        "post elsewhere": await unknown.post(3, "tools/list"),
        "notification elsewhere": await unknown.tell("notifications/cancelled", requestId=1),
        "call elsewhere": await unknown.call(4, "step"),
    }
    for what, answer in answers.items():
        error = answer.json["error"]
        assert (what, answer.status, reason(error)) == (what, 503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        assert error["message"].endswith("try again later.")
    resumed = await browser.post(5, "stream/resume", streamId="A" * 43)
    body = resumed.json if resumed.type == JSON else resumed.events[-1][1]
    assert body is not None
    assert reason(body["error"]) == "unavailable"
    assert "Traceback" not in capsys.readouterr().err + caplog.text
    assert not call.is_whole
    ours.reached.mend()
    await trio.sleep(1)
    assert (await browser.fetch("DELETE")).status == 200


@pytest.mark.parametrize("outage_s", [3.0, HELD_S - 1])
@pytest.mark.parametrize("place", ["the owner", "a follower", "a replica without the session"])
async def test_a_get_is_held_while_the_store_is_away(
    replicas: Replicas, autojump_clock: MockClock, place: str, outage_s: float
) -> None:
    """The official SDKs give a call up after a few refusals within 2 s."""
    owner, other = await replicas.two()
    browser = await owner.browse(PLAIN)
    call = await browser.call(1, "step")
    owner.steps.log("a")
    await wait_all_tasks_blocked()
    await call.hang_up()
    at = browser
    if place != "the owner":
        at = await elsewhere(other, browser)
    if place == "a follower":
        await (await at.go_on(call.ids[0])).hang_up()
    replicas.kill_store(owner, other)
    await trio.sleep(LEASE_S / 10)
    get = at.ask("GET", accept=EVENTS, last_event_id=call.ids[1])
    standing = at.ask("GET", accept=EVENTS)
    await trio.sleep(outage_s)
    assert get.status == 0
    replicas.start_store(owner, other)
    await trio.sleep(3 * LEASE_S)
    owner.steps.finish("after the outage")
    await trio.sleep(LEASE_S)
    assert (get.status, standing.status) == (200, 200)
    assert [text_of(message) for _, message in get.events if message] == ["after the outage"]


async def test_a_get_is_held_for_a_bounded_time(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    owner, other = await replicas.two()
    browser = await owner.browse(PLAIN)
    call = await browser.call(1, "step")
    replicas.kill_store(owner, other)
    unknown = await elsewhere(other, browser)
    await call.hang_up()
    began_at = trio.current_time()
    gets = [at.ask("GET", accept=EVENTS, last_event_id=call.ids[0]) for at in (browser, unknown)]
    gets.append(unknown.ask("GET", accept=EVENTS))
    while not all(get.is_whole for get in gets):
        await trio.sleep(LEASE_S / 10)
    assert HELD_S <= trio.current_time() - began_at < HELD_S + LEASE_S
    for get in gets:
        assert (get.status, get.headers["retry-after"]) == (503, "1")
        assert reason(get.json["error"]) == "unavailable"


@pytest.mark.parametrize("has_session", [True, False])
async def test_a_client_that_leaves_is_held_no_longer(
    replicas: Replicas, autojump_clock: MockClock, *, has_session: bool
) -> None:
    owner, other = await replicas.two()
    browser = await owner.browse(PLAIN)
    call = await browser.call(1, "step")
    await call.hang_up()
    await trio.sleep(LEASE_S)
    at = browser if has_session else await elsewhere(other, browser)
    house = owner if has_session else other
    replicas.kill_store(owner, other)
    tasks = len(house.nursery.child_tasks)
    get = at.ask("GET", accept=EVENTS, last_event_id=call.ids[0])
    await trio.sleep(LEASE_S)
    assert len(house.nursery.child_tasks) == tasks + 1
    await get.hang_up()
    assert len(house.nursery.child_tasks) == tasks
    assert not get.body


async def test_a_replica_that_ends_holds_no_client(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Another replica may have the store."""
    owner, other = await replicas.two()
    browser = await owner.browse(PLAIN)
    call = await browser.call(1, "step")
    await call.hang_up()
    other.reached.cut()
    get = (await elsewhere(other, browser)).ask("GET", accept=EVENTS, last_event_id=call.ids[0])
    await trio.sleep(LEASE_S / 2)
    assert get.status == 0
    with trio.fail_after(HELD_S / 2):
        await other.stop()
    assert (get.status, get.headers["retry-after"]) == (503, "1")


async def test_an_outage_that_begins_in_a_request_is_waited_out(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The session is gone by the time of the answer, and nowhere else there."""
    ours, theirs = await replicas.two()
    browser = await ours.browse(PLAIN)
    await (await elsewhere(theirs, browser)).post(1, "ping")
    find, seen = ours.reached.inner.session, []

    async def once(key: str) -> Any:
        record = await find(key)
        seen.append(record)
        if len(seen) == 2:  # after the lookup of every request, that of the end
            ours.reached.cut()
        return record

    ours.reached.inner.session = once  # type: ignore[method-assign]
    answer = browser.ask("DELETE")
    await trio.sleep(LEASE_S / 4)
    assert answer.status == 0
    ours.reached.mend()
    await trio.sleep(3)
    assert answer.status == 200
    assert (await (await elsewhere(theirs, browser)).post(2, "ping")).status == 404


async def test_a_request_beside_the_end_of_its_session_does_not_bring_that_back(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours = await replicas.start()
    browser = await ours.browse(PLAIN)
    delay(ours, "commit", 0.01)
    browser.ask("DELETE")
    await trio.sleep(0.005)
    assert (await browser.post(3, "tools/list")).status == 404
    await trio.sleep(3605)
    assert (await browser.post(4, "tools/list")).status == 404
    assert (await ours.reached.inner.sessions())[0] == []


async def test_a_stream_that_is_dropped_while_its_grants_are_read_is_not_kept(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours = await replicas.start()
    delay(ours, "grants", 0.002)
    caller = Caller("bearer(tokens, alice)", lambda: math.inf)
    await ours.browse(PLAIN, caller=caller)  # another session of the same user
    browser = await ours.browse(PLAIN, caller=caller)
    answer = await browser.call(1, "step")
    ours.steps.log("a")
    await wait_all_tasks_blocked()
    await answer.hang_up()
    browser.ask("GET", accept=EVENTS, last_event_id=answer.ids[-1])
    await trio.sleep(0.001)
    browser.ask("DELETE")
    await trio.sleep(1000)
    sessions = ours.running.engine.sessions
    assert not sessions._given
    assert not sessions._unclaimed
