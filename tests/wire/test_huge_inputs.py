"""Inputs larger than any memory, over each transport: an error says what to do, and no other client
is affected.

`HUGE_MIB` sets the largest size, `HUGE_LINES` the number of messages at once. The server's use of
memory meanwhile is bounded, and another client's stream goes on.
"""

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import ServerProcess
from tests.wire.raw import DEADLINE_S, Message, PipePeer
from tests.wire.rawhttp import BOTH
from tests.wire.verbs import MIB, POSITIONS, counted, refused

pytestmark = pytest.mark.needs_one_process("it measures the memory of the process")

HUGE = int(os.environ.get("HUGE_MIB", "32")) * MIB
LINES = int(os.environ.get("HUGE_LINES", "5000"))
GROWTH_MAX = 48 * MIB  # some messages of 4 MiB, whatever the total
PIECE = b"x" * MIB
PING = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'
HEAD = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HEAD += f"Accept: {BOTH}\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()


def peak_of(pid: int) -> int:
    """The most memory that a process has had since `forget_peak`, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.fixture(autouse=True)
def unharmed(server: ServerProcess) -> Iterator[None]:
    """Check that memory is bounded, and that another client's stream goes on."""
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        peer.ask("tools/call", {"name": "count", "arguments": {"n": 3}})
        Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak is now the current value
        before = peak_of(server.pid)
        yield
        assert peak_of(server.pid) - before < GROWTH_MAX
        request = peer.call("count", n=3)
        assert counted(peer.read_until(lambda m: m.answers(request)))[-3:] == [1, 2, 3]
    assert not any("Traceback" in line for line in server.log)


class Pouring:
    """A bare connection into which more is poured than the server may hold."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self.received = b""
        self.is_over = False

    def pour(self, first: bytes, *, piece: bytes = PIECE, size: int = HUGE) -> None:
        """Send until all is sent or the server refuses."""
        rest = memoryview(first)
        self.socket.setblocking(False)
        while (rest or size > 0) and not self.is_over:
            if not rest:
                rest, size = memoryview(piece), size - len(piece)
            readable, writable, _ = select.select([self.socket], [self.socket], [], DEADLINE_S)
            assert readable or writable, "the server neither takes nor answers"
            if readable:
                self._take()
            elif writable:
                with contextlib.suppress(ConnectionError):
                    rest = rest[self.socket.send(rest) :]

    def _take(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.received += data
        self.is_over = not data

    def until(self, said: bytes) -> None:
        """Wait until these bytes have come."""
        while said not in self.received:
            assert not self.is_over, self.received
            assert select.select([self.socket], [], [], DEADLINE_S)[0], self.received
            self._take()

    def to_the_end(self) -> bytes:
        """The server's bytes up to its end of the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        while not self.is_over:
            assert select.select([self.socket], [], [], DEADLINE_S)[0], self.received
            self._take()
        self.socket.close()
        return self.received


def error_in(response: bytes) -> Message:
    """The JSON-RPC error of an HTTP response."""
    message = Message(response.partition(b"\r\n\r\n")[2])
    assert message.error["message"].rstrip(".").count(" ") > 3, "a sentence"
    return message


HTTP = {
    "announced, 10^18": (f"{HEAD}Content-Length: {10**18}\r\n\r\n".encode(), PIECE, (413,)),
    "announced, 10^40": (f"{HEAD}Content-Length: {10**40}\r\n\r\n".encode(), PIECE, (400, 413)),
    "endless chunks": (CHUNKED, b"100000\r\n" + PIECE + b"\r\n", (413,)),
    "one chunk": (CHUNKED + b"fffffffffffffff\r\n", PIECE, (400, 413)),
    "endless chunk size": (CHUNKED, b"0" * MIB, (400, 431)),
    "endless chunk extension": (CHUNKED + b"5;", PIECE, (400, 431)),
    "many small chunks": (CHUNKED, b"1\r\nx\r\n" * 100_000, (400, 413)),
    "endless trailer": (CHUNKED + b"0\r\nX: ", PIECE, (400, 431)),
    "endless header": (HEAD.encode() + b"X: ", PIECE, (431,)),
    "endless headers": (HEAD.encode(), b"X: y\r\n" * 100_000, (431,)),
    "endless target": (b"POST /", PIECE, (400, 414, 431)),
    "no HTTP": (b"", PIECE, (400, 431)),
    "gzip": (
        f"{HEAD}Content-Encoding: gzip\r\nContent-Length: {HUGE}\r\n\r\n".encode(),
        PIECE,
        (413, 415),
    ),
}


