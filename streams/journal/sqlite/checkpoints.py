"""The WAL is kept short while a server writes without a pause.

SQLite starts the WAL over when a commit begins and all of it has been copied into the file. Its own
automatic checkpoints make a commit wait for that, and while there are commits all the time it is
never all. So a thread copies what is there, a little at a time: small fsyncs hold up the commits
least. Once the WAL is half as long as it may be, the next commit that finds little left to copy
does that itself; it takes about as long as a commit does. Only where the disk is slower than who
writes does one wait.

While another program reads in one long transaction nothing can be copied beyond what it sees, and
the WAL grows until it is done.
"""

import mmap
import os
import sqlite3
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

_PASSES: Final = 64  # what is copied at a time is this part of what the WAL may hold, at least
_RESTS: Final = 32  # and what a commit may copy itself
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
    """How long the WAL is, how much of it is in the file already, and how large the database is.

    The index is mapped into memory, as SQLite does it. A system call would let go of the
    interpreter's lock, and while another thread commits, to get it back takes 20 µs.

    To be closed after the connections of this process: POSIX drops all locks of a process on a
    file when it closes any descriptor of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-shm")
        self._fd = -1
        self._header: mmap.mmap | None = None

    def open(self) -> None:
        """To be called once a connection has read in WAL mode, which makes the file."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._header = mmap.mmap(self._fd, _INDEX_BYTES, prot=mmap.PROT_READ)

    def frames(self) -> tuple[int, int]:
        """How many pages the WAL has, and how many of them the file has."""
        assert self._header is not None
        [written] = struct.unpack_from("=I", self._header, _MX_FRAME_AT)
        [copied] = struct.unpack_from("=I", self._header, _BACKFILL_AT)
        return written, copied

    def database_bytes(self) -> int:
        """The size of the database as of the last commit, be it in the file or in the WAL.

        0 while there was no commit since the WAL was made: only the file has its size then.
        """
        assert self._header is not None
        [coded] = struct.unpack_from("=H", self._header, _SZ_PAGE_AT)
        [pages] = struct.unpack_from("=I", self._header, _N_PAGE_AT)
        page_bytes = 65_536 if coded == 1 else coded  # which two bytes cannot hold
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

    @property
    def are_due(self) -> bool:
        """Whether the next commit may have to copy something itself."""
        written, _ = self._index.frames()
        return self._is_past_half(written)

    def make_room(self, needed: int) -> None:
        """Before a commit, on the writer's thread; it adds `needed` bytes at most."""
        written, copied = self._index.frames()
        if written == copied:
            return  # it starts over by itself
        size = _HEADER_BYTES + written * self._frame_bytes
        rest = (written - copied) * self._frame_bytes
        is_half = self._is_past_half(written)
        if is_half and rest <= self._bytes_max // _RESTS and self._copying.acquire(blocking=False):
            try:
                self._copy(self._writer)
            finally:
                self._copying.release()
        elif size + needed > self._bytes_max:
            with self._copying:
                self._copy(self._writer)

    def _is_past_half(self, written: int) -> bool:
        return written * self._frame_bytes > self._bytes_max // 2

    def committed(self) -> None:
        """After a commit, on the writer's thread."""
        if self._has_enough():
            self._wanted.set()

    def empty(self) -> None:
        """Give what the WAL takes of the disk back, as far as that can be had now."""
        with (
            self._copying,
            suppress(sqlite3.Error),
        ):  # a commit will find what is wrong, if it lasts
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Wait for what is being copied, and copy no more."""
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
            # A disk that is full or fails is found by a commit as well: at the latest by the one
            # that must copy before it can go on.
            with self._copying, suppress(sqlite3.Error):
                self._copy(self._copier)
            if self._has_enough() and not self._is_held:
                self._wanted.set()

    def _copy(self, connection: sqlite3.Connection) -> None:
        seen, _ = self._index.frames()
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        _, copied = self._index.frames()
        self._is_held = copied < seen
