"""Clients keep their streams while these go from one replica to another."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Limits, Server
from streams.engine.leases import AWAY, BEATS, DOWN, STEPS, Marks
from streams.engine.replicas import SHARED_BEATS
from streams.errors import StoreAway, StoreDown, Unavailable
from streams.journal.records import Outcome
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import POSITIONS, Json, Talker, named, reason, said
from tests.rigs.shared_memory import LEASE_S

MAX_S = 600.0
BEAT_S = LEASE_S / BEATS
# Within this time the streams of a replica that is killed have another owner.
CLAIMED_S = LEASE_S


def make() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


async def begun(replica: Replica, tool: str = "again") -> tuple[Talker, Json]:
    """A call at this replica, which restarts elsewhere, and its stream."""
    talker = await replica.dial(POSITIONS)
    return talker, await talker.begin(1, tool)


async def heard(talker: Talker, text: str) -> None:
    await talker.find(lambda m: said([m]) == [text])


async def attached(replica: Replica, stream: Json, after: int = 0) -> Talker:
    """A client that resumes at this replica, and is attached when this returns."""
    talker = await replica.dial(POSITIONS)
    await talker.ask(2, "stream/resume", **named(stream), after=after)
    if after == 0:
        await talker.announced()
    return talker


def failing(replica: Replica, method: str, fails: Callable[..., bool], result: Any = None) -> None:
    """Let a method of a replica's journal fail, or return `result`, as long as `fails` says so."""
    real = getattr(replica.reached.inner, method)

    async def failing_now(*given: Any, **how: Any) -> Any:
        if fails(*given):
            await trio.lowlevel.checkpoint()
            if result is None:
                raise Unavailable("for the test")
            return result
        return await real(*given, **how)

    setattr(replica.reached.inner, method, failing_now)


# Leases


