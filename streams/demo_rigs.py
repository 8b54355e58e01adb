"""The demo's servers, as real child processes, and the cables to them, which can be cut."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from streams.messages import ClientChannel
from streams.ownership import lock_path, socket_path
from transports import dial, stdio

APP: Final = f"{Path(__file__).with_name('demo_server.py')}:server"


STOP_S: Final = 10.0  # an owner ends within 4 s


class Rig(Protocol):
    """A server and the cable to it."""

    def dialer(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Open a new connection."""

    async def start(self) -> None:
        """Start the server, or start it again."""

    def cut(self) -> None:
        """Cut every connection, without a word."""

    async def kill(self) -> None:
        """Kill the server with SIGKILL."""

    async def stop(self) -> None:
        """End the server in good order, if it runs."""


class StdioRig:
    """Spawns the server as MCP hosts do; the process is a relay to the journal's owner."""

    def __init__(self, app: str, journal: Path) -> None:
        self._journal = journal
        self._pids: list[int] = []
        self._command = [sys.executable, "-m", "streams.cli", "serve", app, "--stdio"]
        self._command += ["--journal", str(journal)]

    @asynccontextmanager
    async def dialer(self) -> AsyncIterator[ClientChannel]:
        """Spawn a server and talk to it."""
        async with stdio.connect(self._command, stderr=subprocess.DEVNULL) as channel:
            self._pids.append(int(re.findall(r"\d+", channel.principal)[0]))
            yield channel
            self._pids.clear()

    async def start(self) -> None:
        """Nothing: whoever connects starts it."""

    def cut(self) -> None:
        """Kill the process that the client has spawned."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._pids.clear()

    async def kill(self) -> None:
        """Kill the journal's owner, whose process id is in the lock file."""
        os.kill(self._owner, signal.SIGKILL)

    async def stop(self) -> None:
        """End the journal's owner, which takes its socket away with it."""
        listening = socket_path(self._journal)
        if not listening.exists():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._owner, signal.SIGTERM)
        with trio.move_on_after(STOP_S):
            while listening.exists():
                await trio.sleep(0.05)

    @property
    def _owner(self) -> int:
        return int(lock_path(self._journal).read_text())


class ListeningRig:
    """A server that listens for `ws` or `http`, and a cable to it through this process."""

    def __init__(self, scheme: str, app: str, journal: Path, nursery: trio.Nursery) -> None:
        self._scheme = scheme
        self._app = app
        self._journal = journal
        self._nursery = nursery
        self._server: trio.Process | None = None
        self._port = 0
        self._cable_port = 0
        self._cables: set[trio.CancelScope] = set()

    def dialer(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Connect through the cable."""
        return dial(f"{self._scheme}://127.0.0.1:{self._cable_port}")()

    async def start(self) -> None:
        """Start the server, and lay the cable the first time."""
        command = [sys.executable, "-m", "streams.cli", "serve", self._app]
        command += [f"--{self._scheme}", f"127.0.0.1:{self._port}", "--journal", str(self._journal)]
        self._server = await trio.lowlevel.open_process(command, stderr=subprocess.PIPE)
        assert self._server.stderr is not None
        said = b""
        while not (found := re.search(rb"://127\.0\.0\.1:(\d+)", said)):
            said += await self._server.stderr.receive_some() or _no_server(said)
        self._nursery.start_soon(_drain, self._server.stderr)
        if not self._port:
            listeners = await self._nursery.start(trio.serve_tcp, self._splice, 0)
            self._cable_port = listeners[0].socket.getsockname()[1]
        self._port = int(found[1])

    async def _splice(self, near: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream("127.0.0.1", self._port) as far,
            trio.open_nursery() as cable,
        ):
            self._cables.add(cable.cancel_scope)
            cable.start_soon(_copy, near, far, cable.cancel_scope)
            cable.start_soon(_copy, far, near, cable.cancel_scope)

    def cut(self) -> None:
        """Cut the cable, wherever in a message it may be."""
        for cable in self._cables:
            cable.cancel()
        self._cables.clear()

    async def kill(self) -> None:
        """Kill the process."""
        assert self._server is not None
        self._server.kill()
        await self._server.wait()

    async def stop(self) -> None:
        """End the server in good order."""
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            await self._server.wait()


def _no_server(said: bytes) -> bytes:
    raise RuntimeError(f"the demo's server did not start:\n{said.decode(errors='replace')}")


async def _drain(stream: trio.abc.ReceiveStream) -> None:
    async with stream:
        async for _ in stream:
            pass


async def _copy(
    source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope
) -> None:
    try:
        async for data in source:
            await sink.send_all(data)
    except trio.BrokenResourceError:
        pass  # one end is gone: so is the cable
    scope.cancel()