@pytest.mark.parametrize("what", HTTP)
def test_a_request_over_http_without_end_is_refused(server: ServerProcess, what: str) -> None:
    """W§7, W§9: an HTTP status and a JSON-RPC error, before most of it was sent."""
    first, piece, statuses = HTTP[what]
    pouring = Pouring(server.http_port)
    pouring.pour(first, piece=piece)
    response = pouring.to_the_end()
    assert int(response.split()[1]) in statuses, response
    error_in(response)


@pytest.mark.parametrize("what", ["endless header", "endless headers", "endless target", "no HTTP"])
def test_a_handshake_without_end_is_refused(server: ServerProcess, what: str) -> None:
    first, piece, statuses = HTTP[what]
    pouring = Pouring(server.port)
    pouring.pour(first.replace(b"POST", b"GET"), piece=piece)
    assert int(pouring.to_the_end().split()[1]) in statuses


def shaken(server: ServerProcess, subprotocol: str) -> Pouring:
    """A WebSocket, past its handshake."""
    head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nConnection: Upgrade\r\n"
    head += "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    pouring = Pouring(server.port)
    request = f"{head}Sec-WebSocket-Protocol: {subprotocol}\r\n\r\n"
    pouring.pour(request.encode(), size=0)
    pouring.until(b"\r\n\r\n")
    assert pouring.received.startswith(b"HTTP/1.1 101 ")
    pouring.received = b""
    return pouring


def masked(opcode: int, payload: bytes, *, announced: int | None = None) -> bytes:
    """RFC 6455, 5.2: a frame of a client, with a key of zeros and a length of 64 bits."""
    size = len(payload) if announced is None else announced
    return bytes([opcode, 0xFF]) + size.to_bytes(8, "big") + bytes(4) + payload


@pytest.mark.parametrize("offered", ["mcp", "mcp-streams.v1"])
@pytest.mark.parametrize("announced", [2**62, 2**63 - 1, 5 * 2**30])
def test_a_frame_that_announces_too_much_ends_its_websocket(
    server: ServerProcess, offered: str, announced: int
) -> None:
    """W§7: "not after RFC 6455's 1007 and 1009": a close frame says why."""
    pouring = shaken(server, offered)
    opcode = 0x81 if offered == "mcp" else 0x82
    pouring.pour(masked(opcode, b"", announced=announced))
    said = pouring.to_the_end()
    assert int.from_bytes(said[2:4], "big") == 1009, said


@pytest.mark.parametrize("offered", ["mcp", "mcp-streams.v1"])
def test_a_message_of_endless_frames_is_refused(server: ServerProcess, offered: str) -> None:
    pouring = shaken(server, offered)
    first = masked(0x01 if offered == "mcp" else 0x02, PIECE)
    pouring.pour(first, piece=masked(0x00, PIECE))
    assert b"too_large" in pouring.to_the_end() or b"\x03\xf1" in pouring.received


def test_frames_full_of_no_message_are_each_refused_and_the_connection_goes_on(
    server: ServerProcess,
) -> None:
    """W§7: "A message above 4 MiB is refused with a clear error; the connection survives where the
    framing allows"."""
    pouring = shaken(server, "mcp-streams.v1")
    pouring.pour(b"", piece=masked(0x82, PIECE))
    pouring.pour(b"\x82" + bytes([0x80 | len(PING)]) + bytes(4) + PING, size=0)
    pouring.until(b'"id":7,"result"')
    pouring.to_the_end()
    assert pouring.received.count(b'"code":-32700') == HUGE // len(masked(0x82, PIECE)) + 1


