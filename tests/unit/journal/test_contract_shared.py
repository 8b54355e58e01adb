"""The promises of every journal that several replicas share: one suite for all of them.

A replica that is gone is one that does nothing more. No test but that of a lost turn waits for a
lease: whether a replica is gone is for the engine to decide, and here `claim` just follows.
"""

from collections.abc import Sequence

import pytest
import trio
from msgspec.structs import replace

from streams.errors import Fenced, Unavailable
from streams.journal.contract import Journal, News
from streams.journal.records import (
    Ack,
    Change,
    Checkpoint,
    Close,
    Create,
    Evict,
    Forget,
    Outcome,
    Record,
    Restart,
    Restore,
)
from streams.journal.sessions import DropSession, SaveGrant, SaveSession
from tests.rigs.journals import (
    PLENTY,
    OpenReplica,
    append,
    applied,
    as_one,
    grant,
    last_append,
    lines,
    read_all,
    record,
    session,
)

NAMES = [bytes([n]) * 16 for n in range(4)]
PATIENCE_S = 30.0  # for news; it only limits how long a failing test takes


def ids(records: Sequence[Record]) -> str:
    return "".join(record.stream for record in records)


async def claimed(journal: Journal, owner: str) -> list[Record]:
    """All streams of `owner`, which are claimed in pieces."""
    records: list[Record] = []
    while piece := await journal.claim(owner):
        records += piece
    return records


async def news_of(journal: Journal) -> News:
    with trio.fail_after(PATIENCE_S):
        return await journal.news()


async def posts_of(journal: Journal, count: int) -> list[tuple[str, str, bytes]]:
    """So many posts, as senders, streams and bodies."""
    posts: list[tuple[str, str, bytes]] = []
    while len(posts) < count:
        posts += [(post.sender, post.stream, post.body) for post in (await news_of(journal)).posts]
    return posts


async def changed(journal: Journal, stream: str) -> None:
    """Wait for the news that a stream has changed."""
    news = await news_of(journal)
    while stream not in news.changed and not news.is_all:
        news = await news_of(journal)


async def has_news(journal: Journal, within_s: float = 0.1) -> bool:
    """Whether there are news now, apart from the first `is_all` of a journal that has begun."""
    with trio.move_on_after(within_s):
        while (await journal.news()).is_all:
            pass
        return True
    return False


def found(record: Record | None) -> Record:
    assert record is not None
    return record


def ended(stream: str, *, last: int = 3) -> list[Change]:
    return [Create(record(stream)), last_append(1, last, stream=stream)]


def evicted(stream: str, due_at: float = 9.0, **more: object) -> list[Change]:
    return [*ended(stream), Evict(stream, 1, due_at, **more)]  # type: ignore[arg-type]


# Leases


