"""Serves a backend at a WebSocket and an HTTP address, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from streams.exchange import Admit
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.limits import Limits
from streams.server.backend import Backend
from streams.server.http.endpoint import HttpEndpoint
from streams.server.running import RunningServer, open_backend
from transports import http, websocket


@dataclass
class Served:
    """A backend that is served."""

    running: RunningServer
    ws_port: int
    http_port: int

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.ws_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/mcp"


@asynccontextmanager
async def backend_served(
    backend: Backend,
    journal: Journal | None = None,
    keyring: Keyring | None = None,
    *,
    admit: Admit | None = None,
    **how: Any,
) -> AsyncIterator[Served]:
    """Serve it for the length of a block, by default over a journal in memory."""
    limits = Limits()
    bytes_max = limits.message_bytes_max
    async with (
        open_backend(
            backend, journal or MemoryJournal(), keyring or Keyring.load(None), limits, **how
        ) as running,
        trio.open_nursery() as nursery,
    ):
        serve_ws = partial(websocket.serve, running.serve, message_bytes_max=bytes_max)
        serve_http = partial(
            http.serve, HttpEndpoint(running), body_bytes_max=bytes_max, admit=admit
        )
        ws_port = await nursery.start(partial(serve_ws, "127.0.0.1", 0, admit=admit))
        http_port = await nursery.start(partial(serve_http, "127.0.0.1", 0, admit=admit))
        yield Served(running, ws_port, http_port)
        nursery.cancel_scope.cancel()
