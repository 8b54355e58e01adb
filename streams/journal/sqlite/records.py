"""Records as rows: what never changes is in `streams`, what does is in `progress`."""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from streams.journal.contract import Outcome, Record, Restart

# A record as it is stored, its columns in the order of the fields. The number of claims is added to
# the fence: a claim changes one row, and not those of a million streams.
RECORD: Final = (
    "SELECT stream, principal, origin, min_s, max_s, created_at, fence + claims, is_announced, "
    "outcome, last, acked, last_request, last_error, ended_at, pages, streams.id, due_at, is_read, "
    "restart "
    "FROM streams JOIN progress USING (id) LEFT JOIN rests USING (id), ownership"
)
_encode_restart: Final = msgspec.msgpack.Encoder().encode
_decode_restart: Final = msgspec.msgpack.Decoder(Restart).decode
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


def record_of(row: Sequence[Any]) -> Record:
    """The record in a row of `RECORD`. Raises `msgspec.DecodeError` where that is none."""
    fields: list[Any] = list(row)
    if fields[8] not in _OUTCOMES:
        raise msgspec.DecodeError(f"{fields[8]!r} is no outcome of a stream")
    fields[7:9] = bool(fields[7]), _OUTCOMES[fields[8]]
    if fields[14] is not None:
        fields[14] = msgspec.json.decode(fields[14], type=tuple[int, ...])
    fields[17] = bool(fields[17])
    if fields[18] is not None:
        fields[18] = _decode_restart(fields[18])
    return Record(*fields)


class RecordTables:
    """Writes the tables."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._many = connection.executemany

    def create(self, records: Sequence[Record]) -> None:
        self._many(
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
        self._many(
            "INSERT INTO progress (fence, outcome, last, acked, last_request, last_error, "
            "ended_at, pages, restart, id) "
            "VALUES (? - (SELECT claims FROM ownership), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(record.fence, *_progress(record)) for record in records],
        )

    def update(self, records: Iterable[Record]) -> None:
        self._many(
            "UPDATE progress SET outcome = ?, last = ?, acked = ?, last_request = ?, "
            "last_error = ?, ended_at = ?, pages = ?, restart = ? WHERE id = ?",
            map(_progress, records),
        )

    def forget(self, ids: Iterable[int]) -> None:
        """Streams of which nothing is kept, nor their lines."""
        rows = [(each,) for each in ids]
        self._many("DELETE FROM runs WHERE stream = ?", rows)
        self._many("DELETE FROM progress WHERE id = ?", rows)
        self._many("DELETE FROM streams WHERE id = ?", rows)


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