async def test_replicas_have_different_names(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        assert one.replica
        assert two.replica
        assert one.replica != two.replica
        assert one.lease_s > 0


async def test_the_creator_owns_a_stream_and_alone_changes_it(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        [answer] = await one.commit([Create(replace(record(), owner=two.replica))])
        assert isinstance(answer, Fenced), "as if it had another name when it made the change"
        await applied(one, Create(record()), append(1, 2))
        assert found(await two.find("s")) == replace(record(), owner=one.replica, last=2, fence=1)
        changes: list[Change] = [
            append(3, 3),
            Ack("s", 1, 2),
            Close("s", 1, Outcome.CANCELLED, 5.0),
            Evict("s", 1, 9.0),
            Forget("s", 1),
        ]
        assert [type(answer) for answer in await two.commit(changes)] == [Fenced] * 5
        assert await two.commit([Create(record())]) == [None]
        assert found(await one.find("s")).owner == one.replica
        await applied(one, append(3, 4))
        assert await read_all(two) == lines(1, 4).body


async def test_a_claim_of_a_replica_takes_all_its_streams_in_pieces(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, *(Create(record(stream)) for stream in "bcaed"))
        await applied(two, Create(record("x")))
        claims = await claimed(three, one.replica)
        assert ids(claims) == "abcde"
        assert {r.owner for r in claims} == {three.replica}
        assert {r.fence for r in claims} == {2}
        assert await claimed(three, one.replica) == []
        assert found(await three.find("x")).owner == two.replica
        late = [append(1, 1, stream=stream) for stream in "abcde"]
        assert [type(answer) for answer in await one.commit(late)] == [Fenced] * 5
        await applied(three, *(append(1, 1, stream=stream, fence=2) for stream in "abcde"))


async def test_of_two_that_claim_a_stream_one_gets_it(open_replica: OpenReplica) -> None:
    async with open_replica() as gone, open_replica() as one, open_replica() as two:
        streams = "abcdefghij"
        await applied(gone, *(Create(record(stream)) for stream in streams))
        got: dict[str, list[Record]] = {}

        async def claim(journal: Journal) -> None:
            got[journal.replica] = await claimed(journal, gone.replica)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim, one)
            nursery.start_soon(claim, two)
        assert sorted(r.stream for claims in got.values() for r in claims) == list(streams)
        for replica, claims in got.items():
            assert {r.owner for r in claims} <= {replica}


async def test_a_claimed_replica_is_told_and_has_a_new_name(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record("a")), Create(record("b")))
        old = one.replica
        assert await one.renew() is not None
        assert ids(await claimed(two, old)) == "ab"
        assert await one.renew() is None
        assert one.replica != old
        assert await one.renew() is not None
        await applied(one, Create(record("c")))
        assert found(await two.find("c")).owner == one.replica
        [answer] = await one.commit([append(1, 1, stream="a")])
        assert isinstance(answer, Fenced)


async def test_a_claimed_replica_cannot_own_a_stream_before_it_was_told(
    open_replica: OpenReplica,
) -> None:
    """A stream whose owner no replica knows of would never be claimed."""
    async with open_replica() as one, open_replica() as two:
        await applied(two, *evicted("e"))
        assert await claimed(two, one.replica) == []
        assert [type(answer) for answer in await one.commit([Create(record())])] == [Fenced]
        assert await one.find("s") is None
        with pytest.raises(Unavailable):
            await one.take("e")
        assert await one.renew() is None
        await applied(one, Create(record()))
        assert found(await one.take("e")).owner == one.replica


