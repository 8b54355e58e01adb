"""A server in the process of its client, for tests: no socket, no file, no port.

Messages take the same way as between two processes: they are encoded, journaled in memory, sent
over a pipe of limited size, and read by the client. `cut` loses what is in flight.
"""

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

import trio

from streams.exchange import Channel
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring


class Running(Protocol):
    """A server that runs: `streams.server.server.RunningServer`."""

    async def serve(self, channel: Channel) -> None:
        """Serve one connection until it ends."""


class Openable(Protocol):
    """A server that can be opened: `streams.Server`."""

    def open(self, journal: Journal, keyring: Keyring) -> AbstractAsyncContextManager[Running]:
        """Run the server for the length of a block."""


class InProcess:
    """Serves one client. A server that was opened by `enter` is shut down by `leave`."""

    def __init__(self, server: Openable | Running) -> None:
        # Imported here (PLC0415): no other client needs this transport.
        from transports.memory import MemoryServer  # noqa: PLC0415

        self._server = server
        self._opened = AsyncExitStack()
        self._running: Running
        self._memory = MemoryServer()
        self.connect = self._memory.connect

    async def enter(self) -> None:
        """Open the server. Raises what it raises."""
        if hasattr(self._server, "open"):
            opened = self._server.open(MemoryJournal(), Keyring.load(None))
            self._running = await self._opened.enter_async_context(opened)
        else:
            self._running = self._server

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve connections until cancelled."""
        await self._memory.serve(self._running.serve, task_status=task_status)

    def cut(self) -> None:
        """Cut the connection: what is in flight is lost."""
        for cable in list(self._memory.cables):
            cable.cut()

    async def leave(self) -> None:
        """Shut the server down, within 4 s."""
        await self._opened.aclose()


def is_server(given: object) -> bool:
    """Whether this is a server and no `Dialer`."""
    return not callable(given) and (hasattr(given, "open") or hasattr(given, "serve"))
