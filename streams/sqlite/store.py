"""Records and lines in tables, and sessions beside them: the whole of the journal, synchronous."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.errors import JournalError, JournalUnusable
from streams.journal import (
    STORED_BYTES_MAX,
    Append,
    Change,
    Create,
    Forget,
    Grant,
    Outcome,
    Record,
    SessionRecord,
    apply,
    apply_to_sessions,
    joined,
)
from streams.messages import Run
from streams.ownership import OwnerLock
from streams.sqlite.file import Durability, configure, connect, create_file, prepare, translated
from streams.sqlite.sessions import SessionTables

BUSY_MS: Final = 1000  # how long a commit waits for another program's look into the file
BUSY_READ_MS: Final = 50  # a read waits on trio's thread, so not for long
# A page that is mapped is copied once less, and asked for without a system call: that halves what a
# read costs. More than SQLite was built for counts as that.
MMAP_BYTES: Final = 1 << 40
# Python asks for a row ahead of the one that it hands over: longer bodies are not in it.
SMALL_BYTES_MAX: Final = 16 * 1024
# Records of the streams that change now are kept, without their origins: looking one up is a third
# of what an append costs. Some 500 bytes each.
KNOWN_MAX: Final = 10_000
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


class SQLiteStore:
    """A journal file, opened and owned. Not for two threads at once, `read` apart.

    All may raise `Unavailable`, `Full` or `JournalUnusable`; then the whole step is rolled back.
    After a `JournalUnusable` from `commit` every later one says the same: memory is ahead of the
    disk, and only a restart can tell the truth.
    """

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = "power",
        secure_delete: bool = False,
        file_bytes_max: int | None = None,
    ) -> None:
        """Open the journal at `path`, or make it.

        More than `file_bytes_max` bytes of file are `Full`. Raises `JournalUnusable`, which says
        what to do, where the file is owned, foreign, damaged, newer or not writable.
        """
        self._path = path = path.resolve()
        self._failure: str | None = None
        self._known: dict[str, tuple[int, Record]] = {}
        with ExitStack() as opened:
            lock = OwnerLock(path)
            lock.acquire()
            opened.callback(lock.release)
            create_file(path)
            with translated(path):
                self._writer = opened.enter_context(closing(connect(path, BUSY_MS)))
                prepare(self._writer, path)
                configure(self._writer, path, durability, secure_delete, file_bytes_max)
                self._reader = opened.enter_context(closing(connect(path, BUSY_READ_MS)))
                self._reader.execute("PRAGMA query_only = ON")
                self._reader.execute(f"PRAGMA mmap_size = {MMAP_BYTES}")
                last_id = self._writer.execute("SELECT max(id) FROM streams").fetchone()[0]
            self._next_id = (last_id or 0) + 1
            self._opened = opened.pop_all()

    def claim(self) -> Sequence[Record]:
        """See `Journal.claim`."""
        self._known.clear()
        with self._transaction():
            self._writer.execute("UPDATE progress SET fence = fence + 1")
            rows = self._writer.execute(
                "SELECT stream, principal, origin, min_s, max_s, created_at, is_announced, "
                "fence, outcome, last, acked, last_request, last_error, ended_at, pages "
                "FROM streams JOIN progress USING (id) ORDER BY id"
            )
            return [_record(*row) for row in rows]

    def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`."""
        if self._failure is not None:
            raise JournalUnusable(self._failure)
        try:
            with self._transaction():
                batch = _Batch(self._writer, self._known, self._next_id)
                answers = [batch.apply(change) for change in changes]
                batch.write()
        except JournalUnusable as error:
            self._failure = str(error)
            raise
        self._next_id = batch.next_id
        self._remember(batch)
        return answers

    def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """See `Journal.sessions`."""
        with translated(self._path):
            return SessionTables(self._writer).read()

    def read(self, stream: str, after: int, *, bytes_max: int) -> Run | None:
        """See `Journal.read`. May run while another thread runs `commit` or `claim`."""
        with translated(self._path), closing(self._reader.cursor()) as cursor:
            # Closing the cursor half-way ends the read transaction.
            cursor.execute(
                "SELECT last, count, CASE WHEN length(body) <= ? THEN body END, rowid FROM runs "
                "WHERE last > ? AND stream = (SELECT id FROM streams WHERE stream = ?) "
                "ORDER BY last",
                (SMALL_BYTES_MAX, after, stream),
            )
            stored = (
                Run(last - count + 1, count, self._body(row) if body is None else body)
                for last, count, body, row in cursor
            )
            return joined(stored, after, bytes_max)

    def _body(self, row: int) -> bytes:
        found = self._reader.execute("SELECT body FROM runs WHERE rowid = ?", (row,))
        body: bytes = found.fetchone()[0]
        return body

    def close(self) -> None:
        """Empty the WAL into the file and let go of both. Twice is as good as once."""
        # The WAL is as durable as the file: what a full or busy disk leaves in it is found there.
        with suppress(sqlite3.Error):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._opened.close()

    def _remember(self, batch: "_Batch") -> None:
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        for stream, entry in batch.entries.items():
            if entry.now is None:
                self._known.pop(stream, None)
            else:
                self._known[stream] = (entry.id, msgspec.structs.replace(entry.now, origin=b""))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translated(self._path):
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # after some errors SQLite has rolled back itself
                    self._writer.execute("ROLLBACK")
                raise


