"""A replica that is gone, stops, or is cut off: others take over its streams, once."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.clock import wall
from streams.engine import posts
from streams.engine.engine import SHUTDOWN_S
from streams.engine.events import CallReleased
from streams.engine.leases import BEATS, GONE
from streams.engine.outbox import SENT_S
from streams.engine.rerun import MISSING_LEASES
from streams.errors import Fenced, JournalError, StoreAway
from streams.journal.contract import Post
from streams.journal.records import Change, Outcome
from tests.rigs import idempotency
from tests.rigs.replicas import TAKEN_S, Replica, Replicas, open_replicas
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    STREAMS,
    Json,
    Talker,
    flood,
    methods,
    named,
    reason,
    said,
    text_of,
)
from tests.rigs.shared_memory import LEASE_S

MAX_S = 600.0


def make(**limits: Any) -> Server:
    settings: Any = {"resume_min_s": 0, "resume_max_s": MAX_S, "announce_after_s": 0}
    return Server("tested", limits=Limits(**limits), **settings)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


async def resumed(replica: Replica, stream: Json, *, after: int | None = None) -> Talker:
    """A client of this replica that has asked for the stream."""
    talker = await replica.dial(POSITIONS)
    cursor = {} if after is None else {"after": after}
    await talker.ask("resume", "stream/resume", **named(stream), **cursor)
    return talker


# After the lease


async def test_the_call_of_a_killed_replica_goes_on_elsewhere_from_its_checkpoint(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")

    async def save(call: Call) -> None:
        await call.checkpoint({"done": 2})

    theirs.again.log("a", "b")
    theirs.again.do(save)
    theirs.again.log("c")
    await wait_all_tasks_blocked()
    theirs.kill()
    killed_at = trio.current_time()
    talker = await resumed(ours, stream, after=0)
    ours.again.log("c", "d")  # the first is compared, and not sent again
    ours.again.finish("elsewhere")
    assert text_of(await talker.answer(1)) == "elsewhere"
    assert trio.current_time() - killed_at < LEASE_S + 0.5
    assert said(talker.seen) == ["a", "b", "c", "d"]
    assert ours.again.call.restored == {"done": 2}
    assert replicas.owner_of(stream["streamId"]) == ours.name


async def test_a_call_that_nobody_asks_for_goes_on_elsewhere_too(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """More calls than one claim gives."""
    ours, theirs = await replicas.two()
    talker = await theirs.dial(POSITIONS)
    streams = [await talker.begin(n, "again") for n in range(7)]
    theirs.kill()
    await trio.sleep(TAKEN_S)
    for n in range(7):
        ours.again.finish(str(n))
    await wait_all_tasks_blocked()
    outcomes = [replicas.store.records[each["streamId"]].outcome for each in streams]
    assert outcomes == [Outcome.COMPLETED] * 7


async def test_a_call_is_listed_while_it_is_taken_over(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The store knows the heir before the heir knows the call."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await ours.dial(POSITIONS)
    inner, is_claimed, may_know = ours.reached.inner, trio.Event(), trio.Event()
    claim = inner.claim

    async def claim_and_wait(*given: Any) -> Any:
        claimed = await claim(*given)
        if claimed:
            is_claimed.set()
            await may_know.wait()
        return claimed

    inner.claim = claim_and_wait  # type: ignore[method-assign]
    theirs.kill()
    await is_claimed.wait()
    listed = await talker.request(2, "stream/poll/all")
    assert [each["streamId"] for each in listed["statuses"]] == [stream["streamId"]]
    may_know.set()
    await trio.sleep(TAKEN_S)
    listed = await talker.request(3, "stream/poll/all")
    assert [each["streamId"] for each in listed["statuses"]] == [stream["streamId"]]


async def test_calls_that_an_heir_has_left_go_on_at_a_replica_that_starts_later(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    theirs = await replicas.start()
    talker = await theirs.dial(POSITIONS)
    streams = [await talker.begin(n, "again") for n in range(3)]
    theirs.kill()
    replicas.store.mark_claimed(theirs.name)  # by an heir that is gone, too
    late = await replicas.start()
    await trio.sleep(TAKEN_S)
    for n in range(3):
        late.again.finish(str(n))
    await wait_all_tasks_blocked()
    outcomes = [replicas.store.records[each["streamId"]].outcome for each in streams]
    assert outcomes == [Outcome.COMPLETED] * 3


async def test_a_replica_that_stood_still_claims_what_an_heir_has_left_of_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It is alone, and has another name by then."""
    ours = await replicas.start()
    stream = await (await ours.dial(POSITIONS)).begin(1, "again")
    replicas.store.mark_claimed(ours.name)
    await trio.sleep(TAKEN_S)
    ours.again.finish("in the end")
    await wait_all_tasks_blocked()
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.COMPLETED


