"""Starts and ends `mcp-streams serve --stdio` as other hosts do."""

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Final

from tests.wire.process import APP, CLI
from tests.wire.raw import DEADLINE_S, PeerGone, PipePeer

# An owner without work ends after this time.
LINGER: Final = ("--linger", "0.2")


class Spawned(PipePeer):
    """`serve --stdio` in a process group of its own, spawned and ended as an SDK does."""

    def __init__(self, journal: Path, *options: str, app: str = APP) -> None:
        super().__init__([*CLI, "serve", app, "--stdio", "--journal", str(journal), *options])

    def end_as_sdks_do(self, *, grace_s: float) -> int:
        """Close stdin and wait; then SIGTERM, then SIGKILL, to the process group where needed.

        The SDKs wait 2 s each time. Returns the exit code, negative for a signal.
        """
        self.half_close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                return self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, number)
        return self.process.wait(DEADLINE_S)

    def hang_up(self) -> None:
        """Close both pipes: no writer and no reader is left."""
        self.half_close()
        self.close_output()

    def drain(self) -> None:
        """Read and throw away all output, to the end."""
        with contextlib.suppress(PeerGone):
            while True:
                self.receive_raw()


def owner_pid(journal: Path) -> int:
    """The process that owns the journal: its id is in the lock file."""
    return int(journal.with_name(f"{journal.name}.lock").read_text())


def owners(journal: Path) -> list[int]:
    """All processes that were started to own the journal and still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = (process / "cmdline").read_bytes()
            if b"streams.process.owner" in command and os.fsencode(journal) in command:
                found.append(int(process.name))
    return found


def wait_for_end(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], DEADLINE_S)[0], f"process {pid} goes on"
    finally:
        os.close(descriptor)


def failed_start(command: list[str]) -> tuple[int, str]:
    """Run a command that cannot serve; returns its exit code and standard error."""
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.stdout == "", "standard output is a wire"
    return ended.returncode, ended.stderr
