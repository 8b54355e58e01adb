"""Free space for a journal, and whether its files are still in place.

The last of the space is kept for final responses, so that calls can end, and for acks, which free
space.
"""

import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from streams.clock import steady, wall
from streams.errors import JournalUnusable
from streams.journal.contract import Shortage
from streams.journal.ownership import lock_path
from streams.journal.sqlite.checkpoints import WalIndex
from streams.limits import MIB
from streams.logs import log

# A folder may change twice within one tick of its modification time.
_TICK_NS: Final = 50_000_000


class Presence:
    """Checks that the journal's files are still the ones that were opened.

    A file that was removed or replaced still takes writes, which are then lost. The file, its WAL
    and its lock are looked at only when their folder has changed.
    """

    def __init__(self, path: Path) -> None:
        """Call it after a connection has written in WAL mode, which creates the WAL."""
        wal = path.with_name(f"{path.name}-wal")
        self._folder = os.fspath(path.parent)
        self._opened = {os.fspath(each): _identity(each) for each in (path, wal, lock_path(path))}
        self._changed_ns = -1  # the folder's modification time when all files were in place

    def check(self) -> None:
        """Raise `JournalUnusable` if a file was removed or replaced."""
        changed_ns = _changed_ns(self._folder)
        if changed_ns == self._changed_ns:
            return
        for path, opened in self._opened.items():
            if _identity(path) != opened:
                raise JournalUnusable(
                    f"{path} was removed or replaced while this server used it: put the file back "
                    "or restore a backup, make sure that no other server uses it, then start "
                    "again."
                )
        if wall() * 1e9 - changed_ns > _TICK_NS:
            self._changed_ns = changed_ns


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0  # no folder has this time, so the files are looked at


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# The space that is kept; a commit may need its size twice, in the WAL and in the file. On a small
# disk it is the eighth part.
RESERVE_BYTES: Final = 64 * MIB
RESERVE_PART: Final = 8
# The reserve of a disk smaller than this may be less than a commit needs. There the file may take
# three quarters at most, and the rest is for the WAL: if the WAL took the last byte, it could not
# be copied into the file, and the journal could free no space.
SMALL_DISK_BYTES: Final = RESERVE_BYTES * RESERVE_PART
WAL_PART: Final = 4
# A stream commits up to 2 MB at a time. A quarter of this disk holds that and its rows in tables.
DISK_BYTES_MIN: Final = 16 * MIB

# How often the rows of anonymous callers are counted at most, once they near their limit. A count
# delays a commit, with ten million streams by 4 s: so the next one waits ten times as long.
COUNT_S: Final = 1.0
COUNT_PART: Final = 10
_COUNT: Final = """
WITH theirs AS (
    SELECT id, length(origin) AS size FROM streams
    WHERE NOT (principal GLOB 'os(*' OR principal GLOB 'bearer(*')
)
SELECT (SELECT coalesce(sum(size), 0) FROM theirs)
    + (SELECT coalesce(sum(length(body)), 0) FROM runs WHERE stream IN (SELECT id FROM theirs))
"""


def small_disk(path: Path) -> int | None:
    """The size of the disk that `path` is on, if it is a small one; else None.

    Raises `JournalUnusable` if it is too small for a journal.
    """
    disk = os.statvfs(path.parent)
    whole = disk.f_blocks * disk.f_frsize
    if 0 < whole < DISK_BYTES_MIN:  # 0: the file system does not say
        raise JournalUnusable(
            f"{path}: its disk has {whole / MIB:.3g} MiB in all, and a journal needs at least "
            f"{DISK_BYTES_MIN // MIB} MiB: name a file on a larger disk."
        )
    return whole if 0 < whole < SMALL_DISK_BYTES else None


def file_part(disk_bytes: int) -> int:
    """The largest file on a small disk."""
    return disk_bytes - disk_bytes // WAL_PART


# Where there is room nothing is looked at again for so long: the reserve is not used up in it.
ROOM_S: Final = 0.01


