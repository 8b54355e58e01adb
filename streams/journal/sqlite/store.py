"""The journal, synchronous: it opens the file, commits, reads and closes."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeVar

from streams.clock import wall
from streams.errors import Full, JournalError, JournalUnusable
from streams.exchange import authenticated
from streams.journal.contract import Shortage
from streams.journal.ownership import OwnerLock, check_files
from streams.journal.records import Append, Change, Create, Record, bytes_in
from streams.journal.runs import joined
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite.batch import Batch
from streams.journal.sqlite.checkpoints import Checkpoints, WalIndex
from streams.journal.sqlite.compaction import cut
from streams.journal.sqlite.disk import Presence, Room, Share, small_disk
from streams.journal.sqlite.file import (
    BUSY_READ_MS,
    DAMAGED,
    SQLITE_ERRORS,
    configure,
    configure_copier,
    connect,
    connect_to_read,
    create_file,
    journal_error,
    prepare,
    translated,
)
from streams.journal.sqlite.log import NO_SEGMENT, Budget, Tail, Tails
from streams.journal.sqlite.segments import Segments
from streams.journal.sqlite.tables import (
    RECORD,
    SessionTables,
    SQLiteLookups,
    WebhookTable,
    overlaid,
    record_of,
)
from streams.limits import CACHE_BYTES_MAX, DAY_S, MIB, Durability
from streams.logs import log
from streams.messages import Run

BUSY_MS: Final = 1000  # how long a commit waits while another program holds the file
# A commit of so much takes a few milliseconds at most; an eviction, the longest change, 25 µs.
# On the journal's thread it would take as many times longer as the loop is busy.
AT_ONCE_BYTES_MAX: Final = 16 * 1024
AT_ONCE_CHANGES_MAX: Final = 200
# After a start each evicted stream is due within this time, whatever a wrong clock has written. The
# engine postpones a stream that is not to expire yet.
LOOKED_AT_WITHIN_S: Final = 30 * DAY_S

Answers = Sequence[JournalError | None]  # of `Journal.commit`

_T = TypeVar("_T")


class SQLiteStore:
    """A journal file, opened and owned.

    Only `read`, `lookups`, `look_for_room` and `anonymous_shortage` may run while another thread
    uses it. All methods may raise `Unavailable`, `Full` or `JournalUnusable`; then the whole step
    is rolled back. After a `JournalUnusable` from `commit`, all later commits raise the same: what
    is on disk is unknown until the file is opened anew.
    """

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = "power",
        secure_delete: bool = False,
        bytes_max: int | None = None,
        anonymous_bytes_max: int | None = None,
        file_bytes_max: int | None = None,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        budget: Budget | None = None,
        is_compact: bool = False,
    ) -> None:
        """Open the journal at `path`, or create it.

        A commit that would make the file longer than `file_bytes_max` bytes raises `Full`.
        `bytes_max` replaces that and limits the file and its WAL together: an eighth of it, at most
        64 MiB, is for the WAL, which may exceed that by one commit of up to 49 MiB. On a small disk
        both are smaller. `anonymous_bytes_max` limits the streams of all anonymous callers
        together. Of the segments that were written last, `cache_bytes_max` bytes stay in memory.
        With `is_compact` the file can be compacted by `shrink`; an older file is
        written anew first.

        Raises `JournalUnusable`, which says what to do, if the file is owned by another process,
        belongs to another program, is damaged, newer or not writable, or if its disk has less than
        16 MiB in all.
        """
        check_files(path)
        self._path = path = Path(os.path.realpath(path))
        self._is_synced = durability == "power"
        self._failure: str | None = None
        self._is_full = False
        budget = budget or Budget(newest_bytes=cache_bytes_max)
        if bytes_max is not None:
            budget = budget.within(bytes_max)
            file_bytes_max = bytes_max - budget.wal_bytes
        self._is_short = False
        self._busy_ms = BUSY_MS  # as it is set for the writer
        with ExitStack() as opened:
            lock = OwnerLock(path)
            lock.acquire()
            opened.callback(lock.release)
            disk_bytes = small_disk(path)
            budget = budget if disk_bytes is None else budget.within(disk_bytes)
            index = opened.enter_context(closing(WalIndex(path)))
            self._room = Room(path, index, file_bytes_max, bytes_max or file_bytes_max, disk_bytes)
            file_bytes_max = self._room.file_bytes_max
            self._tails = Tails(budget)
            create_file(path)
            with translated(path):
                self._writer = opened.enter_context(closing(connect(path, BUSY_MS)))
                prepare(self._writer, path, is_compact=is_compact)
                configure(self._writer, path, durability, secure_delete, file_bytes_max)
                check_files(path)  # SQLite opens -wal and -shm, which others may have made since
                index.open()
                self._reader = opened.enter_context(closing(connect_to_read(path)))
                self._recover()
                copier = opened.enter_context(closing(connect(path, BUSY_READ_MS)))
                configure_copier(copier, durability)
                self._presence = Presence(path)
                self._segments = opened.enter_context(closing(Segments(path, self._presence.check)))
            self._checkpoints = Checkpoints(self._writer, copier, index, budget.wal_bytes)
            opened.callback(self._checkpoints.close)
            # None if anonymous callers have no limit of their own.
            self._share = (
                None if anonymous_bytes_max is None else Share(anonymous_bytes_max, self._writer)
            )
            self.lookups = SQLiteLookups(self._reader, path, self._tails)
            self._opened = opened.pop_all()

    def _recover(self) -> None:
        def load(id: int) -> Tail | None:
            row = self._writer.execute(f"{RECORD} WHERE streams.id = ?", (id,)).fetchone()
            return None if row is None else Tail.of(record_of(row))

        [self._tails.claims] = self._writer.execute("SELECT claims FROM ownership").fetchone()
        try:
            self._tails.recover(self._writer.execute("SELECT id, body FROM log ORDER BY id"), load)
        except (JournalError, ValueError) as error:
            raise JournalUnusable(
                f"{self._path}: its log does not fit its tables ({error}): {DAMAGED}."
            ) from error

    def claim(self) -> Sequence[Record]:
        """See `Journal.claim`."""
        self._set_busy_timeout(BUSY_MS)
        with translated(self._path):
            records, dropped = self._transact(self._claimed)
        for shown in dropped:
            why = "its row in the table `webhooks` has a wrong type, bad UTF-8 or a negative number"
            log.warning("a webhook that cannot be read is dropped", webhook=shown, why=why)
        self._tails.claim()
        known = self._tails.known
        stored = [overlaid(record, known.get(record.stream)) for record in records]
        return sorted([*stored, *self._tails.unwritten()], key=attrgetter("number"))

    def _claimed(self) -> tuple[Sequence[Record], Sequence[str]]:
        """The records, and the ids of webhooks that were dropped."""
        self._writer.execute("UPDATE ownership SET claims = claims + 1")
        # The clock may have been years ahead when streams were evicted.
        due_at = wall() + LOOKED_AT_WITHIN_S
        self._writer.execute("UPDATE rests SET due_at = ? WHERE due_at > ?", (due_at, due_at))
        resident = "WHERE streams.id IN (SELECT id FROM awake) ORDER BY streams.id"
        records = [record_of(row) for row in self._writer.execute(f"{RECORD} {resident}")]
        return records, WebhookTable(self._writer).drop_unreadable()

    def commit(self, changes: Sequence[Change]) -> Answers:
        """See `Journal.commit`."""
        self._set_busy_timeout(BUSY_MS)
        with self._noted():
            return self._begin(changes, is_without_log=self._is_tight)()

    def begin_at_once(self, changes: Sequence[Change]) -> Callable[[], Answers] | None:
        """Write a commit but for its last step, if that takes about as long as a read.

        Returns the last step, which may run on another thread: it waits for the disk where commits
        are synced. Returns None if the first steps would take longer, or wait for another program;
        then nothing has changed.
        """
        if not self._are_short(changes):
            return None
        self._set_busy_timeout(0)
        try:
            finish = self._begin(changes)
        except JournalError:  # the repeat on the journal's thread may wait, and notes how it fails
            return None

        def finish_noted() -> Answers:
            with self._noted():
                return finish()

        return finish_noted

    @property
    def waits_for_disk(self) -> bool:
        """Whether the last step of the next commit does: also where a new WAL begins."""
        return self._is_synced or self._checkpoints.starts_anew()

    def _are_short(self, changes: Sequence[Change]) -> bool:
        return not (
            self._is_short
            or self._is_full
            or len(changes) > AT_ONCE_CHANGES_MAX
            or sum(map(bytes_in, changes)) > AT_ONCE_BYTES_MAX
            or self._checkpoints.are_due(_needed(changes))
            or (self._share is not None and self._share.is_due)
            or any(map(self._may_delete_lines, changes))
        )

    def _may_delete_lines(self, change: Change) -> bool:
        """Whether a change may delete segments, of which a stream may have many."""
        if change.stream is None or type(change) is Create:
            return False
        tail = self._tails.known.get(change.stream)
        if type(change) is Append:  # at the end of a call that restarts, acked lines go
            return tail is not None and tail.may_restart and tail.oldest != NO_SEGMENT
        return tail is None or tail.oldest != NO_SEGMENT

    def _set_busy_timeout(self, busy_ms: int) -> None:
        """Set how long the next statements wait while another program holds the file."""
        if busy_ms != self._busy_ms:
            self._writer.execute(f"PRAGMA busy_timeout = {busy_ms}")
            self._busy_ms = busy_ms

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note how a commit fails, for the next one."""
        is_tight = self._is_tight
        try:
            yield
        except JournalUnusable as error:
            self._failure = str(error)
            raise
        except Full:
            self._is_full = True  # the next commit empties the log, where acked lines take room
            raise
        finally:
            if is_tight or self._is_full:
                self._checkpoints.empty()

    @property
    def _is_tight(self) -> bool:
        return self._is_full or self._is_short

    def _begin(
        self, changes: Sequence[Change], *, is_without_log: bool = False
    ) -> Callable[[], Answers]:
        """Write the changes in a transaction; returns the step that commits it."""
        if self._failure is not None:
            raise JournalUnusable(self._failure)
        batch = Batch(self._writer, self._tails, is_without_log=is_without_log)

        def write() -> Answers:
            self._checkpoints.make_room(_needed(changes))
            if self._share is not None:
                self._share.recount(self._anonymous_unwritten)
            self._writer.execute("BEGIN IMMEDIATE")
            return batch.write(changes)

        answers = self._step(batch, write)

        def finish() -> Answers:
            self._step(batch, lambda: self._writer.execute("COMMIT"))
            self._presence.check()
            batch.publish()
            self._checkpoints.committed()
            if self._share is not None:
                self._share.add(sum(map(self._anonymous_bytes, changes)))
            self._is_full = False
            return answers

        return finish

    def _step(self, batch: Batch, work: Callable[[], _T]) -> _T:
        """Run one step of a commit. If it fails, nothing of the commit remains."""
        try:
            with self._rolled_back():
                return work()
        except BaseException as error:
            batch.undo()
            if isinstance(error, SQLITE_ERRORS):
                raise journal_error(self._path, error) from error
            raise

    def look_for_room(self) -> Shortage | None:
        """See `Journal.shortage`. May run while another thread runs `commit`."""
        try:
            shortage = self._room.shortage(self._reader)
        except SQLITE_ERRORS as error:
            raise journal_error(self._path, error) from error
        self._is_short = shortage is not None
        return shortage

    def _anonymous_bytes(self, change: Change) -> int:
        """The bytes that a change adds to the streams of anonymous callers."""
        if type(change) is Append:
            tail = self._tails.known.get(change.stream)
            return len(change.run.body) if tail is not None and tail.is_anonymous else 0
        if type(change) is Create and not authenticated(change.record.principal):
            return len(change.record.origin)
        return 0

    def _anonymous_unwritten(self) -> int:
        return sum(
            tail.size + len(tail.origin or b"")
            for tail in self._tails.known.values()
            if tail.is_anonymous
        )

    @property
    def anonymous_shortage(self) -> Shortage | None:
        """See `Journal.anonymous_shortage`. May be read while another thread commits."""
        return None if self._share is None else self._share.shortage

    @property
    def sizes(self) -> Mapping[str, int]:
        """See `Journal.sizes`. May be read while another thread commits."""
        wal = self._path.with_name(f"{self._path.name}-wal")
        found = {}
        for name, path in (("file", self._path), ("wal", wal)):
            with suppress(OSError):  # closing the journal removes the WAL
                found[name] = path.stat().st_size
        with suppress(JournalError):  # a commit reports it
            found["unused"] = self.measure()[1]
        return found

    def measure(self) -> tuple[int, int]:
        """The bytes of the file after the last commit, and how many of them are unused."""
        with translated(self._path):
            pages, unused, page_bytes = (
                self._reader.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return pages * page_bytes, unused * page_bytes

    def shrink(self, bytes_max: int) -> None:
        """Return so many unused bytes of a compact file to the file system, at most."""
        if self._failure is not None:
            raise JournalUnusable(self._failure)
        self._checkpoints.make_room(2 * bytes_max)
        with translated(self._path):
            cut(self._writer, bytes_max)
        self._checkpoints.committed()

    def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """See `Journal.sessions`."""
        with translated(self._path):
            return SessionTables(self._writer).read(self._tails.unwritten())

    def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`. May run while another thread runs `commit` or `claim`."""
        # The tail is read first: one that moves to the tables meanwhile is seen twice, not missed.
        tail = self._tails.known.get(stream)
        beyond = () if tail is None else tail.beyond(after)
        if beyond and beyond[0].seq <= after + 1:
            return joined(beyond, after, bytes_max)
        if newest := self._tails.newest.after(stream, after, beyond):
            return joined(newest, after, bytes_max)
        try:
            return self._segments.read(stream, after, bytes_max, beyond)
        except SQLITE_ERRORS as error:
            raise journal_error(self._path, error) from error

    def close(self) -> None:
        """Move the log into the tables and the WAL into the file, and close the file.

        May be called twice.
        """
        self._set_busy_timeout(BUSY_MS)
        # If that fails, as on a full disk, nothing is lost: the next start does it.
        if self._failure is None and not self._tails.is_empty:
            with suppress(JournalError):
                self._begin((), is_without_log=True)()
        with suppress(sqlite3.Error):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._opened.close()

    def _transact(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one transaction, which is rolled back if it fails."""
        with self._rolled_back():
            self._writer.execute("BEGIN IMMEDIATE")
            done = work()
            self._writer.execute("COMMIT")
        return done

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """Roll the transaction back if the block fails."""
        try:
            yield
        except BaseException:
            if self._writer.in_transaction:  # after some errors SQLite has rolled back itself
                self._writer.execute("ROLLBACK")
            raise


def _needed(changes: Sequence[Change]) -> int:
    """How much a commit adds to the WAL at most.

    It writes its lines once to the log and at most twice to the tables.
    """
    return MIB + 3 * sum(map(bytes_in, changes))
