"""stdio: one JSON message a line over a process's standard streams.

`serve` speaks over a pair of file descriptors, which `claim_standard_streams` takes before trio
runs (`transports.relay.standard`); `connect` starts a server as a child process and speaks with
that.
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

# How long a child may take to end by itself once its input has ended, and again after SIGTERM.
# These are the times that the official SDKs give.
GRACE_S: Final = 2.0


def own_principal() -> str:
    """The principal of whoever this process runs for."""
    return f"os({os.getuid()})"


async def serve(
    handler: Handler, fds: tuple[int, int], *, message_bytes_max: int = MESSAGE_BYTES_MAX
) -> None:
    """Run `handler` for the one connection over `fds` (input, output), which are closed at the end.

    They may be pipes, sockets, terminals or regular files. The end of the input does not end the
    output. Raises `OSError` when one of them is no file descriptor.
    """
    channel = open_fds(*fds, principal=own_principal(), message_bytes_max=message_bytes_max)
    try:
        await handler(channel)
    finally:
        with trio.CancelScope(shield=True):
            await channel.aclose()


def split_command(command: str | Sequence[str]) -> list[str]:
    """A command as a list; a string is split as a shell would. Raises `ValueError` when empty."""
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

    Its standard error is ours unless `stderr` says otherwise (as `subprocess.Popen` has it). It is
    given a session of its own, so that the terminal's Ctrl-C is for us alone. Raises `OSError` when
    the command cannot be started, `ValueError` when there is none.
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
        channel = _channel(process, message_bytes_max)
        yield channel
    finally:
        with trio.CancelScope(shield=True):
            await _end(process)


def _channel(process: trio.Process, message_bytes_max: int) -> LineChannel:
    stdin, stdout = process.stdin, process.stdout
    assert isinstance(stdin, trio.lowlevel.FdStream)  # asked for as pipes, on a Unix
    assert isinstance(stdout, trio.lowlevel.FdStream)
    enlarge_pipe(stdin.fileno())
    enlarge_pipe(stdout.fileno())
    return LineChannel(
        trio.StapledStream(stdin, stdout),
        principal=f"child({process.pid})",
        message_bytes_max=message_bytes_max,
        unsent=lambda: unsent_bytes(stdin.fileno()),
    )


async def _end(process: trio.Process) -> None:
    """Hang up, then insist. A child that is blocked writing learns of it as well as one that reads,
    since both pipes are closed. The child is gone and reaped when this returns.
    """
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            await pipe.aclose()
    for last_word in (signal.SIGTERM, signal.SIGKILL):
        with trio.move_on_after(GRACE_S):
            await process.wait()
        if process.returncode is not None:
            return
        process.send_signal(last_word)
    await process.wait()
