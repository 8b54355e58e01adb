"""Clients that take what comes as fast as they can, and look at it afterwards.

What is measured with them is the server: blocking sockets and pipes, read into memory that is there
already, and nothing else while the clock runs. Then every message is looked at: it must be there,
once, in order, byte for byte. Each function calls `fill`, hangs up after the first message, waits
until the call is done, and resumes it over a connection that stands already.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from benchmarks.numbered import Lost
from benchmarks.rawcheck import (
    check_events,
    check_lines,
    check_messages,
    chunks_of,
    frames_of,
)
from benchmarks.servers import ROOT
from streams.extension import EXTENSION
from streams.messages import notification, request
from transports.lines import enlarge_pipe

PIECE_BYTES: Final = 256 * 1024  # of one read
TIMEOUT_S: Final = 120.0
POLL_EVERY_S: Final = 0.05
REVISION: Final = "2025-11-25"
CALL, POLL, RESUME, DROP = 1, 2, 3, 4  # ids of our requests
HEADER_BYTES_MAX: Final = 160  # of what may come with a message: an event id, a frame's header
ROOM_BYTES: Final = 4 * 1024 * 1024  # for what belongs to no message
TAIL_BYTES: Final = 1024

_ENDED: Final = b"mcp-streams/ended"
_LINES: Final = "application/x-ndjson, application/json"
_EVENTS: Final = "application/json, text/event-stream"
_hello: Final = {"protocolVersion": REVISION, "clientInfo": {"name": "raw", "version": "1"}}
_decode: Final = msgspec.json.decode


class Resumed(NamedTuple):
    """What came of a resume: so many messages, of so many bytes without any framing."""

    messages: int
    bytes: int
    seconds: float


class Left(NamedTuple):
    """A call that was left after its first message."""

    stream: str
    token: str
    last_event: str = ""


class Kept:
    """Room for all that comes; it is the process's own before the clock runs."""

    def __init__(self, count: int, size: int) -> None:
        self._buffer = bytearray(b"\1") * (count * (size + HEADER_BYTES_MAX) + ROOM_BYTES)
        self._view = memoryview(self._buffer)
        self.end = 0

    @property
    def room(self) -> memoryview:
        return self._view[self.end : self.end + PIECE_BYTES]

    def is_ended(self, by: bytes) -> bool:
        """Whether the reply to the resume has come, the last thing that does, and what ends it."""
        at = self._buffer.rfind(_ENDED, max(0, self.end - TAIL_BYTES), self.end)
        return at >= 0 and self._buffer.find(by, at, self.end) >= 0

    def all(self) -> bytes:
        return bytes(self._view[: self.end])


class Peer(Protocol):
    """A connection past its introductions, seen as lines."""

    def say(self, line: bytes) -> None: ...

    def hear(self) -> bytes:
        """The next message."""

    def read_into(self, room: memoryview) -> int:
        """What comes next, as it comes; 0 at the end."""


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


# -- stdio


