"""A journal that an older release has written is migrated in its place, or left as it was."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlite_utils import Database

from streams.errors import JournalUnusable
from streams.journal.records import Create, Outcome
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.sqlite import SCHEMA_VERSION, SQLiteStore
from streams.journal.webhooks import SaveWebhook, Webhook
from tests.rigs.journals import as_one, grant, session
from tests.rigs.sqlite import PLENTY, append, last_of, make_journal_of_schema, record

OLDER = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.mark.parametrize("schema", OLDER)
def test_a_journal_of_an_older_schema_is_migrated_in_its_place(path: Path, schema: int) -> None:
    make_journal_of_schema(schema, path)
    for fence in 2, 3:
        with closing(SQLiteStore(path)) as opened:
            assert opened.claim() == [replace(record(), fence=fence, last=2)]
            assert as_one(opened.read("s", 0, bytes_max=PLENTY)) == append(1, 2).run
            opened.commit([SaveSession(session()), SaveGrant(grant())])
            assert opened.sessions() == ([session()], [grant()])
    SQLiteStore(path.with_name("new")).close()
    assert tables_of(path) == tables_of(path.with_name("new"))


def tables_of(path: Path) -> dict[str, tuple[object, object]]:
    """The columns and the indexes of every table."""
    db = Database(path)
    with closing(db):
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        return {table.name: (table.columns, table.indexes) for table in db.tables}


def test_sessions_and_what_was_granted_to_them_are_kept_as_they_were_meant(path: Path) -> None:
    make_journal_of_schema(2, path)
    with closing(SQLiteStore(path)) as opened:
        sessions, [kept] = opened.sessions()
        assert sessions == [session()]
        assert kept == grant(takes_over=False, start=0)  # there was no other kind
        assert type(kept.takes_over) is bool


@pytest.mark.parametrize("schema", OLDER)
def test_in_a_migrated_journal_there_is_room_for_what_is_new(path: Path, schema: int) -> None:
    make_journal_of_schema(schema, path)
    paged = replace(record("t"), pages=())
    first = replace(append(1, 2, stream="t"), pages=(2,))
    waiting = Webhook("msg_1", "t", "https://example.com/", b"{}", due_at=9.0)
    last = replace(append(3, 3, stream="t"), outcome=Outcome.FAILED, ended_at=7.0)
    granted = grant(stream="t", takes_over=True, start=2)
    with closing(SQLiteStore(path)) as opened:
        changes = [Create(paged), first, last, SaveSession(session()), SaveGrant(granted)]
        changes.append(SaveWebhook(waiting))
        assert opened.commit(changes) == [None] * len(changes)
    with closing(SQLiteStore(path)) as opened:
        old, new = opened.claim()
        assert old.pages is None
        assert (new.pages, new.outcome, new.last) == ((2,), Outcome.FAILED, 3)
        assert opened.sessions() == ([session()], [granted])
        assert opened.lookups.webhooks(limit=9) == [waiting]


# A table or a column that is in the way of each schema's last step.
IN_THE_WAY = {
    1: "CREATE TABLE grants (id INTEGER PRIMARY KEY)",
    2: "ALTER TABLE grants ADD COLUMN start TEXT",
    3: "CREATE TABLE names (id INTEGER PRIMARY KEY)",
    4: "CREATE TABLE log (number INTEGER PRIMARY KEY)",
    5: "ALTER TABLE progress ADD COLUMN restart TEXT",
    6: "CREATE TABLE webhooks (number INTEGER PRIMARY KEY)",
}
OUT_OF_THE_WAY = {
    1: "DROP TABLE grants",
    2: "ALTER TABLE grants DROP COLUMN start",
    3: "DROP TABLE names",
    4: "DROP TABLE log",
    5: "ALTER TABLE progress DROP COLUMN restart",
    6: "DROP TABLE webhooks",
}


@pytest.mark.parametrize("schema", OLDER)
def test_a_migration_that_breaks_off_leaves_the_journal_as_it_was(path: Path, schema: int) -> None:
    make_journal_of_schema(schema, path)
    with closing(sqlite3.connect(path)) as other:
        other.execute(IN_THE_WAY[schema])
        before = list(other.iterdump())
        with pytest.raises(JournalUnusable, match=r"grants|start|names|log|restart|webhooks"):
            SQLiteStore(path)
        assert list(other.iterdump()) == before
        assert other.execute("PRAGMA user_version").fetchone() == (schema,)
        other.execute(OUT_OF_THE_WAY[schema])
    with closing(SQLiteStore(path)) as opened:
        assert last_of(opened) == 2
        assert len(opened.sessions()[1]) == min(schema - 1, 1)
