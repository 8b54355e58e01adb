"""The command as a child process, with and without a terminal."""

import codecs
import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from tests.wire.process import CLI
from tests.wire.raw import DEADLINE_S

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Done(subprocess.CompletedProcess[str]):
    """The exit code and the output of a command."""

    @property
    def shown(self) -> list[str]:
        """The lines on standard error."""
        return self.stderr.splitlines()


def run(
    *words: str,
    command: tuple[str, ...] = CLI,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    within_s: float = DEADLINE_S,
) -> Done:
    """Run the command to its end, without a terminal."""
    ended = subprocess.run(
        [*command, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return Done(ended.args, ended.returncode, ended.stdout, ended.stderr)


def run_as_printed(line: str) -> Done:
    """Run a line that the command has printed for its user, as a shell would."""
    name, *words = shlex.split(line)
    assert name == "mcp-streams"
    return run(*words)


class Following:
    """The command while it runs; tests wait for lines on its standard error.

    On a terminal, standard input and error are the terminal's.
    """

    def __init__(
        self,
        *words: str,
        on_terminal: bool = False,
        out_on_terminal: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        if on_terminal:
            self._ear, theirs = pty.openpty()
        else:
            self._ear, theirs = os.pipe()
        self.process = subprocess.Popen(
            [*CLI, *words],
            stdin=theirs if on_terminal else subprocess.DEVNULL,
            stdout=theirs if out_on_terminal else subprocess.PIPE,
            stderr=theirs,
            text=True,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **(env or {})},
            cwd=cwd,
        )
        os.close(theirs)

    def wait_for(self, what: str) -> str:
        """Wait until the output matches, and return the match."""
        while not (found := re.search(what, self.said)):
            assert select.select([self._ear], [], [], DEADLINE_S)[0], f"not {what!r}: {self.said}"
            assert self._hear(), f"ended without {what!r}: {self.said}"
        return found[0]

    def _hear(self) -> bool:
        try:
            data = os.read(self._ear, 1 << 16)
        except OSError:  # the other end of a terminal is gone
            data = b""
        heard = self._decoder.decode(data).replace("\r\n", "\n")
        self.said = _ESCAPES.sub("", self.said + heard)
        return bool(data)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def type(self, text: str) -> None:
        """Type at the terminal."""
        os.write(self._ear, text.encode())

    def kill(self) -> None:
        """Send SIGKILL, which a process cannot handle."""
        self.process.kill()
        self.process.wait()

    def end(self, *, within_s: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the standard output."""
        with ThreadPoolExecutor(1) as beside:
            ending = beside.submit(self._read_out, within_s)
            while self._hear():  # a full terminal blocks its writer, so it is read
                pass
            out = ending.result()
        assert "Traceback" not in self.said, self.said
        return self.process.returncode, out

    def _read_out(self, within_s: float) -> str:
        try:
            return self.process.communicate(timeout=within_s)[0]
        except subprocess.TimeoutExpired:
            self._kill_all()  # so that all output is read
            raise

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def way_back(self) -> str:
        """The command with the ticket that it printed for its user."""
        return self.wait_for(r"mcp-streams resume \S+ [^\n]+(?=\n)")

    @property
    def short_way_back(self) -> str:
        """The command with the call's name that it printed for its user."""
        return self.wait_for(r"mcp-streams resume \S+(?=\n)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._ear)


def stdio_url(app: str, *options: str) -> str:
    """The URL that starts a server for one client."""
    return "stdio:" + shlex.join([sys.executable, "-m", "streams.cli", "serve", app, *options])
