"""Verifies a journal: by SQLite's own check, and by the rules for its contents."""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from streams.errors import Refusal
from streams.journal.records import Outcome, Record
from streams.journal.sqlite.reader import Contents, is_current, is_sound, opened_to_read
from streams.keys import hashed
from streams.messages import parse

PROBLEMS_MAX: Final = 100  # reported by SQLite, and as many of ours

_STREAMS: Final = "(SELECT id FROM streams)"
# Rows that must not exist, and what is wrong with them.
_ORPHANS: Final = (
    (f"runs WHERE stream NOT IN {_STREAMS}", "runs of messages belong to no stream"),
    (f"progress WHERE id NOT IN {_STREAMS}", "states belong to no stream"),
    (f"awake WHERE id NOT IN {_STREAMS}", "rows in `awake` belong to no stream"),
    (f"rests WHERE id NOT IN {_STREAMS}", "rows in `rests` belong to no stream"),
    ("rests WHERE id IN (SELECT id FROM awake)", "streams are in both `awake` and `rests`"),
    (
        "streams WHERE id NOT IN (SELECT id FROM awake UNION ALL SELECT id FROM rests)",
        "streams are in neither `awake` nor `rests`",
    ),
    (f"names WHERE stream NOT IN {_STREAMS}", "names belong to no stream"),
    (
        "grants WHERE stream NOT IN (SELECT stream FROM streams) "
        "AND stream NOT IN (SELECT value FROM json_each(:logged))",
        "grants belong to no stream",
    ),
    ("grants WHERE session NOT IN (SELECT key FROM sessions)", "grants belong to no session"),
)


class Problem(msgspec.Struct, frozen=True):
    """A problem, and its stream: the number, and a hash of the id, because the id is a secret."""

    what: str
    number: int | None = None
    stream_sha256: str | None = None

    def __str__(self) -> str:
        if self.number is None:
            return self.what
        named = f" ({self.stream_sha256[:8]}…)" if self.stream_sha256 else ""
        return f"stream {self.number}{named}: {self.what}"


class Report(msgspec.Struct, frozen=True):
    """The size of a journal, and its problems."""

    schema: int
    is_read: bool  # False if the schema is older, so that only SQLite's own check was made
    streams: int
    messages: int
    problems: tuple[Problem, ...]


def inspect(path: Path) -> Report:
    """Check all of a journal, which may be in use.

    A journal with an older schema gets only SQLite's own check. Raises `JournalUnusable` if the
    file is not a journal, or cannot be read at all.
    """
    with opened_to_read(path, may_be_damaged=True) as (connection, schema):
        inspection = _Inspection(connection)
        inspection.check_file()
        if is_current(schema):
            inspection.check_streams()
            inspection.check_links()
        return inspection.report(schema)


class _Inspection:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._problems: dict[Problem, None] = {}
        self._hashes: dict[int, str] = {}
        self._streams = self._messages = 0
        self._logged: Sequence[str] = ()  # the ids of streams that only the log has

    def report(self, schema: int) -> Report:
        problems = tuple(
            msgspec.structs.replace(problem, stream_sha256=self._hashes.get(problem.number or 0))
            for problem in self._problems
        )
        return Report(schema, is_current(schema), self._streams, self._messages, problems)

    def _complain(self, number: int | None, what: str) -> None:
        if len(self._problems) < 2 * PROBLEMS_MAX:
            self._problems[Problem(what, number)] = None

    def check_file(self) -> None:
        try:
            for (said,) in self._connection.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})"):
                for line in () if said == "ok" else said.splitlines():
                    self._complain(None, f"the file: {line}")
        except sqlite3.Error as error:
            self._complain(None, f"the file: {error}")

    def check_streams(self) -> None:
        contents = Contents(self._connection, self._complain)
        self._logged = [record.stream for record in contents.unwritten]
        for number in contents.numbers():
            self._streams += 1
            record = contents.record(number)
            if record is None:
                self._complain(number, "its record is missing")
                continue
            self._hashes[number] = hashed(record.stream)
            for what in problems_of(record):
                self._complain(number, what)
            self._check_runs(contents, record)

    def _check_runs(self, contents: Contents, record: Record) -> None:
        number, position = record.number, record.trimmed
        for run in contents.runs(number, record.trimmed):
            if run.seq > position + 1:
                self._complain(number, f"{_lines(position + 1, run.seq - 1)} missing")
            elif run.seq <= position and position > record.trimmed:
                self._complain(number, f"{_lines(run.seq, position)} there twice")
            if not is_sound(run):
                self._complain(number, f"{_lines(run.seq, run.last)} damaged")
            self._messages += max(0, run.last - max(position, run.seq - 1))
            position = max(position, run.last)
        if position < record.last:
            self._complain(number, f"{_lines(position + 1, record.last)} missing")
        elif position > record.last:
            self._complain(number, f"{_lines(record.last + 1, position)} beyond its end")

    def check_links(self) -> None:
        """Check that every row belongs to a stream or a session."""
        logged = {"logged": msgspec.json.encode(self._logged).decode()}
        for rows, what in _ORPHANS:
            try:
                query = f"SELECT count(*) FROM {rows}"  # nosec B608 # all of it is our own
                [(count,)] = self._connection.execute(query, logged)
            except sqlite3.Error as error:
                self._complain(None, f"not all tables can be read ({error})")
            else:
                if count:
                    self._complain(None, f"{count} {what}")


def problems_of(record: Record) -> Iterator[str]:
    """The contradictions in a record."""
    if not 0 <= record.acked <= record.last:
        yield f"it ends at {record.last} and is confirmed up to {record.acked}"
    if max(record.last_request, record.last_error) > record.last:
        yield "it refers to messages beyond its end"
    if record.restart is not None and record.restart.seq > record.last:
        yield f"it ends at {record.last} and would restart from {record.restart.seq}"
    if record.outcome.is_tombstone and record.acked != record.last:
        yield "it was abandoned or cancelled, and has messages"
    if record.outcome is Outcome.LIVE and record.due_at is not None:
        yield "it is evicted, and has not ended"
    if not all(record.acked < seq <= record.last for seq in record.pages or ()):
        yield "it has pages that are not among its messages"
    try:
        parse(record.origin)
    except Refusal as refused:
        yield f"its request cannot be read ({refused})"


def _lines(first: int, last: int) -> str:
    return f"message {first} is" if first == last else f"messages {first} to {last} are"
