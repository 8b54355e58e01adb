"""Lines in the table `runs`: many a row, under the seq of the last of them."""

import sqlite3
from collections.abc import Iterator, Sequence

from streams.messages import Run


def stored(
    cursor: sqlite3.Cursor, stream: str, after: int, bytes_max: int, beyond: Sequence[Run]
) -> Iterator[Run]:
    """The runs of a stream that follow `after`: those of the table, then those of `beyond` that it
    does not have. Ends where one does not fit in `bytes_max`, which costs no look at its lines.
    """
    rows = cursor.execute(
        "SELECT rowid, last, count, length(body) FROM runs WHERE last > ? AND stream = "
        "(SELECT id FROM streams WHERE stream = ?) ORDER BY last",
        (after, stream),
    )
    last, bytes_left = after, bytes_max
    for rowid, row_last, count, size in rows:
        if last > after and size > bytes_left:
            return
        # A row's value is copied twice, into memory that is new each time: that takes five times as
        # long.
        with cursor.connection.blobopen("runs", "body", rowid, readonly=True) as body:
            run = Run(row_last - count + 1, count, body.read()).after(after)
        last, bytes_left = row_last, bytes_left - len(run.body)
        yield run
    for run in beyond:
        if run.last > last:
            yield run