async def test_streams_are_claimed_as_soon_as_the_lease_of_their_owner_ends(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    for pause_s in (0.0, BEAT_S / 3, BEAT_S * 3 / 4):
        _, stream = await begun(theirs)
        await trio.sleep(2 * LEASE_S + pause_s)
        theirs.kill()
        with trio.fail_after(CLAIMED_S):
            while stream["streamId"] not in ours.streams:
                await trio.sleep(0.01)
        theirs = await replicas.start()


async def test_a_replica_without_the_store_sends_its_clients_away_before_its_lease_ends(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its calls do not fail: they stand still, as if all packets were dropped."""
    _, theirs = await replicas.two()
    talker, _ = await begun(theirs)
    await trio.sleep(2 * LEASE_S)
    for method in ("renew", "commit", "read", "take", "claim"):

        async def stands_still(*_: Any) -> None:
            await trio.sleep_forever()

        setattr(theirs.reached.inner, method, stands_still)
    began_at = trio.current_time()
    while not theirs.running.engine.unready:
        await trio.sleep(0.01)
    assert trio.current_time() - began_at <= AWAY.late * LEASE_S + 0.05
    await talker.end()
    assert trio.current_time() - began_at <= AWAY.cut_off * LEASE_S + 0.05
    theirs.kill()


async def test_a_replica_keeps_its_clients_while_the_store_is_away_for_a_moment(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """No other replica reaches the store either, so a balancer could send them nowhere."""
    _, theirs = await replicas.two()
    talker, _ = await begun(theirs)
    theirs.reached.cut()
    theirs.again.log("meanwhile")
    for _ in range(BEATS // 2):
        await trio.sleep(LEASE_S / BEATS)
        assert not theirs.running.engine.unready
    theirs.reached.mend()
    await heard(talker, "meanwhile")


async def test_a_replica_that_renews_slowly_keeps_its_clients_while_it_commits(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """Its machine is too busy: clients that are sent away would come back and make it busier."""
    _, theirs = await replicas.two()
    talker, _ = await begun(theirs)
    renew = theirs.reached.inner.renew

    async def slow() -> Any:
        counts = await renew()
        await trio.sleep(LEASE_S)
        return counts

    theirs.reached.inner.renew = slow  # type: ignore[method-assign]
    for number in range(40):
        theirs.again.log(str(number))
        await heard(talker, str(number))
        await trio.sleep(LEASE_S / 8)
    assert not theirs.running.engine.unready


async def assert_ends_by(talker: Talker, marks: Marks, since: float) -> None:
    """Its replica sends it away between these marks, with a beat of tolerance."""
    await talker.end()
    took_s = trio.current_time() - since
    assert marks.late * LEASE_S - BEAT_S < took_s <= marks.cut_off * LEASE_S + BEAT_S


@pytest.mark.parametrize(("trouble", "marks"), [(StoreAway, AWAY), (StoreDown, DOWN)])
async def test_a_replica_keeps_its_clients_longer_where_the_store_says_that_it_is_down(
    replicas: Replicas, autojump_clock: MockClock, trouble: type[StoreAway], marks: Marks
) -> None:
    """A store that restarts refuses connections, and does so for the other replicas, too."""
    _, theirs = await replicas.two()
    talker, _ = await begun(theirs)
    await trio.sleep(2 * LEASE_S)
    began_at = trio.current_time()
    theirs.reached.cut(trouble)
    await assert_ends_by(talker, marks, began_at)
    theirs.kill()


async def test_a_store_that_falls_silent_after_it_said_that_it_is_down_is_away_since_then(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    _, theirs = await replicas.two()
    talker, _ = await begun(theirs)
    theirs.reached.cut(StoreDown)
    await trio.sleep(LEASE_S)
    fell_silent_at = trio.current_time()
    theirs.reached.cut()
    await assert_ends_by(talker, AWAY, fell_silent_at)
    theirs.kill()


async def test_a_replica_without_the_store_does_not_send_all_clients_away_at_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    _, theirs = await replicas.two()
    talkers = [(await begun(theirs))[0] for _ in range(16)]
    await trio.sleep(2 * LEASE_S)
    ended_at: list[float] = []

    async def note_end(talker: Talker) -> None:
        await talker.end()
        ended_at.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for talker in talkers:
            nursery.start_soon(note_end, talker)
        theirs.reached.cut()
    steps = Counter(round(at, 2) for at in ended_at)
    assert len(steps) >= STEPS - 1
    assert max(steps.values()) <= len(talkers) / 2
    theirs.kill()


async def test_the_result_of_a_call_is_there_as_soon_as_its_owner_is_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """An ended call gets no new owner, so the client that waits for its owner is served here."""
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    await trio.sleep(2 * LEASE_S)
    theirs.again.log("a")
    theirs.again.finish()
    await talker.answer(1)
    assert replicas.store.records[stream["streamId"]].outcome is not Outcome.LIVE
    assert replicas.owner_of(stream["streamId"]) == theirs.name
    theirs.kill()
    began_at = trio.current_time()
    await trio.sleep(LEASE_S / 4)
    back = await ours.dial(POSITIONS)
    await back.ask(2, "stream/resume", **named(stream), after=0)
    assert "result" in await back.answer(2)
    assert trio.current_time() - began_at < CLAIMED_S


async def test_replicas_share_the_streams_of_one_that_is_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    *heirs, theirs = [await replicas.start() for _ in range(3)]
    streams = [(await begun(theirs))[1]["streamId"] for _ in range(24)]
    await trio.sleep(2 * LEASE_S)
    theirs.kill()
    await trio.sleep(CLAIMED_S)
    counts = [sum(each in heir.streams for each in streams) for heir in heirs]
    assert sum(counts) == len(streams)
    assert min(counts) >= 4


async def test_all_replicas_run_about_as_many_calls_once_one_is_gone(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """One that has just started takes what the others would have had to share."""
    busy, idle, theirs = [await replicas.start() for _ in range(3)]
    streams = [(await begun(each))[1]["streamId"] for each in (busy, theirs) * 8][1::2]
    await trio.sleep(2 * LEASE_S)
    theirs.kill()
    await trio.sleep(CLAIMED_S)
    assert set(streams) == set(idle.streams)


async def test_replicas_share_the_streams_of_one_that_releases_them(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    *heirs, theirs = [await replicas.start() for _ in range(3)]
    streams = [(await begun(theirs))[1]["streamId"] for _ in range(24)]
    await trio.sleep(2 * LEASE_S)
    await theirs.running.engine._replicas.release()  # type: ignore[union-attr]
    await trio.sleep(0.01)
    counts = [sum(each in heir.streams for each in streams) for heir in heirs]
    assert sum(counts) == len(streams)
    assert min(counts) >= 4
    theirs.kill()


async def test_the_share_of_a_replica_that_claims_nothing_goes_to_the_others(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, other, theirs = [await replicas.start() for _ in range(3)]
    streams = [(await begun(theirs))[1]["streamId"] for _ in range(24)]
    await trio.sleep(2 * LEASE_S)
    failing(other, "claim", lambda *_: True)
    theirs.kill()
    await trio.sleep(CLAIMED_S + SHARED_BEATS * BEAT_S)
    assert all(each in ours.streams for each in streams)


# Posts


async def test_a_post_that_waits_holds_back_no_post_about_another_stream(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stuck = await begun(theirs)
    _, other = await begun(theirs)
    talker = await attached(ours, stuck)
    failing(ours, "post", lambda stream, *_: stream == stuck["streamId"])
    await talker.tell("notifications/stream/ack", **named(stuck), seq=0)
    await talker.leave()
    began_at = trio.current_time()
    await attached(ours, other)
    assert trio.current_time() - began_at < BEAT_S


async def test_a_post_for_a_stream_that_has_just_found_an_owner_goes_there(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The replica must not ask the owner for anything meanwhile: that takes a post as well."""
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    talker = await attached(ours, stream)
    ownerless = iter((True,))
    failing(ours, "post", lambda *_: next(ownerless, False), result=())
    theirs.again.log("a")
    await heard(talker, "a")
    began_at = trio.current_time()
    await talker.tell("notifications/stream/ack", **named(stream), seq=1)
    while replicas.store.records[stream["streamId"]].acked < 1:
        await trio.sleep(0.01)
    assert trio.current_time() - began_at < LEASE_S


# Loading


async def test_requests_for_a_stream_whose_owner_changes_are_all_answered(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    theirs.again.log("a")
    first, second = await ours.dial(POSITIONS), await ours.dial(POSITIONS)
    # As if the owner had changed between two looks at the record, a few times.
    changes = iter(range(4))
    real = ours.reached.inner.follow

    async def follow(stream_id: str) -> Any:
        await trio.sleep(0.03)
        found = await real(stream_id)
        return found if next(changes, None) is None else None

    ours.reached.inner.follow = follow  # type: ignore[method-assign]
    await first.ask(2, "stream/poll", **named(stream))
    await trio.sleep(0.06)  # in the pause between two looks
    await second.ask(2, "stream/poll", **named(stream))
    assert "result" in await first.answer(2)
    assert "result" in await second.answer(2)


# The newest request wins


@pytest.mark.parametrize("is_owner_late", [False, True])
async def test_a_request_that_has_waited_for_an_owner_displaces_no_newer_one(
    replicas: Replicas, is_owner_late: bool, autojump_clock: MockClock
) -> None:
    """The client has given up the first one, whose connection does not show that."""
    ours, theirs = await replicas.two()
    third = await replicas.start()
    _, stream = await begun(theirs)
    theirs.again.log("a")
    await trio.sleep(2 * LEASE_S)
    theirs.kill()
    early, late = (ours, third) if is_owner_late else (third, ours)
    failing(early, "claim", lambda *_: True)  # so that the other one becomes the owner
    stale = await early.dial(POSITIONS)
    await stale.ask(2, "stream/resume", **named(stream), after=0)
    await trio.sleep(LEASE_S / 2)
    newest = await late.dial(POSITIONS)
    await newest.ask(3, "stream/resume", **named(stream), after=0)
    await newest.announced()
    assert replicas.owner_of(stream["streamId"]) == late.name
    late.again.log("a", "to the newest")
    late.again.finish()
    await newest.answer(3)
    assert said(newest.seen)[-1] == "to the newest"
    assert "to the newest" not in said(stale.seen)


async def test_a_request_that_has_waited_displaces_no_newer_one_at_the_same_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    stale = await ours.dial(POSITIONS)
    real, is_first = ours.running.engine.operations._cache.find, iter((True,))

    async def find(stream_id: str) -> Any:
        if next(is_first, False):
            await trio.sleep(1)
        return await real(stream_id)

    ours.running.engine.operations._cache.find = find  # type: ignore[method-assign]
    await stale.ask(2, "stream/resume", **named(stream), after=0)
    await trio.sleep(0.5)
    newest = await attached(ours, stream)
    refused = await stale.answer(2)
    assert reason(refused["error"]) == "superseded"
    theirs.again.log("to the newest")
    await heard(newest, "to the newest")


async def test_a_delivery_that_is_attached_again_displaces_no_newer_one(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The client of a replica that was gone has come back to the owner itself."""
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    stale = await attached(ours, stream)
    theirs.running.engine._replicas.gone(ours.name)  # type: ignore[union-attr]
    newest = await theirs.dial(POSITIONS)
    await newest.ask(3, "stream/resume", **named(stream), after=0)
    await newest.announced()
    await trio.sleep(2 * LEASE_S)  # the other replica knows by now that it was gone
    theirs.again.log("to the newest")
    await heard(newest, "to the newest")
    assert said(stale.seen) == []


async def test_a_new_owner_is_told_of_clients_whoever_notices_it_first(
    autojump_clock: MockClock,
) -> None:
    """A poll notices the new owner before the news do. The client of before is attached there
    too: else the owner would wait for room for ever.
    """
    limits = Limits(unsent_entries_max=2)

    def limited() -> Server:
        return Server("tested", resume_min_s=0, announce_after_s=0, limits=limits)

    async with open_replicas(limited) as replicas:
        ours, theirs = await replicas.two()
        third = await replicas.start()
        _, stream = await begun(theirs)
        talker = await attached(ours, stream)
        await trio.sleep(LEASE_S)
        failing(ours, "claim", lambda *_: True)
        journal = ours.reached.inner
        hear, journal.hear = journal.hear, lambda _: None  # type: ignore[method-assign]
        theirs.kill()
        while stream["streamId"] not in third.streams:
            followed = ours.running.engine._replicas.here(stream["streamId"])  # type: ignore[union-attr]
            assert followed is not None
            followed.refreshed_at = trio.current_time()
            await trio.sleep(0.01)
        await (await ours.dial(POSITIONS)).poll(3, stream)
        journal.hear = hear  # type: ignore[method-assign]
        third.again.log(*"abcdef")
        with trio.fail_after(2 * LEASE_S):
            await heard(talker, "f")


# Shutdown


async def test_the_clients_of_a_replica_that_shuts_down_go_elsewhere_at_once(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    theirs.again.log("a")
    await heard(talker, "a")
    began_at = trio.current_time()
    ours.nursery.start_soon(theirs.stop)
    await talker.end()
    assert trio.current_time() - began_at < 0.1
    ours.again.log("a", "b")
    back = await attached(ours, stream, after=1)
    await heard(back, "b")
    assert trio.current_time() - began_at < 0.1


async def test_acks_do_not_delay_a_shutdown(replicas: Replicas, autojump_clock: MockClock) -> None:
    """The journal takes acks with a delay, and clients go on to send them."""
    ours, theirs = await replicas.two()
    talker, stream = await begun(theirs)
    theirs.again.log(*map(str, range(100)))
    await heard(talker, "99")

    async def ack() -> None:
        with suppress(trio.BrokenResourceError):
            for seq in range(100):
                await talker.tell("notifications/stream/ack", **named(stream), seq=seq)
                await trio.sleep(0.005)

    async def slow(changes: Any) -> Any:
        await trio.sleep(0.02)  # an ack comes meanwhile
        return await commit(changes)

    commit = theirs.reached.inner.commit
    theirs.reached.inner.commit = slow  # type: ignore[method-assign]
    began_at = trio.current_time()
    ours.nursery.start_soon(ack)
    ours.nursery.start_soon(theirs.stop)
    while stream["streamId"] not in ours.streams:
        await trio.sleep(0.01)
    assert trio.current_time() - began_at < 0.2


async def test_a_commit_that_stands_still_does_not_keep_a_replica_from_handing_over(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)

    async def stands_still(_: Any) -> None:
        await trio.sleep_forever()

    theirs.reached.inner.commit = stands_still  # type: ignore[method-assign]
    theirs.again.log("never durable")
    ours.nursery.start_soon(theirs.stop)
    with trio.fail_after(LEASE_S / 2):
        while stream["streamId"] not in ours.streams:
            await trio.sleep(0.01)


async def test_a_replica_that_shuts_down_takes_no_stream_back(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    ours, theirs = await replicas.two()
    _, stream = await begun(theirs)
    failing(ours, "claim", lambda *_: True)
    await theirs.running.engine._replicas.release()  # type: ignore[union-attr]
    talker = await theirs.dial(POSITIONS)
    with trio.fail_after(LEASE_S):
        refused = await talker.request(2, "stream/resume", **named(stream), after=0)
    assert reason(refused) == "released"
    await trio.sleep(2 * LEASE_S)
    assert replicas.owner_of(stream["streamId"]) == ""
