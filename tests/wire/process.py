"""The tested server as a real child process, and the gate by which a test controls its tools."""

import contextlib
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.rigs import balancers, setups
from tests.wire.httppeer import ACCEPTS, HttpPeer
from tests.wire.raw import DEADLINE_S, Peer, PipePeer, WebSocketPeer

APP: Final = f"{Path(__file__).parent / 'tools_server.py'}:server"
FAULTY_APP: Final = f"{Path(__file__).parent / 'faulty_tools_server.py'}:server"
CLI: Final = (sys.executable, "-m", "streams.cli")
OFFERS: Final = {"ws-mcp": ("mcp",), "ws-streams": ("mcp-streams.v1",)}
_OF_OWNERS: Final = ("--limit", "--max-message-bytes", "--require-resume-token")
_END: Final = "(end of standard error)"
_HOLDERS_MAX: Final = 200  # of ports; all of one test, and more
_WS_ADDRESS: Final = re.compile(r"wss?://127\.0\.0\.1:(\d+)")
_HTTP_ADDRESS: Final = re.compile(r"https?://127\.0\.0\.1:(\d+)/mcp")


def wait_until(what: str, is_so: Callable[[], object]) -> None:
    """Wait until the condition holds; `what` names it in the error of a timeout."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.01)


def kept_port() -> int:
    """A free port that no other process chooses while a server is restarted.

    A socket of ours stays bound to each of the last ports. On Linux a server listens there all the
    same, since it sets SO_REUSEADDR, as that socket does then. The system chooses no port below
    32768 for connections (macOS: 49152).
    """
    while True:
        port, holder = _dice.randrange(10_000, 32_768), socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _holders.append(holder)
        while len(_holders) > (_HOLDERS_MAX if sys.platform == "linux" else 0):
            _holders.popleft().close()
        return port


_dice: Final = random.SystemRandom()  # simulations of several processes seed `random` alike
_holders: Final[deque[socket.socket]] = deque()


class _Process:
    """One process of a server. A thread reads standard error, so that it never waits for us."""

    def __init__(self, command: Sequence[str], heard: threading.Condition, log: list[str]) -> None:
        """Start it; `log` gets its lines."""
        self.lines: list[str] = []
        self._heard = heard
        self._log = log
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._add(line.decode(errors="replace"))
        self._add(_END)

    def _add(self, line: str) -> None:
        with self._heard:
            self.lines.append(line)
            self._log.append(line)
            self._heard.notify_all()

    def listening_port(self, address: re.Pattern[str]) -> int:
        """Wait until the log names the address; returns its port."""

        def found() -> re.Match[str] | None:
            return next(filter(None, map(address.search, self.lines)), None)

        with self._heard:
            self._heard.wait_for(lambda: found() or _END in self.lines, timeout=DEADLINE_S)
            match = found()
        assert match is not None, "the server does not listen:\n" + "".join(self.lines)
        return int(match.group(1))

    def reap(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


class ServerProcess:
    """`mcp-streams serve` on one journal; a restart keeps the journal and the ports.

    In some setups (`tests.rigs.setups`) these are three processes behind HAProxy, or the journal is
    in a store. Each way to end the server ends all processes on the journal.
    """

    def __init__(
        self, folder: Path, *, app: str = APP, options: tuple[str, ...] = (), store: str = ""
    ) -> None:
        """With `store`, a URL, the journal is there, and the server is one process."""
        setup = setups.Setup() if store else setups.current
        self.journal = folder / "journal.db"
        self.port = kept_port()
        self.http_port = kept_port()
        self.log: list[str] = []
        self._folder = folder
        self._place = setups.Place(store) if store else setup.place(folder)
        self._app = app
        self._options = options
        self._replicas = [
            balancers.Ports(kept_port(), kept_port(), kept_port())
            for _ in range(setup.replicas)
            if setup.replicas > 1
        ]
        self._heard = threading.Condition()
        self._processes: list[_Process] = []
        self._balancer = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the process; a server with replicas has several."""
        [only] = self.pids
        return only

    @property
    def pids(self) -> list[int]:
        """The ids of all processes of the server."""
        return [each.process.pid for each in self._running]

    @property
    def _running(self) -> list[_Process]:
        assert self._processes, "the server is not started"
        return self._processes

    def start(self) -> "ServerProcess":
        """Start, and wait until the log names the addresses."""
        assert not self._processes
        try:
            if self._replicas:
                self._start_replicas()
            else:
                self._start(self.port, self.http_port)
                [only] = self._processes
                assert only.listening_port(_WS_ADDRESS) == self.port
                assert only.listening_port(_HTTP_ADDRESS) == self.http_port
        except BaseException:
            self._reap()
            raise
        return self

    def _start(self, ws: int, http: int, *more: str) -> None:
        where = ("--ws", f"127.0.0.1:{ws}", "--http", f"127.0.0.1:{http}", *more)
        command = [*CLI, "serve", self._app, *where, *self._place.options, *self._options]
        self._processes.append(_Process(command, self._heard, self.log))

    def _start_replicas(self) -> None:
        for ports in self._replicas:
            self._start(ports.ws, ports.http, "--admin", f"127.0.0.1:{ports.admin}")
        for each in self._processes:
            each.listening_port(_WS_ADDRESS)
            each.listening_port(_HTTP_ADDRESS)
        at = balancers.Ports(self.http_port, self.port, 0)
        self._balancer.enter_context(balancers.patient_haproxy(self._replicas, at, self._folder))

    def hear(self, what: str) -> None:
        """Wait until the log has such a line, in its past or its future."""
        with self._heard:
            is_said = self._heard.wait_for(
                lambda: any(what in line for line in self.log), timeout=DEADLINE_S
            )
        assert is_said, f"not {what!r}:\n" + "".join(self.log)

    def taken_over(self, is_so: Callable[[], object]) -> None:
        """Wait for calls that ran at a restart: over a store they have an owner after one lease."""
        if self._place.state is not None:
            wait_until("the calls are taken over", is_so)

    def check_journal(self) -> None:
        """Verify the journal."""
        words = [*CLI, "verify", self._place.journal]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def is_alive(self) -> bool:
        return bool(self._processes) and all(
            each.process.poll() is None for each in self._processes
        )

    def send(self, number: int) -> None:
        """Send a signal to all processes on the journal."""
        for each in self._running:
            each.process.send_signal(number)
        self._signal_owner(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.stop(signal.SIGKILL)

    def restart(self) -> None:
        """SIGKILL, then again on the same journal and port."""
        self.kill()
        self.start()

    def stop(self, number: int = signal.SIGTERM, *, within_s: float = DEADLINE_S) -> int:
        """Send a signal and wait for the end; the exit code, negative for a signal.

        Raises `subprocess.TimeoutExpired` after `within_s`; the process is reaped all the same.
        """
        self.send(number)
        return self.wait(within_s=within_s)

    def wait(self, *, within_s: float = DEADLINE_S) -> int:
        """Wait until it ends by itself; returns the exit code. As for `stop`."""
        try:
            codes = {each.process.wait(within_s) for each in self._running}
        finally:
            self._reap()
        [code] = codes
        return code

    def _reap(self) -> None:
        for each in self._processes:
            each.reap()
        self._processes.clear()
        self._signal_owner(signal.SIGKILL)
        self._balancer.close()

    def _signal_owner(self, number: int) -> None:
        """Send a signal to the owner that relays have started beside the server, over a store."""
        if self._place.state is not None and (owner := self._place.owner()) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(owner, number)

    def connect(self, kind: str) -> Peer:
        """A new connection; on stdio a new relay process to this owner of the journal."""
        if kind == "stdio":
            # Over a store the relay starts an owner, as one more replica.
            more = self._for_owner() if self._place.state else ()
            return PipePeer(self._place.command([*CLI, "serve", self._app, "--stdio", *more]))
        if kind in ACCEPTS:
            return HttpPeer(self.http_port, kind)
        return WebSocketPeer(self.url, OFFERS[kind])

    def _for_owner(self) -> list[str]:
        """The options that an owner has, too: those of listeners are not for it."""
        taken: list[str] = []
        is_own = False
        for word in self._options:
            is_own = word.startswith(_OF_OWNERS) if word.startswith("--") else is_own
            taken += [word] if is_own else []
        return taken

    def exchange(self, sent: bytes, then: bytes | None = None) -> bytes:
        """Send bytes over a bare TCP connection, then the end; returns all bytes that came.

        `then` is sent once the head of an HTTP response is there.
        """
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as connection:
            received = b""
            with contextlib.suppress(ConnectionError):  # refused while we still send
                connection.sendall(sent)
                while then is not None and b"\r\n\r\n" not in received:
                    chunk = connection.recv(1 << 16)
                    if not chunk:
                        return received
                    received += chunk
                connection.sendall(then or b"")
                connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(1 << 16):
                    received += chunk
        return received

    def handshake(self, *, host: str = "", subprotocol: str = "mcp", then: bytes = b"") -> bytes:
        """Shake hands as a WebSocket client by hand, send `then`, hang up; returns all bytes that
        came.
        """
        head = (
            "GET / HTTP/1.1",
            f"Host: {host or f'127.0.0.1:{self.port}'}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            f"Sec-WebSocket-Protocol: {subprotocol}",
        )
        return self.exchange("\r\n".join([*head, "", ""]).encode(), then)

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._reap()


class Gate:
    """Two named pipes: a tool writes marks into one, and reads its permission to go on from the
    other.

    We hold both ends of each, so a mark outlives the process that made it, and an open never
    blocks.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = str(folder)
        self._seen = b""
        self._pipes = []
        for name in ("marks", "go"):
            os.mkfifo(folder / name)
            self._pipes.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK))

    def release(self, times: int = 1) -> None:
        """Let a tool that waits, or will wait, go on, so many times."""
        os.write(self._pipes[1], b"." * times)

    def marks(self) -> list[str]:
        """The marks so far that `wait_for` has not taken."""
        with contextlib.suppress(BlockingIOError):
            self._seen += os.read(self._pipes[0], 1 << 20)
        return self._seen.decode().splitlines()

    def wait_for(self, mark: str, *, within_s: float = DEADLINE_S) -> None:
        """Wait until a tool has made this mark; takes it and the marks before it."""
        while mark not in (seen := self.marks()):
            if not select.select([self._pipes[0]], [], [], within_s)[0]:
                raise TimeoutError(f"no mark {mark!r} but {seen}")
        rest = seen[seen.index(mark) + 1 :]
        self._seen = "".join(f"{line}\n" for line in rest).encode()

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)


@contextlib.contextmanager
def gate_in(folder: Path) -> Iterator[Gate]:
    gate = Gate(folder)
    try:
        yield gate
    finally:
        gate.close()
