"""Streams that are at rest, or awake, and the names of both: plain tables with indexes.

`awake` has the ids that a restart must look at, `rests` those at rest, with what they are looked up
by; a stream is in one of them. `names` leads from a name to a stream at rest. Rows are written
within the transaction of the caller, and read over a connection of their own.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.journal.contract import Record
from streams.journal.lookups import Totals
from streams.journal.sessions import Grant
from streams.journal.sqlite.file import translated
from streams.journal.sqlite.records import RECORD, record_of
from streams.journal.sqlite.sessions import SessionTables
from streams.journal.sqlite.tails import Tail, Tails

_DUE: Final = "SELECT id FROM rests ORDER BY due_at LIMIT ?"
_UNWANTED: Final = "SELECT id FROM rests WHERE NOT is_wanted ORDER BY due_at LIMIT ?"


class LookupTables:
    """Writes the tables."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._many = connection.executemany

    def create(self, ids: Iterable[int]) -> None:
        """New streams, which are awake."""
        self._many("INSERT INTO awake (id) VALUES (?)", [(each,) for each in ids])

    def update(self, records: Iterable[tuple[Record | None, Record]]) -> None:
        """Streams as they were stored and as they are now: those at rest are kept in order."""
        rows = [
            (now.number, *_eviction(now))
            for stored, now in records
            if now.due_at is not None and (stored is None or _eviction(stored) != _eviction(now))
        ]
        self._many("DELETE FROM awake WHERE id = ?", [row[:1] for row in rows])
        self._many(
            "INSERT INTO rests (id, owner, due_at, is_wanted, is_read) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET due_at = excluded.due_at, "
            "is_wanted = excluded.is_wanted, is_read = excluded.is_read",
            rows,
        )

    def name(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Names of streams; those that are known already stay."""
        self._many("INSERT OR IGNORE INTO names (stream, name) VALUES (?, ?)", names)

    def bring_forward(self, due_at: float) -> None:
        """Those that are due later are due then, to be looked at."""
        self._many("UPDATE rests SET due_at = ? WHERE due_at > ?", [(due_at, due_at)])

    def forget(self, ids: Sequence[int]) -> None:
        """Streams of which nothing is kept."""
        rows = [(each,) for each in ids]
        self._many("DELETE FROM awake WHERE id = ?", rows)
        self._many("DELETE FROM rests WHERE id = ?", rows)
        self._many("DELETE FROM names WHERE stream = ?", rows)


def _eviction(record: Record) -> tuple[Any, ...]:
    return _owner(record.principal), record.due_at, record.is_wanted, record.is_read


def _owner(principal: str) -> bytes:
    """What stands for a principal, however long its name is."""
    return hashlib.sha256(principal.encode("utf-8", "surrogatepass")).digest()[:16]


def overlaid(found: Record, tail: Tail | None) -> Record:
    """A record of the tables as it is now: of those that are not at rest the log may know more."""
    now = None if tail is None else tail.record
    if now is None or now.number != found.number:
        return found
    return msgspec.structs.replace(now, origin=found.origin)


class SQLiteLookups:
    """`streams.journal.lookups.Lookups`, synchronous, over a connection of its own."""

    def __init__(self, connection: sqlite3.Connection, path: Path, tails: Tails) -> None:
        self._connection = connection
        self._path = path
        self._tails = tails

    def totals(self) -> Totals:
        [row] = self._all("SELECT (SELECT count(*) FROM rests), (SELECT max(id) FROM streams)")
        return Totals(row[0], row[1] or 0)

    def find(self, stream: str) -> Record | None:
        tail = self._tails.known.get(stream)  # first: when it is let go, the tables have all of it
        found = self._records("WHERE stream = ?", stream)
        return overlaid(found[0], tail) if found else None

    def principal_of(self, stream: str) -> str | None:
        # The next one is read for one that there is not, and thrown away.
        found = self._all(
            "SELECT stream, principal FROM streams WHERE stream >= ? ORDER BY stream LIMIT 1",
            stream,
        )
        return found[0][1] if found and found[0][0] == stream else None

    def named(self, name: bytes) -> str | None:
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

    def _records(self, which: str, *parameters: Any) -> list[Record]:
        with translated(self._path):
            return [record_of(row) for row in self._all(f"{RECORD} {which}", *parameters)]

    def _all(self, query: str, *parameters: Any) -> list[Any]:
        """All rows at once: none that is left would end the read transaction."""
        with translated(self._path), closing(self._connection.cursor()) as cursor:
            return cursor.execute(query, parameters).fetchall()
