"""The promises of every journal: one suite for all of them."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from streams.errors import Conflict, Ended, Fenced, Gone, JournalError, JournalUnusable
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.records import (
    Ack,
    Append,
    Change,
    Close,
    Create,
    Evict,
    Forget,
    Outcome,
    Record,
)
from streams.journal.runs import joined
from streams.journal.sessions import DropGrant, DropSession, SaveGrant, SaveSession
from streams.messages import RequestId, Run
from tests.rigs.journals import (
    PLENTY,
    OpenJournal,
    Stored,
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
    taken_over,
)


async def test_a_record_comes_back_in_every_field(open_journal: OpenJournal) -> None:
    strange = replace(
        record("ü\U0001f600", number=2**60),
        principal="",
        origin=b"\x00\xff",
        is_announced=False,
        max_s=0.0,
    )
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), Create(strange))
        await applied(journal, last_append(1, 9, last_request=4, last_error=9, at=1.75e9))
        await applied(journal, Ack("s", 1, 3))
        ended = replace(
            record(),
            fence=2,
            outcome=Outcome.COMPLETED,
            last=9,
            acked=3,
            last_request=4,
            last_error=9,
            ended_at=1.75e9,
        )
        assert await taken_over(journal) == [ended, replace(strange, fence=2)]


async def test_a_claim_lists_streams_as_they_were_created(open_journal: OpenJournal) -> None:
    names = ["b", "c", "a", "e", "d"]
    async with open_journal("one") as journal:
        created = [Create(record(name, number=n)) for n, name in enumerate(names, 1)]
        await applied(journal, *created[:3])
        await applied(journal, *created[3:])
        await applied(journal, append(1, 1, stream="b"))
        await applied(journal, Forget("c", 1), Create(record("c", number=6)))
        assert [r.stream for r in await journal.claim()] == ["b", "a", "e", "d", "c"]


async def test_a_claim_voids_the_leases_before_it(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 2))
        assert [r.fence for r in await journal.claim()] == [2]
        late: list[Change] = [
            append(3, 3),
            Ack("s", 1, 2),
            Close("s", 1, Outcome.CANCELLED, 5.0),
            Forget("s", 1),
        ]
        assert [type(answer) for answer in await journal.commit(late)] == [Fenced] * 4
        await applied(journal, append(3, 3, fence=2))
        assert await read_all(journal) == lines(1, 3).body
        assert [r.fence for r in await journal.claim()] == [3]


CHANGES: dict[str, list[Change]] = {
    "create": [Create(record("t"))],
    "append": [append(4, 6, last_request=5)],
    "last append": [last_append(4, 6, last_error=6)],
    "ack": [Ack("s", 1, 2)],
    "close": [Close("s", 1, Outcome.ABANDONED, 9.0)],
    "forget": [Forget("s", 1)],
    "rest": [last_append(4, 6), Evict("s", 1, 9.0, True, (b"n" * 16,))],
    "save a session": [SaveSession(session("l"))],
    "drop a session": [DropSession("k")],
    "save a grant": [SaveGrant(grant(delivery="e"))],
    "drop a grant": [DropGrant("k", "d")],
    "all of them": [
        SaveSession(session("l")),
        SaveGrant(grant("l")),
        DropGrant("k", "d"),
        append(4, 6),
        Ack("s", 1, 5),
        Create(record("t")),
        append(1, 1, stream="t"),
        SaveGrant(grant("l", "e", stream="t")),
        Forget("t", 1),
        DropSession("k"),
    ],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
async def test_a_repeated_commit_changes_nothing(
    open_journal: OpenJournal, changes: list[Change]
) -> None:
    async def state(journal: Journal, times: int) -> tuple[Sequence[Record], bytes, Stored]:
        await applied(journal, Create(record()), append(1, 3))
        await applied(journal, SaveSession(session()), SaveGrant(grant()))
        for _ in range(times):
            await applied(journal, *changes)
        records = await journal.claim()
        acked = sum(r.acked for r in records if r.stream == "s")
        return records, await read_all(journal, acked), await stored(journal)

    async with open_journal("once") as once, open_journal("twice") as twice:
        assert await state(twice, 2) == await state(once, 1)


async def test_a_change_that_is_not_allowed_is_answered_alone(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *(Create(record(name)) for name in ("s", "done", "closed")))
        await applied(journal, last_append(1, 2, stream="done"))
        await applied(journal, Close("closed", 1, Outcome.CANCELLED, 4.0))
        changes: list[tuple[Change, type[JournalError] | None]] = [
            (append(1, 2), None),
            (append(4, 4), Conflict),
            (append(2, 3), Conflict),
            (append(3, 3, stream="done"), Ended),
            (append(1, 1, stream="closed"), Gone),
            (append(1, 1, stream="nobody's"), Gone),
            (append(3, 3, fence=2), Fenced),
            (append(3, 4), None),
        ]
        answers = await journal.commit([change for change, _ in changes])
        assert [None if a is None else type(a) for a in answers] == [e for _, e in changes]
        assert await read_all(journal) == lines(1, 4).body


async def test_changes_of_one_commit_build_on_each_other(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(
            journal,
            Create(record()),
            append(1, 3),
            Ack("s", 1, 3),
            Forget("s", 1),
            Create(record()),
            append(1, 2),
            append(3, 5),
            Ack("s", 1, 2),
        )
        assert await read_all(journal, 2) == lines(3, 5).body
        [kept] = await journal.claim()
        assert (kept.last, kept.acked) == (5, 2)


async def test_small_runs_are_read_as_one(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()))
        for n in range(1, 10):
            await applied(journal, append(n, n))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == lines(1, 9)
        assert as_one(await journal.read("s", 4, bytes_max=PLENTY)) == lines(5, 9)
        assert as_one(await journal.read("s", 0, bytes_max=3 * len(lines(1, 1).body))) == lines(
            1, 3
        )


async def test_a_read_may_begin_inside_a_run(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 10), append(11, 20))
        for after in range(20):
            assert as_one(await journal.read("s", after, bytes_max=PLENTY)) == lines(after + 1, 20)


async def test_there_is_nothing_to_read_after_the_last_line(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) is None
        await applied(journal, Create(record()))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) is None
        await applied(journal, append(1, 3))
        assert as_one(await journal.read("s", 3, bytes_max=PLENTY)) is None
        assert as_one(await journal.read("s", 99, bytes_max=PLENTY)) is None


@pytest.mark.parametrize("bytes_max", [1, 13, 100, 10_000, STORED_BYTES_MAX, PLENTY])
async def test_however_little_is_read_at_a_time_it_is_all_of_it(
    open_journal: OpenJournal, bytes_max: int
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 7), append(8, 8), append(9, 2000))
        assert await read_all(journal, bytes_max=bytes_max) == lines(1, 2000).body


async def test_a_line_that_is_longer_than_asked_for_is_read_alone(
    open_journal: OpenJournal,
) -> None:
    long = b'"' + b"x" * (3 * STORED_BYTES_MAX) + b'"\n'
    body = b"1\n" + long + b"3\n" + long + long + b"6\n"
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), Append("s", 1, Run(1, 6, body), 0, 0))
        assert as_one(await journal.read("s", 0, bytes_max=10)) == Run(1, 1, b"1\n")
        assert as_one(await journal.read("s", 1, bytes_max=10)) == Run(2, 1, long)
        assert as_one(await journal.read("s", 2, bytes_max=10)) == Run(3, 1, b"3\n")
        assert await read_all(journal, bytes_max=STORED_BYTES_MAX) == body


async def test_lines_above_an_ack_are_kept(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 4), append(5, 8))
        for acked in range(1, 9):
            await applied(journal, Ack("s", 1, acked))
            assert await read_all(journal, acked) == lines(acked + 1, 8).body
        await applied(journal, append(9, 9))
        assert await read_all(journal, 8) == lines(9, 9).body


async def test_an_ack_neither_goes_back_nor_ahead_of_the_last_line(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 4), Ack("s", 1, 3), Ack("s", 1, 1))
        assert [r.acked for r in await journal.claim()] == [3]
        await applied(journal, Ack("s", 2, 99))
        assert [r.acked for r in await journal.claim()] == [4]


async def test_a_closed_stream_leaves_a_tombstone_and_no_lines(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 4), Ack("s", 1, 2))
        await applied(journal, Close("s", 1, Outcome.ABANDONED, 77.5))
        await applied(journal, Close("s", 1, Outcome.CANCELLED, 99.0))
        assert as_one(await journal.read("s", 2, bytes_max=PLENTY)) is None
        [tombstone] = await taken_over(journal)
        assert (tombstone.outcome, tombstone.ended_at) == (Outcome.ABANDONED, 77.5)
        assert tombstone.outcome.is_tombstone


async def test_nothing_is_left_of_a_forgotten_stream(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), append(1, 4))
        await applied(journal, Forget("s", 1))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) is None
        assert list(await journal.claim()) == []
        await applied(journal, Create(record()))
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) is None
        assert [r.last for r in await journal.claim()] == [0]


async def test_an_ended_stream_can_be_read(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), last_append(1, 4))
        assert await read_all(journal) == lines(1, 4).body


async def test_sessions_and_grants_outlive_the_server(open_journal: OpenJournal) -> None:
    strange = replace(session("ü\U0001f600"), principal="", capabilities=b"\x00\xff", seen_at=0.0)
    async with open_journal("one") as journal:
        assert await stored(journal) == ([], [])
        await applied(journal, SaveSession(session()), SaveSession(strange), Create(record()))
        await applied(journal, SaveGrant(grant()), SaveGrant(grant(strange.key, "")))
    async with open_journal("one") as journal:
        await journal.claim()
        expected = [session(), strange], [grant(), grant(strange.key, "")]
        assert await stored(journal) == expected
        await applied(journal, Ack("s", 2, 0))
        assert await stored(journal) == expected


@pytest.mark.parametrize("reply_id", [1, "1", 0, -7, "", '"', "ü\x00", 2**64, -(2**70), "null"])
async def test_a_reply_id_keeps_its_json_type(
    open_journal: OpenJournal, reply_id: RequestId
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), SaveSession(session()))
        await applied(journal, SaveGrant(grant(reply_id=reply_id)))
    async with open_journal("one") as journal:
        _, [found] = await journal.sessions()
        assert (found.reply_id, type(found.reply_id)) == (reply_id, type(reply_id))


async def test_what_is_saved_again_replaces_what_was_there(open_journal: OpenJournal) -> None:
    later = replace(session(seen_at=1.8e9), principal="bearer", level="debug", capabilities=b"{}")
    moved = grant(stream="t", reply_id="2")
    async with open_journal("one") as journal:
        await applied(journal, *(Create(record(name)) for name in "st"))
        await applied(journal, *(SaveSession(session(key)) for key in "kl"))
        await applied(
            journal, SaveGrant(grant()), SaveGrant(grant("l")), SaveGrant(grant("l", "e"))
        )
        await applied(journal, SaveSession(later), SaveGrant(moved))
        kept = [grant("l"), grant("l", "e"), moved]
        assert await stored(journal) == ([session("l"), later], kept)
        await applied(journal, Forget("s", 1))
        assert await stored(journal) == ([session("l"), later], [moved])


async def test_a_grant_goes_alone_or_with_its_session(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, Create(record()), *(SaveSession(session(key)) for key in "kl"))
        await applied(journal, *(SaveGrant(grant(key, name)) for key in "kl" for name in "de"))
        await applied(journal, DropGrant("l", "e"), DropGrant("nobody's", "d"), DropGrant("k", "x"))
        assert (await stored(journal))[1] == [grant("k", "d"), grant("k", "e"), grant("l", "d")]
        await applied(journal, DropSession("k"), DropSession("nobody's"))
        assert await stored(journal) == ([session("l")], [grant("l", "d")])
        await applied(journal, SaveSession(session("k")))
        assert (await stored(journal))[1] == [grant("l", "d")]


async def test_grants_go_with_the_stream_but_stay_with_its_tombstone(
    open_journal: OpenJournal,
) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *(Create(record(name)) for name in "stu"))
        await applied(journal, *(SaveSession(session(key)) for key in "kl"))
        pairs = [(key, stream) for key in "kl" for stream in "stu"]
        await applied(journal, *(SaveGrant(grant(key, stream, stream)) for key, stream in pairs))
        await applied(journal, Close("t", 1, Outcome.ABANDONED, 9.0), Forget("s", 1))
        left = [grant(key, stream, stream) for key, stream in pairs if stream != "s"]
        assert (await stored(journal))[1] == left
        await applied(journal, Create(record("s")), Forget("t", 1), SaveGrant(grant("k", "t", "u")))
        left = [grant("k", "u", "u"), grant("l", "u", "u"), grant("k", "t", "u")]
        assert (await stored(journal))[1] == left


async def test_a_grant_needs_its_session_and_its_stream(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, SaveSession(session()), SaveGrant(grant()), Create(record()))
        await applied(journal, SaveGrant(grant("l")), SaveSession(session("l")))
        assert await stored(journal) == ([session("k"), session("l")], [])
        await applied(journal, Forget("s", 1), SaveGrant(grant()), Create(record()))
        assert await stored(journal) == ([session("k"), session("l")], [])
        await applied(journal, SaveGrant(grant()), SaveGrant(grant(stream="nobody's", reply_id=2)))
        assert (await stored(journal))[1] == [grant()]


async def test_sessions_change_in_order_with_streams(open_journal: OpenJournal) -> None:
    changes: list[tuple[Change, type[JournalError] | None]] = [
        (SaveSession(session()), None),
        (Create(record()), None),
        (SaveGrant(grant()), None),
        (append(1, 2), None),
        (append(9, 9), Conflict),
        (SaveGrant(grant(delivery="e")), None),
        (append(3, 3, stream="nobody's"), Gone),
        (DropGrant("k", "d"), None),
        (append(3, 4), None),
    ]
    async with open_journal("one") as journal:
        answers = await journal.commit([change for change, _ in changes])
        assert [None if a is None else type(a) for a in answers] == [e for _, e in changes]
        assert await read_all(journal) == lines(1, 4).body
        assert await stored(journal) == ([session()], [grant(delivery="e")])


async def test_an_empty_commit_is_one(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        assert list(await journal.commit([])) == []


async def test_closing_twice_is_as_good_as_once(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await journal.aclose()
        await journal.aclose()


def test_a_gap_ahead_of_stored_runs_is_never_handed_on() -> None:
    with pytest.raises(JournalUnusable, match="lines 2 to 4 of a stream are missing"):
        joined([lines(5, 6)], 1, PLENTY)


def test_a_gap_between_stored_runs_is_never_handed_on() -> None:
    with pytest.raises(JournalUnusable, match="lines 3 to 4 of a stream are missing"):
        joined([lines(1, 2), lines(5, 6)], 0, PLENTY)


def test_long_runs_are_handed_on_as_they_are_and_short_ones_joined() -> None:
    long, short = STORED_BYTES_MAX // 2 + 1, STORED_BYTES_MAX // 4
    stored = [Run(seq + 1, 1, b"x" * size) for seq, size in enumerate([long, short, short, short])]
    found = joined(stored, 0, PLENTY)
    assert [(run.seq, run.count) for run in found] == [(1, 1), (2, 3)]
    assert [len(run.body) for run in found] == [long, 3 * short]
    assert found[0] is stored[0]
    found = joined(stored, 0, long + 2 * short)
    assert [(run.seq, run.count) for run in found] == [(1, 1), (2, 2)]


async def test_the_newest_streams_come_first(open_journal: OpenJournal) -> None:
    """Evicted ones too, each as it is now, and a page follows the other."""
    async with open_journal("one") as journal:
        streams = [record(f"s{n}", number=n) for n in range(1, 6)]
        await applied(journal, *map(Create, streams))
        await applied(journal, last_append(1, 3, stream="s4"), Evict("s4", 1, 9.0))
        newest = await journal.newest(limit=3)
        assert [each.stream for each in newest] == ["s5", "s4", "s3"]
        assert (newest[1].last, newest[1].outcome) == (3, Outcome.COMPLETED)
        older = await journal.newest(before=newest[-1].number, limit=3)
        assert [each.stream for each in older] == ["s2", "s1"]
        assert await journal.newest(before=1, limit=3) == []


async def test_streams_are_found_by_the_beginning_of_their_ids(open_journal: OpenJournal) -> None:
    async with open_journal("one") as journal:
        await applied(journal, *(Create(record(each)) for each in ("abc", "abd", "b_%")))
        assert sorted(await journal.beginning_with("ab", limit=9)) == ["abc", "abd"]
        assert len(await journal.beginning_with("ab", limit=1)) == 1
        assert await journal.beginning_with("abc", limit=2) == ["abc"]
        assert await journal.beginning_with("_", limit=2) == []
        assert await journal.beginning_with("abce", limit=2) == []
