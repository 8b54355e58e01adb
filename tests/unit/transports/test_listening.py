"""A listener without free file descriptors, or with too many connections."""

import array
import contextlib
import fcntl
import os
import resource
import socket
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from trio.testing import MockClock

from streams.engine.departure import Departure
from streams.exchange import Caller, Head, Request, Responder
from tests.rigs import bare_http, bare_websocket
from tests.rigs.served import tls_contexts
from tests.wire.process import ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S
from tests.wire.verbs import POSITIONS, Reader, ack, opting_in, read_stream, start, up_to
from transports import websocket
from transports.net import listening, sockets
from transports.net.sockets import DISCARD_PAUSE_S, linger

NO_DESCRIPTORS = "no_room_for_connections"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path) as process:
        yield process


def allow(server: ServerProcess, descriptors: int) -> None:
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (descriptors, hard))


def open_descriptors(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def asking(server: ServerProcess, kind: str) -> tuple[int, bytes, bytes]:
    """Where to ask, what, and how the answer to it begins."""
    if kind == "http":
        head = f"GET /nothing HTTP/1.1\r\nHost: localhost:{server.http_port}\r\n\r\n"
        return server.http_port, head.encode(), b"HTTP/1.1 404 "
    fields = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head = f"GET / HTTP/1.1\r\nHost: localhost:{server.port}\r\n{fields}{key}\r\n"
    return server.port, head.encode(), b"HTTP/1.1 101 "


def ask(stack: contextlib.ExitStack, port: int, request: bytes) -> socket.socket:
    address = ("127.0.0.1", port)
    connection = stack.enter_context(socket.create_connection(address, DEADLINE_S))
    connection.sendall(request)
    return connection


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_who_comes_while_descriptors_are_out_is_served_when_there_are_some(
    server: ServerProcess, kind: str
) -> None:
    port, request, answer = asking(server, kind)
    with contextlib.ExitStack() as stack:
        assert ask(stack, port, request).recv(1 << 16).startswith(answer)
        descriptors, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        allow(server, open_descriptors(server))
        waiting = [ask(stack, port, request) for _ in range(5)]
        wait_until("the shortage is logged", lambda: NO_DESCRIPTORS in "".join(server.log))
        for connection in waiting:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            connection.settimeout(DEADLINE_S)
        allow(server, descriptors)
        for connection in waiting:
            assert connection.recv(1 << 16).startswith(answer)
    assert "".join(server.log).count(NO_DESCRIPTORS) == 1
    assert server.stop() == 0


def test_while_descriptors_are_out_calls_go_on_and_new_clients_wait(
    server: ServerProcess,
) -> None:
    """The journal needs no more descriptors meanwhile."""
    with server.connect("ws-streams") as peer, server.connect("http-lines") as other:
        for each in (peer, other):
            each.initialize(opting_in("http-lines", POSITIONS))
        started = start(peer, "count", n=10)
        descriptors, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        allow(server, open_descriptors(server))
        with server.connect("stdio") as relayed:
            waiting = relayed.request("ping")
            wait_until("the shortage is logged", lambda: NO_DESCRIPTORS in "".join(server.log))
            for _ in range(20):  # 20 MB: segments, checkpoints, acks
                big = start(peer, "count", n=100, pad=10_000)
                reader = Reader(peer)
                reader.response(big.id)
                assert reader.seqs(big.stream) == up_to(101)
                ack(peer, big.stream, 101)
            allow(server, descriptors)
            assert relayed.response(waiting).result == {}
        reader, _ = read_stream(other, started.with_token, after=0)
        assert reader.seqs(started.stream) == up_to(11)
    assert "".join(server.log).count(NO_DESCRIPTORS) == 1
    assert server.stop() == 0


def leave(descriptors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a listener of this process take only so many more for its connections."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(listening, "DESCRIPTORS_KEPT", soft - lowest - descriptors)


async def test_who_would_have_one_of_the_last_descriptors_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave(20, monkeypatch)
    async with bare_websocket.server() as port, contextlib.AsyncExitStack() as stack:

        async def fill() -> None:
            for _ in range(20):
                await stack.enter_async_context(websocket.connect(f"ws://127.0.0.1:{port}"))

        with (
            capture_logs() as logs,
            pytest.raises(ConnectionRefusedError, match=r"503.*Too many connections"),
        ):
            await fill()
        assert [each["event"] for each in logs] == ["listening.no_room_for_connections"]
        assert "file descriptors are left" in logs[0]["why"]
        await stack.aclose()
        async with websocket.connect(f"ws://127.0.0.1:{port}") as channel:
            await channel.send(b"1\n")
            assert await channel.receive() == [b"1"]


async def test_over_http_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(20, monkeypatch)
    async with bare_http.serving() as port:
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(12)]
        assert (await bare_http.tell(port, b"")).startswith(b"HTTP/1.1 503 ")
        for stream in idle:
            await stream.aclose()
        answer = await bare_http.tell(port, bare_http.asking(bare_http.CLOSE))
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_what_notices_a_vanished_peer_is_set_on_every_connection() -> None:
    listeners = await listening.listen("127.0.0.1", 0)
    port = listening.port_of(listeners)
    async with (
        listeners[0],
        await trio.open_tcp_stream("127.0.0.1", port),
        await listeners[0].accept() as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            kept_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert kept_ms == sockets.USER_TIMEOUT_MS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_listener_that_leaves_refuses_new_connections_and_keeps_the_open_ones(
    host: str,
) -> None:
    departure = Departure()
    async with (
        bare_websocket.server(host=host, departure=departure) as port,
        websocket.connect(f"ws://127.0.0.1:{port}") as channel,
    ):
        departure.begin()
        with trio.fail_after(DEADLINE_S):
            while await accepts(port):  # until the listener has heard of it
                await trio.sleep(0.01)
        await channel.send(b"1\n")
        assert await channel.receive() == [b"1"]
        await departure.settled()


async def test_no_connection_that_was_made_is_reset_when_a_listener_leaves() -> None:
    departure = Departure()
    answered = refused = 0
    async with bare_websocket.server(departure=departure) as port:

        async def knock() -> None:
            nonlocal answered, refused
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", port)
                except OSError:
                    refused += 1
                    return
                async with stream:
                    await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 4")
                answered += 1
                if answered == 100:
                    departure.begin()

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(knock)
    assert refused == 20


async def test_a_request_that_comes_in_the_turn_in_which_its_server_leaves_is_answered() -> None:
    for _ in range(20):  # tasks of one turn run in any order
        departure = Departure()
        with trio.fail_after(DEADLINE_S):
            async with (
                bare_http.serving(departure=departure) as port,
                await trio.open_tcp_stream("127.0.0.1", port) as stream,
            ):
                await stream.send_all(bare_http.asking())
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
                os.write(stream.socket.fileno(), bare_http.asking())
                departure.begin()
                answer = await bare_http.to_the_end(stream)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in answer.lower()
                await departure.settled()


async def test_a_request_behind_another_is_answered_in_its_turn_when_its_server_leaves() -> None:
    departure = Departure()
    is_asked, admits, is_leaving = trio.Event(), trio.Event(), trio.Event()

    async def echo(request: Request, responder: Responder) -> None:
        if request.path == "/1":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(responder.gone)  # so what follows is read meanwhile
                is_asked.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                nursery.cancel_scope.cancel()
        await responder.respond(200, (), request.path.encode())

    async def admit(head: Head) -> Caller:
        if head.path == "/2":
            admits.set()
            await is_leaving.wait()
        return Caller("bearer(x, y)", lambda: 60.0)

    def asking(path: str) -> bytes:
        return bare_http.asking(start=f"POST {path} HTTP/1.1")

    with trio.fail_after(DEADLINE_S):
        async with (
            bare_http.serving(echo, departure=departure, admit=admit) as port,
            await trio.open_tcp_stream("127.0.0.1", port) as stream,
        ):
            await stream.send_all(asking("/1") + asking("/2"))
            await is_asked.wait()
            await stream.send_all(asking("/3"))
            await admits.wait()
            departure.begin()
            await trio.testing.wait_all_tasks_blocked()
            is_leaving.set()
            answer = await bare_http.to_the_end(stream)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.endswith(b"/2")


async def accepts(port: int) -> bool:
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return False
    await stream.aclose()
    return True


def unread(stream: trio.SocketStream) -> int:
    """The bytes that have come and were not read."""
    count = array.array("i", [0])
    fcntl.ioctl(stream.socket.fileno(), termios.FIONREAD, count)
    return count[0]


async def test_a_peer_that_goes_on_sending_at_the_end_of_a_connection_is_read_with_pauses(
    mock_clock: MockClock,
) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    peer = await trio.testing.open_stream_to_socket_listener(listener)
    ours = await listener.accept()

    async def go_on_sending() -> None:
        await peer.send_all(bytes(16 * 1024 * 1024))
        await peer.send_eof()

    async with listener, peer, ours, trio.open_nursery() as nursery:
        nursery.start_soon(go_on_sending)
        nursery.start_soon(linger, ours)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked(0.01)
            left = unread(ours)
            assert left > 0  # the peer waits, and so do its bytes
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert unread(ours) >= left
            mock_clock.jump(DISCARD_PAUSE_S)
        mock_clock.autojump_threshold = 0.01  # it hears the peer out


async def test_a_handshake_waits_for_its_turn_when_it_has_come_not_when_it_is_accepted(
    mock_clock: MockClock,  # no free units are earned meanwhile
) -> None:
    """Else connections that are opened beforehand could all shake hands in the same moment."""
    async with bare_websocket.server() as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, trio.open_nursery() as nursery:
            await trio.testing.wait_all_tasks_blocked()
            async with bare_http.all_turns_taken():
                nursery.start_soon(bare_websocket.shake_hands, stream, port)
                await trio.testing.wait_all_tasks_blocked()
                assert nursery.child_tasks  # it ends below, once it is answered


async def test_so_does_a_handshake_of_tls(mock_clock: MockClock) -> None:
    theirs, ours = tls_contexts()
    async with bare_websocket.server(host="localhost", ssl_context=theirs) as port:
        stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=ours)
        async with stream, trio.open_nursery() as nursery:
            await trio.testing.wait_all_tasks_blocked()
            async with bare_http.all_turns_taken():
                nursery.start_soon(stream.do_handshake)
                await trio.testing.wait_all_tasks_blocked()
                assert nursery.child_tasks
