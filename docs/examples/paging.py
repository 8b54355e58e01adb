"""Paging: a table of 100,000 rows, a thousand on a page, and a token between the pages.

The tool is a plain generator over a cursor of SQLite. It waits between two pages until a client
asks for the next one. The reader stops half-way and keeps the page token. Another client, which may
be another program on another day, continues behind the last row.

    $ python paging.py fill
    $ mcp-streams serve paging.py:server --http 127.0.0.1:8080 --journal paging.db &
    $ python paging.py read http://127.0.0.1:8080/mcp
    50000 rows, then 50000 more: each of 1 to 100000 once, in order.
"""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import trio

from streams import Client, Server
from transports import dial

DATABASE = "readings.db"
ROWS = 100_000
QUERY = {"celsius_min": -40.0}

server = Server("readings")


@server.tool(pages=True)
def readings(celsius_min: float) -> Iterator[dict[str, Any]]:
    """Read the table, the oldest row first."""
    with closing(sqlite3.connect(DATABASE)) as db:
        cursor = db.execute(
            "SELECT id, celsius FROM readings WHERE celsius >= ? ORDER BY id", [celsius_min]
        )
        for rows in iter(lambda: cursor.fetchmany(1_000), []):
            yield {"rows": rows}


async def read(
    url: str, *, token: str | None = None, rows_max: int = ROWS
) -> tuple[list[int], str | None]:
    """Read up to `rows_max` rows from `token` on; returns their ids and the next page token."""
    ids: list[int] = []
    async with Client(dial(url)) as client:
        pages = client.pages("readings", QUERY, token=token)
        async for page in pages:
            ids += [row[0] for row in page["structuredContent"]["rows"]]
            if len(ids) >= rows_max:
                break
    return ids, pages.token


async def main(url: str) -> None:
    """Read one half, disconnect, and come back for the other half."""
    first, token = await read(url, rows_max=ROWS // 2)
    second, _ = await read(url, token=token)
    assert first + second == list(range(1, ROWS + 1))
    print(f"{len(first)} rows, then {len(second)} more: each of 1 to {ROWS} once, in order.")


def fill() -> None:
    """Make the table."""
    with closing(sqlite3.connect(DATABASE)) as db, db:
        db.execute("CREATE TABLE readings (id INTEGER PRIMARY KEY, celsius REAL)")
        db.executemany(
            "INSERT INTO readings (celsius) VALUES (?)",
            ((number % 500 / 10 - 20,) for number in range(ROWS)),
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["read", url]:
            trio.run(main, url)
        case _:
            fill()
