"""The journal in a SQLite file: the only package that speaks SQL.

`SQLiteStore` does the work, synchronously. `SQLiteJournal` calls it from trio. Commits run on one
thread, so that an fsync does not block trio. `read` and the lookups run inline, over connections of
their own: in WAL mode readers wait for no writer, and a thread would cost more than the read. A
short commit runs inline for the same reason, but for its last step where that is an fsync: the
interpreter's lock, which each statement releases, would change threads with each of them.

Rules of the file:

- A process owns it (`streams.journal.ownership`) from before it is opened until after it is closed.
- The fields of a record that never change are in `streams`, the others in `progress`: a stream's
  arguments may be long, and an update rewrites its whole row. The id of a row is the record's
  number.
- Evicted streams have rows in `rests`, the others in `awake` (`streams.journal.sqlite.tables`).
- Lines are stored in two tiers, because a commit for a thousand streams would otherwise write to a
  thousand places. First, all lines of a commit are one row of `log`, and stay in memory as the tail
  of each stream (`streams.journal.sqlite.log`). Later a tail becomes a segment: a row of `runs`,
  with many lines under the seq of the last one. This happens when the tail is long enough, or when
  its row is among the oldest of a full log. Until then the tables have an older record of the
  stream, and the log the changes since. Opening the file reads the log back; closing empties it.
- A new stream is in the log alone until its tail is written: a call that is over soon costs the
  tables nothing. Streams that are closed, evicted or forgotten are written to the tables at once.
  Lines and requests that are as long as a segment are never logged.
- The segments of the last commit stay in memory until the next one, for connections that follow.
- Acks delete whole segments. Lines that are acked while they are in a tail never become a segment.
- Sessions, their grants, and webhooks that wait are in `sessions`, `grants` and `webhooks`. They
  are few and change seldom, so each is a plain row.
- `commit` is one transaction, whatever the number of changes. Before it is acknowledged, it is
  checked that the files are still there. The last free space is kept for calls to end
  (`streams.journal.sqlite.disk`).
- A process that does not own the file reads it in one read transaction, and tolerates damage
  (`streams.journal.sqlite.reader`).
- Readers leave no transaction open, because the WAL could then never start over. A thread and the
  commits keep the WAL within 64 MiB (`streams.journal.sqlite.checkpoints`); closing empties it.
- The file does not shrink, unless it is compact (`streams.journal.sqlite.compaction`). Pages of
  deleted lines are used again; `secure_delete` overwrites them with zeros first. It is off by
  default: trimming is then 4.8 times cheaper, and only the file's owner can read it. Acked lines
  may stay in the log until it is full or closed.
- With `durability="power"` a commit survives a power failure, at the cost of an fsync. With
  `"process"` it survives the death of the process, but a power failure may lose the last commits.
"""

import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

import trio

from streams.errors import Full, JournalError, JournalUnusable, Unavailable
from streams.journal.alone import Alone
from streams.journal.contract import Shortage, Totals, Wanted
from streams.journal.records import Change, Record
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite.compaction import compact
from streams.journal.sqlite.file import APPLICATION_ID, SCHEMA_VERSION
from streams.journal.sqlite.store import SQLiteStore
from streams.journal.sqlite.tables import SQLiteLookups
from streams.journal.webhooks import Webhook
from streams.limits import CACHE_BYTES_MAX, Durability
from streams.messages import Run

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "SQLiteJournal",
    "SQLiteStore",
    "open_sqlite_journal",
]

RUNS_AT_ONCE: Final = 8  # these are read in less than a millisecond


_T = TypeVar("_T")