async def test_each_renewal_is_seen_by_all(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        before = await two.renew()
        assert before is not None
        assert one.replica in before
        for _ in range(3):
            first = await one.renew()
            after = await two.renew()
            assert first is not None
            assert after is not None
            assert after[one.replica] == first[one.replica] > before[one.replica]
            before = after
        again = await two.renew()
        assert again is not None
        assert again[one.replica] == before[one.replica]


async def test_a_claimed_replica_is_not_counted(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        await claimed(two, one.replica)
        counts = await two.renew()
        assert counts is not None
        assert counts.get(one.replica, -1) == -1


async def test_a_release_is_heard_of_and_what_it_leaves_is_claimed_once(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, *(Create(record(stream)) for stream in "abc"), append(1, 2, stream="a"))
        await one.release()
        while (await news_of(two)).released != {one.replica}:
            pass
        while (await news_of(three)).released != {one.replica}:
            pass
        counts = await two.renew()
        assert counts is not None
        assert counts.get(one.replica, -1) == -1
        assert found(await two.find("a")).owner == ""
        assert [type(each) for each in await one.commit([append(3, 3, stream="a")])] == [Fenced]
        assert ids(await claimed(two, "")) == "abc"
        assert await claimed(three, "") == []
        after = await two.find("a")
        assert (found(after).owner, found(after).last) == (two.replica, 2)
        assert found(after).fence > 1


async def test_a_claim_takes_only_what_is_wanted_and_leaves_the_rest(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        streams = [f"{number:03}" for number in range(220)]
        await applied(one, *(Create(record(stream, number=int(stream))) for stream in streams))
        wanted = set(streams[150:] + streams[:1])
        records: list[Record] = []
        while piece := await two.claim(one.replica, wanted.__contains__):
            records += piece
        assert sorted(each.stream for each in records) == sorted(wanted)
        assert {each.stream for each in await claimed(three, one.replica)} == set(streams) - wanted


async def test_what_a_claim_has_left_is_told_to_replicas_that_come_later(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as gone, open_replica() as one:
        await applied(gone, Create(record("a")), Create(record("b")))
        assert ids(await one.claim(gone.replica, {"a"}.__contains__)) == "a"
        async with open_replica() as late:
            counts = await late.renew()
            assert counts is not None
            assert counts[gone.replica] == -1
            assert ids(await claimed(late, gone.replica)) == "b"
            counts = await late.renew()
            assert counts is not None
            assert gone.replica not in counts


async def test_the_calls_that_run_are_counted_for_each_owner(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *(Create(record(stream)) for stream in "abc"), *evicted("d", stays=True))
        await applied(one, Create(record("e")), last_append(1, 1, stream="e"))
        await applied(two, Create(record("f")))
        running = {one.replica: 3, two.replica: 1, "": 0, "nobody": 0}
        assert await one.running(list(running)) == running
        await one.release()
        assert await two.running([one.replica, ""]) == {one.replica: 0, "": 3}


async def test_a_release_of_nothing_is_no_error(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await one.release()
        assert await claimed(two, "") == []


# Evicted streams


async def test_an_evicted_stream_has_no_owner_and_may_be_taken_once(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, *evicted("s"))
        assert found(await two.find("s")).owner == ""
        taken = found(await two.take("s"))
        assert (taken.owner, taken.fence > 1, taken.due_at) == (two.replica, True, 9.0)
        assert found(await three.take("s")) == taken
        assert found(await three.find("s")) == taken
        assert [type(answer) for answer in await one.commit([Ack("s", 1, 2)])] == [Fenced]
        await applied(two, Ack("s", taken.fence, 2))
        await applied(two, Evict("s", taken.fence, 12.0))
        again = found(await three.take("s"))
        assert again.owner == three.replica
        assert again.fence > taken.fence
        assert await one.take("nobody's") is None


async def test_an_evicted_stream_that_stays_keeps_its_owner(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *evicted("s", stays=True, names=(NAMES[0],)))
        assert found(await two.take("s")).owner == one.replica
        assert await two.named(NAMES[0]) == "s"
        assert await two.due(limit=9) == []
        await applied(one, Ack("s", 1, 2), Evict("s", 1, 10.0))
        assert found(await two.take("s")).owner == two.replica


async def test_the_evicted_streams_of_a_claimed_replica_are_free(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, *evicted("a", stays=True), Create(record("b")), *evicted("c"))
        assert found(await one.take("c")).owner == one.replica
        assert ids(await claimed(two, one.replica)) == "b"
        assert ids(await two.due(limit=9)) == "ac"
        assert found(await three.take("a")).owner == three.replica
        assert [type(answer) for answer in await one.commit([Ack("a", 1, 2)])] == [Fenced]


async def test_a_release_frees_evicted_streams_too(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *evicted("a", stays=True), Create(record("b")))
        await one.release()
        assert ids(await claimed(two, "")) == "b"
        assert found(await two.take("a")).owner == two.replica


async def test_any_replica_may_postpone_or_forget_what_is_due(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *evicted("a", 5.0), *evicted("b", 6.0))
        assert ids(await two.due(limit=9)) == "ab"
        await applied(two, Evict("a", 1, 7.0))
        assert ids(await one.due(limit=9)) == "ba"
        await applied(two, Forget("b", 1))
        assert await one.find("b") is None


async def test_names_of_a_new_stream_find_it_at_once(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record(), tuple(NAMES[:2])))
        for journal in (one, two):
            assert [await journal.named(name) for name in NAMES[:3]] == ["s", "s", None]
            assert await journal.named(NAMES[1], is_secret=True) == "s"
        await applied(two, Create(record("t"), (NAMES[1],)))
        assert await one.named(NAMES[1]) == "t"  # which was given it last
        await applied(one, Forget("s", 1))
        assert [await two.named(name) for name in NAMES[:2]] == [None, "t"]


# Lookups


async def test_all_that_is_wanted_is_listed_and_what_others_own_is_counted(
    open_replica: OpenReplica,
) -> None:
    async def listed(journal: Journal, **how: int) -> str:
        return ids(await journal.listed("os(0)", **({"after": 0, "limit": 9} | how)))  # type: ignore[arg-type]

    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, Create(record("a")), Create(record("d")))
        await applied(two, Create(record("b")), *evicted("c"))
        await applied(two, Create(replace(record("x"), principal="os(1)")))
        assert [await listed(journal) for journal in (one, two, three)] == ["abcd"] * 3
        assert [await journal.count("os(0)") for journal in (one, two, three)] == [2, 3, 4]
        assert await one.count("os(1)") == 1
        assert await listed(three, limit=2) == "ab"
        assert await listed(three, after=record("b").number) == "cd"
        await applied(one, Close("d", 1, Outcome.CANCELLED, 5.0))
        await applied(two, Ack("c", 1, 3))
        assert [await listed(journal) for journal in (one, two, three)] == ["ab"] * 3
        assert (await three.totals()).last_number == record("x").number
        assert await three.principal_of("x") == "os(1)"


async def test_what_was_read_is_listed_alone_to_all(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *evicted("a"), *evicted("b", is_read=True), Create(record("c")))
        for journal in (one, two):
            read = await journal.listed("os(0)", after=0, limit=9, only_read=True)
            assert ids(read) == "b"


async def test_what_is_due_is_so_for_all(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        for stream, due_at in zip("abc", (5.0, 3.0, 4.0), strict=True):
            await applied(one, *evicted(stream, due_at))
        await applied(one, Ack("c", 1, 3), Create(record("d")))
        for journal in (one, two):
            assert ids(await journal.due(limit=9)) == "bca"
            assert ids(await journal.due(limit=1)) == "b"
            assert ids(await journal.due(limit=9, only_unwanted=True)) == "c"


async def test_sessions_and_grants_are_of_all_replicas(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, SaveSession(session("k")), Create(record()))
        await applied(two, SaveSession(session("l")), SaveGrant(grant("k")), SaveGrant(grant("l")))
        assert await two.session("k") == session("k")
        assert await one.session("m") is None
        assert await one.grants("s") == [grant("k"), grant("l")]
        assert await one.count_sessions() == 2
        assert await one.count_sessions("session(l)") == 1
        later = session("k", seen_at=2e9)
        await applied(two, SaveSession(later))
        assert await one.session("k") == later
        await applied(one, DropSession("k"))
        assert await two.grants("s") == [grant("l")]
        assert await two.count_sessions() == 1


# News


async def test_a_follower_hears_of_every_kind_of_change(open_replica: OpenReplica) -> None:
    restarts = record(restart=Restart())
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, Create(restarts), Create(record("t")))
        followed = await two.follow("s")
        assert followed == replace(restarts, owner=one.replica)
        changes: list[Change] = [
            append(1, 2),
            Checkpoint("s", 1, 2, b"{}"),
            Ack("s", 1, 2),
            last_append(3, 3),
            Evict("s", 1, 9.0),
        ]
        for change in changes:
            await applied(one, change)
            await changed(two, "s")
        taken = found(await three.take("s"))
        await changed(two, "s")
        await applied(three, Close("s", taken.fence, Outcome.ABANDONED, 5.0))
        await changed(two, "s")
        await applied(three, Forget("s", taken.fence))
        await changed(two, "s")
        await applied(one, append(1, 2, stream="t"))
        assert not await has_news(two)
        assert not await has_news(three)


async def test_a_change_between_find_and_follow_is_seen(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        await two.find("s")
        await applied(one, append(1, 2))
        assert found(await two.follow("s")).last == 2


async def test_a_claim_or_a_release_is_news_to_followers(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, Create(record()))
        await three.follow("s")
        await claimed(two, one.replica)
        await changed(three, "s")
        assert found(await three.find("s")).owner == two.replica
        await two.release()
        await changed(three, "s")
        assert found(await three.find("s")).owner == ""


async def test_a_follower_that_waits_is_woken(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        await two.follow("s")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(changed, two, "s")
            await trio.testing.wait_all_tasks_blocked()
            await applied(one, append(1, 1))


async def test_the_news_end_with_unfollow(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        await two.follow("s")
        await applied(one, append(1, 1))
        await changed(two, "s")
        await two.unfollow("s")
        await applied(one, append(2, 2))
        assert not await has_news(two)


async def test_a_stream_may_be_followed_before_it_exists(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        assert await two.follow("s") is None
        await applied(one, Create(record()))
        await changed(two, "s")


# Posts


async def test_posts_reach_the_owner_once_and_in_order(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        bodies = [b"%d" % n for n in range(20)]
        for n in range(0, 20, 2):
            assert await two.post("s", *bodies[n : n + 2])
        assert await posts_of(one, 20) == [(two.replica, "s", body) for body in bodies]
        assert not await has_news(one)
        assert await one.post("s", b"\x00\xff\n")
        assert await posts_of(one, 1) == [(one.replica, "s", b"\x00\xff\n")]


async def test_posts_of_any_length_keep_their_order(open_replica: OpenReplica) -> None:
    """The store publishes short ones, and tells of long ones."""
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        bodies = [b"%d" % n + b"\x00" * (20_000 if n % 3 else 9) for n in range(40)]
        async with trio.open_nursery() as nursery:
            for n in range(0, 40, 4):
                nursery.start_soon(two.post, "s", *bodies[n : n + 4])
            posts = await posts_of(one, 40)
        found = [body for _, _, body in posts]
        for n in range(0, 40, 4):  # one post each, which begin in any order
            first = found.index(bodies[n])
            assert found[first : first + 4] == bodies[n : n + 4]
        assert not await has_news(one)


async def test_posts_that_are_not_kept_overtake_none(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        bodies = [b"%d\x00\n" % n for n in range(20)]
        kept = bodies[::3]
        for body in bodies:
            assert await two.post("s", body, is_kept=body in kept)
        posts = await posts_of(one, 20)
        assert {(sender, stream) for sender, stream, _ in posts} == {(two.replica, "s")}
        check_order([body for _, _, body in posts], bodies, kept)
        for body in bodies:
            await one.send(two.replica, "s", body, is_kept=body in kept)
        check_order([body for _, _, body in await posts_of(two, 20)], bodies, kept)
        assert not await two.post("nobody's", b"lost", is_kept=False)


def check_order(found: list[bytes], sent: list[bytes], kept: list[bytes]) -> None:
    """Those that are kept are in order, and so are the others, each behind all kept before it."""
    assert sorted(found) == sorted(sent)
    assert [body for body in found if body in kept] == kept
    others = [body for body in found if body not in kept]
    assert others == [body for body in sent if body not in kept]
    for body in others:
        before = set(sent[: sent.index(body)]) & set(kept)
        assert before <= set(found[: found.index(body)])


async def test_a_post_wakes_the_owner(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(posts_of, one, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert await two.post("s", b"wake up")


async def test_a_cancelled_wait_for_news_loses_none(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()))
        assert not await has_news(one)
        await two.post("s", b"1")
        with trio.CancelScope() as scope:
            scope.cancel()
            await one.news()
        assert await posts_of(one, 1) == [(two.replica, "s", b"1")]


async def test_nothing_is_posted_about_a_stream_without_an_owner(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, *evicted("s"))
        assert not await two.post("s", b"lost")
        assert not await two.post("nobody's", b"lost")
        taken = found(await one.take("s"))
        assert taken.owner == one.replica
        assert await two.post("s", b"kept")
        assert await posts_of(one, 1) == [(two.replica, "s", b"kept")]


async def test_a_claim_inherits_the_posts_of_the_dead(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, *(Create(record(stream)) for stream in "abc"))
        for stream in "abc":
            assert await three.post(stream, stream.encode(), stream.encode() * 2)
        assert ids(await claimed(two, one.replica)) == "abc"
        posts = await posts_of(two, 6)
        for stream in "abc":
            bodies = [body for _, about, body in posts if about == stream]
            assert bodies == [stream.encode(), stream.encode() * 2]


async def test_a_claim_after_a_release_inherits_the_posts(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await applied(one, Create(record()))
        assert await three.post("s", b"in time")
        await one.release()
        assert not await three.post("s", b"too late")
        assert ids(await claimed(two, "")) == "s"
        assert await posts_of(two, 1) == [(three.replica, "s", b"in time")]


async def test_what_is_sent_reaches_one_replica_or_all_others(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two, open_replica() as three:
        await one.send(two.replica, "s", b"1", b"2")
        assert await posts_of(two, 2) == [(one.replica, "s", b"1"), (one.replica, "s", b"2")]
        assert not await has_news(three)
        await one.send("", "", b"3")
        for journal in (two, three):
            assert await posts_of(journal, 1) == [(one.replica, "", b"3")]
        assert not await has_news(one)
        await one.send("no-such-replica", "s", b"lost")


async def test_a_claim_inherits_no_posts_to_the_dead_as_a_follower(
    open_replica: OpenReplica,
) -> None:
    """An answer of the owner to a replica that is gone is for no other replica."""
    async with open_replica() as one, open_replica() as two:
        await applied(two, Create(record()))
        await two.send(one.replica, "s", b"answer")
        assert await claimed(two, one.replica) == []
        assert not await has_news(two)


# Turns


async def test_turns_of_one_name_exclude_each_other(open_replica: OpenReplica) -> None:
    inside: list[str] = []

    async def take_turns(journal: Journal) -> None:
        for _ in range(5):
            async with journal.turn(b"name"):
                assert not inside
                inside.append(journal.replica)
                await trio.sleep(0.001)
                inside.pop()

    async with open_replica() as one, open_replica() as two, trio.open_nursery() as nursery:
        for journal in (one, one, two):
            nursery.start_soon(take_turns, journal)


async def test_turns_of_other_names_do_not_wait(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        with trio.fail_after(PATIENCE_S):
            async with one.turn(b"a"), two.turn(b"b"), one.turn(b"c"):
                pass


async def test_a_turn_that_fails_or_is_cancelled_is_over(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        with pytest.raises(ValueError, match="failed"):
            async with one.turn(b"a"):
                raise ValueError("failed")
        with trio.CancelScope() as scope:
            async with one.turn(b"a"):
                scope.cancel()
                await trio.sleep_forever()
        with trio.fail_after(PATIENCE_S):
            async with two.turn(b"a"):
                pass


async def test_a_replica_that_is_gone_leaves_its_turn(open_replica: OpenReplica) -> None:
    async with open_replica() as gone, open_replica() as one:
        turn = gone.turn(b"a")
        await turn.__aenter__()
        with trio.fail_after(PATIENCE_S):
            async with one.turn(b"a"):
                pass
        await turn.__aexit__(None, None, None)
        async with one.turn(b"a"):
            pass


async def test_a_stream_of_a_turn_is_created_only_by_the_replica_that_still_has_it(
    open_replica: OpenReplica,
) -> None:
    async with open_replica() as late, open_replica() as one:
        turn = late.turn(b"a")
        await turn.__aenter__()
        with trio.fail_after(PATIENCE_S):
            async with one.turn(b"a"):
                await applied(one, Create(record("s"), turn=b"a"))
        created = Create(record("t"), turn=b"a")
        assert [type(error) for error in await late.commit([created])] == [Fenced]
        await turn.__aexit__(None, None, None)
        assert [type(error) for error in await late.commit([created])] == [Fenced]
        assert await one.find("t") is None
        await applied(one, Create(record("s"), turn=b"a"))  # it exists
        async with late.turn(b"a"):
            await applied(late, Create(record("u")), created)
        assert await one.find("t") is not None


# Stores that went back


async def test_lost_lines_are_never_numbered_again(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        await applied(one, Create(record()), append(1, 5))
        known = replace(found(await one.find("s")), last=8)
        await applied(one, Restore(1, known))
        after = found(await two.find("s"))
        assert (after.last, after.lost, after.owner) == (8, (6, 8), one.replica)
        await applied(one, Restore(1, known), append(9, 10))
        assert found(await two.find("s")).lost == (6, 8)
        assert as_one(await two.read("s", 2, bytes_max=PLENTY)) == lines(3, 5)
        assert as_one(await two.read("s", 5, bytes_max=PLENTY)) == lines(9, 10)
        assert as_one(await two.read("s", 7, bytes_max=PLENTY)) == lines(9, 10)


async def test_a_lost_stream_comes_back_with_its_owner(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        known = replace(record(), last=4, acked=1, fence=3)
        await applied(one, Restore(3, known))
        after = found(await two.find("s"))
        assert after == replace(known, owner=one.replica, lost=(2, 4))
        assert await two.read("s", 1, bytes_max=PLENTY) == []
        [answer] = await two.commit([Restore(3, replace(known, last=9))])
        assert isinstance(answer, Fenced)
        await applied(one, append(5, 5, fence=3))
        assert as_one(await two.read("s", 1, bytes_max=PLENTY)) == lines(5, 5)


async def test_a_second_loss_leaves_the_lines_between_out_unless_the_first_is_confirmed(
    open_replica: OpenReplica,
) -> None:
    """A record knows one range. A client has confirmed what lies before it, or is told of all."""
    async with open_replica() as one, open_replica() as two:
        for stream in "st":
            lost = replace(record(stream), last=3)
            await applied(one, Restore(1, lost), append(4, 6, stream=stream))
        await applied(one, Ack("t", 1, 3))
        for stream in "st":
            await applied(one, Restore(1, replace(record(stream), last=8)))
        assert found(await two.find("s")).lost == (1, 8)
        assert await two.read("s", 0, bytes_max=PLENTY) == []
        assert found(await two.find("t")).lost == (7, 8)
        assert as_one(await two.read("t", 3, bytes_max=PLENTY)) == lines(4, 6)


# The streams that a replica owns


async def test_a_replica_lists_what_it_owns(open_replica: OpenReplica) -> None:
    async with open_replica() as one, open_replica() as two:
        for number, stream in enumerate("cab", 1):
            await applied(one, Create(replace(record(stream), number=number)))
        await applied(two, Create(replace(record("d"), number=4)))
        assert ids(await one.owned(after=0, limit=10)) == "cab"
        assert ids(await one.owned(after=0, limit=2)) == "ca"
        assert ids(await one.owned(after=2, limit=2)) == "b"
        assert await one.owned(after=3, limit=2) == []
        await applied(one, last_append(1, 1, stream="a"), Evict("a", 1, 5.0))
        await applied(one, last_append(1, 1, stream="b"), Evict("b", 1, 5.0, stays=True))
        assert ids(await one.owned(after=0, limit=10)) == "cb"
        await two.take("a")
        assert ids(await two.owned(after=0, limit=10)) == "ad"
        await claimed(one, two.replica)
        assert ids(await one.owned(after=0, limit=10)) == "cbd"
        assert await two.owned(after=0, limit=10) == []


async def test_streams_of_a_claim_without_an_answer_are_owned(open_replica: OpenReplica) -> None:
    """Whether it is given up before it is sent, or while the store makes it."""
    async with open_replica() as dead, open_replica() as heir:
        for number, stream in enumerate("abc", 1):
            await applied(dead, Create(replace(record(stream), number=number)))
        for pause_s in (0.0, 0.0005, 0.001, 0.002):
            with trio.move_on_after(pause_s):
                await heir.claim(dead.replica)
        await claimed(heir, dead.replica)
        owned = await heir.owned(after=0, limit=10)
        assert ids(owned) == "abc"
        for each in owned:
            await applied(heir, append(1, 1, stream=each.stream, fence=each.fence))


async def test_a_stream_of_its_own_is_taken_as_it_is(open_replica: OpenReplica) -> None:
    async with open_replica() as one:
        await applied(one, Create(record()), append(1, 3))
        taken = found(await one.take("s"))
        assert (taken.fence, taken.last, taken.lost) == (1, 3, None)
        await applied(one, append(4, 4))
