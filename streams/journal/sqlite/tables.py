"""The tables of streams, sessions and webhooks.

`streams` has the fields of a record that never change, `progress` the others. Each stream is also
in one of two tables: in `rests` if it was evicted, with the columns that lookups use, else in
`awake`. `names` maps names to evicted streams. `sessions`, `grants` and `webhooks` are written as
they come.

Rows are written within the transaction of the caller. `SQLiteLookups` reads them over a connection
of its own.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.journal.contract import Totals
from streams.journal.records import Outcome, Record, Restart
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite.file import translated
from streams.journal.sqlite.log import NUMBERS_END, Tail, Tails
from streams.journal.webhooks import Webhook
from streams.messages import RequestId

# A stored record, with its columns in the order of the fields. The number of claims is added to the
# fence, so that a claim changes one row instead of those of a million streams.
RECORD: Final = (
    "SELECT stream, principal, origin, min_s, max_s, created_at, fence + claims, is_announced, "
    "outcome, last, acked, last_request, last_error, ended_at, pages, streams.id, due_at, is_read, "
    "restart "
    "FROM streams JOIN progress USING (id) LEFT JOIN rests USING (id), ownership"
)
_encode_restart: Final = msgspec.msgpack.Encoder().encode
_decode_restart: Final = msgspec.msgpack.Decoder(Restart).decode
_ROWS_OF_STREAMS: Final = (
    ("runs", "stream"),
    ("progress", "id"),
    ("streams", "id"),
    ("awake", "id"),
    ("rests", "id"),
    ("names", "stream"),
)
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def record_of(row: Sequence[Any]) -> Record:
    """The record in a row of `RECORD`. Raises `msgspec.DecodeError` if it is not valid."""
    fields: list[Any] = list(row)
    if fields[8] not in _OUTCOMES:
        raise msgspec.DecodeError(f"{fields[8]!r} is not an outcome of a stream")
    fields[7:9] = bool(fields[7]), _OUTCOMES[fields[8]]
    if fields[14] is not None:
        fields[14] = msgspec.json.decode(fields[14], type=tuple[int, ...])
    fields[17] = bool(fields[17])
    if fields[18] is not None:
        fields[18] = _decode_restart(fields[18])
    return Record(*fields)


def create_streams(connection: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Write the rows of new streams."""
    connection.executemany(
        "INSERT INTO streams (id, stream, principal, origin, min_s, max_s, created_at, "
        "is_announced) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                record.number,
                record.stream,
                record.principal,
                record.origin,
                record.min_s,
                record.max_s,
                record.created_at,
                record.is_announced,
            )
            for record in records
        ],
    )
    connection.executemany(
        "INSERT INTO progress (fence, outcome, last, acked, last_request, last_error, "
        "ended_at, pages, restart, id) "
        "VALUES (? - (SELECT claims FROM ownership), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(record.fence, *_progress(record)) for record in records],
    )
    if awake := [(record.number,) for record in records if record.due_at is None]:
        connection.executemany("INSERT INTO awake (id) VALUES (?)", awake)
    if evicted := [record for record in records if record.due_at is not None]:
        _rest(connection, evicted)


def update_streams(
    connection: sqlite3.Connection, records: Sequence[tuple[Record, Record]]
) -> None:
    """Update streams: each record as it was stored and as it is now."""
    connection.executemany(
        "UPDATE progress SET outcome = ?, last = ?, acked = ?, last_request = ?, "
        "last_error = ?, ended_at = ?, pages = ?, restart = ? WHERE id = ?",
        [_progress(now) for _, now in records],
    )
    evicted = [
        now
        for stored, now in records
        if now.due_at is not None and _eviction(stored) != _eviction(now)
    ]
    if evicted:
        ids = [(record.number,) for record in evicted]
        connection.executemany("DELETE FROM awake WHERE id = ?", ids)
        _rest(connection, evicted)


def _rest(connection: sqlite3.Connection, evicted: Sequence[Record]) -> None:
    connection.executemany(
        "INSERT INTO rests (id, owner, due_at, is_wanted, is_read) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET due_at = excluded.due_at, "
        "is_wanted = excluded.is_wanted, is_read = excluded.is_read",
        [(record.number, *_eviction(record)) for record in evicted],
    )


