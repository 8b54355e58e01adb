"""Reading a journal that another process may own and use, and that may be damaged.

It reads a snapshot, and writes nothing. The owner does not wait for it, but the owner's WAL grows
until the read ends.
"""

import heapq
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.errors import JournalError, JournalUnusable
from streams.journal.ownership import check_files
from streams.journal.records import Record
from streams.journal.sqlite.file import SCHEMA_VERSION, recognized, translated
from streams.journal.sqlite.log import Budget, LoggedAppend, LoggedMarks, Tail, Tails, decode
from streams.journal.sqlite.tables import RECORD, ids_beginning_with, record_of
from streams.messages import Run, look_at_lines

BUSY_S: Final = 5.0  # how long to wait while the owner opens or closes the file
# To get past damage, ids are tried in steps that grow with the distance, by this part of it.
_PROBES: Final = 1_000
_ID_MAX: Final = 2**48  # used if the highest id cannot be read either

# The errors that a damaged row may raise: from SQLite, wrong types of columns, wrong contents.
_DAMAGES: Final = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError)

_last = attrgetter("last")


@contextmanager
def opened_to_read(
    path: Path, *, may_be_damaged: bool = False
) -> Iterator[tuple[sqlite3.Connection, int]]:
    """A connection to a snapshot of the journal, and its schema's version.

    `may_be_damaged`: a file whose end is missing is opened as well, for those that look at each
    page. Raises `JournalUnusable` if the file is not a journal.
    """
    try:
        path.stat()
    except FileNotFoundError:
        raise JournalUnusable(f"{path}: there is no such file.") from None
    except OSError as error:
        raise JournalUnusable(f"{path} cannot be read: {error.strerror}.") from None
    check_files(path)
    with translated(path), closing(_connect(path)) as connection:
        if may_be_damaged:
            # Otherwise SQLite refuses each statement on a file that is shorter than its header
            # says. Nothing is written: the connection only reads.
            connection.execute("PRAGMA writable_schema = ON")
        _, version = recognized(connection, path)
        if version == 0:
            raise JournalUnusable(f"{path} is empty: it is not a journal yet.")
        connection.execute("BEGIN")
        # The snapshot begins with the first read.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield connection, version


def _connect(path: Path) -> sqlite3.Connection:
    address = f"{path.resolve().as_uri()}?mode=ro"
    return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)


def is_current(version: int) -> bool:
    """Whether this release can read the tables of this schema."""
    return version == SCHEMA_VERSION


def is_sound(run: Run) -> bool:
    """Whether the run has as many valid messages as its `count`, and nothing else."""
    body = run.body
    if body.count(b"\n") != run.count or not body.endswith(b"\n"):
        return False
    try:
        body.decode()
        return len(look_at_lines(body)) == run.count
    except (ValueError, RecursionError):
        return False


