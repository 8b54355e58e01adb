"""A journal file is read while its owner writes, and never changed."""

from pathlib import Path

import pytest

from streams.errors import JournalUnusable
from streams.journal.records import Ack, Create
from streams.journal.sqlite import open_sqlite_journal
from streams.journal.sqlite.snapshot import open_snapshot
from tests.rigs.journals import append, applied, as_one, last_append, lines, record


async def test_a_snapshot_shows_what_the_owner_has_committed(tmp_path: Path) -> None:
    """Lines that are only in the log, too; and nothing that comes later."""
    path = tmp_path / "journal.db"
    async with open_sqlite_journal(path) as journal:
        await applied(journal, *(Create(record(f"s{n}", number=n)) for n in range(1, 5)))
        await applied(journal, append(1, 4, stream="s2"), Ack("s2", 1, 1))
        await applied(journal, last_append(1, 2, stream="s3"))
        with open_snapshot(path) as snapshot:
            await applied(journal, append(5, 6, stream="s2"))
            newest = await snapshot.newest(limit=3)
            assert [each.stream for each in newest] == ["s4", "s3", "s2"]
            older = await snapshot.newest(before=2, limit=3)
            assert [each.stream for each in older] == ["s1"]
            found = await snapshot.find("s2")
            assert found is not None
            assert (found.last, found.acked) == (4, 1)
            runs = await snapshot.read("s2", 1, bytes_max=1024)
            assert as_one(runs).body == lines(2, 4).body
            assert await snapshot.find("s") is None
            assert await snapshot.read("s", 0, bytes_max=1024) == []
            assert await snapshot.beginning_with("s", limit=2) == ["s1", "s2"]
        with open_snapshot(path) as snapshot:
            found = await snapshot.find("s2")
            assert found is not None
            assert found.last == 6


async def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with pytest.raises(JournalUnusable, match="no such file"), open_snapshot(path):
        pass
    path.write_text("no database, but a text that is long enough to be one" * 100)
    with pytest.raises(JournalUnusable), open_snapshot(path):
        pass
