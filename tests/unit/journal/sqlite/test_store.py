"""The journal in a file: durable, private, bounded, and nothing is lost when it fails."""

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from sqlite_utils import Database

from streams.errors import Full, JournalUnusable, Unavailable
from streams.journal.records import Ack, Answered, Change, Checkpoint, Create, Forget
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.sqlite import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    SQLiteJournal,
    SQLiteStore,
    disk,
    open_sqlite_journal,
    store,
)
from streams.journal.sqlite.batch import Batch
from streams.journal.sqlite.checkpoints import WalIndex
from streams.journal.sqlite.log import Budget
from streams.journal.sqlite.schemas import migrations
from streams.limits import MIB, Durability
from tests.rigs.journals import as_one, grant, session
from tests.rigs.sqlite import (
    APPENDING,
    PLENTY,
    append,
    crashed,
    last_of,
    make_journal,
    record,
    running,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def made(path: Path) -> Path:
    return make_journal(path)


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("kill_after", [1, 20, 300])
def test_what_was_committed_outlives_a_kill(path: Path, durability: str, kill_after: int) -> None:
    with running(APPENDING, path, durability) as process:
        assert process.stdout is not None
        for _ in range(kill_after):
            acknowledged = int(process.stdout.readline())
        process.kill()
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
        process.wait()
    with closing(SQLiteStore(path)) as opened:  # the lock went with the process
        [found] = opened.claim()
        assert found.last >= acknowledged
        assert last_of(opened) == found.last
        assert opened.commit([replace(append(found.last + 1, found.last + 1), fence=2)]) == [None]


def test_a_wal_cut_anywhere_leaves_whole_commits(path: Path, tmp_path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record())])
        for n in range(20):
            opened.commit([append(5 * n + 1, 5 * n + 5)])
        crash = crashed(opened, path, tmp_path / "crash")
    wal = Path(f"{crash}-wal").read_bytes()
    found = []
    for size in range(0, len(wal), 4096 * 3 + 77):
        copy = Path(shutil.copy(crash, tmp_path / f"cut-{size}"))
        Path(f"{copy}-wal").write_bytes(wal[:size])
        with closing(SQLiteStore(copy)) as cut:
            found.append(last_of(cut))
            assert [r.last for r in cut.claim()] in ([], [found[-1]])
    assert found == sorted(found)
    assert {last % 5 for last in found} == {0}
    assert 0 < found[-1] <= 100


def test_a_full_journal_says_so_and_goes_on_when_there_is_room(path: Path) -> None:
    with closing(SQLiteStore(path, file_bytes_max=640 * 1024)) as opened:
        opened.commit([Create(record())])
        with pytest.raises(Full, match="no room"):
            opened.commit([append(1, 5000, line=b"x" * 99)])
        assert opened.commit([append(1, 2000, line=b"x" * 99)]) == [None]
        last = last_of(opened)
        assert last == 2000
        waiting = append(last + 1, 2 * last, line=b"x" * 99)
        with pytest.raises(Full):
            opened.commit([waiting, Create(record("t"))])
        assert [r.stream for r in opened.claim()] == ["s"]
        acked = Ack("s", 2, last)
        assert opened.commit([acked, replace(waiting, fence=2)]) == [None, None]
        run = as_one(opened.read("s", last, bytes_max=PLENTY))
        assert run == waiting.run


