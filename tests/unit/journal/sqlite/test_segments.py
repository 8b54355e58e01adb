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
