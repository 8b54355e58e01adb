"""How much room there is for a journal. The last of it is for ending what was begun: final
responses, and acks, which make room.
"""

import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from streams.clock import steady
from streams.journal.contract import Shortage
from streams.journal.sqlite.checkpoints import WalIndex
from streams.limits import MIB

# What is kept for that: a commit may need it twice, in the WAL and in the file. Of a small disk a
# part.
RESERVE_BYTES: Final = 64 * MIB
RESERVE_PART: Final = 8


# How often the rows of anonymous callers are counted, where they have almost all that they may.
COUNT_S: Final = 1.0
_COUNT: Final = """
WITH theirs AS (
    SELECT id, length(origin) AS size FROM streams
    WHERE NOT (principal GLOB 'os(*' OR principal GLOB 'bearer(*')
)
SELECT (SELECT coalesce(sum(size), 0) FROM theirs)
    + (SELECT coalesce(sum(length(body)), 0) FROM runs WHERE stream IN (SELECT id FROM theirs))
"""


class Room:
    """Of a file, and on its disk. `limit` is the setting that `file_bytes_max` comes of."""

    def __init__(
        self, path: Path, index: WalIndex, file_bytes_max: int | None, limit: int | None = None
    ) -> None:
        self._folder = path.parent
        self._index = index
        self._file_bytes_max = file_bytes_max
        self._limit = file_bytes_max if limit is None else limit
        self._is_short = False

    def shortage(self, reader: sqlite3.Connection) -> Shortage | None:
        """See `Journal.shortage`; 5 µs while there is room.

        Then it runs no SQL: that takes three times as long, and longer still on trio's thread
        while another thread commits.
        """
        shortage = self._on_disk(reader) or self._in_file(reader)
        self._is_short = shortage is not None
        return shortage

    def _on_disk(self, reader: sqlite3.Connection) -> Shortage | None:
        disk = os.statvfs(self._folder)
        free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free >= _reserve(whole, was_short=self._is_short):
            return None
        free += self._unused(reader)
        return judged(free, whole, "are free on its disk", was_short=self._is_short)

    def _in_file(self, reader: sqlite3.Connection) -> Shortage | None:
        whole = self._file_bytes_max
        if whole is None:
            return None
        free = whole - (self._index.database_bytes() or _pages(reader, "page_count"))
        if free < _reserve(whole, was_short=self._is_short):
            free += self._unused(reader)
        where = "are left of what its file may take"
        return judged(free, whole, where, was_short=self._is_short, limit=self._limit)

    def _unused(self, reader: sqlite3.Connection) -> int:
        """Bytes within the file that are used before it grows."""
        return _pages(reader, "freelist_count")


class Share:
    """The bytes of all anonymous callers' streams in the journal: messages and requests.

    Additions are counted as they come, deletions are not, so the count is never too low. Once
    little room is left by that count, the rows are counted, at most once in `COUNT_S`. For the
    writer's thread, apart from `shortage`.
    """

    def __init__(self, bytes_max: int | None, writer: sqlite3.Connection) -> None:
        self._bytes_max = bytes_max
        self._writer = writer
        used = _pages(writer, "page_count") - _pages(writer, "freelist_count")
        self._bytes = used  # at most, until they are counted
        self._counted_at = -math.inf
        self._shortage: Shortage | None = None

    @property
    def shortage(self) -> Shortage | None:
        """See `Journal.anonymous_shortage`."""
        return self._shortage

    @property
    def is_due(self) -> bool:
        """Whether `commit` would count, which takes a while."""
        return self._judge() is not None and steady() - self._counted_at >= COUNT_S

    def commit(self, added: int, unwritten: Callable[[], int]) -> None:
        """Count the bytes that a commit has added; `unwritten` gives those that are in no row."""
        self._bytes += added
        if self._bytes_max is None:
            return
        if self.is_due:
            [rows] = self._writer.execute(_COUNT).fetchone()
            self._bytes = rows + unwritten()
            self._counted_at = steady()
        self._shortage = self._judge()

    def _judge(self) -> Shortage | None:
        limit = self._bytes_max
        if limit is None:
            return None
        where = "are left of what anonymous callers may have in it together"
        was_short = self._shortage is not None
        return judged(limit - self._bytes, limit, where, was_short=was_short, limit=limit)


def judged(
    free: int, whole: int, where: str, *, was_short: bool, limit: int | None = None
) -> Shortage | None:
    reserve = _reserve(whole, was_short=was_short)
    if free >= reserve:
        return None
    return Shortage(f"less than {reserve / MIB:.3g} MiB {where}", free < reserve // 2, limit)


def _reserve(whole: int, *, was_short: bool) -> int:
    """The bytes to keep free; a quarter more after a shortage, so that it does not flap."""
    reserve = min(RESERVE_BYTES, whole // RESERVE_PART)
    return reserve + reserve // 4 if was_short else reserve


def _pages(reader: sqlite3.Connection, name: str) -> int:
    [pages] = reader.execute(f"PRAGMA {name}").fetchone()
    [page_bytes] = reader.execute("PRAGMA page_size").fetchone()
    return int(pages * page_bytes)
