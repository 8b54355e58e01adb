"""An export is lines of JSON, or tables for people who look with other tools.

    calls      one row a stream: stream (its number), method, tool, principal, outcome, created_at,
               ended_at, confirmed, last, sha256 (of the stream's id), request
    messages   one row a message that is kept: stream, seq, kind, method, json, at

Times are ISO 8601 in UTC. The journal has no time for each message: `at` is known for the final
response alone. A row without `json` stands for a message that is lost; a longer gap has rows for
its first `MISSING_MAX` messages.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from sqlite_utils import Database

from streams.files import whole
from streams.journal.sqlite.file import check_new, translated
from streams.messages import Kind, Message, look
from streams.protocol.origin import CALL, Origin

ROWS_AT_ONCE: Final = 1_000
# The numbers of a damaged record may be any. The export must not fill the disk with rows for them.
MISSING_MAX: Final = 10_000

_CALLS: Final = {
    "stream": int,
    "method": str,
    "tool": str,
    "principal": str,
    "outcome": str,
    "created_at": str,
    "ended_at": str,
    "confirmed": int,
    "last": int,
    "sha256": str,
    "request": str,
}
_MESSAGES: Final = {
    "stream": int,
    "seq": int,
    "kind": str,
    "method": str,
    "json": str,
    "at": str,
}
_KINDS: Final = {
    Kind.REQUEST: "request",
    Kind.NOTIFICATION: "notification",
    Kind.RESULT: "result",
    Kind.ERROR: "error",
}


class Sink(Protocol):
    """Where an export writes one stream: first its header, then what is kept of it, in order."""

    def header(self, told: dict[str, Any]) -> None:
        """The record; see `streams.journal.sqlite.backup.header`."""

    def lines(self, first: int, last: int, body: bytes) -> None:
        """Messages, as they were sent."""

    def missing(self, first: int, last: int) -> None:
        """These messages are lost."""


class Lines:
    """Lines of JSON."""

    def __init__(self, put: Callable[[bytes], object]) -> None:
        self._put = put

    def header(self, told: dict[str, Any]) -> None:
        """See `Sink.header`."""
        self._put(_encoded(told))

    def lines(self, first: int, last: int, body: bytes) -> None:
        """See `Sink.lines`."""
        self._put(body)

    def missing(self, first: int, last: int) -> None:
        """See `Sink.missing`."""
        self._put(_encoded({"missing": {"from": first, "to": last}}))


def _encoded(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


@contextmanager
def tables_at(path: Path) -> Iterator[Callable[[int], Sink]]:
    """Make a new SQLite file; yields a function that returns where a stream is written.

    If the block fails no file is left. Raises `FileExistsError`, `OSError` or `JournalError`.
    """
    check_new(path)  # before anything is read
    with (
        whole(path, os.link) as file,
        translated(file),
        closing(sqlite3.connect(file)) as connection,
    ):
        connection.execute("PRAGMA journal_mode = OFF")  # a file that fails is removed
        connection.execute("PRAGMA synchronous = OFF")
        db = Database(connection, execute_plugins=False)
        db.table("calls").create(_CALLS, pk="stream")
        key = [("stream", "calls", "stream")]
        db.table("messages").create(_MESSAGES, pk=("stream", "seq"), foreign_keys=key)
        tables = _Tables(connection)
        yield tables.stream
        tables.flush()
        connection.commit()


class _Tables:
    """The rows that are written next."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._messages: list[tuple[Any, ...]] = []

    def stream(self, number: int) -> "_Rows":
        """The rows of a stream."""
        return _Rows(self, number)

    def time(self, seconds: object) -> str | None:
        """Seconds since 1970 as ISO 8601, in UTC."""
        told = "SELECT strftime('%Y-%m-%dT%H:%M:%fZ', ?, 'unixepoch')"
        found: str | None = self._connection.execute(told, (seconds,)).fetchone()[0]
        return found

    def call(self, row: dict[str, Any]) -> None:
        """Add a row to `calls`."""
        names = ", ".join(_CALLS)
        places = ", ".join(f":{name}" for name in _CALLS)
        insert = f"INSERT INTO calls ({names}) VALUES ({places})"  # nosec B608 # our names
        self._connection.execute(insert, dict.fromkeys(_CALLS) | row)

    def message(self, *row: Any) -> None:
        """Add a row to `messages`."""
        self._messages.append(row)
        if len(self._messages) >= ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        self._connection.executemany(
            "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?)", self._messages
        )
        self._messages.clear()


class _Rows:
    """The rows of one stream."""

    def __init__(self, tables: _Tables, number: int) -> None:
        self._tables = tables
        self._number = number
        self._last: int | None = None
        self._ended_at: str | None = None

    def header(self, told: dict[str, Any]) -> None:
        """See `Sink.header`."""
        request: msgspec.Raw | None = told["request"]
        self._ended_at = self._tables.time(told.get("endedAt"))
        self._last = told.get("last")
        call = Origin("") if request is None else Origin.of(bytes(request))
        self._tables.call(
            {
                "stream": self._number,
                "method": call.method or None,
                "tool": (call.target or None) if call.method == CALL else None,
                "created_at": self._tables.time(told.get("createdAt")),
                "ended_at": self._ended_at,
                "request": None if request is None else _text(bytes(request)),
                **{
                    name: told.get(name)
                    for name in ("principal", "outcome", "confirmed", "last", "sha256")
                },
            }
        )

    def lines(self, first: int, last: int, body: bytes) -> None:
        """See `Sink.lines`."""
        for seq, line in enumerate(body.split(b"\n")[: last - first + 1], first):
            message = look(line)
            is_end = seq == self._last and message.kind in (Kind.RESULT, Kind.ERROR)
            at = self._ended_at if is_end else None
            kind, method = _KINDS.get(message.kind), _method(message)
            self._tables.message(self._number, seq, kind, method, _text(line), at)

    def missing(self, first: int, last: int) -> None:
        """See `Sink.missing`."""
        for seq in range(first, min(last + 1, first + MISSING_MAX)):
            self._tables.message(self._number, seq, "missing", None, None, None)


def _method(message: Message) -> str | None:
    return message.method if isinstance(message.method, str) else None


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")