class _Entry:
    """One stream within a commit: its record as stored and as it is to be, and its new lines."""

    __slots__ = ("id", "now", "runs", "stored")

    def __init__(self, id: int, record: Record | None) -> None:
        self.id = id
        self.stored = record
        self.now = record
        self.runs: list[Run] = []


class _Batch:
    """The changes of one commit: those of streams are worked out against the stored records, then
    written at once.
    """

    def __init__(
        self, connection: sqlite3.Connection, known: Mapping[str, tuple[int, Record]], next_id: int
    ) -> None:
        self.next_id = next_id
        self.entries: dict[str, _Entry] = {}
        self._connection = connection
        self._sessions = SessionTables(connection)
        self._known = known
        self._forgotten: list[int] = []

    def apply(self, change: Change) -> JournalError | None:
        """Apply one change in memory; the error is the answer to a change that is not allowed."""
        if change.stream is None:
            apply_to_sessions(self._sessions, change, self._has_stream)
            return None
        entry = self.entries.get(change.stream)
        if entry is None:
            entry = self._load(change.stream)
        before = entry.now
        try:
            entry.now = apply(before, change)
        except JournalError as error:
            return error
        if entry.now is before:
            return None
        if isinstance(change, Append):
            entry.runs.extend(change.run.split(STORED_BYTES_MAX))
        elif isinstance(change, Create):
            entry.id = self.next_id
            self.next_id += 1
        elif isinstance(change, Forget):
            if entry.stored is not None:
                self._forgotten.append(entry.id)
            self.entries[change.stream] = _Entry(0, None)
            self._sessions.drop_grants_of_stream(change.stream)
        return None

    def _has_stream(self, stream: str) -> bool:
        entry = self.entries.get(stream) or self._load(stream)
        return entry.now is not None

    def _load(self, stream: str) -> _Entry:
        entry = self.entries[stream] = self._stored(stream)
        return entry

    def _stored(self, stream: str) -> _Entry:
        known = self._known.get(stream)
        if known is not None:
            return _Entry(*known)
        row = self._connection.execute(
            "SELECT id, principal, fence, outcome, last, acked, last_request, last_error, "
            "ended_at, pages FROM streams JOIN progress USING (id) WHERE stream = ?",
            (stream,),
        ).fetchone()
        if row is None:
            return _Entry(0, None)
        # What `apply` does not look at, the origin above all, is left where it is.
        stream_id, principal, *progress = row
        return _Entry(stream_id, _record(stream, principal, b"", 0.0, 0.0, 0.0, 0, *progress))

    def write(self) -> None:
        """Write what has changed. Forgotten streams first, whose names may have come again."""
        many = self._connection.executemany
        gone = [(forgotten,) for forgotten in self._forgotten]
        entries = [(entry, entry.now) for entry in self.entries.values() if entry.now is not None]
        new = [pair for pair in entries if pair[0].stored is None]
        changed = [(e, now) for e, now in entries if e.stored is not None and e.stored != now]
        for table, key in (("runs", "stream"), ("progress", "id"), ("streams", "id")):
            many(f"DELETE FROM {table} WHERE {key} = ?", gone)
        many(
            "INSERT INTO streams (id, stream, principal, origin, min_s, max_s, created_at, "
            "is_announced) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [_original(entry.id, now) for entry, now in new],
        )
        many(
            "INSERT INTO progress (fence, outcome, last, acked, last_request, last_error, "
            "ended_at, pages, id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_progress(entry.id, now) for entry, now in new],
        )
        many(
            "UPDATE progress SET fence = ?, outcome = ?, last = ?, acked = ?, last_request = ?, "
            "last_error = ?, ended_at = ?, pages = ? WHERE id = ?",
            [_progress(entry.id, now) for entry, now in changed],
        )
        many(
            "DELETE FROM runs WHERE stream = ? AND last <= ?",
            [(e.id, now.acked) for e, now in changed if e.stored and now.acked > e.stored.acked],
        )
        many(
            "INSERT INTO runs (stream, last, count, body) VALUES (?, ?, ?, ?)",
            [
                (entry.id, run.last, run.count, run.body)
                for entry, now in entries
                for run in entry.runs
                if run.last > now.acked
            ],
        )


def _record(
    stream: str,
    principal: str,
    origin: bytes,
    min_s: float,
    max_s: float,
    created_at: float,
    is_announced: int,
    fence: int,
    outcome: str,
    *progress: Any,
) -> Record:
    *marks, pages = progress
    record = Record(
        stream,
        principal,
        origin,
        min_s,
        max_s,
        created_at,
        fence,
        bool(is_announced),
        _OUTCOMES[outcome],
        *marks,
    )
    if pages is None:
        return record
    kept = msgspec.json.decode(pages, type=tuple[int, ...])
    return msgspec.structs.replace(record, pages=kept)


def _original(id: int, record: Record) -> tuple[Any, ...]:
    return (
        id,
        record.stream,
        record.principal,
        record.origin,
        record.min_s,
        record.max_s,
        record.created_at,
        record.is_announced,
    )


def _progress(id: int, record: Record) -> tuple[Any, ...]:
    return (
        record.fence,
        record.outcome.value,
        record.last,
        record.acked,
        record.last_request,
        record.last_error,
        record.ended_at,
        None if record.pages is None else msgspec.json.encode(record.pages).decode(),
        id,
    )
