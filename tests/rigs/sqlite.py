"""Helpers of the tests of the journal's file: lines, journals, and programs that use them."""

import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from streams.journal.records import Append, Create, Record
from streams.journal.sqlite import APPLICATION_ID, SQLiteStore
from streams.messages import Run
from tests.rigs import ROOT
from tests.rigs.journals import as_one

PLENTY = 1024 * 1024


def record(stream: str = "s", number: int = 0) -> Record:
    return Record(
        stream=stream,
        principal="os(0)",
        origin=b"{}",
        min_s=1.0,
        max_s=60.0,
        created_at=1.75e9,
        fence=1,
        is_announced=True,
        number=number or 1 + "st".index(stream),
    )


def append(first: int, last: int, stream: str = "s", line: bytes = b"{}") -> Append:
    count = last + 1 - first
    return Append(stream, 1, Run(first, count, (line + b"\n") * count), 0, 0)


def make_journal(path: Path) -> Path:
    """A closed journal with one stream of 500 lines."""
    with closing(SQLiteStore(path)) as opened:
        assert opened.commit([Create(record()), append(1, 500, line=b"x" * 99)]) == [None, None]
    return path


# The statements of the release that knew schema 1 alone, word for word.
SCHEMA_1 = f"""
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = 1;
    CREATE TABLE "_sqlite_migrations" (
       "id" INTEGER PRIMARY KEY, "migration_set" TEXT, "name" TEXT, "applied_at" TEXT
    );
    CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
        ON "_sqlite_migrations" ("migration_set", "name");
    INSERT INTO "_sqlite_migrations"
        VALUES (1, 'mcp-streams', 'initial', '2026-11-21 15:08:30.048818+00:00');
    CREATE TABLE "streams" (
       "id" INTEGER PRIMARY KEY, "stream" TEXT NOT NULL, "principal" TEXT NOT NULL,
       "origin" BLOB NOT NULL, "min_s" REAL NOT NULL, "max_s" REAL NOT NULL,
       "created_at" REAL NOT NULL, "is_announced" INTEGER NOT NULL
    );
    CREATE UNIQUE INDEX "idx_streams_stream" ON "streams" ("stream");
    INSERT INTO "streams" VALUES (1, 's', 'os(0)', X'7B7D', 1.0, 60.0, 1750000000.0, 1);
    CREATE TABLE "progress" (
       "id" INTEGER PRIMARY KEY, "fence" INTEGER NOT NULL, "last" INTEGER NOT NULL,
       "acked" INTEGER NOT NULL, "last_request" INTEGER NOT NULL,
       "last_error" INTEGER NOT NULL, "outcome" TEXT NOT NULL, "ended_at" REAL NOT NULL
    );
    INSERT INTO "progress" VALUES (1, 1, 2, 0, 0, 0, 'live', 0.0);
    CREATE TABLE "runs" (
       "stream" INTEGER NOT NULL, "last" INTEGER NOT NULL, "count" INTEGER NOT NULL,
       "body" BLOB NOT NULL
    );
    CREATE INDEX "idx_runs_stream_last" ON "runs" ("stream", "last");
    INSERT INTO "runs" VALUES (1, 2, 2, X'7B7D0A7B7D0A');
"""


# The statements of the next release on top of it: a session, and a grant.
SCHEMA_2 = """
    PRAGMA user_version = 2;
    INSERT INTO "_sqlite_migrations"
        VALUES (2, 'mcp-streams', 'sessions', '2026-11-21 20:12:11.011167+00:00');
    CREATE TABLE "sessions" (
       "key" TEXT PRIMARY KEY NOT NULL, "principal" TEXT NOT NULL, "revision" TEXT NOT NULL,
       "capabilities" BLOB NOT NULL, "level" TEXT NOT NULL, "seen_at" REAL NOT NULL
    );
    INSERT INTO "sessions" VALUES
        ('k', 'session(k)', '2025-11-25', CAST('{"streams":{}}' AS BLOB), 'warning', 1750000000.25);
    CREATE TABLE "grants" (
       "session" TEXT NOT NULL, "delivery" TEXT NOT NULL, "stream" TEXT NOT NULL,
       "reply_id" BLOB NOT NULL, PRIMARY KEY ("session", "delivery")
    );
    CREATE INDEX "idx_grants_stream" ON "grants" ("stream");
    INSERT INTO "grants" VALUES ('k', 'd', 's', X'31');
"""


