"""Group commit, over a journal that counts, stalls and fails when it is told to."""

import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.engine.committer import (
    ALONE_BYTES_MAX,
    BATCH_BYTES_MAX,
    FEW_BYTES,
    LOOK_S,
    SHARED_BYTES_MAX,
    SHORTAGE_S,
    Committer,
)
from streams.errors import (
    Conflict,
    Full,
    JournalError,
    JournalUnusable,
    Refusal,
    StoreAway,
    Unavailable,
)
from streams.journal.contract import Shortage
from streams.journal.memory import MemoryJournal
from streams.journal.records import Ack, Append, Change, Close, Create, Forget, Outcome, Record
from streams.limits import STORE_RETRY_S
from streams.messages import Run
from tests.rigs.troubled import Troubled


def record(stream: str) -> Record:
    return Record(
        stream=stream,
        principal="alice",
        origin=b"{}",
        min_s=1.0,
        max_s=2.0,
        created_at=0.0,
        fence=1,
        is_announced=True,
    )


class Source:
    """A stream, as far as the committer knows one."""

    def __init__(self, committer: Committer, stream: str) -> None:
        self.id = stream
        self.durable = -1
        self.asked = 0  # how often it was asked for what it has
        self.can_wait = True
        self.is_anonymous = False
        self._committer = committer
        self._last = 0
        self._lines: list[bytes] = []

    def say(self, *texts: str) -> None:
        for text in texts:
            line = f'"{text}"\n'.encode()
            self._lines.append(line)
            self._committer.mark(self, len(line))

    def take(self) -> list[Append]:
        self.asked += 1
        lines, self._lines = self._lines, []
        if not lines:
            return []
        run = Run(self._last + 1, len(lines), b"".join(lines))
        self._last = run.last
        return [Append(self.id, 1, run, 0, 0)]

    def committed(self, seq: int) -> None:
        self.durable = max(self.durable, seq)


