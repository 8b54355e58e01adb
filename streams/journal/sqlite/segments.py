"""Segments: rows of the table `runs`, with many lines under the seq of the last one.

Those that were written not long ago are read from memory instead (`streams.journal.newest`).
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from streams.journal.runs import joined, keep_freed_memory
from streams.journal.sqlite.file import connect_to_read
from streams.messages import Run

# A connection leaks some bytes for each blob that it opens, until it is closed
# (python/cpython#144424). This many make one MiB.
BLOBS_MAX: Final = 10_000
# Each segment passes once through SQLite's cache. A larger one takes room in the processor's, and
# half of it would be too small for the indexes.
CACHE_BYTES: Final = 256 * 1024


class Segments:
    """Reads segments, one read at a time, over a connection of its own."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        """`check` raises if another file is at `path` by now."""
        self._path = path
        self._check = check
        self._connection = connect_to_read(path, cache_bytes=CACHE_BYTES)
        self._blobs = 0  # that this connection has opened
        keep_freed_memory()

    def close(self) -> None:
        self._connection.close()

    def read(self, stream: str, after: int, bytes_max: int, beyond: Sequence[Run]) -> Sequence[Run]:
        """The runs of a stream after `after`: those of the table, then those of `beyond` that the
        table does not have. It stops before a run that does not fit in `bytes_max`, without reading
        it.
        """
        if self._blobs >= BLOBS_MAX:
            self._renew()
        with closing(self._connection.cursor()) as cursor:
            # Closing the cursor ends the read transaction, even if rows are left.
            return joined(self._stored(cursor, stream, after, bytes_max, beyond), after, bytes_max)

    def _stored(
        self,
        cursor: sqlite3.Cursor,
        stream: str,
        after: int,
        bytes_max: int,
        beyond: Sequence[Run],
    ) -> Iterator[Run]:
        rows = cursor.execute(
            "SELECT rowid, last, count, length(body) FROM runs WHERE last > ? AND stream = "
            "(SELECT id FROM streams WHERE stream = ?) ORDER BY last",
            (after, stream),
        )
        last, bytes_left = after, bytes_max
        for rowid, row_last, count, size in rows:
            if last > after and size > bytes_left:
                return
            run = Run(row_last - count + 1, count, self._body(rowid)).after(after)
            last, bytes_left = row_last, bytes_left - len(run.body)
            yield run
        for run in beyond:
            if run.last > last:
                yield run

    def _body(self, rowid: int) -> bytes:
        # SELECT would copy the body twice into new memory, which takes five times as long.
        self._blobs += 1
        with self._connection.blobopen("runs", "body", rowid, readonly=True) as body:
            return body.read()

    def _renew(self) -> None:
        try:
            renewed = connect_to_read(self._path, cache_bytes=CACHE_BYTES)
        except sqlite3.Error:
            return  # for example no descriptor is left: the old connection still works
        try:
            self._check()
        except BaseException:
            renewed.close()
            raise
        self._connection.close()
        self._connection, self._blobs = renewed, 0
