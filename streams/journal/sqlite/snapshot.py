"""A journal file as it is at one moment, for those that look while another process may own it."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from streams.errors import JournalUnusable
from streams.journal.records import Record
from streams.journal.runs import joined
from streams.journal.sqlite.reader import Contents, is_current, opened_to_read
from streams.messages import Run


class Snapshot:
    """The part of `streams.journal.contract.Journal` that reads, of a file that is not owned.

    Damaged streams are left out: `mcp-streams verify` tells of them.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._numbers: list[int] | None = None  # in order

    async def find(self, stream: str) -> Record | None:
        """See `Lookups.find`."""
        await trio.lowlevel.checkpoint()
        number = self._contents.number_of(stream)
        return None if number is None else self._contents.record(number)

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        """See `Lookups.newest`."""
        await trio.lowlevel.checkpoint()
        if self._numbers is None:
            self._numbers = self._contents.numbers()
        numbers = self._numbers
        at = len(numbers) if before is None else bisect_left(numbers, before)
        found: list[Record] = []
        while at > 0 and len(found) < limit:
            at -= 1
            record = self._contents.record(numbers[at])
            if record is not None:
                found.append(record)
        return found

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        """See `Lookups.beginning_with`."""
        await trio.lowlevel.checkpoint()
        return self._contents.beginning_with(prefix, limit)

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`."""
        await trio.lowlevel.checkpoint()
        number = self._contents.number_of(stream)
        if number is None:
            return []
        return joined(self._contents.runs(number, after), after, bytes_max)


@contextmanager
def open_snapshot(path: Path) -> Iterator[Snapshot]:
    """The journal at `path` as it is now; the WAL of its owner grows until the block ends.

    Raises `JournalUnusable`.
    """
    with opened_to_read(path) as (connection, version):
        if not is_current(version):
            raise JournalUnusable(
                f"{path} was written by another version of mcp-streams (schema {version}): look at "
                "it with that version, or let a server of this one open it, which converts it."
            )
        yield Snapshot(Contents(connection, lambda number, what: None))