def forget_streams(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Delete all rows of streams, apart from their grants."""
    rows = [(each,) for each in ids]
    for table, column in _ROWS_OF_STREAMS:
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)  # nosec B608 # ours


def name_streams(connection: sqlite3.Connection, names: Iterable[tuple[int, bytes]]) -> None:
    """Add names of streams. A name that is in the table already stays as it is."""
    connection.executemany("INSERT OR IGNORE INTO names (stream, name) VALUES (?, ?)", names)


def _progress(record: Record) -> tuple[Any, ...]:
    return (
        record.outcome.value,
        record.last,
        record.acked,
        record.last_request,
        record.last_error,
        record.ended_at,
        None if record.pages is None else msgspec.json.encode(record.pages).decode(),
        None if record.restart is None else _encode_restart(record.restart),
        record.number,
    )


_GRANTS: Final = "SELECT session, delivery, stream, reply_id, takes_over, start FROM grants"


class SessionTables:
    """`streams.journal.sessions.SessionRows`, within the transaction that the caller has begun.

    Unlike those of streams, rows are written at once: sessions change seldom.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def read(self, unwritten: Iterable[Record]) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """See `Journal.sessions`. A replaced row gets a new rowid, above all others.

        `unwritten` are the streams that are in no table yet.
        """
        sessions = self._execute(
            "SELECT key, principal, revision, capabilities, level, seen_at "
            "FROM sessions ORDER BY rowid"
        )
        resident = (
            "WHERE stream IN (SELECT stream FROM streams WHERE id IN (SELECT id FROM awake)) "
            "OR stream IN (SELECT value FROM json_each(?)) ORDER BY rowid"
        )
        logged = msgspec.json.encode([record.stream for record in unwritten]).decode()
        return [SessionRecord(*row) for row in sessions], self._grants(resident, logged)

    def grants_of(self, stream: str) -> Sequence[Grant]:
        """See `Lookups.grants`."""
        return self._grants("WHERE stream = ? ORDER BY rowid", stream)

    def _grants(self, which: str, *parameters: str) -> Sequence[Grant]:
        rows = self._execute(f"{_GRANTS} {which}", parameters)
        return [_grant(*row) for row in rows]

    def has_session(self, key: str) -> bool:
        found = self._execute("SELECT 1 FROM sessions WHERE key = ?", (key,))
        return found.fetchone() is not None

    def put_session(self, record: SessionRecord) -> None:
        self._execute(
            "INSERT OR REPLACE INTO sessions "
            "(key, principal, revision, capabilities, level, seen_at) VALUES (?, ?, ?, ?, ?, ?)",
            msgspec.structs.astuple(record),
        )

    def drop_session(self, key: str) -> None:
        self._execute("DELETE FROM sessions WHERE key = ?", (key,))

    def put_grant(self, grant: Grant) -> None:
        # JSON keeps the type of an id, and holds numbers that are too large for SQLite.
        reply_id = msgspec.json.encode(grant.reply_id)
        self._execute(
            "INSERT OR REPLACE INTO grants "
            "(session, delivery, stream, reply_id, takes_over, start) VALUES (?, ?, ?, ?, ?, ?)",
            (
                grant.session,
                grant.delivery,
                grant.stream,
                reply_id,
                grant.takes_over,
                grant.start,
            ),
        )

    def drop_grant(self, session: str, delivery: str) -> None:
        self._execute("DELETE FROM grants WHERE session = ? AND delivery = ?", (session, delivery))

    def drop_grants_of_session(self, key: str) -> None:
        self._execute("DELETE FROM grants WHERE session = ?", (key,))

    def drop_grants_of_stream(self, stream: str) -> None:
        self._execute("DELETE FROM grants WHERE stream = ?", (stream,))


def _grant(
    session: str, delivery: str, stream: str, reply_id: bytes, takes_over: int, start: int
) -> Grant:
    decoded: RequestId = msgspec.json.decode(reply_id, type=int | str)
    return Grant(session, delivery, stream, decoded, bool(takes_over), start)


class WebhookTable:
    """`streams.journal.webhooks.WebhookRows`, within the transaction that the caller has begun."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def put_webhook(self, webhook: Webhook) -> None:
        self._execute(
            "INSERT OR REPLACE INTO webhooks (id, stream, url, body, due_at, attempts) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            msgspec.structs.astuple(webhook),
        )

    def drop_webhook(self, id: str) -> None:
        self._execute("DELETE FROM webhooks WHERE id = ?", (id,))

    def drop_unreadable(self) -> Sequence[str]:
        """Delete the rows that no release has written; returns their ids, escaped."""
        unreadable = [
            (row, ascii(its_id)[2:-1])
            for row, is_typed, its_id, *others in self._execute(_WEBHOOK_TEXTS)
            if not is_typed or _webhook_of((its_id, *others)) is None
        ]
        for row, _ in unreadable:
            self._execute("DELETE FROM webhooks WHERE rowid = ?", (row,))
        return [shown for _, shown in unreadable]


# SQLite keeps values of other types than those of the columns. Texts are read as bytes, because
# SQLite does not check that they are UTF-8.
_IS_TYPED: Final = (
    "typeof(id) || typeof(stream) || typeof(url) || typeof(body) || typeof(due_at) || "
    "typeof(attempts) = 'texttexttextblobrealinteger' AND attempts >= 0"
)
_TEXTS: Final = "CAST(id AS BLOB), CAST(stream AS BLOB), CAST(url AS BLOB)"
# The bodies are left out: all of them may be long.
_WEBHOOK_TEXTS: Final = (
    f"SELECT rowid, {_IS_TYPED}, {_TEXTS}, "  # nosec B608 # ours
    "x'', 0.0, 0 FROM webhooks"
)
_WEBHOOKS: Final = (
    f"SELECT {_TEXTS}, body, due_at, attempts FROM webhooks WHERE {_IS_TYPED} "  # nosec B608 # ours
    "ORDER BY due_at LIMIT ?"
)
_NAMED: Final = (
    "SELECT streams.stream FROM names JOIN streams ON streams.id = names.stream WHERE name = ?"
)
_DUE: Final = "SELECT id FROM rests ORDER BY due_at LIMIT ?"
_UNWANTED: Final = "SELECT id FROM rests WHERE NOT is_wanted ORDER BY due_at LIMIT ?"


def _webhook_of(row: Sequence[Any]) -> Webhook | None:
    try:
        its_id, stream, url = (text.decode() for text in row[:3])
    except UnicodeDecodeError:
        # Another program has written it. It counts as absent until `drop_unreadable` deletes it.
        return None
    return Webhook(its_id, stream, url, *row[3:])


def _eviction(record: Record) -> tuple[Any, ...]:
    return _owner(record.principal), record.due_at, record.is_wanted, record.is_read


def _owner(principal: str) -> bytes:
    """A key of fixed length for a principal, whose name may be long."""
    return hashlib.sha256(principal.encode("utf-8", "surrogatepass")).digest()[:16]


def ids_beginning_with(prefix: str, limit: int) -> tuple[str, str, str, int]:
    """The query, with its parameters, for the ids that begin with these letters."""
    query = "SELECT stream FROM streams WHERE stream >= ? AND stream < ? ORDER BY stream LIMIT ?"
    return query, prefix, f"{prefix}\U0010ffff", limit


def overlaid(found: Record, tail: Tail | None) -> Record:
    """Complete a record of the tables by its tail: the log may have later changes of it."""
    now = None if tail is None else tail.record
    if now is None or now.number != found.number:
        return found
    return msgspec.structs.replace(now, origin=found.origin)


class SQLiteLookups:
    """`streams.journal.contract.Lookups`, synchronous, over a connection of its own."""

    def __init__(self, connection: sqlite3.Connection, path: Path, tails: Tails) -> None:
        self._connection = connection
        self._path = path
        self._tails = tails

    def totals(self) -> Totals:
        unwritten = self._tails.unwritten()
        [row] = self._all("SELECT (SELECT count(*) FROM rests), (SELECT max(id) FROM streams)")
        last = unwritten[-1].number if unwritten else 0
        return Totals(row[0], max(row[1] or 0, last))

    def find(self, stream: str) -> Record | None:
        # The tail is read first: if it is dropped meanwhile, the tables have all of it.
        tail = self._tails.known.get(stream)
        unwritten = None if tail is None else tail.unwritten
        found = self._records("WHERE stream = ?", stream)
        return overlaid(found[0], tail) if found else unwritten

    def streams(self, after: int, limit: int) -> Sequence[tuple[Record, Sequence[bytes]]]:
        """See `streams.journal.copying.Whole.streams`."""
        which = "WHERE streams.id > ? ORDER BY streams.id LIMIT ?"
        found = self._with_logged(self._tails.unwritten(after), which, after, limit)
        named = "SELECT name FROM names WHERE stream = ? ORDER BY name"
        return [
            (record, [row[0] for row in self._all(named, record.number)])
            for record in found[:limit]
        ]

    def newest(self, before: int | None, limit: int) -> Sequence[Record]:
        below = NUMBERS_END if before is None else before
        which = "WHERE streams.id < ? ORDER BY streams.id DESC LIMIT ?"
        found = self._with_logged(self._tails.unwritten(before=below), which, below, limit)
        return found[::-1][:limit]

    def beginning_with(self, prefix: str, limit: int) -> Sequence[str]:
        known = [each.stream for each in self._tails.unwritten() if each.stream.startswith(prefix)]
        found = [row[0] for row in self._all(*ids_beginning_with(prefix, limit))]
        return sorted({*found, *known})[:limit]

    def principal_of(self, stream: str) -> str | None:
        tail = self._tails.known.get(stream)
        # For an unknown id the next row is read and dropped, so that timing leaks nothing.
        found = self._all(
            "SELECT stream, principal FROM streams WHERE stream >= ? ORDER BY stream LIMIT 1",
            stream,
        )
        if found and found[0][0] == stream:
            return str(found[0][1])
        return None if tail is None or tail.record is None else tail.record.principal

    def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        if is_secret:  # with many streams, an unknown name reads a quarter of the pages
            found = self._all(_NAMED, name)
            return found[0][0] if found else None
        # As in `principal_of`.
        found = self._all(
            "SELECT name, streams.stream FROM names JOIN streams ON streams.id = names.stream "
            "WHERE name >= ? ORDER BY name LIMIT 1",
            name,
        )
        return found[0][1] if found and found[0][0] == name else None

    def grants(self, stream: str) -> Sequence[Grant]:
        with translated(self._path):
            return SessionTables(self._connection).grants_of(stream)

    def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        return self._records(
            "WHERE streams.id IN (SELECT id FROM rests WHERE owner = ? AND is_wanted AND id > ? "
            "AND is_read >= ? ORDER BY id LIMIT ?) ORDER BY streams.id",
            *(_owner(principal), after, only_read, limit),
        )

    def count(self, principal: str) -> int:
        count = "SELECT count(*) FROM rests WHERE owner = ? AND is_wanted"
        [(counted,)] = self._all(count, _owner(principal))
        return int(counted)

    def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        ids = _UNWANTED if only_unwanted else _DUE
        return self._records(f"WHERE streams.id IN ({ids}) ORDER BY due_at", limit)

    def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        found = map(_webhook_of, self._all(_WEBHOOKS, limit))
        return [webhook for webhook in found if webhook is not None]

    def count_webhooks(self) -> int:
        [(counted,)] = self._all("SELECT count(*) FROM webhooks")
        return int(counted)

    def _with_logged(
        self, unwritten: Sequence[Record], which: str, *parameters: Any
    ) -> list[Record]:
        """These and the records of the tables, in the order of their numbers."""
        tails = dict(self._tails.known)  # before the tables, as in `find`
        found = {record.number: record for record in unwritten}
        for record in self._records(which, *parameters):
            found[record.number] = overlaid(record, tails.get(record.stream))
        return [found[number] for number in sorted(found)]

    def _records(self, which: str, *parameters: Any) -> list[Record]:
        with translated(self._path):
            return [record_of(row) for row in self._all(f"{RECORD} {which}", *parameters)]

    def _all(self, query: str, *parameters: Any) -> list[Any]:
        """Fetch all rows, because a cursor with rows left keeps the read transaction open."""
        with translated(self._path), closing(self._connection.cursor()) as cursor:
            return cursor.execute(query, parameters).fetchall()