@pytest.fixture
def looks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look for room is one: a fast machine fills the reserve between two of them."""
    monkeypatch.setattr(disk, "ROOM_S", 0.0)


@pytest.mark.usefixtures("looks_anew")
def test_a_file_that_may_not_grow_has_room_again_when_lines_are_acked(path: Path) -> None:
    with closing(SQLiteStore(path, file_bytes_max=8 * MIB)) as opened:
        opened.commit([Create(record())])
        assert opened.look_for_room() is None
        last = 0
        while (shortage := opened.look_for_room()) is None:
            opened.commit([append(last + 1, last + 1000, line=b"x" * 99)])
            last += 1000
        assert str(shortage) == "less than 1 MiB are left of what its file may take"
        assert path.stat().st_size + Path(f"{path}-wal").stat().st_size > 6 * MIB
        opened.commit([Ack("s", 1, last)])
        assert opened.look_for_room() is None


@pytest.mark.usefixtures("looks_anew")
def test_a_look_for_room_runs_no_sql_while_there_is_room(path: Path) -> None:
    statements: list[str] = []
    with closing(SQLiteStore(path, bytes_max=64 * MIB)) as opened:
        opened.commit([Create(record())])
        opened._reader.set_trace_callback(statements.append)
        assert opened.look_for_room() is None
        assert statements == []
        last = 0
        while opened.look_for_room() is None:
            opened.commit([append(last + 1, last + 10_000, line=b"x" * 99)])
            last += 10_000
        assert statements  # whether pages within the file are free
        opened.commit([Ack("s", 1, last)])
        assert opened.look_for_room() is None


@pytest.mark.parametrize("page_bytes", [512, 4096, 65_536])
def test_the_wal_index_has_the_size_of_the_database(path: Path, page_bytes: int) -> None:
    with closing(WalIndex(path)) as index, closing(sqlite3.connect(path)) as db:

        def asked() -> int:
            [pages] = db.execute("PRAGMA page_count").fetchone()
            return int(pages * page_bytes)

        db.execute(f"PRAGMA page_size = {page_bytes}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("SELECT * FROM sqlite_schema").fetchall()
        index.open()
        assert index.database_bytes() in (0, asked())
        db.execute("CREATE TABLE t (body BLOB)")
        for _ in range(20):
            with db:
                db.execute("INSERT INTO t VALUES (zeroblob(100000))")
            assert index.database_bytes() == asked() > 0
        with db:
            db.execute("DELETE FROM t")
        assert index.database_bytes() == asked()
        for what in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)", "CREATE TABLE u (body BLOB)"):
            db.execute(what)
            assert index.database_bytes() == asked()


FAILING = """
    import resource, sys
    from pathlib import Path
    from streams.errors import JournalError
    from streams.journal.records import Create
    from streams.journal.sqlite import SQLiteStore
    from tests.rigs.sqlite import append, record

    store = SQLiteStore(Path(sys.argv[1]))
    store.commit([Create(record()), append(1, 5)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    for change in append(6, 5005, line=b"x" * 99), append(6, 6):
        try:
            store.commit([change])
        except JournalError as error:
            print(type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    store.close()
"""


def test_after_a_failed_write_nothing_more_is_committed(path: Path) -> None:
    with running(FAILING, path) as process:
        said, _ = process.communicate()
    first, second = said.splitlines()
    assert first == second
    assert first.startswith("JournalUnusable")
    assert "the disk fails" in first
    with closing(SQLiteStore(path)) as opened:
        assert last_of(opened) == 5


@contextmanager
def held_by_another_program(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_a_busy_journal_is_unavailable_and_readable(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_MS", 1)
    with closing(SQLiteStore(made)) as opened:
        with held_by_another_program(made):
            with pytest.raises(Unavailable, match="locked by another program") as busy:
                opened.commit([append(501, 501)])
            assert not isinstance(busy.value, Full)
            assert last_of(opened) == 500
        assert opened.commit([append(501, 501)]) == [None]
        assert last_of(opened) == 501


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, a commit waits until the other program lets go."""
    monkeypatch.setattr(store, "BUSY_MS", 60_000)


@pytest.mark.usefixtures("patient")
async def test_a_cancelled_commit_may_be_repeated(path: Path) -> None:
    async with open_sqlite_journal(path) as journal:
        await journal.commit([Create(record())])
        with held_by_another_program(path), trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(journal.commit, [append(1, 3)])
                await trio.testing.wait_all_tasks_blocked()  # it is in the thread's hands now
                scope.cancel()
        assert scope.cancelled_caught
        assert list(await journal.commit([append(1, 3)])) == [None]
        assert list(await journal.commit([append(4, 4)])) == [None]
        assert [r.last for r in await journal.claim()] == [4]
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == append(1, 4).run


@pytest.mark.parametrize(
    ("kind", "lines", "steps_at_once"),
    [("process", 3, [True, True]), ("process", 500, [False, False]), ("power", 3, [True, False])],
)
async def test_only_an_fsync_of_a_short_commit_needs_the_thread(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Durability,
    lines: int,
    steps_at_once: list[bool],
) -> None:
    async with open_sqlite_journal(path, durability=kind) as journal:
        await journal.commit([Create(record())])
        threads: list[threading.Thread] = []
        write, publish = Batch.write, Batch.publish

        def written(batch: Batch, changes: Sequence[Change]) -> object:
            threads.append(threading.current_thread())
            return write(batch, changes)

        def published(batch: Batch) -> None:
            threads.append(threading.current_thread())
            publish(batch)

        monkeypatch.setattr(Batch, "write", written)
        monkeypatch.setattr(Batch, "publish", published)
        await journal.commit([append(1, lines, line=b"x" * 99)])
        assert [thread is threading.current_thread() for thread in threads] == steps_at_once
        assert (
            as_one(await journal.read("s", 0, bytes_max=PLENTY))
            == append(1, lines, line=b"x" * 99).run
        )


@pytest.mark.parametrize("kind", ["process", "power"])
async def test_a_commit_that_may_delete_segments_is_left_to_the_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: Durability
) -> None:
    async with open_sqlite_journal(path, durability=kind) as journal:
        await journal.commit([Create(record())])
        threads: list[threading.Thread] = []
        write = Batch.write

        def written(batch: Batch, changes: Sequence[Change]) -> object:
            threads.append(threading.current_thread())
            return write(batch, changes)

        monkeypatch.setattr(Batch, "write", written)
        await journal.commit([append(1, 3)])
        await journal.commit([Ack("s", 1, 1)])  # its lines are in the log and in memory alone
        await journal.commit([append(4, 5_000, line=b"x" * 99)])  # a segment
        await journal.commit([Ack("s", 1, 2)])
        at_once = [thread is threading.current_thread() for thread in threads]
        assert at_once == [True, True, False, False]


async def test_a_commit_that_may_have_to_copy_the_wal_is_left_to_the_thread(path: Path) -> None:
    async with open_sqlite_journal(path, bytes_max=8 * MIB) as journal:  # 1 MiB is for the WAL
        await journal.commit([Create(record())])
        assert journal._store.begin_at_once([append(1, 3)]) is None


@pytest.mark.parametrize(
    "large",
    [
        Create(replace(record("t"), origin=b"x" * MIB)),
        Checkpoint("s", 1, 0, b"x" * MIB),
        Answered("s", 1, 1, b"x" * MIB),
    ],
    ids=["request", "state", "answer"],
)
async def test_a_commit_with_many_bytes_is_left_to_the_thread(path: Path, large: Change) -> None:
    async with open_sqlite_journal(path) as journal:
        await journal.commit([Create(record())])
        assert journal._store.begin_at_once([large]) is None


async def test_a_commit_that_starts_the_wal_over_is_synced_in_the_thread(path: Path) -> None:
    """SQLite syncs the header of the new WAL, also where it syncs no commit."""
    async with open_sqlite_journal(path, durability="process") as journal:
        await journal.commit([Create(record())])
        assert not journal._store.waits_for_disk
        journal._store._checkpoints.empty()
        await journal.commit([append(1, 3)])
        assert not journal._store.waits_for_disk
        journal._store._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        assert journal._store.waits_for_disk
        await journal.commit([append(4, 4)])
        assert not journal._store.waits_for_disk


@pytest.mark.usefixtures("patient")
async def test_a_short_commit_waits_for_another_program_in_the_thread(path: Path) -> None:
    async with open_sqlite_journal(path, durability="process") as journal:
        await journal.commit([Create(record())])
        async with trio.open_nursery() as nursery:
            with held_by_another_program(path):
                nursery.start_soon(journal.commit, [append(1, 3)])
                await trio.testing.wait_all_tasks_blocked()  # and everything else goes on
                assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) is None
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == append(1, 3).run


@pytest.mark.usefixtures("patient")
async def test_commits_are_made_in_the_order_of_the_calls(path: Path) -> None:
    async with open_sqlite_journal(path) as journal:
        await journal.commit([Create(record())])
        async with trio.open_nursery() as nursery:
            with held_by_another_program(path):
                for n in range(1, 20):
                    nursery.start_soon(journal.commit, [append(n, n)])
                    await trio.testing.wait_all_tasks_blocked()
        assert as_one(await journal.read("s", 0, bytes_max=PLENTY)) == append(1, 19).run


@pytest.mark.usefixtures("patient")
async def test_reading_goes_on_while_a_commit_is_under_way(made: Path) -> None:
    async with open_sqlite_journal(made) as journal, trio.open_nursery() as nursery:
        with held_by_another_program(made):
            nursery.start_soon(journal.commit, [append(501, 501)])
            await trio.testing.wait_all_tasks_blocked()
            run = as_one(await journal.read("s", 0, bytes_max=PLENTY))
            assert run is not None
            assert run.last == 500


async def test_a_journal_cancelled_while_it_opens_is_not_left_owned(path: Path) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with open_sqlite_journal(path) as journal:
            await journal.claim()
    assert scope.cancelled_caught
    SQLiteStore(path).close()


async def test_a_closed_journal_refuses_instead_of_waiting(path: Path) -> None:
    async with open_sqlite_journal(path) as journal:
        await journal.aclose()
        calls: list[Callable[[SQLiteJournal], Awaitable[object]]] = [
            lambda j: j.commit([]),
            lambda j: j.claim(),
            lambda j: j.sessions(),
            lambda j: j.read("s", 0, bytes_max=1),
        ]
        for call in calls:
            with pytest.raises(JournalUnusable, match="closed"):
                await call(journal)


def test_what_was_committed_last_is_read_without_sql(path: Path) -> None:
    statements: list[str] = []
    with closing(SQLiteStore(path, cache_bytes_max=600_000)) as opened:
        opened.commit([Create(record()), Create(record("t"))])
        opened._segments._connection.set_trace_callback(statements.append)
        opened.commit([append(1, 5_000, line=b"x" * 99)])  # longer than two segments
        opened.commit([append(5_001, 10_000, line=b"x" * 99)])
        for after in (5_000, 7_000, 9_999):
            assert as_one(opened.read("s", after, bytes_max=PLENTY)).last == 10_000
        assert statements == []
        assert as_one(opened.read("s", 4_000, bytes_max=PLENTY)).last == 10_000
        assert len(statements) == 1  # older lines are read from the file
        opened.commit([append(1, 2_000, "t", line=b"x" * 99)])
        assert as_one(opened.read("s", 5_000, bytes_max=PLENTY)).last == 10_000
        assert len(statements) == 2  # the lines of another stream have taken their place


def test_a_read_that_stops_early_leaves_no_transaction(made: Path) -> None:
    with closing(SQLiteStore(made)) as opened:
        opened.commit([append(501, 900, line=b"y" * 99), append(901, 901)])
        assert opened.read("s", 0, bytes_max=10)
        opened.commit([append(902, 902)])
        with closing(sqlite3.connect(made, timeout=0)) as other:
            busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not busy


@pytest.mark.parametrize("count", [50, 1000])  # through the log, and past it
def test_the_wal_stays_bounded_and_goes_with_the_close(path: Path, count: int) -> None:
    wal = Path(f"{path}-wal")
    budget = Budget(log_bytes=MIB, wal_bytes=8 * MIB)
    with closing(SQLiteStore(path, durability="process", budget=budget)) as opened:
        opened.commit([Create(record())])
        for n in range(40_000_000 // 200 // count):
            first = count * n + 1
            opened.commit([append(first, first + count - 1, line=b"x" * 199)])
            opened.read("s", first - 1, bytes_max=PLENTY)
            assert wal.stat().st_size <= budget.wal_bytes  # 40 MB go through it
    assert not wal.exists()


def test_the_wal_grows_while_another_program_reads_and_comes_back(path: Path) -> None:
    wal = Path(f"{path}-wal")
    budget = Budget(wal_bytes=4 * MIB)
    with closing(SQLiteStore(path, durability="process", budget=budget)) as opened:

        def write(first: int) -> None:
            for n in range(first, first + 40_000, 1000):
                opened.commit([append(n, n + 999, line=b"x" * 199)])

        opened.commit([Create(record())])
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM runs").fetchone()
            write(1)
            grown = wal.stat().st_size
            assert grown > 8_000_000
            assert last_of(opened) == 40_000
        write(40_001)
        write(80_001)
        assert wal.stat().st_size < grown + MIB  # it started over
        assert last_of(opened) == 120_000
    assert not wal.exists()


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_nobody_else_may_read_a_journal(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record())])
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    names = ["journal.db", "journal.db-shm", "journal.db-wal", "journal.db.lock"]
    assert modes == dict.fromkeys(names, 0o600)


