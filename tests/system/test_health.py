"""Balancers ask a real server whether it is ready; it says no before it stops listening."""

import http.client
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.rigs.command import run
from tests.rigs.redis_servers import Server, running
from tests.wire.process import APP, FAULTY_APP, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S
from tests.wire.verbs import POSITIONS, start

ADMIN = ("--admin", "127.0.0.1:0")
_URL = re.compile(r"http://127\.0\.0\.1:(\d+)/health/ready")


def port_of(server: ServerProcess) -> int:
    server.hear("/health/ready")
    return int(next(filter(None, map(_URL.search, server.log)))[1])


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()
    except OSError:
        return False
    return True


def test_a_server_that_serves_lives_and_is_ready(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, options=ADMIN) as server:
        port = port_of(server)
        assert asked(port, "/health/live") == (200, "ok\n")
        wait_until("ready", lambda: asked(port, "/health/ready") == (200, "ok\n"))
        assert asked(port, "/health/ready", "HEAD") == (200, "")
        assert asked(port, "/health/ready", "POST")[0] == 405
        assert asked(port, "/mcp")[0] == 404, "clients have another listener"
        assert asked(server.http_port, "/health/ready")[0] == 404, "and operators have this one"


@pytest.mark.parametrize("host", ["", "Host: 10.1.2.3:9090\r\n", "Host: replica-1\r\n"])
def test_a_probe_may_send_any_host_or_none(host: str, tmp_path: Path) -> None:
    """HAProxy sends no Host, and a kubelet the address of the pod, whatever clients must send."""
    options = (*ADMIN, "--allow-host", "mcp.example.com")
    with ServerProcess(tmp_path, options=options) as server:
        for port, status in ((port_of(server), b"200"), (server.http_port, b"403")):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as probe:
                probe.sendall(f"GET /health/live HTTP/1.0\r\n{host}\r\n".encode())
                assert probe.recv(4096).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nHost:"])
def test_connections_that_ask_nothing_keep_no_probe_out(sent: bytes, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, options=ADMIN) as server, ExitStack() as idle:
        port = port_of(server)
        for _ in range(200):
            one = idle.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
            one.sendall(sent)
        wait_until("answered", lambda: asked(port, "/health/live") == (200, "ok\n"))


def test_it_is_not_ready_from_before_its_sockets_close(tmp_path: Path) -> None:
    """A tool that does not end keeps the process alive up to the deadline of its shutdown."""
    with ServerProcess(tmp_path, app=FAULTY_APP, options=ADMIN) as server:
        port = port_of(server)
        wait_until("ready", lambda: asked(port, "/health/ready")[0] == 200)
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            start(peer, "shielded")
            os.kill(server.pid, signal.SIGTERM)
            told = []
            while server.is_alive():
                is_open = accepts(server.http_port)
                with suppress(OSError):  # the process has ended
                    told.append((is_open, asked(port, "/health/ready")))
        assert (False, (200, "ok\n")) not in told
        assert (503, "shutting down\n") in [answer for _, answer in told]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    done = run("serve", APP, "--http=127.0.0.1:0", f"--admin={address}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "HOST:PORT" in done.stderr


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", APP, "--http=127.0.0.1:0", f"--admin={address}")
    assert done.returncode == 2
    assert f"{address}: cannot listen there" in done.shown[-1]


@contextmanager
def ready_on_a_store(folder: Path) -> Iterator[tuple[Server, ServerProcess, int]]:
    """A store, a server that is ready on it, and the port of its operators."""
    with running("redis", folder / "store", "--appendonly", "yes") as store:
        options = (*ADMIN, "--lease=0.5")
        with ServerProcess(folder, store=f"{store.url}/0", options=options) as server:
            port = port_of(server)
            wait_until("ready", lambda: asked(port, "/health/ready") == (200, "ok\n"))
            yield store, server, port


def test_it_is_not_ready_while_its_store_is_gone(tmp_path: Path) -> None:
    with ready_on_a_store(tmp_path) as (store, _, port):
        store.pause()
        wait_until("not ready", lambda: asked(port, "/health/ready")[0] == 503)
        assert "journal" in asked(port, "/health/ready")[1]
        assert asked(port, "/health/live") == (200, "ok\n")
        store.resume()
        wait_until("ready again", lambda: asked(port, "/health/ready")[0] == 200)
        store.kill()
        wait_until("not ready", lambda: asked(port, "/health/ready")[0] == 503)
        store.start()
        wait_until("ready again", lambda: asked(port, "/health/ready")[0] == 200)


def test_not_ready_while_the_store_may_delete_messages(tmp_path: Path) -> None:
    with ready_on_a_store(tmp_path) as (store, server, port):
        store.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.hear("the journal takes nothing until its store is mended")
        wait_until("not ready", lambda: asked(port, "/health/ready")[0] == 503)
        assert "may delete messages" in asked(port, "/health/ready")[1]
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            refused = peer.ask("tools/call", {"name": "count", "arguments": {"n": 1}})
            assert refused.reason == "unavailable"
        done = run("call", f"http://127.0.0.1:{server.http_port}/mcp", "count", "n:=1")
        assert "The store of the journal cannot be used now: try again later." in done.stderr
        store.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        wait_until("ready again", lambda: asked(port, "/health/ready")[0] == 200)
