"""A remote server as a backend, in this process or as a child that a test kills.

As a child: `python -m tests.rigs.remote URL JOURNAL HELLO [RERUN…]` serves the backend over a
WebSocket, and prints its port.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from streams import Server
from streams.backends.remote import RemoteBackend, RemoteSettings
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.journal.ownership import key_path
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring
from streams.server.http.endpoint import HttpEndpoint
from streams.server.running import RunningServer, open_backend
from transports import dial, http, websocket

GIVE_UP_S = 3600.0


def settings(url: str, *, token: str | None = None, **given: Any) -> RemoteSettings:
    dialer = dial(url, token=token, outlast_s=given.get("give_up_s", GIVE_UP_S))
    return RemoteSettings(url=url, dial=dialer, **({"give_up_s": GIVE_UP_S} | given))


@asynccontextmanager
async def attached(
    url: str, *, journal: Journal | None = None, **given: Any
) -> AsyncIterator[RunningServer]:
    """A backend for `url`, over a journal in memory."""
    remote = RemoteBackend(settings(url, **given))
    async with open_backend(remote, journal or MemoryJournal(), Keyring.load(None)) as running:
        yield running


@asynccontextmanager
async def served(server: Server, scheme: str, port: int = 0) -> AsyncIterator[int]:
    """A server of ours at a port of this machine."""
    async with (
        server.open(MemoryJournal(), Keyring.load(None)) as running,
        trio.open_nursery() as nursery,
    ):
        if scheme == "ws":
            serve: Any = partial(websocket.serve, running.serve, "127.0.0.1", port)
        else:
            serve = partial(http.serve, HttpEndpoint(running), "127.0.0.1", port)
        yield await nursery.start(serve)
        nursery.cancel_scope.cancel()


async def main(url: str, journal: str, hello: str, *rerun: str) -> None:
    """Serve until the process is ended."""
    path = Path(journal)
    async with open_sqlite_journal(path) as kept:
        remote = RemoteBackend(settings(url, rerun=rerun, hello_path=Path(hello)))
        async with (
            open_backend(remote, kept, Keyring.load(key_path(path))) as running,
            trio.open_nursery() as nursery,
        ):
            port = await nursery.start(partial(websocket.serve, running.serve, "127.0.0.1", 0))
            print(port, flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
