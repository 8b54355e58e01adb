"""Starting and ending `mcp-streams serve --stdio` as the hosts of others do it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.wire.raw import DEADLINE_S, PeerGone, PipePeer

APP: Final = f"{Path(__file__).parent / 'load_server.py'}:server"
CLI: Final = (sys.executable, "-m", "streams.cli")
# An owner with nothing to do ends so soon.
LINGER: Final = ("--linger", "0.2")
# How the official SDKs end a server: they close its stdin, signal its process group after 2 s with
# SIGTERM, after 2 s more with SIGKILL.
GRACE_S: Final = 2.0


class Spawned(PipePeer):
    """`serve --stdio` in a process group of its own, spawned and ended as an SDK does it."""

    def __init__(self, journal: Path, *options: str, app: str = APP) -> None:
        super().__init__([*CLI, "serve", app, "--stdio", "--journal", str(journal), *options])

    def end_as_sdks_do(self, *, grace_s: float = GRACE_S) -> int:
        """Close stdin and wait; SIGTERM and SIGKILL to the group where that is not enough.

        What the process still writes is read and thrown away. Returns its exit code.
        """
        self.half_close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
                break
            os.killpg(self.process.pid, number)
        code = self.process.wait(DEADLINE_S)
        with contextlib.suppress(PeerGone):
            while True:
                self.receive_raw()
        return code


def owner_pid(journal: Path) -> int:
    """The process that owns the journal: it signs its lock file."""
    return int(journal.with_name(f"{journal.name}.lock").read_text())


def wait_for_end(pid: int, *, within_s: float = DEADLINE_S) -> None:
    """Wait until a process that is no child of ours has ended."""
    with contextlib.suppress(ProcessLookupError), _pidfd(pid) as descriptor:
        signal_when_dead = _poll(descriptor, within_s)
        assert signal_when_dead, f"process {pid} goes on"


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _poll(descriptor: int, within_s: float) -> bool:
    import select

    return bool(select.select([descriptor], [], [], within_s)[0])


def refused_start(journal: Path, *options: str, app: str = APP) -> tuple[int, str]:
    """Start `serve --stdio` where it cannot serve; its exit code and standard error."""
    ended = subprocess.run(
        [*CLI, "serve", app, "--stdio", "--journal", str(journal), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.stdout == "", "standard output is a wire"
    return ended.returncode, ended.stderr
