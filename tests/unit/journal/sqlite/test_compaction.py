"""A compact journal gives back the space of deleted messages while it is used."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from streams.journal.records import Ack, Append, Create, Outcome
from streams.journal.sqlite import SQLiteJournal, SQLiteStore, open_sqlite_journal
from streams.limits import MIB
from streams.messages import Run
from tests.rigs.sqlite import record

LINE = b'{"text":"' + b"a" * 100_000 + b'"}\n'
LINES = 200
STREAM = "long"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def appended(stream: str, seq: int) -> Append:
    return Append(stream, 1, Run(seq, 1, LINE), 0, 0, Outcome.LIVE)


async def fill(journal: SQLiteJournal) -> None:
    """Commit 20 MB of which all but the last lines of another stream are confirmed."""
    for number, stream in enumerate((STREAM, "kept"), 1):
        made = replace(record(number=number), stream=stream)
        assert await journal.commit([Create(made)]) == [None]
    for seq in range(1, LINES + 1):
        await journal.commit([appended(STREAM, seq)])
    for seq in range(1, 6):  # these lie at the end of the file
        await journal.commit([appended("kept", seq)])
    await journal.commit([Ack(STREAM, 1, LINES)])


async def test_a_compact_file_shrinks_while_commits_go_on(path: Path) -> None:
    async with open_sqlite_journal(path, durability="process", is_compact=True) as journal:
        await fill(journal)
        assert journal.sizes["unused"] > 15 * MIB
        seq = 5
        with trio.fail_after(60):
            while journal.sizes["unused"] > 5 * MIB:
                seq += 1
                answers = await journal.commit([appended("kept", seq), Ack("kept", 1, seq - 5)])
                assert answers == [None, None]
                await trio.sleep(0.01)
        runs = await journal.read("kept", seq - 5, bytes_max=MIB)
        assert b"".join(run.body for run in runs) == LINE * 5
    assert path.stat().st_size < 10 * MIB
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_any_other_file_keeps_its_length(path: Path) -> None:
    async with open_sqlite_journal(path, durability="process") as journal:
        await fill(journal)
        before = journal.sizes["unused"]
        await journal.shrink(4 * MIB)
        assert journal.sizes["unused"] == before > 15 * MIB
    assert path.stat().st_size > 15 * MIB


async def test_a_file_that_was_made_without_it_is_written_anew(path: Path) -> None:
    async with open_sqlite_journal(path, durability="process") as journal:
        await fill(journal)
    with closing(SQLiteStore(path, is_compact=True)) as store:
        [run] = store.read("kept", 4, bytes_max=MIB)
        assert run.body == LINE
        assert store.measure()[1] < MIB
    assert path.stat().st_size < 5 * MIB
