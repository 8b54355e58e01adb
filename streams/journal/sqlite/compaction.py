"""Returning the disk space of deleted messages to the file system, while the server runs.

SQLite moves pages from the end of the file into unused ones, and cuts the file, if the file was
made for that (`auto_vacuum`). Each new page costs more then, so it is an option. It is done in
small steps between commits, and a commit waits for one step at most.

Some unused pages stay, because the next commits use them.
"""

import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from streams.limits import MIB

_INCREMENTAL: Final = 2  # `auto_vacuum` of a file that can be compacted in steps

LOOK_EVERY_S: Final = 1.0
# It begins with so many unused bytes that are also a quarter of the file, and ends at the same
# number of bytes that are an eighth of it.
SPARE_BYTES: Final = 4 * MIB
BEGIN_PART: Final = 4
END_PART: Final = 8
STEP_BYTES: Final = 256 * 1024  # takes about a millisecond, and an fsync
REST_TIMES: Final = 4  # it takes a fifth of the time of the thread that commits, at most
REST_MIN_S: Final = 0.005


async def compact(
    measure: Callable[[], tuple[int, int]], shrink: Callable[[int], Awaitable[object]]
) -> None:
    """Keep the file compact, for ever.

    `measure` returns the bytes of the file, and how many of them are unused; `shrink` returns so
    many unused bytes to the file system.
    """
    while True:
        await trio.sleep(LOOK_EVERY_S)
        size, unused = measure()
        if unused < max(SPARE_BYTES, size // BEGIN_PART):
            continue
        while unused > max(SPARE_BYTES, size // END_PART):
            began_at = trio.current_time()
            await shrink(STEP_BYTES)
            await trio.sleep(max(REST_MIN_S, REST_TIMES * (trio.current_time() - began_at)))
            size, unused = measure()


def prepare(connection: sqlite3.Connection) -> None:
    """Make a file one that can be compacted in steps. An empty file must have no table yet.

    Another file is written anew, which takes as long as a copy of its messages.
    """
    if connection.execute("PRAGMA auto_vacuum").fetchone()[0] == _INCREMENTAL:
        return
    connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        connection.execute("VACUUM")


def cut(connection: sqlite3.Connection, bytes_max: int) -> None:
    """Move pages from the end of the file into unused ones, and cut the file."""
    [page_bytes] = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA incremental_vacuum({bytes_max // page_bytes})").fetchall()
