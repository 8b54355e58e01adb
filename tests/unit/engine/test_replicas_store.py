"""A store that has gone back, and answers of it that were lost.

Nothing is sent twice, no number is used again, and what is lost is a gap that clients are told of.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.engine.leases import AWAY, BEATS
from streams.errors import StoreAway
from streams.journal.records import Change, Create, Outcome, Restore
from streams.journal.sessions import SaveSession
from tests.rigs import idempotency
from tests.rigs.replicas import TAKEN_S, Replica, Replicas, open_replicas
from tests.rigs.server import POSITIONS, Json, Talker, named, reason, said, text_of
from tests.rigs.shared_memory import LEASE_S, SKIPPED


def make() -> Server:
    settings: Any = {"resume_min_s": 0, "resume_max_s": 600.0, "announce_after_s": 0}
    return Server("tested", limits=Limits(), **settings)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


async def resumed(replica: Replica, stream: Json, id: str = "resume", **how: Any) -> Talker:
    """A client of this replica that has asked for the stream."""
    talker = await replica.dial(POSITIONS)
    await talker.ask(id, "stream/resume", **named(stream), **how)
    return talker


def lose_the_answer_once(replica: Replica, verb: str) -> None:
    """The store does what it is asked, and the replica does not hear that."""
    inner = replica.reached.inner
    do = getattr(inner, verb)

    async def do_and_say_nothing(*given: Any, **how: Any) -> Any:
        setattr(inner, verb, do)
        await do(*given, **how)
        raise StoreAway("it is done, and nobody knows")

    setattr(inner, verb, do_and_say_nothing)


# Answers that were lost


async def test_calls_of_a_claim_without_an_answer_go_on(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """More calls than one claim gives; their clients do not come back."""
    ours, theirs = await replicas.two()
    talker = await theirs.dial(POSITIONS)
    streams = [await talker.begin(n, "again") for n in range(5)]
    lose_the_answer_once(ours, "claim")
    theirs.kill()
    await trio.sleep(TAKEN_S)
    for n in range(5):
        ours.again.finish(str(n))
    await wait_all_tasks_blocked()
    outcomes = [replicas.store.records[each["streamId"]].outcome for each in streams]
    assert outcomes == [Outcome.COMPLETED] * 5


async def test_a_call_of_a_take_without_an_answer_goes_on(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its replica has let it go, and the client that asks for it does so once."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await wait_all_tasks_blocked()
    inner, held = ours.reached.inner, theirs.reached.inner
    hear = inner.hear_of_release
    inner.hear_of_release = lambda _: None  # type: ignore[method-assign]
    lose_the_answer_once(ours, "take")
    await held.release()
    talker = await resumed(ours, stream)
    refused = (await talker.answer("resume"))["error"]
    assert refused["data"] == {"reason": "unavailable", "retryAfter": 0.25}
    inner.hear_of_release = hear  # type: ignore[method-assign]
    await trio.sleep(TAKEN_S)
    ours.again.finish("by the heir")
    await wait_all_tasks_blocked()
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.COMPLETED


async def test_a_replica_that_was_not_told_of_a_claim_hears_of_it_later(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    theirs.reached.cut()
    await trio.sleep(2 * LEASE_S)
    assert ours.streams == [stream["streamId"]]
    lose_the_answer_once(theirs, "renew")
    theirs.reached.mend()
    await trio.sleep(LEASE_S)
    assert theirs.again.was_cancelled
    assert theirs.streams == []


async def test_no_call_begins_while_others_may_claim_it(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It would end as interrupted, and could be made again for a moment's pause."""
    ours, _ = await replicas.two()
    lost = trio.Event()

    async def renew() -> Any:
        lost.set()
        raise StoreAway("no answer")

    inner = ours.reached.inner
    was, inner.renew = inner.renew, renew  # type: ignore[method-assign]
    await trio.sleep((AWAY.cut_off + 1 / BEATS) * LEASE_S)
    assert lost.is_set()
    talker = await ours.dial(POSITIONS)
    await talker.call(1, "step")
    refused = (await talker.answer(1))["error"]
    assert refused["data"] == {"reason": "unavailable", "retryAfter": 0.25}
    inner.renew = was  # type: ignore[method-assign]
    await trio.sleep(LEASE_S / 4)
    ours.steps.finish()
    talker = await ours.dial(POSITIONS)
    await talker.call(2, "step")
    assert text_of(await talker.answer(2)) == "done"


# A store that has gone back


