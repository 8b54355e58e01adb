"""A journal in memory with faults that no disk has to produce."""

import math
from collections.abc import Sequence

import trio

from streams.errors import Full, JournalError
from streams.journal.memory import MemoryJournal
from streams.journal.records import Append, Change
from streams.messages import Run


class Troubled(MemoryJournal):
    """`streams.journal.contract.Journal` with faults.

    While `trouble` is set, every request raises it. After `hold`, requests wait until `let_go`.
    `room` limits the number of appends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trouble: JournalError | None = None
        self.read_trouble: JournalError | None = None
        self.commits: list[list[Change]] = []  # that succeeded
        self.room: float = math.inf
        self.refused = 0
        self._is_open = trio.Event()
        self._is_open.set()

    def hold(self) -> None:
        self._is_open = trio.Event()

    def let_go(self) -> None:
        self._is_open.set()

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await self._is_open.wait()
        if self.trouble is not None:
            self.refused += 1
            raise self.trouble
        appends = sum(isinstance(change, Append) for change in changes)
        if appends > self.room:
            self.refused += 1
            raise Full("no room for so much")
        self.room -= appends
        self.commits.append(list(changes))
        return await super().commit(changes)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        if self.read_trouble is not None:
            self.refused += 1
            raise self.read_trouble
        return await super().read(stream, after, bytes_max=bytes_max)
