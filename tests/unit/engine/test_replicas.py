"""A client of one replica has the stream of another one: it follows, answers, acks and cancels."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.engine import posts
from streams.engine.leases import BEATS
from streams.errors import JournalError
from streams.journal.records import Change
from tests.rigs import idempotency
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STREAMS,
    Json,
    Talker,
    named,
    reason,
    requested,
    said,
    text_of,
)
from tests.rigs.shared_memory import LEASE_S
from tests.rigs.web import LINES, logged

MAX_S = 600.0


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    def make() -> Server:
        return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)

    async with open_replicas(make) as replicas:
        yield replicas


async def begun(replica: Replica, capabilities: Json = STREAMS) -> tuple[Talker, Json]:
    """A call of `step` at this replica, and its stream."""
    talker = await replica.dial(capabilities)
    return talker, await talker.begin(1, "step")


# Following


async def test_messages_of_another_replica_come_as_they_are_sent(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    theirs.steps.log("before")
    talker = await ours.dial(POSITIONS)
    await talker.ask(2, "stream/resume", **named(stream), after=0)
    await talker.find(lambda m: said([m]) == ["before"])
    for text in "live", "later":
        theirs.steps.log(text)
        before = trio.current_time()
        await talker.find(lambda m, text=text: said([m]) == [text])
        assert trio.current_time() - before < LEASE_S / BEATS / 2, "it waits for no beat"
    theirs.steps.finish("done there")
    answer = await talker.answer(1)
    assert text_of(answer) == "done there"
    assert (await talker.answer(2))["result"]["_meta"] == {"mcp-streams/ended": "completed"}
    assert ours.streams == [], "it has no stream of its own"


async def test_a_resume_elsewhere_goes_on_behind_its_cursor(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs, POSITIONS)
    theirs.steps.log("a", "b", "c")
    await first.find(lambda m: said([m]) == ["c"])
    await first.leave()
    theirs.steps.log("d")
    theirs.steps.finish()
    heard = await (await ours.dial(POSITIONS)).resume(2, stream, after=2)
    assert said(heard) == ["c", "d"]
    positions = [m["params"] for m in heard if m.get("method") == "notifications/stream/position"]
    assert positions[0]["seq"] == 3


async def test_a_cursor_beyond_the_end_is_refused_elsewhere_too(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs, POSITIONS)
    theirs.steps.log("a")
    await first.find(lambda m: said([m]) == ["a"])
    talker = await ours.dial(POSITIONS)
    refused = await talker.request(2, "stream/resume", **named(stream), after=9)
    assert (reason(refused), refused["data"]["lastSeq"]) == ("cursor_ahead", 1)


async def test_a_cursor_given_elsewhere_confirms_what_lies_before_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs, POSITIONS)
    theirs.steps.log("a", "b")
    await first.find(lambda m: said([m]) == ["b"])
    talker = await ours.dial(POSITIONS)
    await talker.ask(2, "stream/resume", **named(stream), after=1)
    await talker.find(lambda m: said([m]) == ["b"])
    await trio.sleep(2)
    assert replicas.store.records[stream["streamId"]].acked == 1
    gone = await (await theirs.dial(POSITIONS)).request(
        3, "stream/resume", **named(stream), after=0
    )
    assert reason(gone) == "messages_gone"


async def test_a_refused_cursor_counts_before_the_client_is_told(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its next resume, at a third replica, would get what this cursor has confirmed."""
    ours, theirs = await replicas.two()
    third = await replicas.start()
    first, token = await requested(theirs, {**REQUESTS, **POSITIONS})
    theirs.steps.finish()
    await first.answer(1)
    talker = await ours.dial({**REQUESTS, **POSITIONS})
    takes_posts = post_late(ours, monkeypatch, posts.Delivered)
    await talker.ask(2, RESUME_REQUEST, **token, after=1)
    with trio.move_on_after(1) as waiting:
        await talker.answer(2)
    assert waiting.cancelled_caught, "it is refused once the store has its cursor"
    takes_posts.set()
    assert reason((await talker.answer(2))["error"]) == "messages_gone"
    again = await (await third.dial(REQUESTS)).request(3, RESUME_REQUEST, **token)
    assert reason(again) == "messages_gone"


