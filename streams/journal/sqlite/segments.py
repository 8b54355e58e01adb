"""Lines in the table `runs`: many a row, under the seq of the last of them."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from streams.journal.runs import joined
from streams.journal.sqlite.file import connect_to_read
from streams.messages import Run

# A connection keeps some bytes for each blob that it has opened, until it is closed
# (python/cpython#144424): here that is a MiB.
BLOBS_MAX: Final = 10_000


class Segments:
    """Reads them, one read at a time, over a connection of its own."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        """`check` raises where another file is at `path` by now."""
        self._path = path
        self._check = check
        self._connection = connect_to_read(path)
        self._blobs = 0  # that this connection has opened

    def close(self) -> None:
        self._connection.close()

    def read(self, stream: str, after: int, bytes_max: int, beyond: Sequence[Run]) -> Sequence[Run]:
        """The runs of a stream that follow `after`: those of the table, then those of `beyond` that
        it does not have. Ends where one does not fit in `bytes_max`, which costs no look at it.
        """
        if self._blobs >= BLOBS_MAX:
            self._renew()
        with closing(self._connection.cursor()) as cursor:
            # Closing the cursor half-way ends the read transaction.
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
        # Without the blob it would be copied twice, into memory that is new each time: that takes
        # five times as long.
        self._blobs += 1
        with self._connection.blobopen("runs", "body", rowid, readonly=True) as body:
            return body.read()

    def _renew(self) -> None:
        try:
            renewed = connect_to_read(self._path)
        except sqlite3.Error:
            return  # no descriptor is left, say: the old connection serves as well
        try:
            self._check()
        except BaseException:
            renewed.close()
            raise
        self._connection.close()
        self._connection, self._blobs = renewed, 0
