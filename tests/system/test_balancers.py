"""The configurations of docs/operate/replicas: what the balancers do when a replica fails.

The replicas are small servers that count their requests, so that a repeated request is seen.
"""

import contextlib
import http.client
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streams.cli.selftest.replicas import processes
from tests.rigs.balancers import FOLDER, NAMES, Ports, balancer
from tests.wire.process import wait_until

PATIENCE_S = 20.0
LOOK_EVERY_S = 0.02


class Replica:
    """A server that answers requests, says whether it is ready, and can fail in several ways."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # of requests, by method
        self.checks = 0  # of its health
        self.is_ready = True
        self.is_draining = False
        self.is_stopped = False  # it accepts connections, and does nothing
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"  # b"": hang up
        self._servers = [self._serving(self._serve) for _ in range(2)]
        self._servers.append(self._serving(self._health))
        self.ports = Ports(*(server.server_address[1] for server in self._servers))

    def close(self) -> None:
        """Refuse connections from now on."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _serving(self, handle: Callable[[Any], None]) -> socketserver.ThreadingTCPServer:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # the balancer may close at any time
                    handle(self)

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True

        server = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(LOOK_EVERY_S,), daemon=True).start()
        return server

    def _serve(self, connection: socketserver.StreamRequestHandler) -> None:
        while (head := _head(connection)) and not self.is_stopped:
            self.counts[head[0].split()[0]] += 1
            if b"upgrade: websocket" in (line.lower() for line in map(str.encode, head)):
                connection.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\n")
                connection.wfile.write(b"Connection: upgrade\r\nUpgrade: websocket\r\n")
                accept = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # of the key of all of these tests
                connection.wfile.write(b"Sec-WebSocket-Accept: %b\r\n\r\nhello" % accept)
            elif head[0].startswith("GET /stream"):
                connection.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello")
            else:
                length = [line for line in head if line.lower().startswith("content-length:")]
                connection.rfile.read(int(length[0].split(":")[1]) if length else 0)
                connection.wfile.write(self.answer)
                if not self.answer:
                    return
                continue
            connection.rfile.read(1)  # an open response, until the balancer closes it
            return
        if self.is_stopped:
            connection.rfile.read()

    def _health(self, connection: socketserver.StreamRequestHandler) -> None:
        head = _head(connection)
        if self.is_stopped or not head:
            connection.rfile.read()
            return
        assert head[0].startswith("GET /health/ready?draining=404 "), head
        self.checks += 1
        status = "200 OK" if self.is_ready else "503 Service Unavailable"
        status = "404 Not Found" if self.is_draining else status
        connection.wfile.write(f"HTTP/1.0 {status}\r\nContent-Length: 0\r\n\r\n".encode())


def _head(connection: socketserver.StreamRequestHandler) -> list[str]:
    lines = []
    while line := connection.rfile.readline().rstrip():
        lines.append(line.decode())
    return lines


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    three = [Replica() for _ in range(3)]
    yield three
    for replica in three:
        with contextlib.suppress(OSError):  # the test may have closed it
            replica.close()


@pytest.fixture(params=NAMES)
def port(request: pytest.FixtureRequest, replicas: list[Replica], tmp_path: Path) -> Iterator[int]:
    with balancer(request.param, [one.ports for one in replicas], tmp_path) as port:
        yield port


@pytest.fixture
def haproxy(replicas: list[Replica], tmp_path: Path) -> Iterator[int]:
    with balancer("haproxy", [one.ports for one in replicas], tmp_path) as port:
        yield port