async def test_an_ack_that_is_given_elsewhere_makes_room(autojump_clock: MockClock) -> None:
    """The owner's handler waits for room, which only the follower's client makes."""
    limits = Limits(undelivered_bytes_max=1, unsent_entries_max=2)

    def make() -> Server:
        return Server("tested", resume_min_s=0, announce_after_s=0, limits=limits)

    async with open_replicas(make) as few:
        ours, theirs = await few.two()
        _, stream = await begun(theirs, POSITIONS)
        talker = await ours.dial(POSITIONS)
        await talker.ask(2, "stream/resume", **named(stream), after=0)
        theirs.steps.log(*"abcdef")
        for seq, text in enumerate("abcdef", 1):
            await talker.find(lambda m, text=text: said([m]) == [text])
            await talker.tell("notifications/stream/ack", **named(stream), seq=seq)
        await trio.sleep(3)
        assert few.store.records[stream["streamId"]].acked == 6


async def test_an_ack_at_a_replica_that_does_not_serve_the_client_counts(
    replicas: Replicas,
    autojump_clock: MockClock,
) -> None:
    """Over HTTP an ack is a request of its own, which a balancer may take anywhere."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(POSITIONS)
    answer = await browser.call(1, "step", LINES)
    theirs.steps.log("a", "b")
    await wait_all_tasks_blocked()
    stream = next(m for m in answer.lines if "stream/create" in m["method"])["params"]["stream"]
    elsewhere = await ours.browse(POSITIONS, browser.session)
    await elsewhere.tell("notifications/stream/ack", **named(stream), seq=1)
    await trio.sleep(2)
    assert replicas.store.records[stream["streamId"]].acked == 1
    other = await ours.browse(POSITIONS)
    await other.tell("notifications/stream/ack", **named(stream), seq=2)
    await trio.sleep(2)
    assert replicas.store.records[stream["streamId"]].acked == 1, "another client's is dropped"


def post_late(replica: Replica, monkeypatch: pytest.MonkeyPatch, kind: type = object) -> trio.Event:
    """From now on the store takes no posts of this kind from a replica until the event is set."""
    takes_posts, post = trio.Event(), replica.reached.inner.post

    async def wait(stream: str, *bodies: bytes, **how: Any) -> bool:
        if any(isinstance(posts.decode(each), kind) for each in bodies):
            await takes_posts.wait()
        return await post(stream, *bodies, **how)

    monkeypatch.setattr(replica.reached.inner, "post", wait)
    return takes_posts


def confirm_late(owner: Replica, follower: Replica, monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """From now on the owner hears of its commits, and of the follower, when the event is set.

    The store shows a commit to all replicas, while the owner waits for the copies of the store.
    """
    is_confirmed, commit = post_late(follower, monkeypatch), owner.reached.inner.commit

    async def commit_late(changes: Sequence[Change]) -> Sequence[JournalError | None]:
        errors = await commit(changes)
        await is_confirmed.wait()
        return errors

    monkeypatch.setattr(owner.reached.inner, "commit", commit_late)
    return is_confirmed


async def test_a_cursor_that_the_copies_of_the_store_have_not_confirmed_is_not_refused_for_good(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs, POSITIONS)
    theirs.steps.log("a")
    await first.find(lambda m: said([m]) == ["a"])
    await first.leave()
    elsewhere, back = await ours.dial(POSITIONS), await theirs.dial(POSITIONS)
    await elsewhere.ask(2, "stream/resume", **named(stream), after=1)
    await wait_all_tasks_blocked()
    is_confirmed = confirm_late(theirs, ours, monkeypatch)
    theirs.steps.log("b")
    await elsewhere.find(lambda m: said([m]) == ["b"])
    await elsewhere.leave()
    refused = await back.request(3, "stream/resume", **named(stream), after=2)
    assert reason(refused) == "unavailable"
    is_confirmed.set()
    theirs.steps.log("c")
    theirs.steps.finish()
    assert said(await back.resume(4, stream, after=2)) == ["c"]


async def test_an_event_that_the_copies_of_the_store_have_not_confirmed_is_waited_for(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    first = await browser.call(1, "step")
    theirs.steps.log("a")
    await wait_all_tasks_blocked()
    await first.hang_up()
    elsewhere = await (await ours.browse(PLAIN, browser.session)).go_on(first.ids[1])
    is_confirmed = confirm_late(theirs, ours, monkeypatch)
    theirs.steps.log("b")
    await wait_all_tasks_blocked()
    await elsewhere.hang_up()
    assert logged(elsewhere) == ["b"]
    back = await browser.go_on(elsewhere.ids[-1])
    is_confirmed.set()
    theirs.steps.log("c")
    theirs.steps.finish()
    await trio.sleep(1)
    assert logged(back) == ["c"]


# Answers, cancels and polls


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_question_is_answered_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock, is_early: bool
) -> None:
    """It was asked before the client has come to that replica, or while it is there."""
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs)
    if is_early:
        theirs.steps.ask()
        await first.question()
        await first.leave()
    talker = await ours.dial()
    await talker.ask(2, "stream/resume", **named(stream))
    if not is_early:
        await talker.announced()
        theirs.steps.ask()
    asked = await talker.question()
    await talker.say({"id": asked["id"], "result": {"says": "yes"}})
    theirs.steps.finish()
    await talker.answer(1)
    assert theirs.steps.answers == [{"says": "yes"}]


async def test_a_question_is_answered_at_a_replica_that_has_nothing_of_the_stream(
    replicas: Replicas,
    autojump_clock: MockClock,
) -> None:
    """Over HTTP the answer is a POST of its own."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(STREAMS)
    answer = await browser.call(1, "step")
    theirs.steps.ask()
    await wait_all_tasks_blocked()
    asked = answer.events[-1][1]
    assert asked is not None
    elsewhere = await ours.browse(STREAMS, browser.session)
    said = {"jsonrpc": "2.0", "id": asked["id"], "result": {"says": "yes"}}
    assert (await elsewhere.fetch("POST", said)).status == 202
    await wait_all_tasks_blocked()
    assert theirs.steps.answers == [{"says": "yes"}]


