"""Servers as child processes, and connections to them that can be made to fail."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol

import trio

from streams.cli.selftest.cables import Cables
from streams.exchange import ClientChannel
from streams.journal.ownership import log_path, owner_of
from transports import dial, stdio

APP: Final = f"{Path(__file__).with_name('demo_server.py')}:server"

STOP_S: Final = 10.0  # an owner ends within 4 s
LOOK_EVERY_S: Final = 0.01


class NoServer(Exception):
    """The server has not started, or not ended; the message is the reason, or its log."""


class Stored(NamedTuple):
    """A journal in the store at `url`. Owners have their files in a folder of state."""

    url: str
    state: Path


def _owner_of(journal: Path | Stored) -> int | None:
    """The process that serves the relays on a journal."""
    if isinstance(journal, Path):
        return owner_of(journal)
    locks = journal.state.glob("mcp-streams/*.lock")
    return next((pid for lock in locks if (pid := owner_of(lock.with_suffix("")))), None)


class Rig(Protocol):
    """A server and the connections to it."""

    def dialer(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Open a new connection."""

    async def start(self) -> None:
        """Start the server, unless a client that connects starts it."""

    async def spawn(self) -> bool:
        """Begin to start the server; return whether it is this method that starts it."""

    async def up(self) -> None:
        """Wait until it has started. Raises `NoServer`."""

    # Each of these makes all connections fail, and returns their number.

    def cut(self, after_bytes: int = 0) -> int:
        """Hang up, at once or, if possible, after so many more bytes to each client."""

    def reset(self) -> int:
        """End them with an error."""

    def silence(self) -> int:
        """Pass nothing on, and leave them open."""

    async def kill(self) -> bool:
        """Kill the server with SIGKILL; return whether it ran."""

    async def stop(self) -> bool:
        """End the server with SIGTERM; return whether it ran."""


class Serving:
    """The arguments of the command, for a server file or, after `wrap`, for a command."""

    def __init__(self, app: str = "", wrapped: Sequence[str] = ()) -> None:
        """`app` is served, unless a command is `wrapped`."""
        self._start = ["wrap"] if wrapped else ["serve", app]
        self._end = ["--", *wrapped] if wrapped else []
        self._stdio = [] if wrapped else ["--stdio"]

    def command(
        self, journal: Path | Stored, options: Sequence[str], scheme: str = ""
    ) -> list[str]:
        """The command that listens for `scheme`, or serves over stdio."""
        where = [f"--{scheme}", "127.0.0.1:0"] if scheme else self._stdio
        place = ["--journal", str(journal)] if isinstance(journal, Path) else []
        words = [*self._start, *where, *place, *options, *self._end]
        return [sys.executable, "-m", "streams.cli", *words]


def _environment(journal: Path | Stored) -> dict[str, str]:
    """The environment of a server. The URL of a store may have a password: it is no argument."""
    if isinstance(journal, Path):
        return dict(os.environ)
    own = {"MCP_STREAMS_SERVE_JOURNAL": journal.url, "XDG_STATE_HOME": str(journal.state)}
    return os.environ | own


class StdioRig:
    """Spawns the server as MCP hosts do; the process is a relay to the journal's owner."""

    def __init__(
        self, app: str | Serving, journal: Path | Stored, options: Sequence[str] = ()
    ) -> None:
        serving = Serving(app) if isinstance(app, str) else app
        self._journal = journal
        self._relays: set[int] = set()
        self._stopped: set[int] = set()  # of the relays
        self._command = serving.command(journal, options)
        self._environment = _environment(journal)

    @asynccontextmanager
    async def dialer(self) -> AsyncIterator[ClientChannel]:
        """Spawn a server and connect to it."""
        relay = 0
        try:
            async with stdio.connect(
                self._command, env=self._environment, stderr=subprocess.DEVNULL
            ) as channel:
                relay = int(re.findall(r"\d+", channel.principal)[0])
                self._relays.add(relay)
                yield channel
        finally:  # the process is reaped; until then a stopped one may have to be killed
            self._relays.discard(relay)
            self._stopped.discard(relay)

    async def start(self) -> None:
        """Nothing: a client that connects starts it."""

    async def spawn(self) -> bool:
        """Nothing, as in `start`."""
        return False

    async def up(self) -> None:
        """Wait until a client has connected, and the owner runs."""
        while _owner_of(self._journal) is None:
            await trio.sleep(LOOK_EVERY_S)

    def cut(self, after_bytes: int = 0) -> int:
        """Kill the processes that clients have spawned."""
        # Processes that still wait for an owner are no connections yet, and are left alone.
        has_owner = _owner_of(self._journal) is not None
        return _signal(self._relays if has_owner else self._stopped, signal.SIGKILL)

    def reset(self) -> int:
        """Like `cut`: a pipe has no other way to end."""
        return self.cut()

    def silence(self) -> int:
        """Stop the processes that clients have spawned."""
        if _owner_of(self._journal) is None:
            return 0
        self._stopped |= self._relays
        return _signal(self._relays, signal.SIGSTOP)

    async def kill(self) -> bool:
        """Kill the journal's owner, if one runs."""
        owner = _owner_of(self._journal)
        if owner is None or not self._signal_owner(signal.SIGKILL):
            return False
        while _owner_of(self._journal) == owner:
            await trio.lowlevel.checkpoint()
        return True

    async def stop(self) -> bool:
        """End the journal's owner, if one runs."""
        owner = _owner_of(self._journal)
        if owner is None or not self._signal_owner(signal.SIGTERM):
            return False
        with trio.move_on_after(STOP_S):
            while _owner_of(self._journal) == owner:
                await trio.sleep(LOOK_EVERY_S)
            return True
        raise NoServer(f"the owner did not end within {STOP_S:g} s of SIGTERM")

    def _signal_owner(self, number: signal.Signals) -> bool:
        owner = _owner_of(self._journal)
        if owner is None:
            return False
        try:
            os.kill(owner, number)
        except ProcessLookupError:
            return False  # it has just ended
        return True