class JobThread:
    """One thread that runs jobs for a trio program, one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given = self._done = 0  # jobs; each is counted by one thread alone
        # A daemon thread: a disk that hangs must not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether it has finished all its jobs."""
        return self._done == self._given

    async def run(self, job: Callable[[], _T]) -> _T:
        """Run `job` and return its result. If cancelled meanwhile, the job still finishes."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        answers: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(job())
            except BaseException as error:  # raised where `run` was called
                errors.append(error)
            self._done += 1
            with suppress(trio.RunFinishedError):  # the program has ended meanwhile
                token.run_sync_soon(done.set)

        self._given += 1
        self._jobs.put(work)
        await done.wait()
        if errors:
            raise errors.pop()
        return answers.pop()

    def close(self) -> None:
        """End the thread once it has finished its jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class SQLiteJournal(Alone):
    """`streams.journal.contract.Journal` in a file; `open_sqlite_journal` makes it."""

    def __init__(self, store: SQLiteStore, thread: JobThread) -> None:
        self._store = store
        self._thread = thread
        self._is_closed = False
        self._runs_read = 0

    @property
    def shortage(self) -> Shortage | None:
        return None if self._is_closed else self._store.look_for_room()

    @property
    def anonymous_shortage(self) -> Shortage | None:
        return None if self._is_closed else self._store.anonymous_shortage

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._store.sizes

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        self._check_open()
        return await self._thread.run(self._store.claim)

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`. If cancelled meanwhile, it may still be made: repeat it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if self._thread.is_idle:
            finish = self._store.begin_at_once(changes)
            if finish is not None and self._store.waits_for_disk:
                return await self._thread.run(finish)
            if finish is not None:
                answers = finish()
                await trio.lowlevel.cancel_shielded_checkpoint()
                return answers
        return await self._thread.run(lambda: self._store.commit(changes))

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        self._check_open()
        return await self._thread.run(self._store.sessions)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`.

        It lets other tasks run only after every `RUNS_AT_ONCE` runs: a checkpoint costs as much as
        a read.
        """
        if self._runs_read < RUNS_AT_ONCE:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._runs_read = 0
            await trio.lowlevel.checkpoint()
        self._check_open()
        found = self._store.read(stream, after, bytes_max=bytes_max)
        self._runs_read += max(1, len(found))
        return found

    async def totals(self) -> Totals:
        return await self._look_up(lambda tables: tables.totals())

    async def streams(self, after: int, limit: int) -> Sequence[tuple[Record, Sequence[bytes]]]:
        """See `streams.journal.copying.Whole.streams`."""
        return await self._look_up(lambda tables: tables.streams(after, limit))

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        return await self._look_up(lambda tables: tables.newest(before, limit))

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        return await self._look_up(lambda tables: tables.beginning_with(prefix, limit))

    async def find(self, stream: str) -> Record | None:
        return await self._look_up(lambda tables: tables.find(stream))

    async def principal_of(self, stream: str) -> str | None:
        return await self._look_up(lambda tables: tables.principal_of(stream))

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        return await self._look_up(lambda tables: tables.named(name, is_secret=is_secret))

    async def grants(self, stream: str) -> Sequence[Grant]:
        return await self._look_up(lambda tables: tables.grants(stream))

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        return await self._look_up(
            lambda tables: tables.listed(principal, after=after, limit=limit, only_read=only_read)
        )

    async def count(self, principal: str) -> int:
        return await self._look_up(lambda tables: tables.count(principal))

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        return await self._look_up(
            lambda tables: tables.due(limit=limit, only_unwanted=only_unwanted)
        )

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        return await self._look_up(lambda tables: tables.webhooks(limit=limit))

    async def count_webhooks(self) -> int:
        return await self._look_up(lambda tables: tables.count_webhooks())

    async def _look_up(self, look_up: Callable[[SQLiteLookups], _T]) -> _T:
        await trio.lowlevel.checkpoint()
        self._check_open()
        return look_up(self._store.lookups)

    async def shrink(self, bytes_max: int) -> None:
        """See `SQLiteStore.shrink`. While the file is locked or full, it does nothing."""
        with suppress(Unavailable, Full):
            await self._thread.run(lambda: self._store.shrink(bytes_max))

    async def aclose(self) -> None:
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        with trio.CancelScope(shield=True):  # closing takes as long as one checkpoint of the WAL
            await self._thread.run(self._store.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise JournalUnusable("the journal is closed")


@asynccontextmanager
async def open_sqlite_journal(
    path: Path,
    *,
    durability: Durability = "power",
    secure_delete: bool = False,
    bytes_max: int | None = None,
    anonymous_bytes_max: int | None = None,
    file_bytes_max: int | None = None,
    cache_bytes_max: int = CACHE_BYTES_MAX,
    is_compact: bool = False,
) -> AsyncIterator[SQLiteJournal]:
    """Open the journal at `path`, and own it until the end of the block; see `SQLiteStore`."""

    def open_store() -> SQLiteStore:
        return SQLiteStore(
            path,
            durability=durability,
            secure_delete=secure_delete,
            bytes_max=bytes_max,
            anonymous_bytes_max=anonymous_bytes_max,
            file_bytes_max=file_bytes_max,
            cache_bytes_max=cache_bytes_max,
            is_compact=is_compact,
        )

    with closing(JobThread("mcp-streams journal")) as thread:
        with trio.CancelScope(shield=True):  # else a cancelled task would leave it open
            store = await thread.run(open_store)
        journal = SQLiteJournal(store, thread)
        try:
            async with _compacted(journal, store) if is_compact else nullcontext():
                yield journal
        finally:
            await journal.aclose()


@asynccontextmanager
async def _compacted(journal: SQLiteJournal, store: SQLiteStore) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(compact, store.measure, journal.shrink)
        yield
        nursery.cancel_scope.cancel()
