"""Sessions and their grants, in tables."""

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec

from streams.journal.sessions import Grant, SessionRecord
from streams.messages import RequestId

_GRANTS: Final = "SELECT session, delivery, stream, reply_id, takes_over, start FROM grants"


class SessionTables:
    """`streams.journal.contract.SessionRows`, within the transaction that the caller has begun.

    Rows are written at once and in order, unlike those of streams: sessions change seldom.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def read(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """See `Journal.sessions`. A row that is replaced gets a new rowid, above all others."""
        sessions = self._execute(
            "SELECT key, principal, revision, capabilities, level, seen_at "
            "FROM sessions ORDER BY rowid"
        )
        resident = (
            "WHERE stream IN (SELECT stream FROM streams WHERE id IN (SELECT id FROM awake)) "
            "ORDER BY rowid"
        )
        return [SessionRecord(*row) for row in sessions], self._grants(resident)

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
        # As JSON: an id keeps its type, and may be a number that is too large for SQLite.
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
