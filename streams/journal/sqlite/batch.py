"""One commit: its changes are applied in memory, then written together.

New streams and changes of others go to the log, as one row. Streams that are closed, evicted or
forgotten are written to the tables, and so are lines that are long enough for a segment.
"""

import sqlite3
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from streams.errors import JournalError
from streams.exchange import authenticated
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
    LoggedCreate,
    LoggedForget,
    Tail,
    Tails,
    encode,
    logged_append,
    logged_restart,
)
from streams.journal.sqlite.tables import (
    RECORD,
    SessionTables,
    WebhookTable,
    create_streams,
    forget_streams,
    name_streams,
    record_of,
    update_streams,
)
from streams.journal.webhooks import DropWebhook, SaveWebhook, apply_to_webhooks
from streams.messages import Run


class Batch:
    """`write` it in a transaction. When that is durable, `publish` it; if it fails, `undo` it."""

    def __init__(
        self, connection: sqlite3.Connection, tails: Tails, *, is_without_log: bool
    ) -> None:
        """With `is_without_log` all is written to the tables, and the log is emptied."""
        self._connection = connection
        self._tails = tails
        self._is_without_log = is_without_log
        self._direct_bytes = 0 if is_without_log else tails.budget.direct_bytes
        self._touched: list[Tail] = []
        self._added: dict[str, Tail] = {}  # not in memory before, or forgotten now
        self._created: dict[Tail, Record] = {}  # as they were created
        self._forgotten: list[Tail] = []
        self._names: list[tuple[Tail, bytes]] = []
        self._chosen: dict[Tail, None] = {}  # to be written to the tables
        self._trimmed: dict[Tail, None] = {}  # to lose segments
        self._segments: dict[str, list[Run]] = {}  # as they are written, by stream
        self._logged: list[Logged] = []
        self._row_bytes = 0
        self._first_row = 0
        self._kinds: dict[type[Change], Callable[[Tail], None]] = {
            Ack: self._ack,
            Create: self._create,
            Forget: self._forget,
        }

    def write(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """Apply and write the changes. Returns the answers of `Journal.commit`."""
        answers = [self._apply(change) for change in changes]
        self._write()
        return answers

    def _apply(self, change: Change) -> JournalError | None:
        """Apply one change in memory. Returns its error, if it is not allowed."""
        if change.stream is None:
            if isinstance(change, SaveWebhook | DropWebhook):
                apply_to_webhooks(WebhookTable(self._connection), change)
            else:
                apply_to_sessions(SessionTables(self._connection), change, self._has_stream)
            return None
        tail = self._tails.known.get(change.stream)
        if tail is None or tail.now is None:
            tail = self._find_tail(change.stream)
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
                    self._trim(tail)  # an ended call keeps nothing for a restart
            elif isinstance(change, OfRestart):
                self._restart(tail, change)
            else:
                self._kinds.get(type(change), self._settle)(tail)
                if isinstance(change, Evict):
                    self._names += [(tail, name) for name in change.names]
        return None

    def _append(self, tail: Tail, change: Append) -> None:
        for webhook in change.webhooks:
            WebhookTable(self._connection).put_webhook(webhook)
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
            self._chosen[tail] = None  # lookups of evicted streams read the tables
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
        tail.oldest = NO_SEGMENT
        tail.is_anonymous = not authenticated(tail.now.principal)
        self._created[tail] = tail.now
        if len(tail.now.origin) >= self._direct_bytes or tail.now.due_at is not None:
            self._chosen[tail] = None
        else:
            self._logged.append(LoggedCreate(tail.id, tail.now, self._tails.claims))

    def _forget(self, tail: Tail) -> None:
        if tail.record is not None:
            self._forgotten.append(tail)
        stream = (tail.record or self._created.pop(tail)).stream
        self._added[stream] = Tail(0, None)
        self._logged.append(LoggedForget(tail.id))
        SessionTables(self._connection).drop_grants_of_stream(stream)

    def _settle(self, tail: Tail) -> None:
        """The stream was closed or evicted."""
        self._chosen[tail] = None
        self._trimmed[tail] = None

    def _has_stream(self, stream: str) -> bool:
        tail = self._tails.known.get(stream)
        if tail is None or tail.now is None:
            tail = self._find_tail(stream)
        return tail.now is not None

    def _find_tail(self, stream: str) -> Tail:
        tail = self._added.get(stream)
        if tail is None:
            row = self._connection.execute(f"{RECORD} WHERE stream = ?", (stream,)).fetchone()
            tail = self._added[stream] = Tail.of(record_of(row)) if row else Tail(0, None)
        return tail

    def _write(self) -> None:
        """Write all changes, deletions first.

        Deletions free space for the rest, and the names and numbers of forgotten streams may be in
        use again in this commit.
        """
        row = encode(self._logged) if self._logged else b""
        self._row_bytes = len(row)
        self._first_row = self._tails.due(
            len(row), len(self._logged), self._chosen, everything=self._is_without_log
        )
        for gone in [tail for tail in self._chosen if tail.now is None]:
            del self._chosen[gone]
        self._delete()
        if self._chosen:
            self._write_chosen()
        if self._names:
            names = [(tail.id, name) for tail, name in self._names if tail.now is not None]
            name_streams(self._connection, names)
        if row:
            into = "INSERT INTO log (id, body) VALUES (?, ?)"
            self._connection.execute(into, (self._tails.next_row, row))

    def _delete(self) -> None:
        if stored := [tail.id for tail in self._forgotten if tail.origin is None]:
            forget_streams(self._connection, stored)
        if self._trimmed:
            self._connection.executemany(
                "DELETE FROM runs WHERE stream = ? AND last <= ?",
                [(tail.id, tail.now.trimmed) for tail in self._trimmed if tail.now is not None],
            )
        if self._first_row:
            self._connection.execute("DELETE FROM log WHERE id < ?", (self._first_row,))

    def _write_chosen(self) -> None:
        """Write the records and lines that leave the log."""
        new: list[Record] = []
        stored: list[tuple[Record, Record]] = []
        rows: list[tuple[int, int, int, bytes]] = []
        for tail in self._chosen:
            now, created = tail.now, self._created.get(tail)
            assert now is not None
            origin = tail.origin if created is None else created.origin
            if origin is not None:
                new.append(replace(now, origin=origin))
            elif tail.record is not None:
                stored.append((tail.record, now))
            runs = self._segments[now.stream] = list(tail.segments())
            rows += [(tail.id, run.last, run.count, run.body) for run in runs]
        # A statement costs a change of threads while another one computes.
        if new:
            create_streams(self._connection, new)
        if stored:
            update_streams(self._connection, stored)
        if rows:
            self._connection.executemany(
                "INSERT INTO runs (stream, last, count, body) VALUES (?, ?, ?, ?)", rows
            )

    def publish(self) -> None:
        """The commit is durable: readers may see it."""
        tails = self._tails
        for tail, record in self._created.items():
            assert tail.now is not None
            tail.origin, tail.now = record.origin, replace(tail.now, origin=b"")
        for tail in self._forgotten:
            tails.forget(tail)
        for tail in self._trimmed:
            tail.oldest = UNKNOWN
            if tail.now is not None:
                tails.newest.drop(tail.now.stream, tail.now.trimmed)
        # A batch is in a cycle, so it lives longer than its segments may.
        segments, self._segments = self._segments, {}
        tails.publish(
            self._touched,
            self._chosen,
            self._added.values(),
            segments=segments,
            row_bytes=self._row_bytes,
            first_row=self._first_row,
        )

    def undo(self) -> None:
        """The transaction was rolled back: forget the changes."""
        for tail in self._touched:
            tail.undo()