def test_a_journal_that_others_may_read_is_made_private(made: Path) -> None:
    made.chmod(0o644)
    SQLiteStore(made).close()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


@pytest.mark.parametrize("secure_delete", [True, False])
def test_with_secure_delete_acked_lines_cannot_be_found(path: Path, secure_delete: bool) -> None:
    with closing(SQLiteStore(path, secure_delete=secure_delete)) as opened:
        opened.commit([Create(record()), append(1, 900, line=b"the secret of the line")])
        opened.commit([Ack("s", 1, 900)])
    assert (b"the secret" in path.read_bytes()) is not secure_delete


def test_trimming_makes_room_for_what_follows(path: Path) -> None:
    with closing(SQLiteStore(path, durability="process")) as opened:
        opened.commit([Create(record())])
        for n in range(0, 5000, 100):
            opened.commit([append(n + 1, n + 100, line=b"x" * 999), Ack("s", 1, n + 50)])
            opened.commit([Ack("s", 1, n + 100)])
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    assert path.stat().st_size < 1024 * 1024  # 5 MB went through it


def test_lines_that_are_acked_in_the_same_commit_are_not_stored(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record()), append(1, 5), append(6, 9), Ack("s", 1, 5)])
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT last, count FROM runs").fetchall() == [(9, 4)]


