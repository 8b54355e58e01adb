"""The official Python SDK's server with an event store in SQLite, as its user would write one.

    python -m benchmarks.peers.python_sdk_server PORT [FILE]

Without a file the events stay in memory.
"""

import sqlite3
import sys
from typing import Final

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage, jsonrpc_message_adapter

from benchmarks.stock import MemoryStore, server

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS event (id INTEGER PRIMARY KEY, stream TEXT NOT NULL, message TEXT);
CREATE INDEX IF NOT EXISTS event_of_stream ON event (stream, id);
"""


class SqliteStore(EventStore):
    """A row for each event, on disk before it is sent."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        text = message and message.model_dump_json(by_alias=True, exclude_none=True)
        added = self._db.execute(
            "INSERT INTO event (stream, message) VALUES (?, ?)", (stream_id, text)
        )
        return str(added.lastrowid)

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        found = self._db.execute("SELECT stream FROM event WHERE id = ?", (last_event_id,))
        row = found.fetchone()
        if row is None:
            return None
        events = self._db.execute(
            "SELECT id, message FROM event WHERE stream = ? AND id > ? AND message IS NOT NULL "
            "ORDER BY id",
            (row[0], last_event_id),
        )
        for event_id, text in events:
            message = jsonrpc_message_adapter.validate_json(text)
            await send_callback(EventMessage(message, str(event_id)))
        return str(row[0])


if __name__ == "__main__":
    store = SqliteStore(sys.argv[2]) if sys.argv[2:] else MemoryStore()
    app = server.streamable_http_app(event_store=store)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        access_log=False,
        timeout_graceful_shutdown=1,
    )
