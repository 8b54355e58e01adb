"""Connections of raw clients, past their `initialize`: they read into memory that is kept."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from benchmarks.numbered import Lost
from benchmarks.rawcheck import frames_of
from benchmarks.servers import spawn
from streams.messages import notification, request
from streams.protocol.extension import EXTENSION
from transports.net.sockets import enlarge_pipe

PIECE_BYTES: Final = 256 * 1024  # of one read
TIMEOUT_S: Final = 120.0
REVISION: Final = "2025-11-25"
HEADER_BYTES_MAX: Final = 160  # of the framing of a message: an event id, a frame's header
ROOM_BYTES: Final = 4 * 1024 * 1024  # for bytes between messages
TAIL_BYTES: Final = 1024
ENDED: Final = b"mcp-streams/ended"

_hello: Final = {"protocolVersion": REVISION, "clientInfo": {"name": "raw", "version": "1"}}


def hello_of(*, positions: bool) -> dict[str, Any]:
    ours = {"experimental": {EXTENSION: {"positions": True}}}
    return {**_hello, "capabilities": ours if positions else {"streams": {}}}


class Kept:
    """Memory for all messages; its pages are touched before the clock runs."""

    def __init__(self, count: int, size: int) -> None:
        self._buffer = bytearray(b"\1") * (count * (size + HEADER_BYTES_MAX) + ROOM_BYTES)
        self._view = memoryview(self._buffer)
        self.end = 0

    @property
    def room(self) -> memoryview:
        return self._view[self.end : self.end + PIECE_BYTES]

    def is_ended(self, by: bytes) -> bool:
        """Whether the reply to the resume, which comes last, has come with its end."""
        at = self._buffer.rfind(ENDED, max(0, self.end - TAIL_BYTES), self.end)
        return at >= 0 and self._buffer.find(by, at, self.end) >= 0

    def all(self) -> bytes:
        return bytes(self._view[: self.end])


class Peer(Protocol):
    """A connection past its `initialize`, read as lines."""

    def say(self, line: bytes) -> None: ...

    def hear(self) -> bytes:
        """The next message."""

    def read_into(self, room: memoryview) -> int:
        """Read the next bytes; 0 at the end."""


class _Lines:
    """Messages out of pieces of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, fetch: Callable[[int], bytes]) -> bytes:
        while b"\n" not in self._rest:
            data = fetch(PIECE_BYTES)
            if not data:
                raise Lost("the server hung up")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Child:
    """A process that speaks over its standard streams."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process, self._stdin, self._stdout = spawn(command)
        self._in, self._out = self._stdin.fileno(), self._stdout.fileno()
        enlarge_pipe(self._out)
        self._lines = _Lines()

    def say(self, line: bytes) -> None:
        os.write(self._in, line)

    def hear(self) -> bytes:
        return self._lines.take(lambda size: os.read(self._out, size))

    def read_into(self, room: memoryview) -> int:
        return os.readv(self._out, [room])

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._process.wait(TIMEOUT_S)


class WebSocket:
    """A WebSocket that masks its frames with zeros."""

    def __init__(self, url: str, subprotocol: str) -> None:
        self._socket = _dial(url)
        host = urlsplit(url).netloc
        self._socket.sendall(
            f"GET {_path(url)} HTTP/1.1\r\nHost: {host}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Protocol: {subprotocol}\r\n\r\n".encode()
        )
        head, self._rest = _read_head(self._socket)
        if not head.startswith(b"HTTP/1.1 101 "):
            raise Lost(f"the server refused: {head!r}")
        self._opcode = 2 if subprotocol == "mcp-streams.v1" else 1
        self._heard: list[bytes] = []

    def say(self, line: bytes) -> None:
        payload = line if self._opcode == 2 else line.rstrip(b"\n")
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        self._socket.sendall(bytes([0x80 | self._opcode]) + length + bytes(4) + payload)

    def hear(self) -> bytes:
        while not self._heard:
            data = self._socket.recv(PIECE_BYTES)
            if not data:
                raise Lost("the server hung up")
            self._rest += data
            frames, self._rest = frames_of(self._rest)
            for frame in frames:
                self._heard += frame.splitlines()
        return self._heard.pop(0)

    def read_into(self, room: memoryview) -> int:
        return self._socket.recv_into(room)

    def close(self) -> None:
        self._socket.close()


class Http:
    """A session, and a connection of it for one request after the other."""

    def __init__(self, url: str, *, positions: bool) -> None:
        self._url = url
        self._fields = ""
        self._connect()
        head, _ = self.post(request(0, "initialize", hello_of(positions=positions)))
        session = _field(head, b"mcp-session-id").decode()
        self._fields = f"Mcp-Session-Id: {session}\r\nMCP-Protocol-Version: {REVISION}\r\n"
        self.post(notification("notifications/initialized"))

    def _connect(self) -> None:
        self.socket = _dial(self._url)

    def reconnect(self) -> None:
        self.socket.close()
        self._connect()

    def begin(self, method: str, accept: str, body: bytes = b"", fields: str = "") -> None:
        host = urlsplit(self._url).netloc
        head = (
            f"{method} /mcp HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\n{self._fields}"
            f"{fields}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def post(self, body: bytes) -> tuple[bytes, bytes]:
        """Send a request, for its response alone; returns the head and the body of the answer."""
        self.begin("POST", "application/json", body)
        head, rest = _read_head(self.socket)
        length = int(_field(head, b"content-length") or 0)
        while len(rest) < length:
            rest += self.socket.recv(PIECE_BYTES)
        return head, rest

    def close(self) -> None:
        self.socket.close()


def _path(url: str) -> str:
    return urlsplit(url).path or "/"


def _dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head of a response, and the bytes that came after it."""
    came = b""
    while b"\r\n\r\n" not in came:
        data = connection.recv(PIECE_BYTES)
        if not data:
            raise Lost(f"the server hung up: {came!r}")
        came += data
    head, _, rest = came.partition(b"\r\n\r\n")
    return head, rest


def _field(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        found, _, value = line.partition(b":")
        if found.lower() == name:
            return value.strip()
    return b""