def ask(port: int, method: str = "POST", path: str = "/mcp") -> int:
    """The status of one request over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def asked(replicas: Sequence[Replica], method: str = "POST") -> int:
    return sum(replica.counts[method] for replica in replicas)


def test_requests_go_to_all_replicas(port: int, replicas: list[Replica]) -> None:
    assert {ask(port) for _ in range(12)} == {200}
    assert all(replica.counts["POST"] for replica in replicas)


def test_a_replica_that_is_gone_costs_no_request(port: int, replicas: list[Replica]) -> None:
    replicas[0].close()
    replicas[2].close()
    assert {ask(port) for _ in range(8)} == {200}
    assert replicas[1].counts["POST"] == 8


def test_a_post_that_may_have_begun_is_never_sent_again(port: int, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.answer = b""  # it hangs up, as a killed process does
    assert ask(port) == 502
    assert asked(replicas) == 1


def test_a_post_that_was_refused_is_not_sent_again(port: int, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
    assert ask(port) == 503
    assert asked(replicas) == 1


def test_a_delete_and_its_neighbours_reach_one_replica(port: int, replicas: list[Replica]) -> None:
    for method in ("DELETE", "OPTIONS"):
        assert ask(port, method) == 200
        assert asked(replicas, method) == 1


def test_nginx_sends_a_resume_on_from_a_replica_that_is_not_ready(
    replicas: list[Replica], tmp_path: Path
) -> None:
    for replica in replicas[:2]:
        replica.answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
    with balancer("nginx", [one.ports for one in replicas], tmp_path) as port:
        assert {ask(port, "GET") for _ in range(6)} == {200}
    assert replicas[2].counts["GET"] == 6


def open_stream(port: int, request: bytes) -> socket.socket:
    """Begin a response that stays open; returns when its first bytes have come."""
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    connection.sendall(request)
    received = b""
    while not received.endswith(b"hello"):
        data = connection.recv(4096)
        assert data, received
        received += data
    return connection


EVENTS = b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n"
WEBSOCKET = (
    b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("request_", [EVENTS, WEBSOCKET], ids=["events", "websocket"])
def test_the_first_bytes_of_a_stream_do_not_wait_for_more(port: int, request_: bytes) -> None:
    open_stream(port, request_).close()


@pytest.mark.parametrize("request_", [EVENTS, WEBSOCKET], ids=["events", "websocket"])
@pytest.mark.parametrize("how", ["is_stopped", "is_ready"])
def test_haproxy_closes_the_streams_of_a_replica_that_is_not_ready(
    haproxy: int, replicas: list[Replica], request_: bytes, how: str
) -> None:
    streams = [open_stream(haproxy, request_) for _ in range(3)]  # one at each replica
    [busy, *others] = [one for one in replicas if one.counts["GET"]]
    setattr(busy, how, how == "is_stopped")
    (closed,) = _closed(streams, wanted=1)
    for stream in streams:
        if stream is not closed:
            stream.setblocking(False)
            with pytest.raises(BlockingIOError):  # the others are left alone
                stream.recv(1)
        stream.close()
    before = asked([busy])
    assert {ask(haproxy) for _ in range(6)} == {200}
    assert asked([busy]) == before
    assert len(others) == 2
    # Ready again, it gets requests again.
    busy.is_stopped, busy.is_ready = False, True
    deadline = time.monotonic() + PATIENCE_S
    while asked([busy]) == before:
        assert time.monotonic() < deadline
        assert ask(haproxy) == 200


@pytest.mark.parametrize("request_", [EVENTS, WEBSOCKET], ids=["events", "websocket"])
def test_haproxy_leaves_the_streams_of_a_replica_that_shuts_down(
    haproxy: int, replicas: list[Replica], request_: bytes
) -> None:
    streams = [open_stream(haproxy, request_) for _ in range(3)]  # one at each replica
    for one in replicas:
        one.checks, one.is_draining = 0, True
    wait_until("each is checked", lambda: all(one.checks >= 4 for one in replicas))
    for stream in streams:
        stream.setblocking(False)
        with pytest.raises(BlockingIOError):
            stream.recv(1)
        stream.close()
    assert ask(haproxy) == 503, "none gets a new connection"


def _closed(streams: list[socket.socket], *, wanted: int) -> list[socket.socket]:
    """The streams that the balancer has closed, once there are so many."""
    deadline = time.monotonic() + PATIENCE_S
    closed: list[socket.socket] = []
    while len(closed) < wanted:
        assert time.monotonic() < deadline
        time.sleep(LOOK_EVERY_S)
        for stream in streams:
            stream.setblocking(False)
            try:
                if stream not in closed and not stream.recv(1):
                    closed.append(stream)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                closed.append(stream)
    return closed


def test_torture_has_the_documented_configuration(tmp_path: Path) -> None:
    """All but the addresses, and how they are found."""

    def rules(text: str) -> list[str]:
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        found = [" ".join(words) for words in lines if words and words[0] not in ("bind", "server")]
        places = ("resolvers names init-addr libc,none ", "port 9090 ")
        for place in places:
            found = [line.replace(place, "") for line in found]
        return [line for line in found if line not in RESOLVERS]

    replicas = [processes.Replica(number, "app.py:server", (), tmp_path) for number in (1, 2, 3)]
    ours = processes.configured(replicas, 1)
    assert rules(ours) == rules((FOLDER / "haproxy.cfg").read_text())
    one = replicas[0]
    assert f"server replica-1 127.0.0.1:{one.http} port {one.admin}\n" in ours
    assert f"server replica-1 127.0.0.1:{one.ws} track streams/replica-1\n" in ours


RESOLVERS = ("resolvers names", "parse-resolv-conf", "hold valid 2s")