async def began_and_lost(replicas: Replicas, owner: Replica, *, lost: int) -> tuple[Json, Talker]:
    """A call that has sent `a` and `b`, and then so many messages that the store has lost."""
    talker = await owner.dial(POSITIONS)
    stream = await talker.begin(1, "again")
    owner.again.log("a", "b")
    await wait_all_tasks_blocked()
    copy = replicas.store.copy()
    owner.again.log(*(f"lost {n}" for n in range(lost)))
    await wait_all_tasks_blocked()
    replicas.store.go_back(copy)
    return stream, talker


@pytest.mark.parametrize("is_here", [True, False], ids=["at the owner", "at a follower"])
async def test_a_client_with_all_messages_notices_nothing(
    replicas: Replicas, autojump_clock: MockClock, *, is_here: bool
) -> None:
    ours, theirs = await replicas.two()
    stream, talker = await began_and_lost(replicas, theirs, lost=2)
    await wait_all_tasks_blocked()
    if not is_here:
        talker = await resumed(ours, stream, after=4)
    await wait_all_tasks_blocked()
    theirs.again.log("c")
    theirs.again.finish()
    await talker.answer(1)
    assert said(talker.seen) == ([*"ab", "lost 0", "lost 1", "c"] if is_here else ["c"])


@pytest.mark.parametrize("is_here", [True, False], ids=["at the owner", "at a follower"])
async def test_a_client_is_told_of_the_gap_and_goes_on_behind_it(
    replicas: Replicas, autojump_clock: MockClock, *, is_here: bool
) -> None:
    """A gap at the end is told as well, before anything follows it."""
    ours, theirs = await replicas.two()
    stream, _ = await began_and_lost(replicas, theirs, lost=3)
    await wait_all_tasks_blocked()
    replica = theirs if is_here else ours
    talker = await resumed(replica, stream, after=1)
    gone = (await talker.answer("resume"))["error"]
    assert gone["data"] == {"reason": "messages_gone", "earliestSeq": 6}
    assert "resume from earliestSeq - 1" in gone["message"]
    assert said(talker.seen) == ["b"]
    await talker.ask("again", "stream/resume", **named(stream), after=5)
    theirs.again.log("c")
    theirs.again.finish()
    await talker.answer("again")
    assert said(talker.seen) == ["b", "c"]