def test_a_line_without_end_over_stdio_is_refused_and_the_connection_goes_on(
    stdio: Wire,
) -> None:
    peer = stdio.connect()
    assert isinstance(peer, PipePeer)
    for _ in range(HUGE // MIB):
        peer.send_bytes(PIECE)
    peer.send_bytes(b"\n" + PING + b"\n")
    refused(peer.receive(), "too_large")
    assert peer.receive() == {"jsonrpc": "2.0", "id": 7, "result": {}}


DEEP = b"[" * 100_000 + b"]" * 100_000
DIGITS = b"9" * 3_000_000
VALUES = {
    "nested": DEEP,
    "nested in params": b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":' + DEEP + b"}}",
    "half nested": b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":' + b"[{" * 100_000,
    "a number": b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":' + DIGITS + b"}}",
    "a number for an id": b'{"jsonrpc":"2.0","id":' + DIGITS + b',"method":"ping"}',
    "an exponent": b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":1e' + DIGITS + b"}}",
    "a name": b'{"jsonrpc":"2.0","id":7,"method":"' + DIGITS + b'"}',
    "a key": b'{"jsonrpc":"2.0","id":7,"method":"ping","' + DIGITS + b'":1}',
    "many keys": b"{" + b",".join(b'"%d":1' % n for n in range(300_000)) + b"}",
    "an id": json.dumps({"jsonrpc": "2.0", "id": "x" * 3_000_000, "method": "ping"}).encode(),
    "arguments": json.dumps(
        {
            "jsonrpc": "2.0",
            "id": 7,
            "method": "tools/call",
            "params": {"name": "add", "arguments": {"a": int("9" * 4000), "b": 1}},
        }
    ).encode(),
}


@pytest.mark.parametrize("kind", ["ws-streams", "http-sse"])
@pytest.mark.parametrize("what", VALUES)
def test_a_huge_value_is_answered_and_the_connection_goes_on(
    server: ServerProcess, kind: str, what: str
) -> None:
    """W§9: a result or an error, in words."""
    with server.connect(kind) as peer:
        peer.initialize(POSITIONS)
        peer.send_raw(VALUES[what])
        answer = peer.expect(lambda message: "method" not in message)
        assert ("result" in answer) != ("error" in answer)
        assert peer.ask("ping").result == {}


DENSE = {
    "lists": b"[" + b"[[[[]]]]," * 400_000 + b"1]",
    "objects": b"[" + b'{"":0},' * 500_000 + b"1]",
    "a list of objects": b"[" + b"{}," * 1_300_000 + b"1]",
}


@pytest.mark.parametrize("kind", ["ws-streams", "ws-mcp", "http-sse", "http-lines", "stdio"])
@pytest.mark.parametrize("what", DENSE)
def test_too_many_lists_and_objects_are_refused_before_they_are_made(
    server: ServerProcess, kind: str, what: str
) -> None:
    """4 MiB of them would take 100 to 200 MiB of memory, and up to 0.3 s."""
    with server.connect(kind) as peer:
        peer.initialize(POSITIONS)
        call = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"add",'
        peer.send_raw(call + b'"arguments":{"a":' + DENSE[what] + b"}}}")
        answer = peer.expect(lambda message: "method" not in message)
        assert answer["id"] == 7
        assert refused(answer, "too_large") == {"reason": "too_large", "limit": 262_144}
        assert peer.ask("ping").result == {}


@pytest.mark.parametrize("line", [b"", b"[]", PING])
@pytest.mark.parametrize("kind", ["ws-streams", "stdio"])
def test_many_lines_at_once_are_each_answered(
    server: ServerProcess, kind: str, line: bytes
) -> None:
    with server.connect(kind) as peer:
        peer.initialize(POSITIONS)
        many = (line + b"\n") * LINES
        if isinstance(peer, PipePeer):
            peer.send_bytes(many)
        else:
            peer.send_raw(many[:-1])
        for _ in range(LINES if line else 0):
            answer = peer.receive()
            assert answer.get("id") == (7 if line is PING else None)
        peer.settle()
