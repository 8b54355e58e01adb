"""ASGI servers as child processes, with the applications of `tests.rigs.asgi_apps`."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

from tests.rigs import ROOT
from tests.wire.httpclient import Headers, HttpClient
from tests.wire.raw import DEADLINE_S

_RUNNING: Final = re.compile(r"[Rr]unning on http://127\.0\.0\.1:(\d+)")

HOSTS: Final = {
    "uvicorn": ("uvicorn", "--host", "127.0.0.1", "--port", "{port}"),
    "uvicorn-h11": (
        *("uvicorn", "--host", "127.0.0.1", "--port", "{port}"),
        *("--http", "h11", "--loop", "asyncio"),
    ),
    "uvloop": ("uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--loop", "uvloop"),
    "hypercorn": ("hypercorn", "--bind", "127.0.0.1:{port}"),
    "hypercorn-trio": ("hypercorn", "--bind", "127.0.0.1:{port}", "--worker-class", "trio"),
}


class AsgiServer:
    """An ASGI server on one journal; a restart keeps the journal and the port."""

    def __init__(self, folder: Path, *, host: str = "uvicorn", app: str = "mounted") -> None:
        self.journal = folder / "calls.db"
        self.port = 0
        self.environment = {**os.environ, "JOURNAL": str(self.journal)}
        self._log = folder / "server.log"
        self._app = f"tests.rigs.asgi_apps:{app}"
        self._host = HOSTS[host]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start, and wait until it listens."""
        command = [word.format(port=self.port) for word in self._host]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command, self._app],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )
        give_up_at = time.monotonic() + DEADLINE_S
        while (found := _RUNNING.search(self.log)) is None:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.02)
        self.port = int(found[1])
        return self

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self._process is not None
        if number is signal.SIGKILL:
            _kill(self._process)
        else:
            self._process.send_signal(number)
        return self.wait()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait until the port is closed."""
        os.kill(self.pid, number)
        give_up_at = time.monotonic() + DEADLINE_S
        while self._listens():
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.02)

    def _listens(self) -> bool:
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self.port)),
        ):
            return True
        return False

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        try:
            return process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                _kill(process)
                process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with its workers, which may be processes of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class MountedClient(HttpClient):
    """A client of a server that is mounted under a prefix."""

    def __init__(self, port: int, prefix: str = "/tools") -> None:
        super().__init__(port)
        self.path = f"{prefix}/mcp"

    def head(self, method: str, more: Headers | None = None, *, path: str = "") -> bytes:
        return super().head(method, more, path=path or self.path)