async def test_an_answer_is_accepted_once_the_store_has_it(
    replicas: Replicas, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that has accepted it may die at once."""
    ours, theirs = await replicas.two()
    browser = await theirs.browse(STREAMS)
    answer = await browser.call(1, "step")
    theirs.steps.ask()
    await wait_all_tasks_blocked()
    asked = answer.events[-1][1]
    assert asked is not None
    elsewhere = await ours.browse(STREAMS, browser.session)
    said = {"jsonrpc": "2.0", "id": asked["id"], "result": {"says": "yes"}}
    takes_posts = post_late(ours, monkeypatch)
    refused = await elsewhere.fetch("POST", said)
    await trio.sleep(10)
    assert (refused.status, reason(refused.json["error"])) == (503, "unavailable")
    takes_posts.set()
    accepted = await elsewhere.fetch("POST", said)
    while not accepted.status:
        await wait_all_tasks_blocked()
    ours.kill()
    assert accepted.status == 202
    await trio.sleep(1)
    assert theirs.steps.answers == [{"says": "yes"}]


async def test_a_strangers_answer_elsewhere_is_dropped(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, _ = await begun(theirs)
    theirs.steps.ask()
    asked = await first.question()
    stranger = await ours.dial(principal="mallory")
    await stranger.say({"id": asked["id"], "result": {"says": "no"}})
    assert await stranger.request(2, "ping") == {}
    await wait_all_tasks_blocked()
    await first.say({"id": asked["id"], "result": {"says": "yes"}})
    await wait_all_tasks_blocked()
    assert theirs.steps.answers == [{"says": "yes"}]


async def test_a_resumed_call_is_cancelled_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await requested(theirs)
    await first.leave()
    talker = await ours.dial(REQUESTS)
    await talker.ask(1, RESUME_REQUEST, **stream)
    await wait_all_tasks_blocked()
    await talker.tell("notifications/cancelled", requestId=1)
    await theirs.steps.is_over.wait()
    assert theirs.steps.was_cancelled
    await trio.sleep(1)
    assert replicas.store.records[next(iter(replicas.store.records))].outcome.value == "cancelled"


async def test_a_call_over_http_is_cancelled_at_another_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    browser = await theirs.browse(PLAIN)
    await browser.call(1, "step")
    stranger = await ours.browse(PLAIN)
    await stranger.tell("notifications/cancelled", requestId=1)
    assert not theirs.steps.was_cancelled
    elsewhere = await ours.browse(PLAIN, browser.session)
    assert (await elsewhere.tell("notifications/cancelled", requestId=1)).status == 202
    await wait_all_tasks_blocked()
    assert theirs.steps.was_cancelled


async def test_a_call_that_two_operators_cancel_ends_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The second one asks before the owner hears of the first."""
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    engine = ours.running.engine
    await (await ours.dial()).poll(2, stream)
    followed = engine.here(stream["streamId"])
    assert followed is not None
    engine.operations.stop(followed, is_told=True)
    engine.operations.stop(followed, is_told=True)
    assert reason((await talker.answer(1))["error"]) == "cancelled"
    await wait_all_tasks_blocked()
    assert not theirs.is_over.is_set()


async def test_a_client_that_cancels_its_resume_elsewhere_leaves_the_call(
    replicas: Replicas,
    autojump_clock: MockClock,
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    talker = await ours.dial()
    await talker.ask(2, "stream/resume", **named(stream))
    await talker.announced()
    await talker.tell("notifications/cancelled", requestId=2)
    await wait_all_tasks_blocked()
    theirs.steps.finish("after all")
    heard = await (await ours.dial()).resume(3, stream)
    assert text_of(next(m for m in heard if m.get("id") == 1)) == "after all"
    assert not theirs.steps.was_cancelled


async def test_a_client_that_was_displaced_cancels_nothing(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its replica may hear later than the owner that it was displaced."""
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    talker, newest = await ours.dial(), await theirs.dial()
    await talker.ask(2, "stream/resume", **named(stream), after=0)
    await talker.announced()
    await newest.ask(3, "stream/resume", **named(stream), after=0)
    await newest.announced()
    (followed,) = ours.running.engine._replicas._followed.values()  # type: ignore[union-attr]
    followed._home.post(followed.id, posts.Stopped(number=1))
    await wait_all_tasks_blocked()
    assert not theirs.steps.was_cancelled
    followed._home.post(followed.id, posts.Stopped())
    await wait_all_tasks_blocked()
    assert theirs.steps.was_cancelled


async def test_a_retry_with_its_key_has_its_own_progress_token_elsewhere(
    replicas: Replicas,
    autojump_clock: MockClock,
) -> None:
    ours, theirs = await replicas.two()
    first, second = await theirs.dial(), await ours.dial()
    await idempotency.call(first, 1, _meta={"progressToken": "first"})
    await first.announced()
    await idempotency.call(second, 5, _meta={"progressToken": "second"})
    await wait_all_tasks_blocked()
    theirs.steps.do(lambda call: call.progress(1, 2))
    told = await second.find(lambda m: m.get("method") == "notifications/progress")
    assert told["params"]["progressToken"] == "second"
    theirs.steps.finish()
    assert text_of(await second.answer(5)) == "done"


async def test_polls_tell_the_status_of_another_replicas_stream(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs)
    talker = await ours.dial()
    assert (await talker.poll(2, stream))["status"] == "live"
    theirs.steps.ask()
    asked = await first.question()
    await first.leave()
    (listed,) = (await talker.request(3, "stream/poll/all"))["statuses"]
    assert (listed["streamId"], listed["hasRequest"]) == (stream["streamId"], True)
    await talker.say({"id": asked["id"], "result": {}})
    theirs.steps.fail()
    await theirs.steps.is_over.wait()
    await wait_all_tasks_blocked()
    ended = await talker.poll(4, stream)
    assert (ended["status"], ended["hasError"]) == ("completed", True)
    assert ended == await (await theirs.dial()).poll(4, stream)


async def test_the_first_calls_of_a_principal_may_come_at_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Each of them needs to know how many streams the principal has at other replicas."""
    ours, _ = await replicas.two()
    talkers = [await ours.dial(principal="alice") for _ in range(3)]
    for talker in talkers:
        await talker.call(1, "step")
    for talker in talkers:
        await talker.announced()


# Memory


def small(resident_max: int) -> Server:
    """A server that takes two streams, and forgets those that have ended after half a minute."""
    limits = Limits(streams_max=2, resident_max=resident_max, drained_s=30, tombstone_s=30)
    return Server("tested", resume_min_s=0, announce_after_s=0, limits=limits)


async def test_running_calls_of_another_replica_take_no_room_here(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: small(0)) as replicas:
        for replica in await replicas.two():
            for _ in range(2):
                await begun(replica)
            await trio.sleep(60)


async def test_streams_that_another_replica_forgets_leave_room_here(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: small(0)) as replicas:
        ours, theirs = await replicas.start(), await replicas.start(small(100))
        for _ in range(4):
            talker, stream = await begun(ours)
            await talker.leave()
            ours.steps.finish()
            await trio.sleep(LEASE_S)
            for after in (0, 1):
                reader = await theirs.dial(POSITIONS)
                await reader.resume(2, stream, after=after)
                await reader.leave()
            await trio.sleep(100)
            assert not replicas.store.records


async def test_questions_of_a_followed_call_go_with_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first, stream = await begun(theirs)
    theirs.steps.ask()
    await first.question()
    await first.leave()
    reader = await ours.dial()
    await reader.ask(2, "stream/resume", **named(stream))
    await reader.question()
    await reader.leave()
    await trio.sleep(5 * LEASE_S)
    assert not ours.running.engine._streams.answers
    assert len(theirs.running.engine._streams.answers) == 1