# The statements of the release that knew pages.
SCHEMA_3 = """
    PRAGMA user_version = 3;
    INSERT INTO "_sqlite_migrations"
        VALUES (3, 'mcp-streams', 'pages', '2026-11-21 21:40:17.205119+00:00');
    ALTER TABLE "progress" ADD COLUMN "pages" TEXT;
    ALTER TABLE "grants" ADD COLUMN "takes_over" INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE "grants" ADD COLUMN "start" INTEGER NOT NULL DEFAULT 0;
"""


# The statements of the release that evicted streams.
SCHEMA_4 = """
    PRAGMA user_version = 4;
    INSERT INTO "_sqlite_migrations"
        VALUES (4, 'mcp-streams', 'lookups', '2026-11-21 23:51:19.707544+00:00');
    CREATE TABLE "awake" ("id" INTEGER PRIMARY KEY);
    INSERT INTO "awake" VALUES (1);
    CREATE TABLE "names" ("name" BLOB PRIMARY KEY NOT NULL, "stream" INTEGER NOT NULL);
    CREATE INDEX "idx_names_stream" ON "names" ("stream");
    CREATE TABLE "ownership" ("claims" INTEGER NOT NULL);
    INSERT INTO "ownership" VALUES (0);
    CREATE TABLE "rests" (
       "id" INTEGER PRIMARY KEY, "owner" BLOB NOT NULL, "due_at" REAL NOT NULL,
       "is_wanted" INTEGER NOT NULL, "is_read" INTEGER NOT NULL
    );
    CREATE INDEX "idx_rests_due_at" ON "rests" ("due_at");
    CREATE INDEX idx_rests_wanted ON rests (owner, id, is_read) WHERE is_wanted;
    CREATE INDEX idx_rests_leftover ON rests (due_at) WHERE NOT is_wanted;
"""


# The statements of the release that had a log, and of the one that restarted calls.
SCHEMA_5 = """
    PRAGMA user_version = 5;
    INSERT INTO "_sqlite_migrations"
        VALUES (5, 'mcp-streams', 'log', '2026-11-22 03:02:11.143271+00:00');
    CREATE TABLE "log" ("id" INTEGER PRIMARY KEY, "body" BLOB NOT NULL);
"""
SCHEMA_6 = """
    PRAGMA user_version = 6;
    INSERT INTO "_sqlite_migrations"
        VALUES (6, 'mcp-streams', 'restart', '2026-11-22 07:40:52.043531+00:00');
    ALTER TABLE "progress" ADD COLUMN "restart" BLOB;
"""
SCHEMAS = (SCHEMA_1, SCHEMA_2, SCHEMA_3, SCHEMA_4, SCHEMA_5, SCHEMA_6)


def make_journal_of_schema(version: int, path: Path) -> Path:
    """A closed journal with `record()` and two lines of it, in WAL mode like all journals.

    From schema 2 on it also has the `session()` and the `grant()` of `tests.rigs.journals`.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("PRAGMA journal_mode = WAL")
        for schema in SCHEMAS[:version]:
            made.executescript(schema)
    return path


def crashed(opened: SQLiteStore, path: Path, to: Path) -> Path:
    """A copy of the journal in another place, as a killed process would leave it."""
    del opened  # an open journal still has its WAL
    shutil.copy(path, to)
    shutil.copy(f"{path}-wal", f"{to}-wal")
    return to


def last_of(opened: SQLiteStore, stream: str = "s") -> int:
    """The seq of the stream's last line; all lines are read."""
    last = 0
    while (run := as_one(opened.read(stream, last, bytes_max=PLENTY))) is not None:
        assert run.seq == last + 1
        last = run.last
    return last


@contextmanager
def running(program: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `program`; killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


APPENDING = """
    import sys
    from pathlib import Path
    from streams.journal.records import Create
    from streams.journal.sqlite import SQLiteStore
    from tests.rigs.sqlite import append, record

    store = SQLiteStore(Path(sys.argv[1]), durability=sys.argv[2])
    store.commit([Create(record())])
    last = 0
    while True:
        count = 1 + last % 7
        assert store.commit([append(last + 1, last + count)]) == [None]
        last += count
        print(last, flush=True)
"""