async def test_calls_that_a_replica_had_released_when_it_died_go_on_elsewhere(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its news of that had not come."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await trio.sleep(TAKEN_S)
    replicas.store.free(replicas.store.owned_by(theirs.name))
    theirs.kill()
    await trio.sleep(TAKEN_S)
    assert replicas.owner_of(stream["streamId"]) == ours.name
    ours.again.finish()
    await wait_all_tasks_blocked()
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.COMPLETED


async def test_a_late_change_under_an_old_fence_does_not_lose_a_stream_that_came_back(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await trio.sleep(TAKEN_S)
    theirs.reached.cut()
    theirs.again.log("late")  # waits for the store
    await trio.sleep(TAKEN_S)
    assert replicas.owner_of(stream["streamId"]) == ours.name
    may_commit, commit = trio.Event(), theirs.reached.inner.commit

    async def late(changes: Any) -> Any:
        if not may_commit.is_set():
            raise StoreAway("for now")
        return await commit(changes)

    theirs.reached.commit = late  # type: ignore[attr-defined]
    await ours.stop()
    theirs.reached.mend()
    await trio.sleep(TAKEN_S)
    assert replicas.owner_of(stream["streamId"]) == theirs.name
    may_commit.set()
    await trio.sleep(TAKEN_S)
    assert theirs.streams == [stream["streamId"]]


async def test_a_damaged_stream_does_not_hold_up_the_take_over_of_others(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, one, another = await replicas.start(), await replicas.start(), await replicas.start()
    damaged = await (await one.dial(POSITIONS)).begin(1, "again")
    one.again.ask()
    sound = await (await another.dial(POSITIONS)).begin(1, "again")
    await trio.sleep(TAKEN_S)
    replicas.store.kept._runs.pop(damaged["streamId"])
    one.kill()
    another.kill()
    await trio.sleep(5 * TAKEN_S)
    assert replicas.owner_of(sound["streamId"]) == ours.name


@pytest.mark.parametrize("has_question", [True, False])
async def test_a_damaged_call_is_interrupted_in_the_end(
    replicas: Replicas, autojump_clock: MockClock, *, has_question: bool
) -> None:
    """No replica waits for ever for lines that another program has deleted."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    if has_question:
        theirs.again.ask()
    else:
        theirs.again.log("lost")
    await wait_all_tasks_blocked()
    replicas.store.kept._runs.pop(stream["streamId"])
    theirs.kill()
    ours.again.log("lost")
    await trio.sleep(TAKEN_S)
    record = replicas.store.records[stream["streamId"]]
    assert (record.owner, record.outcome) == (ours.name, Outcome.LIVE)
    await trio.sleep(MISSING_LEASES * LEASE_S)
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.FAILED
    assert ours.running.running_tools == []


async def test_a_call_with_a_key_does_not_begin_once_the_turn_was_lost(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Another replica may run it by then."""
    theirs = await replicas.start()
    browser = await theirs.browse(STREAMS)
    engine, may_begin = theirs.running.engine, trio.Event()

    async def make_room(_: Any) -> None:
        await may_begin.wait()

    engine.make_room = make_room  # type: ignore[method-assign]
    params = {"name": "step", "arguments": {}, "_meta": {"mcp-streams/idempotencyKey": "a" * 32}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    answer = browser.ask("POST", call)
    await wait_all_tasks_blocked()
    replicas.store.mark_claimed(theirs.name)
    await trio.sleep(TAKEN_S)
    may_begin.set()
    await wait_all_tasks_blocked()
    assert answer.json["error"]["data"]["reason"] == "unavailable"
    assert not theirs.streams


@pytest.mark.parametrize("is_cancel", [False, True])
async def test_an_answer_or_a_cancel_is_taken_only_once_it_is_durable(
    replicas: Replicas, autojump_clock: MockClock, *, is_cancel: bool
) -> None:
    theirs = await replicas.start()
    browser = await theirs.browse(STREAMS)
    answer = await browser.call(1, "again")
    theirs.again.ask()
    await wait_all_tasks_blocked()
    asked = answer.events[-1][1]
    assert asked is not None
    said: Json = {"jsonrpc": "2.0", "id": asked["id"], "result": {"says": "yes"}}
    if is_cancel:
        method = "notifications/cancelled"
        said = {"jsonrpc": "2.0", "method": method, "params": {"requestId": 1}}
    may_commit, commit = trio.Event(), theirs.reached.inner.commit

    async def slow(changes: Any) -> Any:
        await may_commit.wait()
        return await commit(changes)

    theirs.reached.commit = slow  # type: ignore[attr-defined]
    answers = [browser.ask("POST", said)]
    await trio.sleep(2 * SENT_S)
    answers.append(browser.ask("POST", said))
    await wait_all_tasks_blocked()
    assert [each.status for each in answers] == [503, 0]
    may_commit.set()
    await trio.sleep(0.01)
    assert answers[1].status == 202


async def test_a_call_that_cannot_restart_is_interrupted_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Three replicas see that it is gone, and two clients ask."""
    theirs, *others = [await replicas.start() for _ in range(4)]
    stream = await (await theirs.dial(POSITIONS)).begin(1, "step")
    theirs.steps.log("before")
    await wait_all_tasks_blocked()
    theirs.kill()
    for replica in others:
        talker = await resumed(replica, stream, after=0)
        answers = [await talker.answer(1)]
        assert said(talker.seen) == ["before"]
        assert [reason(answer["error"]) for answer in answers] == ["interrupted"]
    await trio.sleep(TAKEN_S)
    assert replicas.store.records[stream["streamId"]].last == 2, "one message, one end"


async def test_a_client_that_follows_stays_attached_while_another_replica_takes_over(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The heir is a third replica, or that of the client itself: no message is lost or repeated."""
    theirs, *others = [await replicas.start() for _ in range(3)]
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    for replica in others:
        talker = await resumed(replica, stream, after=0)
        await wait_all_tasks_blocked()
    theirs.again.log("a")
    await talker.find(lambda m: said([m]) == ["a"])
    theirs.kill()
    await trio.sleep(TAKEN_S)
    (heir,) = [each for each in others if each.streams]
    heir.again.log("a", "b")
    heir.again.finish("by the heir")
    await talker.answer("resume")
    assert said(talker.seen) == ["a", "b"]
    assert text_of(next(m for m in talker.seen if m.get("id") == 1)) == "by the heir"


@pytest.mark.parametrize("knows_client", [True, False])
async def test_what_a_client_says_while_the_owner_is_dead_reaches_the_heir(
    replicas: Replicas, autojump_clock: MockClock, *, knows_client: bool
) -> None:
    """Posts to the dead are inherited: an answer, an ack, and that the client is there at all."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await resumed(ours, stream, after=0)
    theirs.again.ask()
    asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
    if knows_client:
        await wait_all_tasks_blocked()
    theirs.kill()
    await talker.say({"id": asked["id"], "result": {"says": "to the dead"}})
    await talker.tell("notifications/stream/ack", **named(stream), seq=1)
    await trio.sleep(TAKEN_S)
    ours.again.ask()  # the same question again
    ours.again.finish()
    await talker.answer(1)
    assert ours.again.answers == [{"says": "to the dead"}]
    assert replicas.store.records[stream["streamId"]].acked >= 1
    assert methods(talker.seen).count("elicitation/create") == 1


async def test_a_cancel_while_the_owner_is_dead_reaches_the_heir(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    await idempotency.call(first, 1, name="again")
    stream = await first.announced()
    second = await ours.dial(POSITIONS)
    await idempotency.call(second, 5, name="again")
    await wait_all_tasks_blocked()
    theirs.kill()
    await second.tell("notifications/cancelled", requestId=5)
    await trio.sleep(TAKEN_S)
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.CANCELLED
    assert ours.running.running_tools == []


async def test_a_request_waits_for_the_heir_of_a_dead_owner(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The owner is asked, and dies before it answers."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial()).begin(1, "again")
    theirs.kill()
    talker = await ours.dial()
    began = trio.current_time()
    assert (await talker.poll(2, stream))["status"] == "live"
    assert trio.current_time() - began < LEASE_S + 0.5


async def test_the_client_of_a_dead_follower_counts_as_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its stream expires at the owner, once the lease of the follower is over."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial()).begin(1, "step")
    await resumed(ours, stream)
    await wait_all_tasks_blocked()
    ours.kill()
    await trio.sleep(MAX_S - 5)
    assert not theirs.steps.was_cancelled
    await trio.sleep(5 + TAKEN_S)
    assert theirs.steps.was_cancelled


async def test_a_cancel_that_a_former_owner_passes_on_counts_only_while_no_client_is_here(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours = await replicas.start()
    talker = await ours.dial()
    await talker.begin(1, "step")
    [stream] = ours.running.engine._streams.index
    late = posts.encode(posts.Stopped(is_late=True))
    others = ours.running.engine._replicas
    assert others is not None
    others._receive(Post("former", stream.id, late))
    await wait_all_tasks_blocked()
    assert not ours.steps.was_cancelled
    await talker.leave()
    await wait_all_tasks_blocked()
    others._receive(Post("former", stream.id, late))
    await wait_all_tasks_blocked()
    assert ours.steps.was_cancelled


# A replica that is cut off


async def test_an_owner_that_was_cut_off_stops_its_handlers(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "again")
    theirs.again.log("a")
    await first.find(lambda m: said([m]) == ["a"])
    theirs.reached.cut()
    await trio.sleep(LEASE_S)
    assert not first.channel.is_writable() or await first.end() == []
    assert theirs.running.engine.unready
    await trio.sleep(LEASE_S)
    assert ours.streams == [stream["streamId"]]
    theirs.again.log("never committed")
    await wait_all_tasks_blocked()
    assert not theirs.again.was_cancelled
    theirs.reached.mend()
    await trio.sleep(LEASE_S)
    assert theirs.again.was_cancelled, "another replica owns the stream"
    assert theirs.streams == []
    assert theirs.running.engine.unready == ""
    talker = await resumed(theirs, stream, after=0)
    ours.again.log("a", "b")
    ours.again.finish()
    await talker.answer(1)
    assert said(talker.seen) == ["a", "b"]
    again = await (await theirs.dial()).begin(9, "step")
    assert replicas.owner_of(again["streamId"]) == theirs.name, "under its new name"


async def test_a_replica_that_has_lost_its_lease_stops_handlers_that_send_nothing(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    theirs = await replicas.start()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "step")
    await wait_all_tasks_blocked()
    replicas.store.mark_claimed(theirs.name)
    await trio.sleep(LEASE_S)
    assert theirs.steps.was_cancelled
    record = replicas.store.records[stream["streamId"]]
    assert (record.owner, record.outcome.is_end) == (theirs.name, True), "claimed by its new name"
    assert await first.end() == []


async def test_a_replica_that_has_lost_its_lease_lets_the_clients_go_that_follow_others(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It stood still for longer than the lease: owners have detached its clients."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "step")
    talker = await resumed(ours, stream, after=0)
    await talker.announced()
    former = ours.name
    replicas.store.mark_claimed(former)
    await trio.sleep(LEASE_S)
    assert ours.name != former
    assert await talker.end() == []
    talker = await resumed(ours, stream, after=0)
    theirs.steps.log("under the new name")
    theirs.steps.finish()
    await talker.answer(1)
    assert said(talker.seen) == ["under the new name"]


async def test_streams_that_are_gone_are_followed_no_more(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "step")
    talker = await resumed(ours, stream, after=0)
    await talker.announced()
    [listener] = [each for each in replicas.store.listeners if each.replica == ours.name]
    assert listener._followed == {stream["streamId"]}
    [held] = theirs.running.engine._streams.index
    theirs.running.engine._streams._forget(held)
    await trio.sleep(LEASE_S)
    assert listener._followed == set()


async def test_a_replica_that_has_lost_its_lease_follows_nothing_more(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "step")
    await (await resumed(ours, stream, after=0)).announced()
    [listener] = [each for each in replicas.store.listeners if each.replica == ours.name]
    replicas.store.mark_claimed(ours.name)
    await trio.sleep(LEASE_S)
    assert listener._followed == set()


async def test_a_post_of_the_dead_attaches_no_client_for_ever(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The heir inherits that a client has attached at a replica, which is gone by then as well."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await wait_all_tasks_blocked()
    theirs.kill()
    attach = posts.Attach(
        number=1,
        taker=posts.Taker("a session", 5),
        start=0,
        position=0,
        reply_id=5,
        level="debug",
        confirms=True,
        is_new=True,
        at=wall(),
    )
    post = Post("a replica that is gone", stream["streamId"], posts.encode(attach))
    replicas.store.keep_posts(theirs.name, [post])
    await trio.sleep(TAKEN_S)
    assert replicas.owner_of(stream["streamId"]) == ours.name
    await trio.sleep(MAX_S)
    assert ours.again.was_cancelled


async def test_a_follower_that_dies_while_the_owner_is_cut_off_counts_as_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """A third replica has claimed its streams before the owner looks at the leases again."""
    owner, follower, third = [await replicas.start() for _ in range(3)]
    stream = await (await owner.dial()).begin(1, "step")
    await resumed(follower, stream)
    await trio.sleep(LEASE_S)
    follower.kill()
    await trio.sleep((GONE - 1 / BEATS) * LEASE_S)
    owner.reached.cut()
    await trio.sleep((GONE - 3 / BEATS) * LEASE_S)
    assert follower.name not in replicas.store.counts
    owner.reached.mend()
    await trio.sleep(MAX_S + LEASE_S)
    assert owner.steps.was_cancelled
    assert third.streams == []


async def test_a_fenced_commit_stops_the_handler_before_the_next_beat(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The stream has gone to another replica, which this one did not notice."""
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "again")
    record = replicas.store.records[stream["streamId"]]
    replicas.store.give(record, ours.name)
    theirs.again.log("refused")
    await theirs.again.is_over.wait()
    await wait_all_tasks_blocked()
    assert theirs.again.was_cancelled
    assert said(await first.end()) == [], "a message is journaled before it is sent"
    assert theirs.streams == []


# The store is away for all


@pytest.mark.parametrize("leases", [0.4, 4.0])
async def test_an_outage_of_the_store_causes_no_take_over(
    replicas: Replicas, autojump_clock: MockClock, leases: float
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "step")
    await trio.sleep(LEASE_S)
    replicas.kill_store(ours, theirs)
    theirs.steps.log("meanwhile")
    await trio.sleep(leases * LEASE_S)
    names = ours.name, theirs.name
    replicas.start_store(ours, theirs)
    await trio.sleep(2 * TAKEN_S)
    assert (ours.name, theirs.name) == names
    assert not theirs.steps.was_cancelled
    talker = await resumed(ours, stream, after=0)
    theirs.steps.finish("no one took it")
    assert text_of(await talker.answer(1)) == "no one took it"
    assert said(talker.seen) == ["meanwhile"]


async def test_replicas_that_see_the_store_again_at_other_times_take_over_nothing_at_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The first to see it has not seen the other one renew for long, but could not have."""
    ours, theirs = await replicas.two()
    await (await theirs.dial(POSITIONS)).begin(1, "step")
    await trio.sleep(LEASE_S)
    replicas.kill_store(ours, theirs)
    await trio.sleep(4 * LEASE_S)
    ours.reached.mend()
    await trio.sleep(LEASE_S / 2)
    theirs.reached.mend()
    await trio.sleep(TAKEN_S)
    assert not theirs.steps.was_cancelled
    assert ours.streams == []


async def test_clients_stay_where_they_are_while_the_store_is_away_shortly(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "step")
    second = await resumed(ours, stream, after=0)
    await second.announced()
    replicas.kill_store(ours, theirs)
    theirs.steps.log("while it is away")
    await trio.sleep(LEASE_S / 4)
    replicas.start_store(ours, theirs)
    await second.find(lambda m: said([m]) == ["while it is away"])


# A shutdown


async def test_a_replica_that_stops_hands_its_calls_over_at_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    stream = await first.begin(1, "again")
    theirs.again.log("a")
    await first.find(lambda m: said([m]) == ["a"])
    began = trio.current_time()
    await theirs.stop()
    talker = await resumed(ours, stream, after=1)
    ours.again.log("a", "b")
    ours.again.finish("handed over")
    assert text_of(await talker.answer(1)) == "handed over"
    assert said(talker.seen) == ["b"]
    assert trio.current_time() - began < LEASE_S / 2


async def test_a_call_that_is_handed_over_is_told_as_released_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its replica meets it twice: when it suspends its calls, and when another one has taken it."""
    _, theirs = await replicas.two()
    engine = theirs.running.engine
    released: list[CallReleased] = []
    engine.events.listen(released.append, [CallReleased])
    talker = await theirs.dial(POSITIONS)
    stream = engine.here((await talker.begin(1, "again"))["streamId"])
    assert stream is not None
    engine._streams.suspend(stream)
    engine._streams.lose(stream)
    assert [each.stream for each in released] == [stream]


async def test_a_call_that_nobody_asks_for_goes_on_before_the_next_beat(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """News tell that streams are free."""
    ours, theirs = await replicas.two()
    talker = await theirs.dial(POSITIONS)
    await talker.begin(1, "again")
    await talker.leave()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.stop)
        while not ours.running.running_tools:
            await trio.sleep(LEASE_S / 1_000)
    assert trio.current_time() - began < LEASE_S / BEATS / 2
    ours.again.finish()


async def test_a_follower_of_a_replica_that_stops_notices_only_a_short_silence(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await resumed(ours, stream, after=0)
    await talker.announced()
    began = trio.current_time()
    await theirs.stop()
    ours.again.log("by the heir")
    await talker.find(lambda m: said([m]) == ["by the heir"])
    assert trio.current_time() - began < LEASE_S / 2


async def test_a_call_that_cannot_restart_ends_at_the_replica_that_stops(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its own client and one elsewhere are told so, once each."""
    ours, theirs = await replicas.two()
    first = await theirs.dial(POSITIONS)
    other = await theirs.dial(POSITIONS)
    stream = await other.begin(2, "step")
    await first.call(1, "step")
    await first.announced()
    talker = await resumed(ours, stream, after=0)
    await talker.announced()
    await theirs.stop()
    assert reason((await first.answer(1))["error"]) == "interrupted"
    assert reason((await talker.answer(2))["error"]) == "interrupted"
    await trio.sleep(TAKEN_S)
    assert replicas.store.records[stream["streamId"]].last == 1


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS, POSITIONS])
async def test_the_answer_of_a_call_that_has_just_ended_is_written_before_the_replica_stops(
    replicas: Replicas, autojump_clock: MockClock, capabilities: Json
) -> None:
    """The heir forgets the call of a client that cannot come back."""
    _, theirs = await replicas.two()
    talker = await theirs.dial(capabilities)
    await talker.call(1, "step")
    theirs.steps.log("a")
    await talker.find(lambda m: said([m]) == ["a"])
    read, may_read = theirs.reached.inner.read, trio.Event()

    async def read_slowly(*given: Any, **how: Any) -> Any:
        await may_read.wait()
        return await read(*given, **how)

    theirs.reached.inner.read = read_slowly  # type: ignore[method-assign]
    theirs.steps.finish("at the last moment")
    await wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.stop)
        await trio.sleep(0.2)
        may_read.set()
        assert text_of(await talker.answer(1)) == "at the last moment"


async def test_a_client_that_reads_nothing_delays_no_hand_over_for_long(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    reader = await theirs.dial(POSITIONS)
    stream = await reader.begin(1, "again")
    theirs.again.log("a")
    await reader.find(lambda m: said([m]) == ["a"])
    slow = await theirs.dial(PLAIN, capacity=16)
    await slow.call(2, "step")
    theirs.steps.log("x" * 1_000)
    await wait_all_tasks_blocked()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.stop)
        await wait_all_tasks_blocked()
        ours.again.log("a")
        ours.again.finish()
        answer = await (await resumed(ours, stream, after=1)).answer(1)
        assert text_of(answer) == "done"
        assert trio.current_time() - began <= 1
    assert trio.current_time() - began <= SHUTDOWN_S


async def test_the_streams_of_a_replica_that_stops_are_taken_by_one_that_starts(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """None was there to take them: a single replica is started anew."""
    theirs = await replicas.start()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await theirs.stop()
    ours = await replicas.start()
    await wait_all_tasks_blocked()
    ours.again.finish("anew")
    assert text_of(await (await resumed(ours, stream)).answer(1)) == "anew"


async def test_a_replica_takes_over_what_another_one_left_when_it_starts(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    theirs = await replicas.start()
    await (await theirs.dial(POSITIONS)).begin(1, "again")
    theirs.kill()
    ours = await replicas.start()
    await trio.sleep(TAKEN_S)
    assert len(ours.streams) == 1
    ours.again.finish()


# Evicted streams


async def test_an_evicted_stream_is_taken_by_the_replica_that_is_asked(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: make(resident_max=0)) as replicas:
        ours, theirs = await replicas.two()
        first = await theirs.dial(POSITIONS)
        stream = await first.begin(1, "step")
        theirs.steps.log("a")
        theirs.steps.finish("kept")
        await first.leave()
        await trio.sleep(20)
        assert theirs.streams == []
        assert replicas.owner_of(stream["streamId"]) == ""
        heard = await (await ours.dial(POSITIONS)).resume(2, stream, after=0)
        assert said(heard) == ["a"]
        assert replicas.owner_of(stream["streamId"]) == ours.name
        await trio.sleep(20)
        assert replicas.owner_of(stream["streamId"]) == "", "evicted again"
        heard = await (await theirs.dial(POSITIONS)).resume(3, stream, after=1)
        assert text_of(next(m for m in heard if m.get("id") == 1)) == "kept"


async def test_two_replicas_that_are_asked_at_once_serve_one_evicted_stream(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: make(resident_max=0)) as replicas:
        ours, theirs = await replicas.two()
        first = await theirs.dial(PLAIN)
        await idempotency.call(first, 1)
        theirs.steps.finish("kept")
        await first.leave()
        await trio.sleep(60)
        (record,) = replicas.store.records.values()
        assert (record.owner, ours.streams, theirs.streams) == ("", [], [])
        talkers = [await ours.dial(POSITIONS), await theirs.dial(POSITIONS)]
        for talker in talkers:
            await talker.ask(2, "stream/resume", streamId=record.stream)
        await wait_all_tasks_blocked()
        assert len(ours.streams) + len(theirs.streams) == 1


async def test_an_evicted_stream_expires_though_its_replica_is_dead(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(lambda: make(resident_max=0, tombstone_s=50)) as replicas:
        ours, theirs = await replicas.two()
        first = await theirs.dial(POSITIONS)
        stream = await first.begin(1, "step")
        theirs.steps.log("unread")
        theirs.steps.finish()
        await first.leave()
        await trio.sleep(20)
        theirs.kill()
        await trio.sleep(MAX_S + 20)
        talker = await ours.dial(POSITIONS)
        refused = await talker.request(2, "stream/resume", **named(stream), after=0)
        assert reason(refused) == "abandoned"
        await trio.sleep(120)
        assert replicas.store.records == {}


async def test_a_shutdown_is_bounded_although_the_store_is_away(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    await (await theirs.dial(POSITIONS)).begin(1, "again")
    theirs.reached.cut()
    began = trio.current_time()
    await theirs.stop()
    assert trio.current_time() - began <= SHUTDOWN_S
    await trio.sleep(TAKEN_S)
    assert len(ours.streams) == 1
    ours.again.finish()


async def test_a_replica_whose_lease_may_be_over_judges_no_cursor(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its streams may have gone on elsewhere, and an error would be final."""
    ours, _ = await replicas.two()
    stream = await (await ours.dial()).begin(1, "again")
    ours.reached.cut()
    await trio.sleep(3 * LEASE_S)
    talker = await ours.dial()
    refused = await talker.request(2, "stream/resume", **named(stream), after=99)
    assert reason(refused) == "unavailable"
    ours.reached.mend()
    await trio.sleep(LEASE_S)
    talker = await ours.dial()
    assert reason(await talker.request(2, "stream/resume", **named(stream), after=99)) == (
        "cursor_ahead"
    )


async def test_a_replica_does_not_take_back_what_it_has_just_forgotten(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_replicas(partial(make, streams_per_principal_max=1)) as replicas:
        replica = await replicas.start()
        first = await replica.dial()
        read = await first.begin(1, "step")
        replica.steps.finish()
        await first.answer(1)
        await trio.sleep(1)
        may_commit, commit = trio.Event(), replica.reached.inner.commit

        async def held(changes: Sequence[Change]) -> Sequence[JournalError | None]:
            await may_commit.wait()
            return await commit(changes)

        monkeypatch.setattr(replica.reached.inner, "commit", held)
        second, third = await replica.dial(), await replica.dial()
        await second.call(2, "step")  # there is room for it without the first one
        await wait_all_tasks_blocked()
        assert reason(await third.poll(3, read)) == "stream_not_found"
        may_commit.set()
        running = await second.announced()
        assert replica.streams == [running["streamId"]]


async def test_a_shielded_sender_waits_for_no_room_in_a_call_that_another_replica_has(
    autojump_clock: MockClock,
) -> None:
    async with open_replicas(partial(make, unsent_entries_max=3)) as replicas:
        ours, theirs = await replicas.two()
        stream = await (await ours.dial()).begin(1, "again")
        heard: list[type[Exception]] = []

        async def send(call: Call) -> None:
            heard.append(type(await flood(call)))

        ours.again.do(send)
        await trio.sleep(1)
        replicas.kill_store(ours)
        await trio.sleep(TAKEN_S)
        assert theirs.streams == [stream["streamId"]]
        replicas.start_store(ours)
        await trio.sleep(LEASE_S)
        assert heard == [Fenced]
