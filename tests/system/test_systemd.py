"""The sockets that systemd passes to a service: some to listen at, and one for notices."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.command import run
from tests.wire.process import APP, CLI
from tests.wire.raw import DEADLINE_S

# The steps of systemd between fork and exec: the sockets become 3, 4, …, LISTEN_PID is the child.
ACTIVATE = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
moved = [os.dup(fd) for fd in fds]
held = [os.dup2(fd, 100 + at) for at, fd in enumerate(moved)]
for at, fd in enumerate(held):
    os.dup2(fd, 3 + at)
    os.close(fd)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds))}
os.execv(sys.argv[2], sys.argv[2:])
"""


def command_line(sockets: list[socket.socket], *words: str) -> list[str]:
    fds = ",".join(str(each.fileno()) for each in sockets)
    return [sys.executable, "-c", ACTIVATE, fds, *CLI, *words]


class Service:
    """A process that was started as systemd starts a service; a socket hears its notices."""

    def __init__(self, folder: Path, sockets: list[socket.socket], *words: str, **env: str) -> None:
        self.heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heard.bind(str(folder / "notify"))
        self.heard.settimeout(DEADLINE_S)
        self.process = subprocess.Popen(
            command_line(sockets, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[each.fileno() for each in sockets],
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), **env},
        )

    def notice(self) -> str:
        return self.heard.recv(4096).decode()

    def end(self) -> str:
        """Stop it; returns its log."""
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, log
        return log


@contextlib.contextmanager
def service(
    folder: Path, sockets: list[socket.socket], *words: str, **env: str
) -> Iterator[Service]:
    started = Service(folder, sockets, *words, **env)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.heard.close()


@pytest.fixture
def listening() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    path = "/mcp" if scheme == "http" else ""
    return f"{scheme}://127.0.0.1:{listening.getsockname()[1]}{path}"


def tools_at(url: str) -> list[str]:
    done = run("tools", url, "--json")
    assert done.returncode == 0, done.stderr
    return [each["name"] for each in json.loads(done.stdout)]


def test_one_socket_is_served_by_the_option_that_is_given_and_the_supervisor_is_told(
    tmp_path: Path, listening: list[socket.socket]
) -> None:
    words = ("serve", APP, "--http", "127.0.0.1:0")
    with service(tmp_path, listening[:1], *words) as started:
        assert started.notice() == "READY=1"
        assert tools_at(url_of(listening[0]))
        started.process.send_signal(signal.SIGHUP)
        reloading = started.notice()
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", reloading)
        assert started.notice() == "READY=1"
        log = started.end()
        assert started.notice() == "STOPPING=1"
        started.heard.setblocking(False)
        with pytest.raises(BlockingIOError):
            started.notice()
    assert url_of(listening[0]) in log
    assert listening[0].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), "it is systemd's"


def test_clients_that_come_before_the_service_are_served(
    tmp_path: Path, listening: list[socket.socket]
) -> None:
    with (
        socket.create_connection(listening[0].getsockname()) as early,
        service(tmp_path, listening[:1], "serve", APP, "--http=127.0.0.1:0"),
    ):
        early.settimeout(DEADLINE_S)
        early.sendall(b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert early.recv(100).startswith(b"HTTP/1.1 4")


def test_names_say_what_to_serve_at_each_socket(
    tmp_path: Path, listening: list[socket.socket]
) -> None:
    words = ("serve", APP, "--http=127.0.0.1:0", "--ws=127.0.0.1:0")
    with service(tmp_path, listening, *words, LISTEN_FDNAMES="ws:http") as started:
        assert started.notice() == "READY=1"
        assert tools_at(url_of(listening[0], "ws")) == tools_at(url_of(listening[1]))


def test_both_addresses_of_one_unit_are_served(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        sockets = []
        for _ in range(2):
            sockets.append(opened.enter_context(socket.create_server(("127.0.0.1", 0))))
        words = ("serve", APP, "--http=127.0.0.1:0")
        with service(tmp_path, sockets, *words, LISTEN_FDNAMES="http:http") as started:
            assert started.notice() == "READY=1"
            assert tools_at(url_of(sockets[0])) == tools_at(url_of(sockets[1]))


def refused(sockets: list[socket.socket], *words: str, **env: str) -> str:
    done = subprocess.run(
        command_line(sockets, *words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        pass_fds=[each.fileno() for each in sockets],
        env={**os.environ, **env},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_socket_without_a_purpose_is_refused(listening: list[socket.socket]) -> None:
    assert "add --http or --ws" in refused(listening[:1], "serve", APP)
    assert "add --http or --ws" in refused(listening[:1], "wrap", "--", "true")
    both = ("serve", APP, "--http=127.0.0.1:0", "--ws=127.0.0.1:0")
    assert "FileDescriptorName=http" in refused(listening[:1], *both)
    named = {"LISTEN_FDNAMES": "ws"}
    assert "add --ws" in refused(listening[:1], "serve", APP, "--http=127.0.0.1:0", **named)


def test_what_is_no_listening_tcp_socket_is_refused(tmp_path: Path) -> None:
    words = ("serve", APP, "--http=127.0.0.1:0")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        assert "no TCP socket" in refused([unix], *words)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert "no TCP socket" in refused([datagrams], *words)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as accepted,
    ):
        assert "Accept=no" in refused([accepted], *words)


def test_the_address_of_the_socket_is_checked_and_not_that_of_the_option() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        said = refused([everywhere], "serve", APP, "--http=127.0.0.1:0")
        assert "--insecure-anonymous" in said
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("", 0)) as far:
        assert "--insecure-anonymous" in refused([near, far], "serve", APP, "--http=127.0.0.1:0")


def test_sockets_of_another_process_are_not_taken(tmp_path: Path) -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
    done = run("serve", APP, "--stdio", env=env)
    assert done.returncode == 0, done.stderr


def test_a_notice_in_the_abstract_namespace(tmp_path: Path) -> None:
    name = f"mcp-streams-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name}")
        heard.settimeout(DEADLINE_S)
        with service(
            tmp_path, [], "serve", APP, "--http=127.0.0.1:0", NOTIFY_SOCKET=f"@{name}"
        ) as started:
            assert heard.recv(100) == b"READY=1"
            started.end()
            assert heard.recv(100) == b"STOPPING=1"


def test_a_supervisor_that_does_not_listen_does_no_harm(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with service(tmp_path, [], "serve", APP, "--http=127.0.0.1:0", NOTIFY_SOCKET=gone) as started:
        assert started.process.stderr is not None
        for line in started.process.stderr:
            if "systemd cannot be told" in line:
                break
        started.end()
