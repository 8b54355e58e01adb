"""The log, and the tails of streams in memory: what the tables do not have yet.

A commit writes one row of the log, with its new streams and its changes to others. One row is
written in one place; tables would take a write for each stream. Rows are read only when the file is
opened after a crash. They name streams by the ids of their rows in the tables.

The same lines stay in memory as the tail of each stream, with the request of a new one. When a tail
is long enough for a segment, or the log would grow beyond its budget, the stream is written to the
tables.

This is one file because the entries and the tails are the same changes, on disk and in memory:
whatever is logged is a part of a tail, and a replay makes the tails again.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

import msgspec
from msgspec.structs import replace

from streams.errors import Gone, JournalError
from streams.exchange import authenticated
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.newest import NewestRuns
from streams.journal.records import (
    Ack,
    Answered,
    Append,
    Checkpoint,
    OfRestart,
    Outcome,
    Record,
    Restarted,
    apply,
)
from streams.journal.runs import as_one
from streams.limits import CACHE_BYTES_MAX, MIB
from streams.messages import Run


class LoggedAppend(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """Lines of a stream that has not ended."""

    id: int
    seq: int
    count: int
    body: bytes
    last_request: int
    last_error: int

    def change(self, stream: str, fence: int) -> Append:
        run = Run(self.seq, self.count, self.body)
        return Append(stream, fence, run, self.last_request, self.last_error)


class LoggedMarks(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Lines, with pages or the final response among them."""

    id: int
    seq: int
    count: int
    body: bytes
    last_request: int
    last_error: int
    outcome: Outcome
    ended_at: float
    pages: tuple[int, ...]

    def change(self, stream: str, fence: int) -> Append:
        return Append(
            stream,
            fence,
            Run(self.seq, self.count, self.body),
            self.last_request,
            self.last_error,
            self.outcome,
            self.ended_at,
            self.pages,
        )


