"""The log, the tails and the segments: whatever breaks off, the file says what was committed."""

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from msgspec.structs import replace

from streams import messages
from streams.errors import JournalUnusable
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.memory import MemoryJournal
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
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.sqlite import SQLiteStore
from streams.journal.sqlite.log import Budget
from streams.journal.sqlite.snapshot import open_snapshot
from streams.journal.sqlite.verify import inspect
from streams.limits import MIB
from streams.messages import Run
from tests.rigs.journals import append, as_one, grant, last_append, lines, record, session
from tests.rigs.sqlite import PLENTY, crashed, running

_T = TypeVar("_T")
State = dict[str, tuple[Record, bytes]]
SMALL = Budget(log_bytes=3000, segment_bytes=600, direct_bytes=2000, wal_bytes=300_000)
STREAMS = "abcd"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def workload() -> Iterator[list[Change]]:
    """Commits that log, write tails, write segments past the log, trim, close and forget."""
    yield [Create(record(stream)) for stream in STREAMS]
    for n in range(30):
        appends: list[Change] = [
            append(10 * n + 1, 10 * n + 10, stream=stream) for stream in STREAMS[: 2 + n % 3]
        ]
        if n < 6:
            yield appends[:2]
            yield [Ack("a", 1, 10 * n - 5)]
        elif n == 6:
            yield [append(61, 300, stream="a"), append(61, 70, stream="b")]
            yield [append(301, 310, stream="a"), Ack("a", 1, 305), Ack("b", 1, 44)]
        elif n == 7:
            yield [append(1, 3, stream="c"), Forget("c", 1), Create(record("c"))]
            yield [append(1, 5, stream="c"), last_append(71, 75, stream="b")]
        elif n == 8:
            yield [Evict("b", 1, 9.0), Ack("b", 1, 72), append(6, 9, stream="c")]
            yield [Close("d", 1, Outcome.CANCELLED, 7.0), Close("c", 1, Outcome.ABANDONED, 8.0)]
        else:
            first = 311 + 10 * (n - 9)
            yield [append(first, first + 9, stream="a"), Ack("a", 1, first)]


COMMITS = list(workload())


def state_after(commits: Sequence[list[Change]]) -> State:
    async def main() -> State:
        memory, state = MemoryJournal(), {}
        for changes in commits:
            assert not any(await memory.commit(changes))
        for stream in STREAMS:
            known = await memory.find(stream)
            if known is not None:
                run = as_one(await memory.read(stream, known.acked, bytes_max=PLENTY))
                state[stream] = known, b"" if run is None else run.body
        return state

    return trio.run(main)


STATES = [state_after(COMMITS[:n]) for n in range(len(COMMITS) + 1)]


def state_of(opened: SQLiteStore) -> State:
    state = {}
    for stream in STREAMS:
        known = opened.lookups.find(stream)
        if known is not None:
            body, after = b"", known.acked
            while (run := as_one(opened.read(stream, after, bytes_max=500))) is not None:
                assert run.seq == after + 1
                body, after = body + run.body, run.last
            state[stream] = known, body
    return state


