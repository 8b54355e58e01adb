"""One commit: its changes are worked out in memory, then written at once.

What is added to streams goes to the log, as one row. What makes a stream, closes it, lets it rest
or forgets it goes to the tables, and so do lines that are a segment by themselves.
"""

import sqlite3
from collections.abc import Callable

from msgspec.structs import replace

from streams.errors import JournalError
from streams.journal.records import (
    Ack,
    Append,
    Change,
    Create,
    Evict,
    Forget,
    OfRestart,
    Record,
    apply,
)
from streams.journal.sessions import apply_to_sessions
from streams.journal.sqlite.log import (
    NO_SEGMENT,
    UNKNOWN,
    Logged,
    LoggedAck,
    LoggedForget,
    Tail,
    Tails,
    encode,
    logged_append,
    logged_restart,
)
from streams.journal.sqlite.tables import (
    RECORD,
    LookupTables,
    RecordTables,
    SessionTables,
    record_of,
)


class Batch:
    """`apply` each change and `write`; then, when that is durable, `publish`, or else `undo`."""

    def __init__(
        self, connection: sqlite3.Connection, tails: Tails, *, is_without_log: bool
    ) -> None:
        """`is_without_log`: all goes to the tables, also what the log had before."""
        self._connection = connection
        self._tails = tails
        self._is_without_log = is_without_log
        self._direct_bytes = 0 if is_without_log else tails.budget.direct_bytes
        self._sessions = SessionTables(connection)
        self._touched: list[Tail] = []
        self._met: dict[str, Tail] = {}  # those that were not in memory, or are no more
        self._created: dict[Tail, Record] = {}
        self._forgotten: list[Tail] = []
        self._names: list[tuple[Tail, bytes]] = []
        self._chosen: dict[Tail, None] = {}  # to be written to the tables
        self._trimmed: dict[Tail, None] = {}  # to lose segments
        self._logged: list[Logged] = []
        self._row_bytes = 0
        self._first_row = 0
        self._kinds: dict[type[Change], Callable[[Tail], None]] = {
            Ack: self._ack,
            Create: self._create,
            Forget: self._forget,
        }

    def apply(self, change: Change) -> JournalError | None:
        """Apply one change in memory; the error is the answer to a change that is not allowed."""
        if change.stream is None:
            apply_to_sessions(self._sessions, change, self._has_stream)
            return None
        tail = self._tails.known.get(change.stream)
        if tail is None or tail.now is None:
            tail = self._meet(change.stream)
        before = tail.now
        try:
            tail.now = now = apply(before, change)
        except JournalError as error:
            return error
        if now is not before:
            if before is tail.record:
                self._touched.append(tail)
            if isinstance(change, Append):
                self._append(tail, change)
                if before is not None and before.restart is not None:
                    self._trim(tail)  # the last line lets go of what was kept for a restart
            elif isinstance(change, OfRestart):
                self._restart(tail, change)
            else:
                self._kinds.get(type(change), self._settle)(tail)
                if isinstance(change, Evict):
                    self._names += [(tail, name) for name in change.names]
        return None

    def _append(self, tail: Tail, change: Append) -> None:
        size = len(change.run.body)
        tail.staged.append(change.run)
        tail.staged_size += size
        if size >= self._direct_bytes:
            self._chosen[tail] = None
        elif not self._chosen or tail not in self._chosen:
            self._logged.append(logged_append(tail.id, change))

    def _ack(self, tail: Tail) -> None:
        assert tail.now is not None
        if tail.now.due_at is not None or self._is_without_log:
            self._chosen[tail] = None  # what finds those at rest is in tables
        else:
            self._logged.append(LoggedAck(tail.id, tail.now.acked))
        self._trim(tail)

    def _restart(self, tail: Tail, change: OfRestart) -> None:
        if self._is_without_log:
            self._chosen[tail] = None
        else:
            self._logged.append(logged_restart(tail.id, change))
        self._trim(tail)

    def _trim(self, tail: Tail) -> None:
        assert tail.now is not None
        if tail.oldest == UNKNOWN:
            first = "SELECT last FROM runs WHERE stream = ? ORDER BY last LIMIT 1"
            found = self._connection.execute(first, (tail.id,)).fetchone()
            tail.oldest = found[0] if found else NO_SEGMENT
        if tail.oldest <= tail.now.trimmed:
            self._trimmed[tail] = None

    def _create(self, tail: Tail) -> None:
        assert tail.now is not None
        tail.id = tail.now.number
        self._created[tail] = tail.now

    def _forget(self, tail: Tail) -> None:
        if tail.record is not None:
            self._forgotten.append(tail)
        stream = (tail.record or self._created.pop(tail)).stream
        self._met[stream] = Tail(0, None)
        self._logged.append(LoggedForget(tail.id))
        self._sessions.drop_grants_of_stream(stream)

    def _settle(self, tail: Tail) -> None:
        """Closed, or at rest."""
        self._chosen[tail] = None
        self._trimmed[tail] = None

    def _has_stream(self, stream: str) -> bool:
        tail = self._tails.known.get(stream)
        if tail is None or tail.now is None:
            tail = self._meet(stream)
        return tail.now is not None

    def _meet(self, stream: str) -> Tail:
        tail = self._met.get(stream)
        if tail is None:
            row = self._connection.execute(f"{RECORD} WHERE stream = ?", (stream,)).fetchone()
            tail = self._met[stream] = Tail.of(record_of(row)) if row else Tail(0, None)
        return tail

    def write(self) -> None:
        """Write what has changed. What goes is first, to make room for what comes; and forgotten
        streams, since their names and numbers may have come again.
        """
        row = encode(self._logged) if self._logged else b""
        self._row_bytes = len(row)
        self._first_row = self._tails.due(
            len(row), len(self._logged), self._chosen, everything=self._is_without_log
        )
        for gone in [tail for tail in self._chosen if tail.now is None]:
            del self._chosen[gone]
        self._delete()
        self._write_records()
        self._connection.executemany(
            "INSERT INTO runs (stream, last, count, body) VALUES (?, ?, ?, ?)",
            (
                (tail.id, run.last, run.count, run.body)
                for tail in self._chosen
                for run in tail.segments()
            ),
        )
        if row:
            into = "INSERT INTO log (id, body) VALUES (?, ?)"
            self._connection.execute(into, (self._tails.next_row, row))

    def _delete(self) -> None:
        forgotten = [tail.id for tail in self._forgotten]
        if forgotten:
            RecordTables(self._connection).forget(forgotten)
            LookupTables(self._connection).forget(forgotten)
        self._connection.executemany(
            "DELETE FROM runs WHERE stream = ? AND last <= ?",
            [(tail.id, tail.now.trimmed) for tail in self._trimmed if tail.now is not None],
        )
        if self._tails.has_rows_before(self._first_row):
            self._connection.execute("DELETE FROM log WHERE id < ?", (self._first_row,))

    def _write_records(self) -> None:
        """Of streams that were made now, the log tells what came after, unless they are chosen."""
        records, lookups = RecordTables(self._connection), LookupTables(self._connection)
        if self._created:
            records.create(list(self._created.values()))
            lookups.create(tail.id for tail in self._created)
        if self._chosen:
            changed = [(tail.record, tail.now) for tail in self._chosen if tail.now is not None]
            records.update(now for _, now in changed)
            lookups.update(changed)
        if self._names:
            lookups.name((tail.id, name) for tail, name in self._names if tail.now is not None)

    def publish(self) -> None:
        """All is durable: readers may see it."""
        tails, row = self._tails, self._tails.next_row
        tails.logged(self._row_bytes, self._first_row)
        for tail, record in self._created.items():
            if tail.now is record:
                self._chosen[tail] = None  # the tables have all of it
            assert tail.now is not None
            tail.now = replace(tail.now, origin=b"")
        for tail in self._forgotten:
            tails.forget(tail)
        tails.publish(self._touched, self._chosen, row)
        for tail in self._trimmed:
            tail.oldest = UNKNOWN
        for stream, tail in self._met.items():
            if tail.record is not None:
                tails.known[stream] = tail

    def undo(self) -> None:
        """Nothing has been written."""
        for tail in self._touched:
            tail.undo()