@asynccontextmanager
async def committing(journal: Troubled) -> Any:
    committer = Committer(journal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        yield committer
        nursery.cancel_scope.cancel()


def test_nothing_is_wanted_of_a_new_committer() -> None:
    committer = Committer(MemoryJournal())
    committer.check()
    assert not committer.is_full(is_anonymous=False)


async def test_what_comes_together_is_committed_together() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        sources = [Source(committer, f"s{n}") for n in range(50)]
        for source in sources:
            committer.add(Create(record(source.id)))
            source.say("a", "b")
        await committer.settle()
    assert len(journal.commits) == 1
    assert {source.durable for source in sources} == {2}


async def test_while_one_commit_is_under_way_the_next_gathers() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        journal.hold()
        source.say("a")
        await wait_all_tasks_blocked()
        for n in range(100):
            source.say(str(n))
            await wait_all_tasks_blocked()
        assert source.durable == -1
        journal.let_go()
        await committer.settle()
    assert [len(changes) for changes in journal.commits] == [2, 1]
    assert source.durable == 101


async def test_a_source_without_lines_hears_that_its_record_is_durable() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        committer.mark(source, 0)
        await committer.settle()
    assert source.durable == 0


async def test_an_ack_waits_a_second_for_company(autojump_clock: MockClock) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        source.say("a", "b", "c")
        await committer.settle()
        start = trio.current_time()
        for acked in (1, 2, 3):
            committer.ack(Ack("s", 1, acked))
        await committer.commit_done()
        assert trio.current_time() - start == pytest.approx(1.0)
        assert journal.commits[1:] == [[Ack("s", 1, 3)]]
        committer.ack(Ack("s", 1, 3))
        start = trio.current_time()
        source.say("company")
        await committer.commit_done()
        assert trio.current_time() == start


async def test_what_may_wait_goes_with_the_next_change(autojump_clock: MockClock) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        committer.add(Create(record("s")))
        await committer.settle()
        committer.add(Forget("s", 1), may_wait=True)
        await trio.sleep(0.9)
        committer.add(Create(record("t")))
        await wait_all_tasks_blocked()
        assert journal.commits[1:] == [[Forget("s", 1), Create(record("t"))]]
        committer.add(Forget("t", 1), may_wait=True)
        await trio.sleep(0.9)
        assert len(journal.commits) == 2
        await trio.sleep(0.2)
        assert journal.commits[2:] == [[Forget("t", 1)]]


async def test_an_ack_is_not_sent_after_what_is_forgotten() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        committer.add(Create(record("s")))
        await committer.settle()
        committer.ack(Ack("s", 1, 0))
        committer.add(Forget("s", 1))
        await committer.settle()
    assert journal.commits[1:] == [[Forget("s", 1)]]


@pytest.mark.parametrize("trouble", [Full("no room"), Unavailable("busy")])
async def test_a_journal_that_is_in_trouble_is_asked_again(
    autojump_clock: MockClock, trouble: Unavailable
) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        source.say("a")
        journal.trouble = trouble
        await trio.sleep(60)
        assert source.durable == -1
        with pytest.raises(Refusal, match=f"{trouble}.*try again later") as refused:
            committer.check()
        assert refused.value.code == -32603
        assert 25 < journal.refused < 40  # every 2 s at last
        journal.trouble = None
        await committer.settle()
        committer.check()
        assert source.durable == 1


async def test_a_client_is_not_told_the_address_of_a_store_that_is_away(
    autojump_clock: MockClock,
) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        committer.add(Create(record("s")))
        journal.trouble = StoreAway("redis://10.0.0.7:6379/0: no connection to 10.0.0.7:6379")
        await trio.sleep(1)
        with pytest.raises(Refusal) as refused:
            committer.check()
        told = "The store of the journal cannot be used now: try again later."
        assert str(refused.value) == told
        assert refused.value.data == {"reason": "unavailable", "retryAfter": STORE_RETRY_S}
        assert not committer.why_not, "the lease tells when balancers must know"
        journal.trouble = None
        await committer.settle()


async def test_what_waits_for_a_commit_is_bounded() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        committer.mark(source, BATCH_BYTES_MAX - 1)
        assert not committer.is_full(is_anonymous=False)
        committer.mark(source, 1)
        assert committer.is_full(is_anonymous=False)
        await committer.settle()
        assert not committer.is_full(is_anonymous=False)


async def test_where_room_is_short_who_has_much_to_say_waits(autojump_clock: MockClock) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        much, little, last = (Source(committer, name) for name in ("much", "little", "last"))
        for source in (much, little, last):
            committer.add(Create(record(source.id)))
        await committer.settle()
        journal.shortage = Shortage("little is left", is_severe=False)
        await trio.sleep(LOOK_S)
        last.can_wait = False
        much.say("x" * FEW_BYTES)
        little.say("x")
        last.say("x" * FEW_BYTES)
        await trio.sleep(100)
        assert [source.durable for source in (much, little, last)] == [-1, 1, 1]
        with pytest.raises(Refusal, match=r"\(little is left\): try again later"):
            committer.check("alice")
        committer.check()  # of a session, which may bring acks
        journal.shortage = Shortage("nothing is left", is_severe=True)
        with pytest.raises(Refusal, match=r"\(nothing is left\): try again later"):
            committer.check()
        committer.check(is_freeing=True)
        journal.shortage = Shortage("little is left", is_severe=False)
        assert committer.why_not == "", "clients must come in to confirm what they have"
        much.can_wait = False  # it has ended
        much.say("the end")
        await committer.commit_done()
        assert much.durable == 2


async def test_where_hardly_any_room_is_left_only_ends_are_committed(
    autojump_clock: MockClock,
) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        going, ending = Source(committer, "going"), Source(committer, "ending")
        ending.can_wait = False
        committer.add(Create(record("going")))
        committer.add(Create(record("ending")))
        journal.shortage = Shortage("little is left", is_severe=True)
        await trio.sleep(LOOK_S)
        going.say("x")
        ending.say("x")
        await trio.sleep(100)
        assert (going.durable, ending.durable) == (-1, 1)
        assert len(journal.commits) < 2 * 100 / SHORTAGE_S
        journal.shortage = None
        committer.check()
        await trio.sleep(SHORTAGE_S)
        assert going.durable == 1


async def test_an_anonymous_caller_that_is_refused_has_the_share_counted_again(
    autojump_clock: MockClock,
) -> None:
    """It is counted in a commit, and where all calls are refused nothing else may commit."""
    journal = Troubled()
    async with committing(journal) as committer:
        journal.anonymous_shortage = Shortage("little is left", is_severe=False, limit=1)
        for count in (1, 2):
            await trio.sleep(10)
            for _ in range(100):
                with pytest.raises(Refusal, match="Too much waits"):
                    committer.check("conn(1)")
            committer.check("os(1)")
            await trio.sleep(10)
            assert len(journal.commits) == count


async def test_an_ack_goes_ahead_of_a_commit_that_finds_no_room(autojump_clock: MockClock) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        source.say("a", "b")
        await committer.settle()
        journal.trouble = Full("the disk is full")
        source.say("c")
        await trio.sleep(10)
        committer.ack(Ack("s", 1, 2))
        await trio.sleep(10)
        journal.trouble = None
        await committer.commit_done()
    assert journal.commits[-2] == [Ack("s", 1, 2)]
    assert [type(change) for change in journal.commits[-1]] == [Append]


async def test_what_finds_no_room_together_is_committed_in_smaller_steps(
    autojump_clock: MockClock,
) -> None:
    """And told of: a client that confirms the first makes room for the next."""
    journal = Troubled()
    async with committing(journal) as committer:
        sources = [Source(committer, name) for name in ("s", "t", "u")]
        for source in sources:
            committer.add(Create(record(source.id)))
        await committer.settle()
        journal.room = 1
        for source in sources:
            source.say("a")
        await trio.sleep(10)
        assert [source.durable for source in sources] == [1, -1, -1]
        committer.ack(Ack("s", 1, 1))
        journal.room = 1
        await trio.sleep(10)
        assert [source.durable for source in sources] == [1, 1, -1]
        journal.room = math.inf
        await committer.settle()
        assert [source.durable for source in sources] == [1, 1, 1]


async def test_the_acks_of_a_long_shortage_are_one_for_each_stream(
    autojump_clock: MockClock,
) -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        source = Source(committer, "s")
        committer.add(Create(record("s")))
        source.say("a", "b", "c")
        await committer.settle()
        journal.trouble = Full("the disk is full")
        source.say("d")
        for seq in (1, 2, 3):
            await trio.sleep(10)
            committer.ack(Ack("s", 1, seq))
        await trio.sleep(10)
        count = len(journal.commits)
        journal.trouble = None
        await committer.settle()
    assert [type(change) for step in journal.commits[count:] for change in step] == [Ack, Append]


async def end(changes: list[Change], journal: Troubled) -> Exception:
    """How the committer ends that is given these."""
    committer = Committer(journal)
    for change in changes:
        committer.add(change)
    with pytest.raises(JournalError) as caught:
        await committer.run()
    return caught.value


async def test_what_one_source_may_have_is_less_as_soon_as_there_is_another() -> None:
    async with committing(Troubled()) as committer:
        first, second = Source(committer, "s"), Source(committer, "t")
        first.say("a", "b")
        assert committer.stream_bytes_max == ALONE_BYTES_MAX
        second.say("c")
        assert committer.stream_bytes_max == SHARED_BYTES_MAX


async def test_a_change_that_does_not_fit_is_the_end() -> None:
    gap = Append("s", 1, Run(5, 1, b"{}\n"), 0, 0)
    assert isinstance(await end([Create(record("s")), gap], Troubled()), Conflict)


async def test_a_journal_that_fails_for_good_is_the_end() -> None:
    journal = Troubled()
    journal.trouble = JournalUnusable("the disk is gone")
    assert await end([Create(record("s"))], journal) is journal.trouble


MAKE: dict[str, Callable[[], Change]] = {
    "create": lambda: Create(record("s")),
    "close": lambda: Close("s", 1, Outcome.CANCELLED, 1.0),
    "forget": lambda: Forget("s", 1),
}


async def test_changes_keep_their_order() -> None:
    journal = Troubled()
    async with committing(journal) as committer:
        for make in MAKE.values():
            committer.add(make())
        await committer.settle()
    assert journal.commits == [[make() for make in MAKE.values()]]