class LoggedAck(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    id: int
    acked: int

    def change(self, stream: str, fence: int) -> Ack:
        return Ack(stream, fence, self.acked)


class LoggedForget(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """All entries with this id up to here are of a stream that was forgotten."""

    id: int


class LoggedCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    id: int
    seq: int
    state: bytes

    def change(self, stream: str, fence: int) -> Checkpoint:
        return Checkpoint(stream, fence, self.seq, self.state)


class LoggedAnswer(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    id: int
    seq: int
    line: bytes

    def change(self, stream: str, fence: int) -> Answered:
        return Answered(stream, fence, self.seq, self.line)


class LoggedRestart(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    id: int
    attempts: int
    reached: int

    def change(self, stream: str, fence: int) -> Restarted:
        return Restarted(stream, fence, self.attempts, self.reached)


class LoggedCreate(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """A new stream. The tables have it only if they were written later."""

    id: int
    record: Record
    claims: int  # of the file until then; each later one adds 1 to the fence


_LIVE: Final = Outcome.LIVE
LoggedOfRestart = LoggedCheckpoint | LoggedAnswer | LoggedRestart
LoggedChange = LoggedAppend | LoggedMarks | LoggedAck | LoggedOfRestart
Logged = LoggedChange | LoggedForget | LoggedCreate

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(list[Logged]).decode


def logged_append(id: int, change: Append) -> LoggedAppend | LoggedMarks:
    """The log entry for lines added to the stream with this id."""
    run = change.run
    if change.outcome is _LIVE and not change.pages and not change.ended_at:
        return LoggedAppend(
            id, run.seq, run.count, run.body, change.last_request, change.last_error
        )
    return LoggedMarks(
        id,
        run.seq,
        run.count,
        run.body,
        change.last_request,
        change.last_error,
        change.outcome,
        change.ended_at,
        change.pages,
    )


def logged_restart(id: int, change: OfRestart) -> LoggedOfRestart:
    """The log entry for a change of a call that may restart."""
    match change:
        case Checkpoint():
            return LoggedCheckpoint(id, change.seq, change.state)
        case Answered():
            return LoggedAnswer(id, change.seq, change.line)
        case Restarted():
            return LoggedRestart(id, change.attempts, change.reached)


UNKNOWN: Final = 0
NO_SEGMENT: Final = 2**63
# The cost of writing a tail besides its lines, and the highest cost of a log entry, in bytes of
# lines. With them, tails are written as fast as the log grows.
_TAIL_COST: Final = 256
ENTRY_COST: Final = 128
_WAL_PART: Final = 8

_last, _id = attrgetter("last"), attrgetter("id")
NUMBERS_END: Final = 2**62  # above all numbers of records


class Budget(msgspec.Struct, frozen=True):
    """The sizes of the tails, the log and the WAL. Tests make them small."""

    # A larger log makes larger segments when many streams write, and costs memory and a slower
    # start after a crash. With 16 MiB, 1,000 streams that write in turn make segments of 16 KiB.
    log_bytes: int = 16 * MIB
    segment_bytes: int = 64 * 1024  # a tail of this size becomes a segment
    direct_bytes: int = 16 * 1024  # lines of this size become one at once, and are never logged
    # Streams in memory, of some 600 bytes each: reading one from the tables would add a third to
    # the cost of an append. Half of them may be ahead of the tables.
    streams_max: int = 20_000
    # One commit, or a long read transaction of another program, may exceed it.
    wal_bytes: int = 64 * MIB
    newest_bytes: int = CACHE_BYTES_MAX  # segments in memory

    def within(self, bytes_max: int) -> "Budget":
        """The budget of a journal of at most `bytes_max` bytes, smaller for a small journal."""
        part = bytes_max // _WAL_PART
        return replace(
            self, wal_bytes=min(self.wal_bytes, part), log_bytes=min(self.log_bytes, part // 2)
        )


class Tail:
    """One stream as the writer knows it.

    `now` and `staged` belong to the commit that is under way; readers do not use them.
    """

    __slots__ = (
        "id",
        "is_anonymous",
        "now",
        "oldest",
        "origin",
        "record",
        "runs",
        "since",
        "size",
        "staged",
        "staged_size",
    )

    def __init__(self, id: int, record: Record | None) -> None:
        self.id = id  # the record's number
        self.is_anonymous = record is not None and not authenticated(record.principal)
        self.record = record  # without its origin; None if the stream does not exist
        self.now = record
        self.origin: bytes | None = None  # of a stream that is in no table yet
        self.runs: list[Run] = []  # in no segment yet; only ever added to, or replaced
        self.staged: list[Run] = []
        self.size = 0  # bytes of `runs`
        self.staged_size = 0
        self.since = 0  # the first row of the log that the tables need for it; 0 for none
        self.oldest = UNKNOWN  # the seq of the last line of its first segment

    @classmethod
    def of(cls, record: Record) -> "Tail":
        """The tail of a stream that is fully in the tables."""
        return cls(record.number, replace(record, origin=b""))

    @property
    def unwritten(self) -> Record | None:
        """The whole record of a stream that is in no table yet; for a reader on another thread."""
        origin, record = self.origin, self.record
        return None if origin is None or record is None else replace(record, origin=origin)

    @property
    def may_restart(self) -> bool:
        """Whether the call is restarted if its process dies; then acked lines may be kept."""
        return self.record is not None and self.record.restart is not None

    def beyond(self, after: int) -> Sequence[Run]:
        """The runs that reach beyond `after`; for a reader on another thread."""
        runs = self.runs[:]
        return runs[bisect_right(runs, after, key=_last) :]

    def segments(self) -> Iterator[Run]:
        """All lines that are kept, including those of this commit, as rows of `runs`."""
        assert self.now is not None
        runs = [*self.runs, *self.staged]
        runs = runs[bisect_right(runs, self.now.trimmed, key=_last) :]
        start = size = 0
        for n, run in enumerate(runs):
            if size + len(run.body) > STORED_BYTES_MAX and n > start:
                yield from as_one(runs[start:n]).split(STORED_BYTES_MAX)
                start, size = n, 0
            size += len(run.body)
        if runs:
            yield from as_one(runs[start:]).split(STORED_BYTES_MAX)

    def publish(self) -> None:
        """The staged changes are durable: readers may see them."""
        before, now = self.record, self.now
        assert now is not None
        self.record = now
        if self.staged:
            self.runs.extend(self.staged)
            self.size += self.staged_size
            self.staged.clear()
            self.staged_size = 0
        if before is not None and (before.acked != now.acked or before.restart is not now.restart):
            self._drop(now.trimmed)

    def written(self) -> None:
        """The tables have all of the stream."""
        self.origin = None
        if self.runs:  # they are its first segment, or another one
            self.oldest = UNKNOWN
        self.runs = []
        self.size = self.since = 0

    def undo(self) -> None:
        self.now = self.record
        self.staged.clear()
        self.staged_size = 0

    def _drop(self, trimmed: int) -> None:
        kept = bisect_right(self.runs, trimmed, key=_last)
        if kept:
            self.size -= sum(len(run.body) for run in self.runs[:kept])
            self.runs = self.runs[kept:]


class Tails:
    """The tails of all streams that change now, and the rows of the log.

    Only the writer may use it, except that a reader may look up a stream in `known`.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.known: dict[str, Tail] = {}
        self.newest = NewestRuns(budget.newest_bytes)
        self.next_row = 1
        self._ahead: dict[Tail, None] = {}  # of the tables, in the order of `since`
        self._ripe: dict[Tail, None] = {}  # long enough for a segment
        self.claims = 0  # of the file
        self._rows: deque[tuple[int, int]] = deque()  # of the log: id and bytes of each
        self._log_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether the log is empty: the tables have everything."""
        return not self._rows

    def unwritten(self, after: int = 0, *, before: int = NUMBERS_END) -> list[Record]:
        """The records of streams that are in no table yet, with numbers between these two.

        In the order of the numbers. For a reader on another thread, before it reads the tables:
        then it sees a stream that moves there meanwhile twice, and does not miss it.
        """
        tails = [
            tail
            for tail in list(self.known.values())
            if tail.origin is not None and after < tail.id < before
        ]
        found = [tail.unwritten for tail in sorted(tails, key=_id)]
        return [record for record in found if record is not None]

    def due(self, added: int, entries: int, chosen: dict[Tail, None], *, everything: bool) -> int:
        """Choose further tails to write to the tables, and put them into `chosen`.

        The commit adds `added` bytes and `entries` entries to the log. The tails have at most about
        twice these bytes, so that no commit takes long; `everything` chooses all tails. Returns the
        id below which rows of the log are no longer needed; 0 if all are needed.
        """
        first = self._choose_due(added, entries, chosen, everything=everything)
        return first if self._rows and self._rows[0][0] < first else 0

    def _choose_due(
        self, added: int, entries: int, chosen: dict[Tail, None], *, everything: bool
    ) -> int:
        left = 2 * (added + entries * ENTRY_COST)
        for tail in self._ripe:
            if left <= 0:
                break
            left -= self._choose(tail, chosen)
        rows = iter(self._rows)
        row, freed = next(rows, None), 0
        excess = self._log_bytes + added - self.budget.log_bytes
        for tail in self._ahead:
            while row is not None and row[0] < tail.since:
                freed += row[1]
                row = next(rows, None)
            if tail in chosen:
                continue
            many = len(self._ahead) - len(chosen) > self.budget.streams_max // 2
            if not everything and (left <= 0 or (freed >= excess and not many)):
                return tail.since
            left -= self._choose(tail, chosen)
        return self.next_row

    def _choose(self, tail: Tail, chosen: dict[Tail, None]) -> int:
        if tail in chosen:
            return 0
        chosen[tail] = None
        return tail.size + tail.staged_size + len(tail.origin or b"") + _TAIL_COST

    def _logged(self, size: int, first: int) -> None:
        """A row of `size` bytes was added, and those before `first` were deleted."""
        while self._rows and self._rows[0][0] < first:
            self._log_bytes -= self._rows.popleft()[1]
        if size:
            self._rows.append((self.next_row, size))
            self._log_bytes += size
            self.next_row += 1

    def publish(
        self,
        touched: Iterable[Tail],
        chosen: Collection[Tail],
        met: Iterable[Tail],
        *,
        segments: Mapping[str, Sequence[Run]],
        row_bytes: int,
        first_row: int,
    ) -> None:
        """The commit is durable: readers may see what it has staged.

        It added a row of `row_bytes` bytes to the log and deleted those before `first_row`. The
        `chosen` tails were written to the tables, with these `segments`. Those in `met` were not in
        memory before.
        """
        for stream, runs in segments.items():  # first: a reader looks at them last
            self.newest.add(stream, runs)
        row = self.next_row
        self._logged(row_bytes, first_row)
        self._publish(touched, row)
        for tail in chosen:
            tail.written()
            self._ahead.pop(tail, None)
            self._ripe.pop(tail, None)
        for tail in met:
            if tail.record is not None:
                self.known[tail.record.stream] = tail
        if len(self.known) > self.budget.streams_max:
            self._forget_written()  # the tables have all of the others

    def _publish(self, touched: Iterable[Tail], row: int) -> None:
        ripe = self.budget.segment_bytes
        for tail in touched:
            if tail.now is None:
                continue  # forgotten
            tail.publish()
            if not tail.since:
                tail.since = row
                self._ahead[tail] = None
            if tail.size >= ripe:
                self._ripe[tail] = None

    def forget(self, tail: Tail) -> None:
        """The stream was forgotten."""
        assert tail.record is not None
        self.known.pop(tail.record.stream, None)
        self.newest.drop(tail.record.stream, tail.record.last)
        self._ahead.pop(tail, None)
        self._ripe.pop(tail, None)

    def claim(self) -> None:
        """The fence of every record was raised by one; drop the tails that the tables have."""
        self.claims += 1
        for tail in self._ahead:
            assert tail.record is not None
            tail.now = tail.record = replace(tail.record, fence=tail.record.fence + 1)
        self._forget_written()

    def recover(
        self,
        rows: Iterable[tuple[int, bytes]],
        load: Callable[[int], Tail | None],
        on_misfit: Callable[[int, Tail | None, JournalError], None] | None = None,
    ) -> None:
        """Replay the log, oldest row first. `load` gives the tail of a stream from the tables.

        If an entry does not fit the tables, it raises a `JournalError`, or calls `on_misfit`, if
        that is given, with the number of the stream and its tail.
        """
        entries = [(row, entry) for row, body in self._taken(rows) for entry in decode(body)]
        forgotten = {e.id: n for n, (_, e) in enumerate(entries) if isinstance(e, LoggedForget)}
        by_id: dict[int, Tail | None] = {}
        for n, (row, entry) in enumerate(entries):
            if isinstance(entry, LoggedForget) or n < forgotten.get(entry.id, 0):
                continue
            if entry.id not in by_id:
                by_id[entry.id] = load(entry.id)
            tail = by_id[entry.id]
            if isinstance(entry, LoggedCreate):
                if tail is None:
                    by_id[entry.id] = self._created(entry, row)
                continue
            try:
                if tail is None:
                    raise Gone(f"the stream {entry.id} is in no table")
                self._replay(tail, entry, row)
            except JournalError as error:
                if on_misfit is None:
                    raise
                on_misfit(entry.id, tail, error)
        self._forget_written()

    def _created(self, entry: LoggedCreate, row: int) -> Tail:
        fence = entry.record.fence + self.claims - entry.claims
        tail = Tail.of(replace(entry.record, fence=fence))
        tail.origin, tail.oldest = entry.record.origin, NO_SEGMENT
        self._publish([tail], row)
        return tail

    def _forget_written(self) -> None:
        # A new dict, since a reader may be using the old one.
        self.known = {tail.record.stream: tail for tail in self._ahead if tail.record}

    def _taken(self, rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for row, body in rows:
            self.next_row = row
            self._logged(len(body), 0)
            yield row, body

    def _replay(self, tail: Tail, entry: LoggedChange, row: int) -> None:
        assert tail.record is not None
        change = entry.change(tail.record.stream, tail.record.fence)
        if isinstance(change, Append):
            if change.run.last <= tail.record.last:
                return  # the tables were written later than this entry
            tail.staged.append(change.run)
            tail.staged_size += len(change.run.body)
        tail.now = apply(tail.record, change)
        self._publish([tail], row)
