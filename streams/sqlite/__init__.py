"""The journal in a SQLite file: the only package that speaks SQL.

`SQLiteStore` is the whole of it, and synchronous. `SQLiteJournal` is its shell: what writes runs on
one thread of its own, so that an fsync holds up nobody; `read` runs inline over a connection of its
own, since in WAL mode readers wait for nobody, and a thread would cost more than the read.

Rules of the file:

- It is owned (`streams.ownership`) from before it is opened until after it is closed.
- What never changes of a record is in `streams`, what does is in `progress`: a stream's arguments
  may be long, and an update rewrites its whole row. Ids are given in the order of creation.
- Lines are in `runs`, many a row, under the seq of the last of them. Nothing is clustered by
  stream: with a thousand streams writing, every commit would touch a thousand places.
- Sessions and what they were granted are in `sessions` and `grants`. There are few, they change
  seldom, and each is a row of text that is found by its keys.
- `commit` is one transaction, whatever the number of changes.
- Readers leave no transaction open behind them, else the WAL could never start over. Automatic
  checkpoints bound it; closing empties it.
- The file does not shrink. Pages of deleted lines are used again, and `secure_delete` decides
  whether they are overwritten with zeros before that. It is off: trimming is then 4.8 times
  cheaper, and the file is readable by its owner alone.
- `durability="power"`: what was committed outlives a power failure (an fsync a commit).
  `"process"`: it outlives the death of the process, but a power failure may take the last commits.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import trio

from streams.errors import JournalError, JournalUnusable
from streams.journal import Change, Grant, Record, SessionRecord
from streams.messages import Run
from streams.sqlite.file import APPLICATION_ID, SCHEMA_VERSION, Durability
from streams.sqlite.store import SQLiteStore
from streams.sqlite.thread import JobThread

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "Durability",
    "SQLiteJournal",
    "SQLiteStore",
    "open_sqlite_journal",
]

READS_AT_ONCE: Final = 8  # half a millisecond, if they are long


class SQLiteJournal:
    """`streams.journal.Journal`, in a file: made by `open_sqlite_journal`."""

    def __init__(self, store: SQLiteStore, thread: JobThread) -> None:
        self._store = store
        self._thread = thread
        self._is_closed = False
        self._reads = 0

    async def claim(self) -> Sequence[Record]:
        self._check_open()
        return await self._thread.run(self._store.claim)

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """See `Journal.commit`. Cancelled in flight, it is finished all the same: repeat it."""
        self._check_open()
        return await self._thread.run(lambda: self._store.commit(changes))

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        self._check_open()
        return await self._thread.run(self._store.sessions)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Run | None:
        """See `Journal.read`. It lets others run now and then: each time would double its price."""
        self._reads += 1
        if self._reads % READS_AT_ONCE:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()
        self._check_open()
        return self._store.read(stream, after, bytes_max=bytes_max)

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
    file_bytes_max: int | None = None,
) -> AsyncIterator[SQLiteJournal]:
    """Open the journal at `path` and own it until the block is left; see `SQLiteStore`."""

    def open_store() -> SQLiteStore:
        return SQLiteStore(
            path,
            durability=durability,
            secure_delete=secure_delete,
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
