"""Checkpoints, which keep the WAL short while a server writes without a pause.

SQLite starts the WAL over when a commit begins and the whole WAL has been copied into the file. Its
own automatic checkpoints make a commit wait, and with commits all the time they never copy all of
it. So a thread copies the WAL in small pieces, because small fsyncs delay commits least. Once the
WAL has half of its maximum length, the next commit that finds little left to copy copies that
itself, which takes about as long as a commit. A commit waits longer only if the disk is too slow.

While another program reads in a long transaction, later pages than it sees cannot be copied, and
the WAL grows until that transaction ends.
"""

import mmap
import os
import sqlite3
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

_PASSES: Final = 64  # the thread copies at least this part of the WAL's maximum at a time
_RESTS: Final = 32  # a commit itself copies at most this part
_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
# The WAL-index header in the -shm file, https://www.sqlite.org/walformat.html: szPage, mxFrame,
# nPage and nBackfill.
_SZ_PAGE_AT: Final = 14
_MX_FRAME_AT: Final = 16
_N_PAGE_AT: Final = 20
_BACKFILL_AT: Final = 96
_INDEX_BYTES: Final = 100


class WalIndex:
    """The length of the WAL, how much of it has been copied, and the size of the database.

    The index is mapped into memory, as SQLite does it. A system call would release the
    interpreter's lock, and getting it back takes 20 µs while another thread commits.

    Close it after the connections of this process: POSIX drops all locks of a process on a file
    when the process closes any descriptor of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-shm")
        self._fd = -1
        self._header: mmap.mmap | None = None

    def open(self) -> None:
        """Call it after a connection has read in WAL mode, which creates the file."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._header = mmap.mmap(self._fd, _INDEX_BYTES, prot=mmap.PROT_READ)

    def frames(self) -> tuple[int, int]:
        """The number of pages in the WAL, and how many of them have been copied to the file."""
        assert self._header is not None
        [written] = struct.unpack_from("=I", self._header, _MX_FRAME_AT)
        [copied] = struct.unpack_from("=I", self._header, _BACKFILL_AT)
        return written, copied

    def database_bytes(self) -> int:
        """The size of the database after the last commit, whether in the file or in the WAL.

        0 before the first commit since the WAL was created; then only the file tells its size.
        """
        assert self._header is not None
        [coded] = struct.unpack_from("=H", self._header, _SZ_PAGE_AT)
        [pages] = struct.unpack_from("=I", self._header, _N_PAGE_AT)
        page_bytes = 65_536 if coded == 1 else coded  # 65,536 does not fit in two bytes
        return int(pages * page_bytes)

    def close(self) -> None:
        if self._header is not None:
            self._header.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Checkpoints:
    """Copies the WAL into the file, in a thread of its own and in the writer's."""

    def __init__(
        self,
        writer: sqlite3.Connection,
        copier: sqlite3.Connection,
        index: WalIndex,
        bytes_max: int,
    ) -> None:
        self._writer = writer
        self._copier = copier
        self._index = index
        self._bytes_max = bytes_max
        [page_bytes] = writer.execute("PRAGMA page_size").fetchone()
        self._frame_bytes: int = page_bytes + _FRAME_HEADER_BYTES
        self._copying = threading.Lock()
        self._wanted = threading.Event()
        self._is_held = False  # by another program's transaction
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="mcp-streams WAL", daemon=True)
        self._thread.start()

    def are_due(self, needed: int) -> bool:
        """Whether a commit of at most `needed` bytes may have to copy something itself."""
        written, copied = self._index.frames()
        if written == copied:
            return False  # SQLite starts the WAL over
        return self._is_past_half(written) or self._size(written) + needed > self._bytes_max

    def starts_anew(self) -> bool:
        """Whether the next commit starts the WAL over, whose new header is always synced."""
        written, copied = self._index.frames()
        return written == copied > 0

    def make_room(self, needed: int) -> None:
        """Call it before a commit of at most `needed` bytes, on the writer's thread."""
        if not self.are_due(needed):
            return
        written, copied = self._index.frames()
        rest = (written - copied) * self._frame_bytes
        is_half = self._is_past_half(written)
        if is_half and rest <= self._bytes_max // _RESTS and self._copying.acquire(blocking=False):
            try:
                self._copy(self._writer)
            finally:
                self._copying.release()
        elif self._size(written) + needed > self._bytes_max:
            with self._copying:
                self._copy(self._writer)

    def _size(self, written: int) -> int:
        """The bytes of a WAL of so many pages."""
        return _HEADER_BYTES + written * self._frame_bytes

    def _is_past_half(self, written: int) -> bool:
        return written * self._frame_bytes > self._bytes_max // 2

    def committed(self) -> None:
        """Call it after a commit, on the writer's thread."""
        if self._has_enough():
            self._wanted.set()

    def empty(self) -> None:
        """Free the disk space of the WAL, as far as possible now."""
        with (
            self._copying,
            suppress(sqlite3.Error),
        ):  # if the error lasts, the next commit reports it
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Stop copying, after the copy that is under way."""
        self._is_closed = True
        self._wanted.set()
        self._thread.join()

    def _has_enough(self) -> bool:
        written, copied = self._index.frames()
        return (written - copied) * self._frame_bytes >= self._bytes_max // _PASSES

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_closed:
                return
            # A commit reports a disk that is full or fails: at the latest the one that must itself
            # copy before it can be made.
            with self._copying, suppress(sqlite3.Error):
                self._copy(self._copier)
            if self._has_enough() and not self._is_held:
                self._wanted.set()

    def _copy(self, connection: sqlite3.Connection) -> None:
        seen, _ = self._index.frames()
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        _, copied = self._index.frames()
        self._is_held = copied < seen
