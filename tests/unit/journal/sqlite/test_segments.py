"""Lines that are read out of the table, however often."""

import gc
import os
import platform
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streams.errors import JournalUnusable
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.sqlite import SQLiteStore, segments
from streams.journal.sqlite.segments import Recent
from streams.messages import Run
from tests.rigs.sqlite import make_journal, running

BLOBS_MAX = 10
LINES = (b"x" * 99 + b"\n") * 500


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SQLiteStore]:
    monkeypatch.setattr(segments, "BLOBS_MAX", BLOBS_MAX)
    with closing(SQLiteStore(make_journal(tmp_path / "journal.db"))) as opened:
        yield opened


def read(opened: SQLiteStore) -> bytes:
    return b"".join(run.body for run in opened.read("s", 0, bytes_max=STORED_BYTES_MAX))


def kept() -> int:
    """How many objects there are of the kind that a connection keeps for each blob."""
    gc.collect()
    return sum(type(each) is weakref.ref for each in gc.get_objects())


def test_to_read_for_ever_takes_no_more_memory(opened: SQLiteStore) -> None:
    before = kept()
    for _ in range(20 * BLOBS_MAX):
        assert read(opened) == LINES
    assert kept() - before <= 2 * BLOBS_MAX


def test_where_nothing_more_can_be_opened_reading_goes_on(
    opened: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *, cache_bytes: int) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(segments, "connect_to_read", refuse)
    for _ in range(3 * BLOBS_MAX):
        assert read(opened) == LINES


def test_a_file_in_the_place_of_the_journal_is_not_read(
    opened: SQLiteStore, tmp_path: Path
) -> None:
    os.replace(make_journal(tmp_path / "another.db"), tmp_path / "journal.db")
    while opened._segments._blobs < BLOBS_MAX:
        assert read(opened) == LINES
    with pytest.raises(JournalUnusable, match="removed or replaced"):
        read(opened)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators differ")
def test_the_memory_of_what_was_read_is_used_again(tmp_path: Path) -> None:
    program = """
        import sys
        from contextlib import closing
        from pathlib import Path
        from resource import RUSAGE_SELF, getrusage
        from streams.journal.contract import STORED_BYTES_MAX
        from streams.journal.sqlite import SQLiteStore

        def use() -> None:
            for _ in range(20):
                [b"x" * STORED_BYTES_MAX for _ in range(4)]

        with closing(SQLiteStore(Path(sys.argv[1]))):
            use()
            before = getrusage(RUSAGE_SELF).ru_minflt
            use()
            print(getrusage(RUSAGE_SELF).ru_minflt - before)
    """
    with running(program, make_journal(tmp_path / "journal.db")) as process:
        faults, _ = process.communicate()
    assert int(faults) < 20  # one for each round; memory that was given back makes 150 or more


def run(seq: int, count: int = 1, size: int = 10) -> Run:
    return Run(seq, count, (b"x" * (size // count - 1) + b"\n") * count)


def kept_of(recent: Recent, stream: str, after: int = 0) -> list[int]:
    return [run.last for run in recent.after(stream, after)]


def test_the_oldest_segments_of_all_streams_leave_memory_first() -> None:
    recent = Recent(40)
    recent.add("a", [run(1), run(2)])
    recent.add("b", [run(1)])
    recent.add("a", [run(3)])
    recent.add("b", [run(2)])
    assert kept_of(recent, "a", after=1) == [2, 3]
    recent.add("b", [run(3)])
    assert kept_of(recent, "a", after=2) == [3]
    assert kept_of(recent, "b") == [1, 2, 3]


def test_a_reader_that_needs_older_lines_gets_none_from_memory() -> None:
    recent = Recent(20)
    recent.add("a", [run(1), run(2), run(3)])
    assert kept_of(recent, "a", after=0) == []
    assert kept_of(recent, "a", after=1) == [2, 3]
    assert kept_of(recent, "a", after=3) == []
    assert kept_of(recent, "b") == []


def test_what_is_in_no_segment_yet_follows_the_segments() -> None:
    recent = Recent(20)
    recent.add("a", [run(1), run(2)])
    beyond = [run(2), run(3)]  # one of them has become a segment meanwhile
    assert [each.last for each in recent.after("a", 0, beyond)] == [1, 2, 3]
    assert recent.after("a", 2, beyond) == ()


def test_what_is_dropped_makes_room_once() -> None:
    recent = Recent(40)
    recent.add("a", [run(1), run(2, 2), run(4)])
    recent.drop("a", 2)  # ends within the second segment
    assert kept_of(recent, "a", after=2) == [3, 4]
    recent.drop("a", 2)
    recent.add("b", [run(1), run(2)])
    assert (kept_of(recent, "a", after=2), kept_of(recent, "b")) == ([3, 4], [1, 2])
    recent.drop("a", 4)
    recent.drop("a", 4)
    recent.add("b", [run(3), run(4)])
    assert (kept_of(recent, "a"), kept_of(recent, "b")) == ([], [1, 2, 3, 4])
    recent.add("b", [run(5)])
    assert (kept_of(recent, "b"), kept_of(recent, "b", after=1)) == ([], [2, 3, 4, 5])


def test_short_segments_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "RECENT_MAX", 3)
    recent = Recent(1000)
    for stream in "abcd":
        recent.add(stream, [run(1)])
    assert [kept_of(recent, stream) for stream in "abcd"] == [[], [1], [1], [1]]


def test_a_stream_without_kept_lines_takes_no_memory() -> None:
    recent = Recent(1000)
    recent.add("a", [])
    recent.add("b", [run(1)])
    recent.drop("b", 1)
    assert not recent._runs


def test_with_no_room_nothing_stays_in_memory() -> None:
    recent = Recent(0)
    recent.add("a", [run(1)])
    assert kept_of(recent, "a") == []
