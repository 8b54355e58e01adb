"""The journal in a SQLite file: the only package that speaks SQL.

`SQLiteStore` is the whole of it, and synchronous. `SQLiteJournal` is its shell: what writes runs on
one thread of its own, so that an fsync holds up nobody; `read` and the lookups run inline over a
connection of their own, since in WAL mode readers wait for nobody, and a thread would cost more
than the read. So it would for a short commit that waits for no fsync: that runs inline as well.

Rules of the file:

- It is owned (`streams.journal.ownership`) from before it is opened until after it is closed.
- What never changes of a record is in `streams`, what does is in `progress`: a stream's arguments
  may be long, and an update rewrites its whole row. The id of a row is the record's number.
- What finds streams that are at rest is in tables of its own (`streams.journal.sqlite.tables`).
- Lines are in two tiers, for with a thousand streams writing a commit would touch a thousand
  places. What a commit adds to streams is one row of `log`, and stays in memory as the tail of each
  stream (`streams.journal.sqlite.log`). A tail that is long enough, or whose row of the log is
  among the oldest and must go, becomes a segment: a row of `runs`, many lines under the seq of the
  last of them. Of the streams that have a tail the tables know an older record, and the log the
  rest. Whoever opens the file reads the log back; closing empties it.
- What is made, closed, put to rest or forgotten is in the tables at once, and lines that are as
  long as a segment are never logged.
- Acks delete whole segments, and what is acked before it became one is never written as one.
- Sessions and what they were granted are in `sessions` and `grants`. There are few, they change
  seldom, and each is a row of text that is found by its keys.
- `commit` is one transaction, whatever the number of changes. It is not acknowledged before it was
  looked whether the files are still there (`streams.journal.sqlite.disk`), and the last of the
  room for them is kept for what ends (`streams.journal.sqlite.disk`).
- Who only looks (`streams.journal.sqlite.reader`) has a read transaction, and takes damage as it
  comes.
- Readers leave no transaction open behind them, else the WAL could never start over. A thread and
  the commits themselves keep it within 64 MiB (`streams.journal.sqlite.checkpoints`); closing
  empties it.
- The file does not shrink. Pages of deleted lines are used again, and `secure_delete` decides
  whether they are overwritten with zeros before that. It is off: trimming is then 4.8 times
  cheaper, and the file is readable by its owner alone. Acked lines may be in the log until it is
  full, or closed.
- `durability="power"`: what was committed outlives a power failure (an fsync a commit).
  `"process"`: it outlives the death of the process, but a power failure may take the last commits.
"""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

import trio

from streams.errors import JournalError, JournalUnusable
from streams.journal.contract import Shortage, Totals
from streams.journal.records import Change, Record
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite.file import APPLICATION_ID, SCHEMA_VERSION
from streams.journal.sqlite.store import SQLiteStore
from streams.journal.sqlite.tables import SQLiteLookups
from streams.limits import Durability
from streams.messages import Run

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "SQLiteJournal",
    "SQLiteStore",
    "open_sqlite_journal",
]

RUNS_AT_ONCE: Final = 8  # are read in less than a millisecond


_T = TypeVar("_T")


class JobThread:
    """One thread that does one job after the other for a trio program."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given = self._done = 0  # jobs; each is counted by one thread alone
        # A daemon: a disk that hangs for ever must not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether it has done all that it was given."""
        return self._done == self._given

    async def run(self, job: Callable[[], _T]) -> _T:
        """Do `job` and return what it returns. Cancelled half-way, it is done all the same."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        answers: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(job())
            except BaseException as error:  # whatever it is, it belongs to who waits
                errors.append(error)
            self._done += 1
            with suppress(trio.RunFinishedError):  # nobody waits any more
                token.run_sync_soon(done.set)

        self._given += 1
        self._jobs.put(work)
        await done.wait()
        if errors:
            raise errors.pop()
        return answers.pop()

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class SQLiteJournal:
    """`streams.journal.contract.Journal`, in a file: made by `open_sqlite_journal`."""

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

    async def claim(self) -> Sequence[Record]:
        self._check_open()
        return await self._thread.run(self._store.claim)

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`. Cancelled in flight, it is finished all the same: repeat it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if self._thread.is_idle:
            answers = self._store.commit_at_once(changes)
            if answers is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return answers
        return await self._thread.run(lambda: self._store.commit(changes))

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        self._check_open()
        return await self._thread.run(self._store.sessions)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`. It lets others run now and then: each time would double its price."""
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

    async def find(self, stream: str) -> Record | None:
        return await self._look_up(lambda tables: tables.find(stream))

    async def principal_of(self, stream: str) -> str | None:
        return await self._look_up(lambda tables: tables.principal_of(stream))

    async def named(self, name: bytes) -> str | None:
        return await self._look_up(lambda tables: tables.named(name))

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

    async def _look_up(self, look_up: Callable[[SQLiteLookups], _T]) -> _T:
        await trio.lowlevel.checkpoint()
        self._check_open()
        return look_up(self._store.lookups)

    async def aclose(self) -> None:
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        with trio.CancelScope(shield=True):  # it takes one checkpoint of the WAL
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
) -> AsyncIterator[SQLiteJournal]:
    """Open the journal at `path` and own it until the block is left; see `SQLiteStore`."""

    def open_store() -> SQLiteStore:
        return SQLiteStore(
            path,
            durability=durability,
            secure_delete=secure_delete,
            bytes_max=bytes_max,
            anonymous_bytes_max=anonymous_bytes_max,
            file_bytes_max=file_bytes_max,
        )

    with closing(JobThread("mcp-streams journal")) as thread:
        with trio.CancelScope(shield=True):  # cancelled, it would be opened for nobody
            store = await thread.run(open_store)
        journal = SQLiteJournal(store, thread)
        try:
            yield journal
        finally:
            await journal.aclose()
