"""A journal of idle streams, as a server leaves it once its clients have left; written quickly.

The journal itself writes one stream, through its own interface. The rows of all others are copies
of its rows, with ids and names of their own. So this module knows no column but the ids and names.
Rows are appended in the order of their keys, without a rollback journal and without indexes, which
are made at the end: ten million streams take two to three minutes. Through the interface, with each
at a random place of two indexes, they would take more than ten.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import trio

from streams.journal.ownership import key_path
from streams.journal.records import Append, Change, Create, Evict, Outcome, Record
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring, new_stream_id
from streams.messages import Run

MESSAGE_BYTES: Final = 200
PRINCIPAL: Final = f"os({os.getuid()})"
MAX_S: Final = 86_400.0
BEGUN_PER_S: Final = 500  # streams: their ids tell when they began
_CACHE_BYTES: Final = 256 * 1024 * 1024
# The tables with rows of each stream, and the column that has its id.
_TABLES: Final = {"streams": "id", "progress": "id", "runs": "stream", "rests": "id"}
_LINE: Final = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n'
_ORIGIN: Final = (
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call",'
    b'"params":{"name":"fill","arguments":{"count":10,"size":200}}}'
)


def write(path: Path, streams: int, each: int, *, principal: str = PRINCIPAL) -> None:
    """Write a journal of so many idle streams with `each` messages. Stream 1 is numbered 1."""
    keyring = Keyring.load(key_path(path))
    trio.run(_write_one, path, each, principal, keyring)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for setting in ("journal_mode = DELETE", "journal_mode = OFF", "synchronous = OFF"):
            db.execute(f"PRAGMA {setting}").fetchone()
        db.execute(f"PRAGMA cache_size = {-_CACHE_BYTES // 1024}")
        db.execute("BEGIN")
        _copy(db, streams, keyring)
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL").fetchone()
    with path.open("rb+") as file:
        os.fsync(file)  # else the system would write while a server is measured


async def _write_one(path: Path, each: int, principal: str, keyring: Keyring) -> None:
    now = time.time()
    stream = new_stream_id(now)
    record = Record(stream, principal, _ORIGIN, 0.0, MAX_S, now, 1, True, number=1)
    line = _LINE % (b"x" * (MESSAGE_BYTES - len(_LINE) + 2))
    changes: list[Change] = [
        Create(record),
        Append(stream, 1, Run(1, each, line * each), 0, 0, Outcome.COMPLETED, now),
        Evict(stream, 1, now + MAX_S, False, tuple(keyring.names(stream))),
    ]
    async with open_sqlite_journal(path, durability="process") as journal:
        if any(await journal.commit(changes)):
            raise ValueError("the journal refused a stream")


def _copy(db: sqlite3.Connection, streams: int, keyring: Keyring) -> None:
    indexes = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    made = db.execute(indexes).fetchall()
    for name, _ in made:
        db.execute(f"DROP INDEX {name}")
    db.execute("CREATE TEMP TABLE copies (id INTEGER PRIMARY KEY, stream TEXT, name BLOB)")
    db.executemany("INSERT INTO copies VALUES (?, ?, ?)", _copies(streams, keyring))
    for table, id_column in _TABLES.items():
        cursor = db.execute(f"SELECT * FROM {table} WHERE {id_column} = 1")  # nosec B608 # ours
        columns = [column[0] for column in cursor.description]
        [row] = cursor.fetchall()
        own = {id_column: "id"} | ({"stream": "stream"} if table == "streams" else {})
        values = ", ".join(own.get(each, "?") for each in columns)
        given = [value for each, value in zip(columns, row, strict=True) if each not in own]
        db.execute(f"INSERT INTO {table} SELECT {values} FROM copies ORDER BY id", given)  # nosec B608 # ours
    db.execute("INSERT INTO names (name, stream) SELECT name, id FROM copies ORDER BY name")
    for _, sql in made:
        db.execute(sql)


def _copies(streams: int, keyring: Keyring) -> Iterator[tuple[int, str, bytes]]:
    began_at = time.time() - streams / BEGUN_PER_S
    for number in range(2, streams + 1):
        stream = new_stream_id(began_at + number / BEGUN_PER_S)
        [name] = keyring.names(stream)
        yield number, stream, name