class Contents:
    """The contents of a journal, as far as they can be read.

    `on_damage` is called for the rest, with the number of the stream, if known, and a text.
    """

    def __init__(
        self, connection: sqlite3.Connection, on_damage: Callable[[int | None, str], None]
    ) -> None:
        self._connection = connection
        self._on_damage = on_damage
        self._places: dict[int, list[tuple[int, int, int]]] | None = None
        self._tails: dict[int, Tail] = {}
        self.unwritten: Sequence[Record] = ()  # of streams that only the log has
        self._unfit: set[int] = set()  # streams whose record does not fit their entries in the log
        self._logged: dict[int, list[Run]] | None = None
        self._recover()

    def numbers(self) -> list[int]:
        """The numbers of all streams that are in any table or in the log."""
        found = {*self._tails, *self._unfit}
        for table in ("streams", "progress"):
            found.update(row[0] for row in self.scanned(table))
        try:
            found.update(row[0] for row in self._rows("SELECT DISTINCT stream FROM runs"))
        except sqlite3.Error:
            found.update(self._scanned_places())
        return sorted(number for number in found if isinstance(number, int))

    def number_of(self, stream: str) -> int | None:
        """The number of the stream with this id; None if it is unknown or cannot be read."""
        try:
            rows = self._rows("SELECT id FROM streams WHERE stream = ?", stream)
        except sqlite3.Error as error:
            self._on_damage(None, f"an index cannot be read ({error})")
            return None
        if rows and isinstance(rows[0][0], int):
            return rows[0][0]
        return next((each.number for each in self.unwritten if each.stream == stream), None)

    def beginning_with(self, prefix: str, limit: int) -> list[str]:
        """The ids of streams that begin with these letters, at most `limit`."""
        try:
            rows = self._rows(*ids_beginning_with(prefix, limit))
        except sqlite3.Error as error:
            self._on_damage(None, f"an index cannot be read ({error})")
            return []
        found = {row[0] for row in rows if isinstance(row[0], str)}
        found.update(each.stream for each in self.unwritten if each.stream.startswith(prefix))
        return sorted(found)[:limit]

    def record(self, number: int) -> Record | None:
        """The record of a stream; None if it is missing or cannot be read."""
        tail = self._tails.get(number)
        try:
            found = self._loaded(number)
        except _DAMAGES as error:
            self._on_damage(number, f"its record cannot be read ({error})")
            found = None
        if found is None and tail is not None:
            return tail.unwritten
        if found is None or tail is None or tail.record is None:
            return found
        return msgspec.structs.replace(tail.record, origin=found.origin)

    def request(self, number: int) -> bytes | None:
        """The originating request, which may be readable even if the record is not."""
        tail = self._tails.get(number)
        if tail is not None and tail.origin is not None:
            return tail.origin
        try:
            rows = self._rows("SELECT origin FROM streams WHERE id = ?", number)
        except _DAMAGES:
            return None
        return bytes(rows[0][0]) if rows and isinstance(rows[0][0], bytes) else None

    def runs(self, number: int, after: int) -> Iterator[Run]:
        """The stored runs of a stream that reach beyond `after`, in order and unchecked."""
        places = self._indexed_places(number)
        if not follows(places, after):
            places = sorted({*places, *self._scanned_places().get(number, [])})
        in_tables = self._in_tables(number, places, after)
        if number in self._unfit:
            yield from heapq.merge(in_tables, self._in_log(number), key=_last)
            return
        for run in in_tables:
            after = run.last
            yield run
        tail = self._tails.get(number)
        yield from (() if tail is None else tail.beyond(after))

    def _in_tables(
        self, number: int, places: Iterable[tuple[int, int, int]], after: int
    ) -> Iterator[Run]:
        for last, count, rowid in places:
            if last > after and (body := self._body(number, rowid)) is not None:
                yield Run(last - count + 1, count, body)

    def _in_log(self, number: int) -> Iterable[Run]:
        """The runs that the log has of a stream, even those that are in the tables too."""
        if self._logged is None:
            self._logged = {}
            for _, body in self._scanned_log():
                for entry in decode(body):
                    if isinstance(entry, LoggedAppend | LoggedMarks):
                        run = Run(entry.seq, entry.count, entry.body)
                        self._logged.setdefault(entry.id, []).append(run)
        return sorted(self._logged.get(number, []), key=_last)

    def scanned(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """All readable rows of a table, each with its rowid first, in that order."""
        named = ", ".join(("rowid", *columns))
        query = f"SELECT {named} FROM {table} WHERE rowid >= ? ORDER BY rowid"  # nosec B608 # ours
        start, is_over = 0, False
        while not is_over:
            try:
                for row in self._connection.execute(query, (start,)):
                    if row[0] >= start:  # smaller if damaged pages lead in a circle
                        start = row[0] + 1
                        yield row
                is_over = True
            except sqlite3.Error as error:
                self._on_damage(None, f"a part of the table {table} cannot be read ({error})")
                found = self._readable_from(table, f"{query} LIMIT 1", start)
                start, is_over = found or 0, found is None

    def _readable_from(self, table: str, query: str, start: int) -> int | None:
        try:
            last = self._rows(f"SELECT max(rowid) FROM {table}")[0][0] or 0  # nosec B608 # ours
        except sqlite3.Error:
            last = _ID_MAX
        candidate = start + 1
        while candidate <= last:
            try:
                self._rows(query, candidate)
            except sqlite3.Error:
                candidate += 1 + (candidate - start) // _PROBES
            else:
                return candidate
        return None

    def _recover(self) -> None:
        """Replay the log as when the file is opened, but skip entries that do not fit."""
        tails = Tails(Budget(streams_max=_ID_MAX))
        tails.claims = next((claims for _, claims in self.scanned("ownership", "claims")), 0)

        def on_misfit(number: int, tail: Tail | None, error: JournalError) -> None:
            if tail is not None:
                tail.undo()
            if number not in self._unfit:
                self._unfit.add(number)
                self._on_damage(number, f"the log does not fit the tables ({error})")

        def load(number: int) -> Tail | None:
            try:
                record = self._loaded(number)
            except _DAMAGES as error:
                self._on_damage(number, f"its record cannot be read ({error})")
                record = None
            return None if record is None else Tail.of(record)

        tails.recover(self._scanned_log(), load, on_misfit)
        self._tails = {tail.id: tail for tail in tails.known.values()}
        self.unwritten = tails.unwritten()

    def _scanned_log(self) -> Iterator[tuple[int, bytes]]:
        """The rows of the log that can be read."""
        for row, body in self.scanned("log", "body"):
            try:
                decode(body)
            except (ValueError, TypeError) as error:
                self._on_damage(None, f"row {row} of the log cannot be read ({error})")
            else:
                yield row, body

    def _loaded(self, number: int) -> Record | None:
        rows = self._rows(f"{RECORD} WHERE streams.id = ?", number)
        if not rows:
            return None
        record = record_of(rows[0])
        fields = msgspec.structs.asdict(record)
        msgspec.convert(fields, Record)  # SQLite does not enforce types
        if not all(math.isfinite(v) and v >= 0 for v in fields.values() if isinstance(v, float)):
            raise ValueError("one of its times is invalid")
        return record

    def _indexed_places(self, number: int) -> list[tuple[int, int, int]]:
        query = "SELECT last, count, rowid FROM runs WHERE stream = ? ORDER BY last"
        try:
            return [row for row in self._rows(query, number) if _is_place(row)]
        except sqlite3.Error:
            return []

    def _scanned_places(self) -> dict[int, list[tuple[int, int, int]]]:
        if self._places is None:
            self._places = {}
            for rowid, number, *place in self.scanned("runs", "stream", "last", "count"):
                if isinstance(number, int) and _is_place(place):
                    self._places.setdefault(number, []).append((place[0], place[1], rowid))
        return self._places

    def _body(self, number: int, rowid: int) -> bytes | None:
        try:
            rows = self._rows("SELECT body FROM runs WHERE rowid = ?", rowid)
        except sqlite3.Error as error:
            self._on_damage(number, f"a part of its messages cannot be read ({error})")
            return None
        return rows[0][0] if rows and isinstance(rows[0][0], bytes) else None

    def _rows(self, query: str, *parameters: object) -> list[Any]:
        return self._connection.execute(query, parameters).fetchall()


def follows(places: Iterable[tuple[int, int, int]], after: int) -> bool:
    """Whether these places of runs (last, count, rowid) continue from `after` without a gap."""
    for last, count, _ in places:
        if last - count > after:
            return False
        after = max(after, last)
    return True


def _is_place(columns: Sequence[Any]) -> bool:
    last, count = columns[:2]
    return isinstance(last, int) and isinstance(count, int) and 0 < count <= last
