"""stdio: one JSON message a line over a process's standard streams.

`serve` runs a server over two file descriptors, which `claim_standard_streams`
(`transports.relay.standard`) takes before trio runs. `connect` starts a server as a child process.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from streams.exchange import Handler
from streams.messages import MESSAGE_BYTES_MAX
from transports.lines import LineChannel, open_fds
from transports.net.sockets import enlarge_pipe, unsent_bytes
from transports.relay.standard import claim_standard_streams

__all__ = ["claim_standard_streams", "connect", "own_principal", "serve", "split_command"]

# How long a child may take to end by itself once its input has ended, and then after SIGTERM. The
# official SDKs wait as long.
GRACE_S: Final = 2.0

# How long the end of a child may come behind the end of its output.
ENDING_S: Final = 0.5


def own_principal() -> str:
    """The principal of the user that runs this process."""
    return f"os({os.getuid()})"


async def serve(
    handler: Handler, fds: tuple[int, int], *, message_bytes_max: int = MESSAGE_BYTES_MAX
) -> None:
    """Run `handler` for the one connection over `fds` (input, output), and close them at the end.

    They may be pipes, sockets, terminals or regular files. The end of the input does not end the
    output. Raises `OSError` when one of them is invalid.
    """
    channel = open_fds(*fds, principal=own_principal(), message_bytes_max=message_bytes_max)
    try:
        await handler(channel)
    finally:
        with trio.CancelScope(shield=True):
            await channel.aclose()


def split_command(command: str | Sequence[str]) -> list[str]:
    """A command as a list; a string is split as a shell does. Raises `ValueError` when empty."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words:
        raise ValueError("no command to start: write stdio:COMMAND")
    return words


@asynccontextmanager
async def connect(
    command: str | Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> AsyncIterator[LineChannel]:
    """Start a server as a child process; leaving the block ends it.

    The child inherits standard error unless `stderr` is given, as for `subprocess.Popen`. It has a
    session of its own, so that Ctrl-C in the terminal reaches only this process. Raises `OSError`
    when the command cannot be started, `ValueError` when it is empty.
    """
    process = await trio.lowlevel.open_process(
        split_command(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )
    try:
        yield _channel(process, message_bytes_max)
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)


def _channel(process: trio.Process, message_bytes_max: int) -> LineChannel:
    stdin, stdout = process.stdin, process.stdout
    assert isinstance(stdin, trio.lowlevel.FdStream)  # opened as pipes
    assert isinstance(stdout, trio.lowlevel.FdStream)
    enlarge_pipe(stdin.fileno())
    enlarge_pipe(stdout.fileno())
    channel = _ChildChannel(
        trio.StapledStream(stdin, stdout),
        principal=f"child({process.pid})",
        message_bytes_max=message_bytes_max,
        unsent=lambda: unsent_bytes(stdin.fileno()),
    )
    channel.process = process
    return channel


class _ChildChannel(LineChannel):
    """Its end tells how the child has ended."""

    process: trio.Process

    async def _read(self) -> bytes:
        try:
            return await super()._read()
        except trio.EndOfChannel:
            with trio.move_on_after(ENDING_S):
                await self.process.wait()
            raise trio.EndOfChannel(_ending(self.process.returncode)) from None


def _ending(code: int | None) -> str:
    if code is None:
        return "the command has closed its standard output"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the command has ended {how}: see its standard error"


async def _end(process: trio.Process) -> None:
    """Close both pipes, which a child notices whether it reads or writes; then send signals.

    On return the child has ended and was reaped.
    """
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            await pipe.aclose()
    for next_signal in (signal.SIGTERM, signal.SIGKILL):
        with trio.move_on_after(GRACE_S):
            await process.wait()
        if process.returncode is not None:
            return
        process.send_signal(next_signal)
    await process.wait()