def test_a_commit_that_breaks_off_leaves_nothing_behind(made: Path) -> None:
    beyond_sqlite = replace(record("t"), last=2**64)
    with closing(SQLiteStore(made)) as opened:
        with pytest.raises(OverflowError):
            opened.commit([SaveSession(session()), append(501, 502), Create(beyond_sqlite)])
        assert opened.commit([append(501, 501)]) == [None]
        assert last_of(opened) == 501
        assert [r.stream for r in opened.claim()] == ["s"]
        assert opened.sessions() == ([], [])


def test_nothing_is_left_of_a_forgotten_stream_in_any_table(made: Path) -> None:
    with closing(SQLiteStore(made)) as opened:
        opened.commit([SaveSession(session()), SaveGrant(grant()), Forget("s", 1)])
        opened.commit([Create(record()), SaveGrant(grant()), append(1, 9), Forget("s", 1)])
    db = Database(made)
    with closing(db):
        tables = ("streams", "progress", "runs", "grants", "awake", "rests", "names", "log")
        assert [db.table(name).count for name in tables] == [0] * len(tables)


def test_more_streams_than_are_kept_in_memory_are_no_trouble(path: Path) -> None:
    names = [f"stream {n}" for n in range(10)]
    with closing(SQLiteStore(path, durability="process", budget=Budget(streams_max=3))) as opened:
        opened.commit([Create(record(name, n)) for n, name in enumerate(names, 1)])
        for n in range(1, 6):
            for name in names:
                assert opened.commit([append(n, n, stream=name)]) == [None]
        assert [last_of(opened, name) for name in names] == [5] * 10


