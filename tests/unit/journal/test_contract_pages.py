"""The promises of every journal about streams that give pages, and of deliveries that may go on."""

import pytest
from msgspec.structs import replace

from streams.journal.records import Ack, Append, Close, Create, Outcome, Record
from streams.journal.sessions import SaveGrant, SaveSession
from tests.rigs.journals import (
    OpenJournal,
    append,
    applied,
    grant,
    last_append,
    lines,
    read_all,
    record,
    session,
    stored,
    taken_over,
)


def paged(**more: object) -> Record:
    return replace(record(pages=()), **more)


async def test_a_record_says_where_its_pages_are(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record("plain")), Create(paged()))
        await applied(journal, append(1, 3, pages=(2,)), append(4, 6, pages=(4, 6)), append(7, 7))
        await applied(journal, append(1, 2, stream="plain"))
    async with open_journal("one") as journal:
        plain, kept = await journal.claim()
        assert (plain.pages, kept.pages) == (None, (2, 4, 6))
        assert not kept.outcome.is_end


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED])
async def test_how_a_stream_ended_is_known_to_who_opens_the_journal_next(
    open_journal: OpenJournal, outcome: Outcome
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(paged()), append(1, 1, pages=(1,)))
        await applied(journal, last_append(2, 3, outcome=outcome, at=7.5, pages=(2,)))
    async with open_journal("one") as journal:
        [ended] = await journal.claim()
        assert ended == paged(fence=2, outcome=outcome, last=3, ended_at=7.5, pages=(1, 2))
        assert ended.outcome.is_end
        assert not ended.outcome.is_tombstone
        assert await read_all(journal) == lines(1, 3).body


async def test_an_ack_lets_go_of_the_pages_below_it(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(paged()), append(1, 6, pages=(2, 4, 6)), Ack("s", 1, 3))
        [kept] = await journal.claim()
        assert (kept.acked, kept.pages) == (3, (4, 6))
        await applied(journal, Ack("s", 2, 4), append(7, 7, fence=2, pages=(7,)), Ack("s", 2, 1))
        [kept] = await journal.claim()
        assert (kept.acked, kept.pages) == (4, (6, 7))
        assert await read_all(journal, 4) == lines(5, 7).body


async def test_a_stream_whose_pages_are_all_gone_still_is_one_with_pages(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(paged()), append(1, 2, pages=(2,)), Ack("s", 1, 2))
    async with open_journal("one") as journal:
        assert [r.pages for r in await journal.claim()] == [()]


@pytest.mark.parametrize("outcome", [Outcome.ABANDONED, Outcome.CANCELLED])
async def test_a_tombstone_has_no_pages(open_journal: OpenJournal, outcome: Outcome) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(paged(number=1)), Create(record("plain")))
        await applied(journal, append(1, 3, pages=(1, 2)))
        await applied(journal, Close("s", 1, outcome, 9.0), Close("plain", 1, outcome, 9.0))
        assert [r.pages for r in await taken_over(journal)] == [(), None]


async def test_an_append_that_is_repeated_adds_its_pages_once(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        again: Append = append(1, 2, pages=(2,))
        await applied(journal, Create(paged()), again, again, append(3, 3), again)
        assert [(r.last, r.pages) for r in await journal.claim()] == [(3, (2,))]


async def test_a_grant_says_what_it_stands_for_and_where_it_began(
    open_journal: OpenJournal,
) -> None:
    grants = [
        grant(delivery=f"{takes_over}-{start}", takes_over=takes_over, start=start)
        for takes_over in (False, True)
        for start in (0, 7, 2**40)
    ]
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), SaveSession(session()))
        await applied(journal, *map(SaveGrant, grants))
    async with open_journal("one") as journal:
        assert (await stored(journal))[1] == grants
