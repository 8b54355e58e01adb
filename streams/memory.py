"""A journal in memory: for tests, and for a server that is told no file.

It is bounded by what the engine lets go of, and by nothing else. All is durable as soon as it is
written, for as long as the process lives.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import trio

from streams.errors import JournalError
from streams.journal import STORED_BYTES_MAX, Append, Change, Create, Record, apply, joined
from streams.messages import Run

_last = attrgetter("last")


class MemoryJournal:
    """`streams.journal.Journal`, in memory."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}  # in the order of creation
        self._runs: dict[str, list[Run]] = {}

    async def claim(self) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        for stream, record in self._records.items():
            self._records[stream] = msgspec.structs.replace(record, fence=record.fence + 1)
        return list(self._records.values())

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await trio.lowlevel.checkpoint()  # first: who is cancelled here has written nothing
        return [self._commit_one(change) for change in changes]

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Run | None:
        await trio.lowlevel.checkpoint()
        runs = self._runs.get(stream, [])
        first = bisect_right(runs, after, key=_last)
        return joined((runs[i] for i in range(first, len(runs))), after, bytes_max)

    async def aclose(self) -> None:
        """Nothing to let go of: another engine may take the same journal over, as if restarted."""
        await trio.lowlevel.checkpoint()

    def _commit_one(self, change: Change) -> JournalError | None:
        before = self._records.get(change.stream)
        try:
            record = apply(before, change)
        except JournalError as error:
            return error
        if record is before:
            return None
        if record is None:
            del self._records[change.stream], self._runs[change.stream]
            return None
        self._records[change.stream] = record
        self._store(change, record)
        return None

    def _store(self, change: Change, record: Record) -> None:
        if isinstance(change, Create):
            self._runs[change.stream] = []
            return
        runs = self._runs[change.stream]
        if isinstance(change, Append):
            runs.extend(change.run.split(STORED_BYTES_MAX))
        else:
            del runs[: bisect_right(runs, record.acked, key=_last)]
