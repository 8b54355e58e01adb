"""Ways from a client to a real server process that a test can cut: each is a `Dialer`."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from streams.exchange import Channel
from streams.journal.ownership import owner_of
from tests.acceptance.launch import LINGER, wait_for_end
from tests.rigs.proxy import Proxy
from tests.wire.process import CLI, ServerProcess
from transports import dial, stdio

APP: Final = f"{Path(__file__).with_name('client_server.py')}:server"
NARROW: Final = APP.replace(":server", ":narrow")
KINDS: Final = ("stdio", "ws", "http")
PATIENCE_S: Final = 100.0  # a bound for a test that hangs


class Way(Protocol):
    """A client's way to the server."""

    connections: int  # connections so far

    def __call__(self) -> AbstractAsyncContextManager[Channel]:
        """Connect."""

    def cut(self) -> None:
        """Cut every open connection."""


class RelayWay:
    """stdio: a relay as a child process, which a cut kills."""

    def __init__(self, app: str, journal: Path) -> None:
        self._command = [*CLI, "serve", app, "--stdio", "--journal", str(journal), *LINGER]
        self._pid: int | None = None
        self.connections = 0

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Channel]:
        async with stdio.connect(self._command) as channel:
            self.connections += 1
            self._pid = int(channel.principal.removeprefix("child(").removesuffix(")"))
            try:
                yield channel
            finally:
                self._pid = None

    def cut(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)


class ProxyWay:
    """TCP, with a proxy on it."""

    def __init__(self, proxy: Proxy, scheme: str) -> None:
        self._dialer = dial(f"{scheme}://127.0.0.1:{proxy.port}")
        self._proxy = proxy
        self.connections = 0

    def __call__(self) -> AbstractAsyncContextManager[Channel]:
        self.connections += 1
        return self._dialer()

    def cut(self) -> None:
        self._proxy.cut()

    async def cut_after(self, count: int) -> None:
        """Cut after so many more bytes from the server; later bytes pass."""
        await self._proxy.cut_after(count)


class Served(Protocol):
    """A server that serves a journal."""

    app: str
    journal: Path
    ports: dict[str, int]

    def restart(self) -> None:
        """Kill it.

        It serves the same journal again, at once or when the next client comes.
        """


class Listening:
    """A server that the test has started, reachable over every transport."""

    def __init__(self, process: ServerProcess, app: str) -> None:
        self.app = app
        self.journal = process.journal
        self.ports = {"ws": process.port, "http": process.http_port}
        self.restart: Callable[[], None] = process.restart


class Owned:
    """A server that the first relay starts, as with the hosts of stdio servers."""

    def __init__(self, folder: Path, app: str) -> None:
        self.app = app
        self.journal = folder / "journal.db"
        self.ports: dict[str, int] = {}

    def restart(self) -> None:
        """Kill the owner; the next relay starts another one, which may take a while."""
        deadline = time.monotonic() + PATIENCE_S
        while (pid := owner_of(self.journal)) is None:
            assert time.monotonic() < deadline, "no relay has started an owner"
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)


@asynccontextmanager
async def way_to(served: Served, kind: str, *, within_s: float = PATIENCE_S) -> AsyncIterator[Way]:
    """A way of this kind to the server."""
    if kind == "stdio":
        with trio.fail_after(within_s):
            yield RelayWay(served.app, served.journal)
        return
    async with way_to_port(served, kind, within_s=within_s) as way:
        yield way


@asynccontextmanager
async def way_to_port(
    served: Served, kind: str, *, within_s: float = PATIENCE_S
) -> AsyncIterator[ProxyWay]:
    """A way to the server's port of this kind."""
    proxy = Proxy(served.ports[kind])
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.serve)
            yield ProxyWay(proxy, kind)
            nursery.cancel_scope.cancel()