class Room:
    """The free space within the file's limit and on its disk."""

    def __init__(
        self,
        path: Path,
        index: WalIndex,
        file_bytes_max: int | None,
        limit: int | None,
        disk_bytes: int | None,
    ) -> None:
        """`file_bytes_max` follows from the setting `limit`; on a small disk, whose size is
        `disk_bytes`, the file may take less.
        """
        self._folder = path.parent
        self._index = index
        self.file_bytes_max = file_bytes_max
        self._limit = limit
        self._where = "are left of what its file may take"
        if disk_bytes is not None and file_part(disk_bytes) < (file_bytes_max or math.inf):
            self.file_bytes_max, self._limit = file_part(disk_bytes), None
            self._where += f" of a disk of {disk_bytes / MIB:.3g} MiB"
        self._is_short = False
        self._look_again_at = -math.inf

    def shortage(self, reader: sqlite3.Connection) -> Shortage | None:
        """See `Journal.shortage`. It takes 1 µs while there is room.

        It runs no SQL then: that takes three times as long, and longer still while another thread
        commits.
        """
        if (now := steady()) < self._look_again_at:
            return None
        shortage = self._on_disk(reader) or self._in_file(reader)
        self._is_short = shortage is not None
        if shortage is None:
            self._look_again_at = now + ROOM_S
        return shortage

    def _on_disk(self, reader: sqlite3.Connection) -> Shortage | None:
        disk = os.statvfs(self._folder)
        free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free >= _reserve(whole, was_short=self._is_short):
            return None
        free += self._unused(reader)
        return shortage_of(free, whole, "are free on its disk", was_short=self._is_short)

    def _in_file(self, reader: sqlite3.Connection) -> Shortage | None:
        whole = self.file_bytes_max
        if whole is None:
            return None
        free = whole - (self._index.database_bytes() or _pages(reader, "page_count"))
        if free >= _reserve(whole, was_short=self._is_short):
            return None
        free += self._unused(reader)
        found = shortage_of(free, whole, self._where, was_short=self._is_short, limit=self._limit)
        if found is None or self._limit is None:
            return found
        return msgspec.structs.replace(found, used=whole - free)

    def _unused(self, reader: sqlite3.Connection) -> int:
        """Bytes of free pages within the file."""
        return _pages(reader, "freelist_count")


class Share:
    """The bytes of all anonymous callers' streams in the journal: messages and requests.

    The count grows with each commit, but not back with deletions, so it is never too low. Once it
    nears the limit, the rows are counted, at most once in `COUNT_S`. Only the writer's thread may
    use it, except for `shortage`.
    """

    def __init__(self, bytes_max: int, writer: sqlite3.Connection) -> None:
        self._bytes_max = bytes_max
        self._writer = writer
        used = _pages(writer, "page_count") - _pages(writer, "freelist_count")
        self._bytes = used  # an upper bound until the rows are counted
        self._next_count_at = -math.inf
        self.shortage: Shortage | None = None  # see `Journal.anonymous_shortage`
        self._is_near = self._judge() is not None  # whether the count nears the limit

    @property
    def is_due(self) -> bool:
        """Whether the next commit will count the rows, which takes a while."""
        return self._is_near and steady() >= self._next_count_at

    def recount(self, unwritten: Callable[[], int]) -> None:
        """Before a commit: count the rows if that is due. `unwritten` gives the bytes in no row.

        If the rows cannot be counted, the former count stays, which is not too low. The commit that
        follows will report what is wrong with the file.
        """
        if not self.is_due:
            return
        began_at = steady()
        try:
            [rows] = self._writer.execute(_COUNT).fetchone()
        except sqlite3.Error as error:
            log.warning("the bytes of anonymous callers cannot be counted", why=str(error))
        else:
            self._bytes = rows + unwritten()
            self._is_near = self._judge() is not None
        now = steady()
        self._next_count_at = now + max(COUNT_S, COUNT_PART * (now - began_at))

    def add(self, added: int) -> None:
        """After a commit: add the bytes that it has added."""
        self._bytes += added
        self.shortage = self._judge()
        self._is_near = self.shortage is not None

    def _judge(self) -> Shortage | None:
        limit = self._bytes_max
        where = "are left of what anonymous callers may have in it together"
        was_short = self.shortage is not None
        return shortage_of(limit - self._bytes, limit, where, was_short=was_short, limit=limit)


def shortage_of(
    free: int, whole: int, where: str, *, was_short: bool, limit: int | None = None
) -> Shortage | None:
    reserve = _reserve(whole, was_short=was_short)
    if free >= reserve:
        return None
    return Shortage(f"less than {reserve / MIB:.3g} MiB {where}", free < reserve // 2, limit)


def _reserve(whole: int, *, was_short: bool) -> int:
    """The bytes to keep free; a quarter more after a shortage, so that its state does not flap."""
    reserve = min(RESERVE_BYTES, whole // RESERVE_PART)
    return reserve + reserve // 4 if was_short else reserve


def _pages(reader: sqlite3.Connection, name: str) -> int:
    [pages] = reader.execute(f"PRAGMA {name}").fetchone()
    [page_bytes] = reader.execute("PRAGMA page_size").fetchone()
    return int(pages * page_bytes)
