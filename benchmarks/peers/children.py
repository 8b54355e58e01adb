"""Peers as child processes."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

from benchmarks.peers import Missing
from benchmarks.servers import LOOK_EVERY_S, ROOT, START_S, STOP_S

HERE: Final = Path(__file__).resolve().parent
# The folder of Debian's servers, which is not in every user's path.
_SYSTEM: Final = "/usr/sbin"
_LOG_BYTES_MAX: Final = 4096  # of the text that a server prints before it dies


def executable(name: str, comes_with: str) -> str:
    """The path of a program. Raises `Missing`, with the package that it is in."""
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join([own, os.environ.get("PATH", os.defpath), _SYSTEM])
    if found := shutil.which(name, path=path):
        return found
    raise Missing(f"no {name} here; it comes with {comes_with}")


def said_by(*command: str) -> str:
    """The first line that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S)  # nosec B603 # what the benchmark names
    return done.stdout.partition("\n")[0]


def with_clients(name: str, version: str, *packages: str) -> str:
    """A peer's version, and those of the Python packages that read from it."""
    clients = [f"{package} {version_of(package)}" for package in packages]
    return ", ".join([f"{name} {version}".rstrip(), *clients])


def node_module(name: str) -> str:
    """The version of an npm package. Raises `Missing`."""
    package = HERE / "node_modules" / name / "package.json"
    if not package.exists():
        raise Missing(f"no {name} in benchmarks/peers/node_modules; make bench-peers puts it there")
    return said_by(executable("node", "Node.js"), "-p", f"require({str(package)!r}).version")


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """A server, from its first accepted connection to the end of the block. Raises `Missing`."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process,  # nosec B603 # what the benchmark names
    ):
        try:
            _wait(process, port, log.fileno())
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # SIGTERM was sent, and none of its data is needed


def _wait(process: subprocess.Popen[bytes], port: int, log: int) -> None:
    give_up_at = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), START_S).close()
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > give_up_at:
                said = os.pread(log, _LOG_BYTES_MAX, 0).decode(errors="replace")
                raise Missing(f"it does not start: {said}") from None
            time.sleep(LOOK_EVERY_S)
        else:
            return