class _Breaking:
    """A connection that breaks off at a statement."""

    def __init__(self, real: sqlite3.Connection, statements: int) -> None:
        self._real = real
        self.left = statements

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        self._step(statement)
        return self._real.execute(statement, *parameters)

    def executemany(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        self._step(statement)
        return self._real.executemany(statement, *parameters)

    def _step(self, statement: str) -> None:
        self.left -= statement != "ROLLBACK"
        if not self.left:
            raise sqlite3.OperationalError("breaks off")


def statements_of(path: Path) -> int:
    with closing(SQLiteStore(path, durability="process", budget=SMALL)) as opened:
        counting = _Breaking(opened._writer, -1)
        opened._writer = counting  # type: ignore[assignment]
        for changes in COMMITS:
            opened.commit(changes)
        opened._writer = counting._real
    return -1 - counting.left


def committed_until_it_breaks(opened: SQLiteStore) -> int:
    done = iter(range(len(COMMITS)))

    def commit_all() -> None:
        for changes in COMMITS:
            opened.commit(changes)
            next(done)

    with pytest.raises(JournalUnusable, match="breaks off"):
        commit_all()
    return next(done)


def test_a_commit_that_breaks_off_at_any_statement_changes_neither_memory_nor_file(
    tmp_path: Path,
) -> None:
    statements = statements_of(tmp_path / "counted")
    assert statements > 100
    for n in range(1, statements + 1):
        path = tmp_path / f"broken-{n}"
        with closing(SQLiteStore(path, durability="process", budget=SMALL)) as opened:
            breaking = _Breaking(opened._writer, n)
            opened._writer = breaking  # type: ignore[assignment]
            done = committed_until_it_breaks(opened)
            assert state_of(opened) == STATES[done]
            crash = crashed(opened, path, tmp_path / f"crash-{n}")
            opened._writer = breaking._real
        left = crash if n % 2 else path  # as it was, or closed in good order
        with closing(SQLiteStore(left, durability="process")) as again:
            assert state_of(again) == STATES[done]
            for changes in COMMITS[done:]:
                assert not any(again.commit(changes))
            assert state_of(again) == STATES[-1]
        for leftover in tmp_path.glob("*-[0-9]*"):
            leftover.unlink()


@pytest.mark.parametrize("budget", [SMALL, Budget()], ids=["small", "plenty"])
def test_a_crash_after_any_commit_takes_nothing_back(tmp_path: Path, budget: Budget) -> None:
    with closing(SQLiteStore(tmp_path / "j", durability="process", budget=budget)) as opened:
        for n, changes in enumerate(COMMITS, 1):
            opened.commit(changes)
            crash = crashed(opened, tmp_path / "j", tmp_path / f"crash-{n}")
            with closing(SQLiteStore(crash, durability="process")) as again:
                assert state_of(again) == STATES[n]
                claimed = {r.stream: r for r in again.claim()}
            awake = {s: r for s, (r, _) in STATES[n].items() if r.due_at is None}
            assert claimed == {s: replace(r, fence=r.fence + 1) for s, r in awake.items()}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from streams.journal.sqlite import SQLiteStore
    from tests.system.test_sqlite_tiers import COMMITS, SMALL, _Breaking

    class Killing(_Breaking):
        def _step(self, statement):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

    store = SQLiteStore(Path(sys.argv[1]), budget=SMALL)
    store._writer = Killing(store._writer, int(sys.argv[2]))
    for n, changes in enumerate(COMMITS, 1):
        store.commit(changes)
        print(n, flush=True)
    store.close()
"""


@pytest.mark.parametrize("statement", [9, 23, 47, 71, 95, 119, 131, 140])
def test_a_kill_at_a_statement_leaves_what_was_committed(path: Path, statement: int) -> None:
    with running(KILLED, path, statement) as process:
        said, _ = process.communicate()
    done = len(said.split())
    with closing(SQLiteStore(path)) as opened:
        # The commit itself may have been the last statement.
        assert state_of(opened) in (STATES[done], STATES[min(done + 1, len(COMMITS))])


WRITING = """
    import sys
    from pathlib import Path
    from streams.journal.records import Create
    from streams.journal.sqlite import SQLiteStore
    from tests.rigs.journals import append, record
    from tests.system.test_sqlite_tiers import SMALL, STREAMS

    store = SQLiteStore(Path(sys.argv[1]), durability="process", budget=SMALL)
    store.commit([Create(record(stream)) for stream in STREAMS])
    for n in range(1, 10**9):
        assert not any(store.commit([append(n, n, stream=stream) for stream in STREAMS]))
        print(n, flush=True)
"""


@pytest.mark.parametrize("kill_after", [30, 200, 600])
def test_a_kill_while_the_wal_is_copied_takes_nothing_back(path: Path, kill_after: int) -> None:
    with running(WRITING, path) as process:
        assert process.stdout is not None
        for _ in range(kill_after):
            done = int(process.stdout.readline())
        process.kill()
        done = max([done, *(int(n) for n in process.stdout.read().split())])
        process.wait()
    with closing(SQLiteStore(path)) as opened:
        found = state_of(opened)
        assert {r.last for r, _ in found.values()} <= {done, done + 1}
        assert {body for _, body in found.values()} == {
            lines(1, r.last).body for r, _ in found.values()
        }


def test_a_reader_never_misses_what_becomes_a_segment_meanwhile(path: Path) -> None:
    total = 1000
    with closing(SQLiteStore(path, durability="process", budget=SMALL)) as opened:
        opened.commit([Create(record())])
        errors: list[BaseException] = []

        def write() -> None:
            try:
                for n in range(1, total + 1):
                    assert not any(opened.commit([append(n, n)]))
            except BaseException as error:
                errors.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        after = 0
        while after < total and not errors:
            for start in (after, after // 2):
                run = as_one(opened.read("s", start, bytes_max=PLENTY))
                if run is not None:
                    assert run == lines(start + 1, run.last)
                    after = max(after, run.last)
            time.sleep(1e-4)  # a reader without a pause may keep the interpreter from the writer
        writer.join()
        assert not errors


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as other:
        return other.execute(query).fetchall()


def test_lines_are_logged_until_they_make_a_segment(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record())])
        for n in range(0, 7000, 100):
            opened.commit([append(n + 1, n + 100)])
        [(count, size)] = rows(path, "SELECT count, length(body) FROM runs")
        assert 64 * 1024 <= size < 80 * 1024
        assert len(rows(path, "SELECT id FROM log")) == (7000 - count) // 100
        assert as_one(opened.read("s", 0, bytes_max=PLENTY)) == lines(1, 7000)
    assert rows(path, "SELECT count(*), sum(count) FROM runs") == [(2, 7000)]
    assert rows(path, "SELECT id FROM log") == []


IN_TABLES = " UNION ALL ".join(
    f"SELECT id FROM {each}" for each in ("streams", "progress", "awake")
)


def test_a_call_that_is_soon_forgotten_is_in_the_log_alone(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record()), append(1, 2)])
        assert rows(path, IN_TABLES) == []
        opened.commit([Forget("s", 1), Create(record())])
        assert rows(path, IN_TABLES) == []
        crash = crashed(opened, path, path.with_name("crash"))
    with closing(SQLiteStore(crash)) as again:
        assert again.lookups.find("s") == record()
        again.commit([Forget("s", 1)])
    assert rows(crash, IN_TABLES) == []


def test_a_long_request_is_not_logged(path: Path) -> None:
    asked = replace(record(), origin=b"x" * 20_000)
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(asked)])
        assert rows(path, "SELECT length(origin) FROM streams") == [(20_000,)]
        assert rows(path, "SELECT * FROM log") == []
        assert opened.lookups.find("s") == asked


def test_streams_of_the_log_are_found_like_those_of_the_tables(path: Path) -> None:
    """Of nine streams every second one is in the tables, after two claims and a crash."""
    origin = messages.request(1, "tools/call", {"name": "build"})
    made = [replace(record(f"{n}", number=n), origin=origin) for n in range(1, 10)]
    with closing(SQLiteStore(path)) as opened:
        opened.claim()
        opened.commit([SaveSession(session()), *map(Create, made)])
        grants = [grant(stream=each.stream, delivery=each.stream) for each in made]
        written = [lines_of(each, long=bool(each.number % 2)) for each in made]
        assert not any(opened.commit([*written, *map(SaveGrant, grants)]))
        assert rows(path, "SELECT id FROM streams") == [(n,) for n in (1, 3, 5, 7, 9)]
        crash = crashed(opened, path, path.with_name("crash"))
    with closing(SQLiteStore(crash)) as again:
        known = again.claim()
        assert [(each.stream, each.last) for each in known] == [(r.stream, 100) for r in made]
        assert {each.fence for each in known} == {2}
        assert again.sessions()[1] == grants
        found = again.lookups
        assert found.totals().last_number == 9
        assert [found.find(each.stream) for each in made] == known
        assert found.newest(None, 3) == known[:-4:-1]
        assert found.newest(8, 9) == known[6::-1]
        assert [each for each, _ in found.streams(2, 3)] == known[2:5]
        assert {found.principal_of(each.stream) for each in made} == {"os(0)"}
        assert [found.beginning_with(each.stream, 2) for each in made] == [[r.stream] for r in made]
        assert inspect(crash).problems == ()
        with open_snapshot(crash) as seen:
            assert trio.run(partial(seen.newest, limit=9)) == known[::-1]
            assert trio.run(partial(seen.find, "2")) == known[1]
            assert trio.run(partial(seen.beginning_with, "2", limit=2)) == ["2"]


def lines_of(made: Record, *, long: bool) -> Append:
    """100 lines, which are as long as a segment by themselves or are logged."""
    text = "x" * (1000 if long else 10)
    body = messages.notification("notifications/message", {"data": text}) * 100
    return Append(made.stream, made.fence, Run(1, 100, body), 0, 0)


def test_lines_of_a_segment_by_themselves_are_not_logged(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record()), append(1, 10)])
        opened.commit([append(11, 50_000)])
        assert rows(path, "SELECT id FROM log") == []
        stored = rows(path, "SELECT last, length(body) FROM runs ORDER BY last")
        assert stored[-1][0] == 50_000
        assert all(STORED_BYTES_MAX - 100 < size <= STORED_BYTES_MAX for _, size in stored[1:-1])


def test_a_stored_segment_is_read_in_one_piece(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record()), append(1, 50_000)])
        after = 0
        for last, count in rows(path, "SELECT last, count FROM runs ORDER BY last"):
            run = as_one(opened.read("s", after, bytes_max=STORED_BYTES_MAX))
            assert run == lines(last - count + 1, last)
            after = last


def test_what_is_acked_early_is_never_written(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record())])
        for n in range(0, 900, 100):
            opened.commit([append(n + 1, n + 100), Ack("s", 1, n + 50)])
        opened.commit([Ack("s", 1, 900)])
        assert rows(path, "SELECT count(*) FROM runs") == [(0,)]
    assert rows(path, "SELECT count(*) FROM runs") == [(0,)]
    assert rows(path, "SELECT last, acked FROM progress") == [(900, 900)]


def test_the_log_keeps_within_its_budget_however_many_write(path: Path) -> None:
    names = [f"{n:03}" for n in range(300)]
    budget = Budget(log_bytes=MIB // 4)
    with closing(SQLiteStore(path, durability="process", budget=budget)) as opened:
        opened.commit([Create(record(name)) for name in names])
        for n in range(1, 300):
            changes: list[Append] = [append(n, n, stream=name) for name in names]
            assert not any(opened.commit(changes))
            [(size,)] = rows(path, "SELECT sum(length(body)) FROM log")
            assert size < 2 * budget.log_bytes
        assert all(
            as_one(opened.read(name, 0, bytes_max=PLENTY)) == lines(1, 299) for name in names
        )


def test_a_log_that_does_not_fit_its_tables_is_refused(path: Path) -> None:
    with closing(SQLiteStore(path)) as opened:
        opened.commit([Create(record()), append(1, 3)])
        opened.commit([append(4, 5)])
        crash = Path(shutil.copy(path, path.with_name("crash")))
        shutil.copy(f"{path}-wal", f"{crash}-wal")
    with closing(sqlite3.connect(crash, isolation_level=None)) as other:
        other.execute("DELETE FROM log WHERE id = 1")
    with pytest.raises(JournalUnusable, match="log does not fit its tables"):
        SQLiteStore(crash)