def _signal(processes: set[int], number: signal.Signals) -> int:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return len(processes)


class _Log:
    """The standard error of a server and of its predecessors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0  # where the last server's part begins

    def begun_anew(self) -> BinaryIO:
        """The file, for the next server to write to."""
        file = self._path.open("ab")
        self._start = file.seek(0, os.SEEK_END)
        return file

    def read(self) -> bytes:
        """The output of the last server up to now."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            return file.read()


class ListeningRig:
    """A server that listens for `ws` or `http`, and cables to it.

    Its standard error is kept beside the journal. It has a session of its own, so that Ctrl-C on
    the terminal does not reach it.
    """

    def __init__(
        self,
        scheme: str,
        app: str | Serving,
        journal: Path | Stored,
        nursery: trio.Nursery,
        options: Sequence[str] = (),
    ) -> None:
        self._scheme = scheme
        # The port is another one each time, so that no other process can have taken it meanwhile.
        serving = Serving(app) if isinstance(app, str) else app
        self._command = serving.command(journal, options, scheme)
        self._environment = _environment(journal)
        self._log = _Log(log_path(journal if isinstance(journal, Path) else journal.state / scheme))
        self._nursery = nursery
        self._server: trio.Process | None = None
        self._cables = Cables()

    def dialer(self) -> AbstractAsyncContextManager[ClientChannel]:
        """Connect through a cable."""
        return dial(f"{self._scheme}://127.0.0.1:{self._cables.port}")()

    async def start(self) -> None:
        """Start the server."""
        await self.spawn()
        await self.up()

    async def spawn(self) -> bool:
        """Begin to start the server; the first time, also serve the cables."""
        if not self._cables.port:
            await self._nursery.start(self._cables.serve)
        with self._log.begun_anew() as log:
            self._server = await trio.lowlevel.open_process(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return True

    async def up(self) -> None:
        """Wait until it listens. Raises `NoServer`."""
        assert self._server is not None
        while True:
            is_over = self._server.poll() is not None
            said = self._log.read()
            if found := re.search(rb"(?:ws|http)://127\.0\.0\.1:(\d+)", said):
                self._cables.lead_to(int(found[1]))
                return
            if is_over:
                raise NoServer(said.decode(errors="replace"))
            await trio.sleep(LOOK_EVERY_S)

    def cut(self, after_bytes: int = 0) -> int:
        """Cut the cables, perhaps in the middle of a message."""
        return self._cables.cut(after_bytes)

    def reset(self) -> int:
        """Reset the connections."""
        return self._cables.reset()

    def silence(self) -> int:
        """Pass nothing on."""
        return self._cables.silence()

    async def kill(self) -> bool:
        """Kill the process, if it runs."""
        if self._server is None or self._server.poll() is not None:
            return False
        self._cables.lead_to(None)
        self._server.kill()
        await self._server.wait()
        return True

    async def stop(self) -> bool:
        """End the process, if it runs. Raises `NoServer` if it does not end."""
        if self._server is None or self._server.poll() is not None:
            return False
        self._cables.lead_to(None)
        self._server.terminate()
        with trio.move_on_after(STOP_S):
            await self._server.wait()
            return True
        await self.kill()
        raise NoServer(f"the server did not end within {STOP_S:g} s of SIGTERM")