def test_the_file_says_what_it_is(made: Path) -> None:
    db = Database(made)
    with closing(db):
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert len(migrations.applied(db)) == SCHEMA_VERSION
        assert not migrations.pending(db)


def test_a_count_that_takes_long_is_made_less_often(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, count_s = 1000.0, 0.0

    def steady() -> float:
        nonlocal now
        now += count_s
        return now

    monkeypatch.setattr(disk, "steady", steady)
    with closing(SQLiteStore(path, anonymous_bytes_max=64 * 1024)) as opened:
        share = opened._share
        assert share is not None
        assert share.is_due
        count_s = 2.0
        share.recount(lambda: 60_000)
        count_s = 0.0
        now += 19
        assert not share.is_due
        now += 1
        assert share.is_due


def test_a_share_that_cannot_be_counted_neither_undoes_nor_repeats_a_commit(path: Path) -> None:
    """The count is not part of the commit, so its error does not fail the commit."""
    with closing(SQLiteStore(path, anonymous_bytes_max=64 * 1024)) as opened:
        made = replace(record(), principal="session(x)")
        long = append(1, 1, line=b'"%s"' % (b"x" * 60_000))
        assert opened.commit([Create(made), long]) == [None, None]
        assert opened.anonymous_shortage is not None
        denied = []

        def authorize(_: int, table: str | None, column: str | None, *more: object) -> int:
            if (table, column) != ("runs", "body"):  # which the count alone reads here
                return sqlite3.SQLITE_OK
            denied.append(column)
            return sqlite3.SQLITE_DENY

        opened._share._next_count_at = -float("inf")  # a second has passed
        opened._writer.set_authorizer(authorize)
        assert opened.commit([append(2, 2)]) == [None]
        opened._writer.set_authorizer(None)
        assert denied
        assert last_of(opened) == 2
        assert opened.anonymous_shortage is not None


async def test_webhooks_that_cannot_be_read_are_dropped_when_it_is_claimed(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ("good", "s", "https://a.example/", b"{}", 1.0, 0)
    bad: list[tuple[object, ...]] = [
        (b"id\xff", *good[1:]),
        ("stream", b"\xff", *good[2:]),
        ("url", "s", b"https://a.example/", *good[3:]),
        ("body", *good[1:3], "{}", *good[4:]),
        ("due", *good[1:4], "soon", 0),
        ("attempts", *good[1:5], "x"),
        ("negative", *good[1:5], -5),
        ("a\r\nb", *good[1:5], "x"),
    ]
    with closing(sqlite3.connect(made)) as connection, connection:
        add = "INSERT INTO webhooks VALUES (?, ?, ?, ?, ?, ?)"
        connection.executemany(add, [good, *bad])
        connection.execute(add.replace("(?,", "(CAST(x'75ff' AS TEXT),", 1), good[1:])
    async with open_sqlite_journal(made) as journal:
        assert [each.id for each in await journal.webhooks(limit=99)] == ["good"]
        await journal.claim()
        assert await journal.count_webhooks() == 1
        assert [each.id for each in await journal.take_webhooks(2.0, 3.0, limit=9)] == ["good"]
        await journal.claim()
    lines = [each for each in capsys.readouterr().err.splitlines() if "dropped" in each]
    assert len(lines) == len(bad) + 1
    for shown in ("id\\xff", "stream", "negative", "a\\r\\nb", "u\\xff"):
        assert any(shown in line.replace("\\\\", "\\") for line in lines), shown