class _Child:
    """A process that is spoken with over its standard streams."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        enlarge_pipe(self._out)
        self._lines = _Lines()

    def say(self, line: bytes) -> None:
        os.write(self._in, line)

    def hear(self) -> bytes:
        return self._lines.take(lambda size: os.read(self._out, size))

    def read_into(self, room: memoryview) -> int:
        return os.readv(self._out, [room])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(TIMEOUT_S)


def stdio(command: Sequence[str], count: int, size: int) -> Resumed:
    """Over the pipes of a child: `command` is spawned twice. Raises `Lost`."""
    with contextlib.closing(_Child(command)) as child:
        _introduce(child, positions=True)
        left = _leave(child, count, size)
    with contextlib.closing(_Child(command)) as child:
        _introduce(child, positions=True)
        kept, seconds = _resume(child, left, Kept(count, size), b"}\n")
        came = check_lines(kept.all().splitlines(keepends=True), count, size)
        _drop(child, left, count + 1)
    return Resumed(*came, seconds)


# -- WebSocket


class _WebSocket:
    """A WebSocket, which masks what it says with zeros."""

    def __init__(self, url: str, subprotocol: str) -> None:
        self._socket = _dial(url)
        host = urlsplit(url).netloc
        self._socket.sendall(
            f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
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


def websocket_lines(url: str, count: int, size: int) -> Resumed:
    """Over a WebSocket with our own subprotocol, many messages a frame. Raises `Lost`."""
    return _over_websocket(url, "mcp-streams.v1", count, size)


def websocket_messages(url: str, count: int, size: int) -> Resumed:
    """Over a WebSocket with the subprotocol `mcp`, one message a frame. Raises `Lost`."""
    return _over_websocket(url, "mcp", count, size)


def _over_websocket(url: str, subprotocol: str, count: int, size: int) -> Resumed:
    is_numbered = subprotocol != "mcp"
    with contextlib.closing(_WebSocket(url, subprotocol)) as peer:
        _introduce(peer, positions=is_numbered)
        left = _leave(peer, count, size)
    with contextlib.closing(_WebSocket(url, subprotocol)) as peer:
        _introduce(peer, positions=is_numbered)
        end = b"}\n" if is_numbered else b"}}}"
        kept, seconds = _resume(peer, left, Kept(count, size), end)
        frames, _ = frames_of(kept.all())
        if is_numbered:
            came = check_lines(b"".join(frames).splitlines(keepends=True), count, size)
        else:
            came = check_messages([frame + b"\n" for frame in frames], count, size)
        _drop(peer, left, count + 1)
    return Resumed(*came, seconds)


# -- HTTP


class _Http:
    """A session, and a connection of it over which one request is made after the other."""

    def __init__(self, url: str, accept: str, *, positions: bool) -> None:
        self._url = url
        self.accept = accept
        self._fields = ""
        self._connect()
        head, _ = self.post(request(0, "initialize", _hello_of(positions=positions)))
        session = _field(head, b"mcp-session-id").decode()
        self._fields = f"Mcp-Session-Id: {session}\r\nMCP-Protocol-Version: {REVISION}\r\n"
        self.post(notification("notifications/initialized"))

    def _connect(self) -> None:
        self.socket = _dial(self._url)

    def reconnect(self) -> None:
        self.socket.close()
        self._connect()

    def begin(self, method: str, body: bytes = b"", fields: str = "") -> None:
        host = urlsplit(self._url).netloc
        head = (
            f"{method} /mcp HTTP/1.1\r\nHost: {host}\r\nAccept: {self.accept}\r\n{self._fields}"
            f"{fields}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def post(self, body: bytes) -> tuple[bytes, bytes]:
        """A request that has a short answer: its head and its body."""
        self.begin("POST", body)
        head, rest = _read_head(self.socket)
        if b"chunked" in head.lower():
            while not rest.endswith(b"0\r\n\r\n"):
                rest += self.socket.recv(PIECE_BYTES)
            return head, b"".join(chunks_of(rest))
        length = int(_field(head, b"content-length") or 0)
        while len(rest) < length:
            rest += self.socket.recv(PIECE_BYTES)
        return head, rest

    def close(self) -> None:
        self.socket.close()


def http_lines(url: str, count: int, size: int) -> Resumed:
    """Over HTTP in our own framing, with the POST of a resume. Raises `Lost`."""
    with contextlib.closing(_Http(url, _LINES, positions=True)) as session:
        left = _leave_http(session, count, size)
        _wait_http(session, left)
        kept = Kept(count, size)
        body = request(RESUME, "stream/resume", _named(left, after=1))
        began_at = time.perf_counter()
        session.begin("POST", body)
        while not kept.is_ended(b"\r\n0\r\n\r\n"):
            kept.end += _some(session.socket.recv_into(kept.room))
        seconds = time.perf_counter() - began_at
        _, _, chunked = kept.all().partition(b"\r\n\r\n")
        lines = b"".join(chunks_of(chunked)).splitlines(keepends=True)
        came = check_lines([line for line in lines if line.strip()], count, size, is_embedded=True)
        session.post(request(DROP, "stream/resume", _named(left, after=count + 1)))
    return Resumed(*came, seconds)


def sse(url: str, count: int, size: int) -> Resumed:
    """Server-sent events, with a GET and the id of the last event. Raises `Lost`."""
    with contextlib.closing(_Http(url, _EVENTS, positions=False)) as session:
        left = _leave_http(session, count, size)
        _wait_http(session, left)
        kept = Kept(count, size)
        session.accept = "text/event-stream"
        began_at = time.perf_counter()
        session.begin("GET", fields=f"Last-Event-ID: {left.last_event}\r\n")
        while got := session.socket.recv_into(kept.room):
            kept.end += got
        seconds = time.perf_counter() - began_at
        _, _, body = kept.all().partition(b"\r\n\r\n")
        came = check_events(body, left.last_event, count, size)
        session.accept = _EVENTS
        session.reconnect()
        session.begin("POST", request(DROP, "stream/resume", _named(left, after=count + 1)))
        while session.socket.recv(PIECE_BYTES):
            pass
    return Resumed(*came, seconds)


def _leave_http(session: _Http, count: int, size: int) -> Left:
    session.begin("POST", _call(count, size))
    said = b""
    while b'"n":' not in said:
        data = session.socket.recv(PIECE_BYTES)
        if not data:
            raise Lost(f"the server hung up: {said!r}")
        said += data
    session.reconnect()
    at = said.index(b'{"stream')
    created = msgspec.json.decode(said[at : said.index(b"\n", at) - 1])["stream"]
    event = said[said.rfind(b"id: ", 0, said.index(b'"n":')) :].split(b"\n")[0]
    return Left(created["streamId"], created["resumeToken"], event.removeprefix(b"id: ").decode())


def _wait_http(session: _Http, left: Left) -> None:
    session.accept, accept = "application/json", session.accept
    while True:
        _, body = session.post(request(POLL, "stream/poll", _named(left)))
        if _result(body)["status"] == "completed":
            break
        time.sleep(POLL_EVERY_S)
    session.accept = accept


# -- what they share


def _introduce(peer: Peer, *, positions: bool) -> None:
    peer.say(request(0, "initialize", _hello_of(positions=positions)))
    _result(peer.hear())
    peer.say(notification("notifications/initialized"))


def _hello_of(*, positions: bool) -> dict[str, Any]:
    ours = {"experimental": {EXTENSION: {"positions": True}}}
    return {**_hello, "capabilities": ours if positions else {"streams": {}}}


def _leave(peer: Peer, count: int, size: int) -> Left:
    peer.say(_call(count, size))
    created = _decode(peer.hear())["params"]["stream"]
    while b'"n":' not in peer.hear():
        pass
    return Left(created["streamId"], created["resumeToken"])


def _resume(peer: Peer, left: Left, kept: Kept, by: bytes) -> tuple[Kept, float]:
    while True:
        peer.say(request(POLL, "stream/poll", _named(left)))
        if _result(peer.hear())["status"] == "completed":
            break
        time.sleep(POLL_EVERY_S)
    resume = request(RESUME, "stream/resume", _named(left, after=1))
    began_at = time.perf_counter()
    peer.say(resume)
    while not kept.is_ended(by):
        kept.end += _some(peer.read_into(kept.room))
    return kept, time.perf_counter() - began_at


def _drop(peer: Peer, left: Left, last: int) -> None:
    """Let the server keep nothing of it."""
    peer.say(request(DROP, "stream/resume", _named(left, after=last)))
    while _ENDED not in peer.hear():
        pass


def _named(left: Left, *, after: int | None = None) -> dict[str, Any]:
    named: dict[str, Any] = {"streamId": left.stream, "resumeToken": left.token}
    return named if after is None else {**named, "after": after}


def _call(count: int, size: int) -> bytes:
    params = {"name": "fill", "arguments": {"count": count, "size": size}}
    return request(CALL, "tools/call", params)


def _result(line: bytes) -> Any:
    message = _decode(line)
    if "result" not in message:
        raise Lost(f"a result was expected: {line!r}")
    return message["result"]


def _some(count: int) -> int:
    if not count:
        raise Lost("the server hung up during the resume")
    return count


def _dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head of a response, and what has come of what follows it."""
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
