"""Lookups of evicted streams, the same for every journal."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from streams.errors import Conflict, Fenced, Gone
from streams.journal.contract import Journal, Totals
from streams.journal.records import Ack, Change, Close, Create, Evict, Forget, Outcome, Record
from streams.journal.sessions import DropSession, SaveGrant, SaveSession
from tests.rigs.journals import (
    OpenJournal,
    append,
    applied,
    as_one,
    grant,
    last_append,
    lines,
    read_all,
    record,
    session,
    stored,
)

NAMES = [bytes([n]) * 16 for n in range(4)]


def ended(stream: str, *, last: int = 3) -> list[Change]:
    return [Create(record(stream)), last_append(1, last, stream=stream)]


def evicted(
    stream: str, due_at: float = 9.0, *, is_read: bool = False, names: Sequence[bytes] = ()
) -> list[Change]:
    """A stream that has ended and is evicted."""
    return [*ended(stream), Evict(stream, 1, due_at, is_read, tuple(names))]


def ids(records: Sequence[Record]) -> str:
    return "".join(record.stream for record in records)


async def listed(journal: Journal, principal: str = "os(0)", after: int = 0) -> str:
    return ids(await journal.listed(principal, after=after, limit=99))


async def test_a_claim_leaves_those_at_rest_where_they_are(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        assert await journal.totals() == Totals(0, 0)
        await applied(
            journal, Create(record("a")), *evicted("b", 7.5, is_read=True), Create(record("c"))
        )
    async with open_journal("one") as journal:
        assert ids(await journal.claim()) == "ac"
        assert await journal.totals() == Totals(1, record("c").number)
        assert await journal.find("b") == replace(
            record("b"),
            fence=2,
            outcome=Outcome.COMPLETED,
            last=3,
            ended_at=5.0,
            due_at=7.5,
            is_read=True,
        )
        assert as_one(await journal.read("b", 1, bytes_max=999)) == lines(2, 3)


async def test_a_claim_voids_the_leases_of_those_at_rest_as_well(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *evicted("s"))
        await journal.claim()
        late: list[Change] = [Evict("s", 1, 1.0, names=(NAMES[0],)), Ack("s", 1, 3)]
        assert [type(answer) for answer in await journal.commit(late)] == [Fenced] * 2
        await applied(journal, Evict("s", 2, 11.0), Create(replace(record("t"), fence=1)))
        await journal.claim()
        found = [await journal.find(stream) for stream in "st"]
        assert [(r.fence, r.due_at) for r in found if r] == [(3, 11.0), (2, None)]
        assert await journal.named(NAMES[0]) is None


async def test_any_record_is_found_by_its_id(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record("a")), *evicted("b"), *evicted("c"), Forget("c", 1))
        found = [await journal.find(stream) for stream in ("a", "b", "c", "nobody's")]
        assert [r and r.due_at for r in found] == [None, 9.0, None, None]
        assert [r is None for r in found] == [False, False, True, True]
        owners = [await journal.principal_of(s) for s in ("a", "b", "c", "nobody's", "", "~")]
        assert owners == ["os(0)", "os(0)", None, None, None, None]


@pytest.mark.parametrize("pages", [None, ()])
async def test_what_runs_or_has_pages_is_not_put_to_rest(
    open_journal: OpenJournal, pages: tuple[int, ...] | None
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record(pages=pages)), append(1, 2))
        if pages is not None:
            await applied(journal, last_append(3, 3))
        answers = await journal.commit([Evict("s", 1, 5.0), Evict("nobody's", 1, 5.0)])
        assert [type(answer) for answer in answers] == [Conflict, Gone]
        assert ids(await journal.claim()) == "s"


async def test_a_stream_goes_by_every_name_that_it_was_given(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *evicted("a", names=NAMES[:1]), *evicted("b", names=NAMES[1:2]))
        await applied(journal, Evict("a", 1, 9.0, names=(NAMES[0], NAMES[2])), Evict("a", 1, 8.0))
        refused: list[Change] = [Create(record("c")), Evict("c", 1, 9.0, names=(NAMES[3],))]
        assert [type(answer) for answer in await journal.commit(refused)] == [type(None), Conflict]
        assert [await journal.named(name) for name in NAMES] == ["a", "b", "a", None]
        secret = [await journal.named(name, is_secret=True) for name in NAMES]
        assert secret == ["a", "b", "a", None]
        await applied(journal, Close("a", 1, Outcome.ABANDONED, 6.0))
        assert await journal.named(NAMES[2]) == "a"
        await applied(journal, Forget("a", 1), *ended("a"))
        assert [await journal.named(name) for name in NAMES] == [None, "b", None, None]
        assert await journal.named(NAMES[0], is_secret=True) is None
        await applied(journal, *evicted("d", names=NAMES[:1]), Forget("b", 1))
        assert [await journal.named(name) for name in NAMES] == ["d", None, None, None]


async def test_what_is_wanted_of_a_principal_is_listed_in_pieces(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        other = replace(record("x"), principal="os(1)")
        await applied(journal, *evicted("d"), *evicted("a"), *ended("b"), *evicted("c"))
        await applied(journal, Create(other), last_append(1, 1, stream="x"), Evict("x", 1, 1.0))
        # One that is not evicted is in the memory of its owner, who may not know it yet.
        b = "b" if journal.replica else ""
        assert await listed(journal) == f"a{b}cd"
        assert await listed(journal, after=record("a").number) == f"{b}cd"
        assert ids(await journal.listed("os(0)", after=0, limit=2)) == f"a{b}c"[:2]
        assert await listed(journal, "os(1)") == "x"
        assert await listed(journal, "os(2)") == ""
        assert [await journal.count(f"os({n})") for n in range(3)] == [3, 1, 0]


async def test_what_was_fully_written_is_listed_alone(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        for stream in "abcd":
            await applied(journal, *evicted(stream, is_read=stream in "bd"))
        read = await journal.listed("os(0)", after=0, limit=1, only_read=True)
        assert ids(read) == "b"
        read = await journal.listed("os(0)", after=read[0].number, limit=9, only_read=True)
        assert ids(read) == "d"
        await applied(journal, Evict("d", 1, 9.0, is_read=False))
        assert ids(await journal.listed("os(0)", after=0, limit=9, only_read=True)) == "b"


async def test_what_is_confirmed_abandoned_or_forgotten_is_wanted_no_more(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        for due_at, stream in enumerate("abcd"):
            await applied(journal, *evicted(stream, due_at))
        await applied(journal, Ack("a", 1, 3), Ack("b", 1, 2))
        await applied(journal, Close("c", 1, Outcome.ABANDONED, 6.0), Forget("d", 1))
        assert await listed(journal) == "b"
        assert await journal.count("os(0)") == 1
        assert ids(await journal.due(limit=9)) == "abc"
        assert ids(await journal.due(limit=9, only_unwanted=True)) == "ac"
        assert ids(await journal.claim()) == ""
        assert (await journal.totals()).evicted == 3
        assert await read_all(journal) == b""


async def test_those_that_are_due_first_come_first(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        for stream, due_at in zip("abcde", (5.0, 3.0, 1.0, 4.0, 2.0), strict=True):
            await applied(journal, *evicted(stream, due_at), Ack(stream, 1, 3 * (stream in "ae")))
        assert ids(await journal.due(limit=3)) == "ceb"
        assert ids(await journal.due(limit=1, only_unwanted=True)) == "e"
        await applied(journal, Evict("c", 1, 4.5), Evict("e", 1, 6.0))
        assert ids(await journal.due(limit=9)) == "bdcae"
        assert ids(await journal.due(limit=9, only_unwanted=True)) == "ae"


async def test_grants_of_those_at_rest_are_found_with_their_stream(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, SaveSession(session("k")), SaveSession(session("l")))
        await applied(journal, *ended("a"), *evicted("b"))
        pairs = [("l", "a"), ("l", "b"), ("k", "b"), ("k", "a")]
        await applied(journal, *(SaveGrant(grant(key, of, of)) for key, of in pairs))
        assert (await stored(journal))[1] == [grant("l", "a", "a"), grant("k", "a", "a")]
        assert await journal.grants("b") == [grant("l", "b", "b"), grant("k", "b", "b")]
        assert await journal.grants("nobody's") == []
        await applied(journal, DropSession("l"))
        assert await journal.grants("b") == [grant("k", "b", "b")]