async def test_a_gap_is_told_once_more_to_a_client_that_asks_for_it_again(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    _, theirs = await replicas.two()
    stream, _ = await began_and_lost(replicas, theirs, lost=1)
    await wait_all_tasks_blocked()
    talker = await resumed(theirs, stream, after=2)
    for request_id in ("resume", "again"):
        gone = (await talker.answer(request_id))["error"]
        assert gone["data"] == {"reason": "messages_gone", "earliestSeq": 4}
        await talker.ask("again", "stream/resume", **named(stream), after=2)


async def test_an_heir_uses_no_number_that_a_client_has_seen(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The owner dies with the store, and nobody knows what it has sent."""
    ours, theirs = await replicas.two()
    stream, _ = await began_and_lost(replicas, theirs, lost=2)
    theirs.kill()
    await trio.sleep(TAKEN_S)
    talker = await resumed(ours, stream, after=4)
    gone = (await talker.answer("resume"))["error"]
    assert gone["data"] == {"reason": "messages_gone", "earliestSeq": 2 + SKIPPED + 1}
    await talker.ask("again", "stream/resume", **named(stream), after=2 + SKIPPED)
    ended = await talker.answer(1)
    assert reason(ended["error"]) == "interrupted", "the call cannot be compared with its first run"


async def test_a_call_whose_lines_were_lost_is_not_run_on(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """It has restarted, and has not yet repeated what it had sent, when the store goes back."""
    ours, theirs = await replicas.two()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    await wait_all_tasks_blocked()
    copy = replicas.store.copy()
    theirs.again.log("a", "b")
    await wait_all_tasks_blocked()
    theirs.kill()
    await trio.sleep(TAKEN_S)
    assert ours.streams == [stream["streamId"]]
    claimed = replicas.store.records[stream["streamId"]]
    replicas.store.go_back(copy)
    await ours.reached.inner.commit([Restore(claimed.fence, claimed)])
    ours.again.log("a")
    await trio.sleep(TAKEN_S)
    assert replicas.store.records[stream["streamId"]].outcome is Outcome.FAILED
    talker = await resumed(ours, stream, after=2)
    assert reason((await talker.answer(1))["error"]) == "interrupted"


async def test_an_evicted_call_that_comes_back_uses_no_number_again(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its owner has let it go from memory, and the store has lost its end and its eviction."""
    owner = await replicas.start(
        Server(
            "tested",
            limits=Limits(resident_max=0),
            resume_min_s=0,
            resume_max_s=600.0,
            announce_after_s=0,
        )
    )
    talker = await owner.dial(POSITIONS)
    stream = await talker.begin(1, "step")
    await wait_all_tasks_blocked()
    copy = replicas.store.copy()
    owner.steps.finish("seen")
    assert text_of(await talker.answer(1)) == "seen"
    await talker.tell("notifications/stream/ack", **named(stream), seq=1)
    await trio.sleep(5 * LEASE_S)
    assert owner.streams == []
    replicas.store.go_back(copy)
    await trio.sleep(TAKEN_S)
    record = replicas.store.records[stream["streamId"]]
    assert record.outcome is Outcome.FAILED, "it is interrupted, since its handler is over"
    assert record.lost == (1, SKIPPED)
    assert record.last == SKIPPED + 1


async def test_a_checkpoint_that_was_lost_is_no_end(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The owner lives, and its call goes on with numbers of its own."""
    _, theirs = await replicas.two()
    talker = await theirs.dial(POSITIONS)
    stream = await talker.begin(1, "again")
    theirs.again.log("a")
    await wait_all_tasks_blocked()
    copy = replicas.store.copy()

    async def save(call: Call) -> None:
        await call.checkpoint({"done": 1})

    theirs.again.log("b")
    theirs.again.do(save)
    await wait_all_tasks_blocked()
    replicas.store.go_back(copy)
    theirs.again.do(save)
    theirs.again.log("c")
    theirs.again.finish()
    await talker.answer(1)
    assert said(talker.seen) == ["a", "b", "c"]
    assert replicas.store.records[stream["streamId"]].last == 4


# Until owners have put back what the store has lost


async def test_a_client_elsewhere_keeps_the_call_that_the_store_has_lost(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The store does not know of the call until its owner has put that back."""
    ours, theirs = await replicas.two()
    await trio.sleep(LEASE_S)
    copy = replicas.store.copy()
    stream = await (await theirs.dial(POSITIONS)).begin(1, "again")
    talker = await resumed(ours, stream, after=0)
    await trio.sleep(LEASE_S)
    replicas.store.go_back(copy)
    later = await ours.dial(POSITIONS)
    assert (await later.poll("poll", stream))["status"] == "live"
    theirs.again.finish("still there")
    assert text_of(await talker.answer(1)) == "still there"


async def test_a_retry_runs_no_call_again_that_the_store_has_lost(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its owner commits again what the store lacks, a moment later."""
    ours, theirs = await replicas.two()
    await trio.sleep(LEASE_S)
    copy = replicas.store.copy()
    commit = theirs.reached.inner.commit
    committed: list[Change] = []

    async def commit_and_keep(changes: Sequence[Change]) -> Any:
        committed.extend(changes)
        return await commit(changes)

    theirs.reached.inner.commit = commit_and_keep  # type: ignore[method-assign]
    await idempotency.call(await theirs.dial(POSITIONS), 1, name="again")
    await wait_all_tasks_blocked()
    replicas.store.go_back(copy)
    talker = await ours.dial(POSITIONS)
    await idempotency.call(talker, 2, name="again")
    await wait_all_tasks_blocked()
    await commit([each for each in committed if isinstance(each, Create)])
    theirs.again.finish("once")
    assert text_of(await talker.answer(2)) == "once"
    assert ours.running.running_tools == []


async def test_a_client_keeps_the_session_that_the_store_has_lost(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The replica that it has begun it at commits it again."""
    ours, theirs = await replicas.two()
    await trio.sleep(LEASE_S)
    copy = replicas.store.copy()
    browser = await theirs.browse(POSITIONS)
    [session] = (await replicas.store.kept.sessions())[0]
    elsewhere = await ours.browse({}, browser.session)
    assert (await elsewhere.post(1, "tools/list")).status == 200
    replicas.store.go_back(copy)
    await wait_all_tasks_blocked()
    answer = elsewhere.ask("POST", {"jsonrpc": "2.0", "id": 2, "method": "tools/list"})
    await wait_all_tasks_blocked()
    await theirs.reached.inner.commit([SaveSession(session)])
    await trio.sleep(LEASE_S)
    assert answer.status == 200
