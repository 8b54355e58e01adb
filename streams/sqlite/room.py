"""How much room there is for a journal. The last of it is for ending what was begun: final
responses, and acks, which make room.
"""

import os
import sqlite3
from pathlib import Path
from typing import Final

from streams.journal import Shortage
from streams.limits import MIB

# What is kept for that: a commit may need it twice, in the WAL and in the file. Of a small disk a
# part.
RESERVE_BYTES: Final = 64 * MIB
RESERVE_PART: Final = 8


class Room:
    """Of a file, and on its disk."""

    def __init__(self, path: Path, file_bytes_max: int | None) -> None:
        self._path = path
        self._folder = path.parent
        self._file_bytes_max = file_bytes_max
        self._is_short = False

    def shortage(self, reader: sqlite3.Connection) -> Shortage | None:
        """See `Journal.shortage`; 10 µs while there is room."""
        shortage = self._on_disk(reader) or self._in_file(reader)
        self._is_short = shortage is not None
        return shortage

    def _on_disk(self, reader: sqlite3.Connection) -> Shortage | None:
        disk = os.statvfs(self._folder)
        free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free >= self._reserve(whole):
            return None
        return self._judged(free + self._unused(reader), whole, "are free on its disk")

    def _in_file(self, reader: sqlite3.Connection) -> Shortage | None:
        whole = self._file_bytes_max
        if whole is None:
            return None
        free = whole - _pages(reader, "page_count") + self._unused(reader)
        return self._judged(free, whole, "are left of what its file may take")

    def _judged(self, free: int, whole: int, where: str) -> Shortage | None:
        reserve = self._reserve(whole)
        if free >= reserve:
            return None
        return Shortage(f"less than {reserve / MIB:.3g} MiB {where}", free < reserve // 2)

    def _unused(self, reader: sqlite3.Connection) -> int:
        """Bytes within the file that are used before it grows."""
        return _pages(reader, "freelist_count")

    def _reserve(self, whole: int) -> int:
        """Who was short of room has enough with a little more: it would be short again at once."""
        reserve = min(RESERVE_BYTES, whole // RESERVE_PART)
        return reserve + reserve // 4 if self._is_short else reserve


def _pages(reader: sqlite3.Connection, name: str) -> int:
    [pages] = reader.execute(f"PRAGMA {name}").fetchone()
    [page_bytes] = reader.execute("PRAGMA page_size").fetchone()
    return int(pages * page_bytes)
