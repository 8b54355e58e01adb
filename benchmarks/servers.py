"""The measured servers: real child processes, ended when the block is left."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
import trio

from streams.exchange import Dialer
from streams.journal.ownership import lock_path, socket_path
from streams.limits import Durability
from transports import dial, stdio

ROOT: Final = Path(__file__).resolve().parent.parent  # this package is imported from here
APP: Final = f"{Path(__file__).resolve().with_name('app.py')}:server"
START_S: Final = 60.0
STOP_S: Final = 30.0
LOOK_EVERY_S: Final = 0.02
LOG_BYTES_MAX: Final = 64 * 1024  # of the text that a server prints before it listens
# The owner of a journal stays for the length of a run, even without a client.
LINGER_S: Final = 3600
_ADDRESS: Final = re.compile(rb"(ws|http)://127\.0\.0\.1:\d+")


class Served(msgspec.Struct, frozen=True):
    """A server that can be reached: it has a URL, or a command that is spawned for each client.

    `pid` is that of the process that listens; 0 where none does.
    """

    dialer: Dialer
    url: str = ""
    command: Sequence[str] = ()
    pid: int = 0


def spawn(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Start a server that speaks over its standard streams: the process, its input, its output."""
    process = subprocess.Popen(  # nosec B603 # what the benchmark names
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return process, process.stdin, process.stdout


@asynccontextmanager
async def stdio_server(app: str, journal: Path | None) -> AsyncIterator[Served]:
    """A command to be spawned for each connection.

    With a journal the command is a relay, and one owner does the work for all relays.
    """
    command = stdio_command(app, journal)
    try:
        dialer = partial(stdio.connect, command, cwd=ROOT, stderr=subprocess.DEVNULL)
        yield Served(dialer, command=command)
    finally:
        if journal is not None:
            with trio.CancelScope(shield=True), trio.fail_after(STOP_S):
                await end_owner(journal)


def stdio_command(app: str, journal: Path | None) -> list[str]:
    """The command for each connection over stdio."""
    return [*_serve(app, journal), "--stdio", "--linger", str(LINGER_S)]


async def end_owner(journal: Path) -> None:
    """End the process behind the relays of a journal, if there is one."""
    if not socket_path(journal).exists():
        return  # no client has connected
    os.kill(int(lock_path(journal).read_text()), signal.SIGTERM)
    while socket_path(journal).exists():
        await trio.sleep(LOOK_EVERY_S)


def websocket_server(
    app: str, journal: Path | None, *, durability: Durability = "power"
) -> AbstractAsyncContextManager[Served]:
    """A server that listens on loopback, for both subprotocols."""
    command = [*_serve(app, journal), "--ws", "127.0.0.1:0", "--durability", durability]
    return listening(command)


def http_server(app: str, journal: Path | None) -> AbstractAsyncContextManager[Served]:
    """A server that listens on loopback, for our own framing and for server-sent events."""
    return listening([*_serve(app, journal), "--http", "127.0.0.1:0"])


def bare_server(kind: Literal["trio", "uvicorn"]) -> AbstractAsyncContextManager[Served]:
    """A server that answers short calls and does no more: see `benchmarks.bare`."""
    return listening([sys.executable, "-m", "benchmarks.bare", kind])


@asynccontextmanager
async def everywhere(
    app: str,
    journal: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Mapping[str, Served]]:
    """One server with all its transports, by name."""
    command = [*_serve(app, journal), "--ws", "127.0.0.1:0", "--http", "127.0.0.1:0", *options]
    relay = stdio_command(app, journal)
    spawned = partial(stdio.connect, relay, cwd=ROOT, stderr=subprocess.DEVNULL)
    async with _started(command, 2, environment) as (process, urls):
        listens = {url.partition(":")[0]: Served(dial(url), url, pid=process.pid) for url in urls}
        yield {"stdio": Served(spawned, command=relay, pid=process.pid), **listens}


@asynccontextmanager
async def listening(command: Sequence[str]) -> AsyncIterator[Served]:
    """Any server that logs where it listens."""
    async with _started(command, 1) as (process, [url]):
        yield Served(dial(url), url, pid=process.pid)


@asynccontextmanager
async def _started(
    command: Sequence[str], count: int, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[trio.Process, list[str]]]:
    """A server that listens at so many addresses, which its log names."""
    with tempfile.TemporaryFile() as log:
        # Ctrl-C on a terminal is for us; we end the server.
        process = await trio.lowlevel.open_process(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            with trio.fail_after(START_S):
                urls = await _addresses(process, log.fileno(), count)
            yield process, urls
        finally:
            with trio.CancelScope(shield=True), trio.fail_after(STOP_S):
                process.terminate()
                await process.wait()


def _serve(app: str, journal: Path | None) -> list[str]:
    command = [sys.executable, "-m", "streams.cli", "serve", app]
    return command if journal is None else [*command, "--journal", str(journal)]


async def _addresses(process: trio.Process, log: int, count: int) -> list[str]:
    """The addresses from the server's log, as soon as it names them."""
    while True:
        is_over = process.poll() is not None
        said = os.pread(log, LOG_BYTES_MAX, 0)
        found = [each[0].decode() for each in _ADDRESS.finditer(said)]
        if len(found) >= count:
            return found[:count]
        if is_over:
            raise RuntimeError(f"the server did not start:\n{said.decode(errors='replace')}")
        await trio.sleep(LOOK_EVERY_S)
