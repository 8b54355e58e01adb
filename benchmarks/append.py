"""The cost of appends while a thousand streams write in turn.

Each commit brings one message of every stream, the smallest group commit there is. Our journal is
compared with a plain table, one row a message, with an index by stream and seq. Both get the same
messages in turn, in one process, and each commit waits for the disk. Our journal then gets ten
times as many. The process is killed, and the journal is opened again.
"""

import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.servers import ROOT
from streams.journal.records import Append, Create, Record
from streams.journal.sqlite import SQLiteStore
from streams.messages import Run

_JOURNAL: Final = "journal.db"
_LINE: Final = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n'


class Plan(msgspec.Struct, frozen=True):
    """The amounts to measure."""

    streams: int = 1000
    few: int = 1_000_000  # messages in each
    many: int = 10_000_000  # in our journal
    turn: int = 50_000  # messages in one before it is the other's turn
    message_bytes: int = 200


QUICK: Final = Plan(streams=50, few=5_000, many=10_000, turn=1_000)


class Appended(msgspec.Struct, frozen=True):
    """Figures of the appends: messages a second of the time in commits, and commits in ms."""

    rate: float
    commit_p50_ms: float
    commit_p99_ms: float
    commit_max_ms: float


class Results(msgspec.Struct, frozen=True):
    """The results of one plan.

    `ratio` is ours over the plain table, of the same messages; `at_scale` is the rate of the last
    tenth of `many` messages over the rate of the first `few`.
    """

    plan: Plan
    plain: Appended
    ours: Appended
    ours_at_many: Appended
    ratio: float
    at_scale: float
    wal_bytes_max: int
    restart_s: float  # open and claim the journal, after a kill
    file_bytes: int


class _Times:
    """The times of commits with so many messages each."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self.seconds: list[float] = []

    def result(self) -> Appended:
        spent = sorted(self.seconds)
        return Appended(
            rate=self._messages * len(spent) / sum(spent),
            commit_p50_ms=1e3 * statistics.median(spent),
            commit_p99_ms=1e3 * spent[int(0.99 * len(spent))],
            commit_max_ms=1e3 * spent[-1],
        )


class _Ours:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._store = SQLiteStore(folder / _JOURNAL)
        self._wal = folder / f"{_JOURNAL}-wal"
        self._names = [f"{n:032x}" for n in range(1, plan.streams + 1)]
        self._body = _line(plan)
        self.wal_bytes_max = 0
        self._store.commit([Create(_record(name, n)) for n, name in enumerate(self._names, 1)])

    def commit(self, seq: int) -> float:
        """Append one message to each stream; returns the seconds that it took."""
        changes = [Append(name, 1, Run(seq, 1, self._body), 0, 0) for name in self._names]
        begin = time.perf_counter()
        answers = self._store.commit(changes)
        spent = time.perf_counter() - begin
        assert not any(answers)
        self.wal_bytes_max = max(self.wal_bytes_max, self._wal.stat().st_size)
        return spent


class _Plain:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self._db = sqlite3.connect(folder / "plain.db", isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = OFF;"
            "CREATE TABLE messages (stream INTEGER, last INTEGER, body BLOB);"
            "CREATE INDEX by_stream ON messages (stream, last)"
        )
        self._streams = range(1, plan.streams + 1)
        self._body = _line(plan)

    def commit(self, seq: int) -> float:
        """Append one message to each stream; returns the seconds that it took."""
        rows = [(stream, seq, self._body) for stream in self._streams]
        begin = time.perf_counter()
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO messages VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")
        return time.perf_counter() - begin


def run(plan: Plan, folder: Path) -> Results:
    """Measure in a process of its own, kill it, and open the journal that it leaves in `folder`."""
    command = [sys.executable, "-m", "benchmarks.append", str(folder)]
    given = msgspec.json.encode(plan)
    worker = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, check=False)  # nosec B603 # our own program
    if worker.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the worker ended with {worker.returncode}")
    results = msgspec.json.decode(worker.stdout, type=Results)
    begin = time.perf_counter()
    with closing(SQLiteStore(folder / _JOURNAL)) as store:
        records = store.claim()
        restart_s = time.perf_counter() - begin
        if {record.last for record in records} != {plan.many // plan.streams}:
            raise RuntimeError("messages are missing")
    return msgspec.structs.replace(results, restart_s=restart_s)


def _work(folder: Path) -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    ours, plain = _Ours(folder, plan), _Plain(folder, plan)
    times = {side: _Times(plan.streams) for side in ("plain", "ours", "between", "many")}

    def append(times: _Times, commit: Callable[[int], float], seqs: range) -> None:
        times.seconds += map(commit, seqs)

    few, many = plan.few // plan.streams, plan.many // plan.streams
    turn = plan.turn // plan.streams
    for first in range(1, few + 1, turn):
        seqs = range(first, min(first + turn, few + 1))
        append(times["plain"], plain.commit, seqs)
        append(times["ours"], ours.commit, seqs)
    last_tenth = many - (many - few) // 9
    append(times["between"], ours.commit, range(few + 1, last_tenth + 1))
    append(times["many"], ours.commit, range(last_tenth + 1, many + 1))
    by_side = {side: taken.result() for side, taken in times.items()}
    results = Results(
        plan,
        plain=by_side["plain"],
        ours=by_side["ours"],
        ours_at_many=by_side["many"],
        ratio=by_side["ours"].rate / by_side["plain"].rate,
        at_scale=by_side["many"].rate / by_side["ours"].rate,
        wal_bytes_max=ours.wal_bytes_max,
        restart_s=0.0,
        file_bytes=(folder / _JOURNAL).stat().st_size,
    )
    sys.stdout.buffer.write(msgspec.json.encode(results))
    sys.stdout.buffer.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _record(name: str, number: int) -> Record:
    return Record(name, "os(0)", b"{}", 1.0, 60.0, 1.75e9, 1, True, number=number)


def _line(plan: Plan) -> bytes:
    return _LINE % (b"x" * (plan.message_bytes - len(_LINE) + 2))


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
