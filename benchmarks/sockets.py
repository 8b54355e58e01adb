"""A client of our WebSocket subprotocol written by hand.

No library can be the slower part, and the client checks every message.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import trio

from benchmarks.events import REVISION, WAITING, fill
from benchmarks.numbered import METHOD, Lost, number_of
from streams.messages import POSITION
from streams.protocol.extension import EXTENSION

READ_BYTES: Final = 64 * 1024

_HELLO: Final = {
    "protocolVersion": REVISION,
    "capabilities": {"extensions": {EXTENSION: {"dialects": ["streams"], "positions": True}}},
    "clientInfo": {"name": "benchmarks", "version": "1"},
}
_HELLO_ID: Final = 0
_CALL_ID: Final = 1
_RESUME_ID: Final = 2
_ENDED: Final = b'"mcp-streams/ended"'
_CONTROL: Final = 0x8  # opcodes from here on
_TAIL_BYTES: Final = 4096  # the last messages are no longer


class Step(NamedTuple):
    """Bytes to send, and whether what came since then is the whole answer."""

    sent: bytes
    is_answered: Callable[[bytearray], bool]


class Ticket(NamedTuple):
    """The data that a client needs to resume its call."""

    stream: str
    token: str


class Socket:
    """One connection. It keeps the bytes that come, and checks them afterwards."""

    def __init__(self, url: str) -> None:
        self.came = bytearray()
        self._address = address_of(url)
        self._connection = trio.socket.socket()
        self._opening = _opening(url)

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    async def open(self) -> None:
        """Connect, shake hands, and initialize. Raises `Lost` where that is refused."""
        await self._connection.connect(self._address)
        for step in self._opening:
            await self._connection.send(step.sent)
            await self._until(step.is_answered)
            self.came.clear()

    async def call(self, count: int, size: int) -> Ticket:
        """Call `fill`, read to its response, and confirm nothing; the connection stays open."""
        await self.begin(count, size)
        await self._until(partial(_has_line, b'"id":%d,"result"' % _CALL_ID))
        announcement = next(_lines(self.came))
        told = msgspec.json.decode(announcement)["params"]["stream"]
        return Ticket(told["streamId"], told["resumeToken"])

    async def begin(self, count: int, size: int) -> None:
        """Call `fill`, and read nothing."""
        await self._connection.send(_frame(_request(_CALL_ID, "tools/call", fill(count, size))))

    async def wait(self) -> None:
        """Call `wait` and read its first message."""
        await self._connection.send(_frame(_request(_CALL_ID, "tools/call", WAITING)))
        await self._until(partial(_has_line, METHOD.encode()))

    async def read_to_the_end(self) -> None:
        """Read until the server hangs up."""
        while data := await self._connection.recv(READ_BYTES):
            self.came += data

    def opcodes(self) -> list[int]:
        """The first byte of each frame that has come."""
        return [first for first, _ in _frames(self.came)]

    async def _until(self, is_answered: Callable[[bytearray], bool]) -> None:
        """Read until the answer is whole, or the connection ends."""
        while not is_answered(self.came):
            data = await self._connection.recv(READ_BYTES)
            if not data:
                return  # too early: the check will find a message missing
            self.came += data


def address_of(url: str) -> tuple[str, int]:
    """The host and the port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def coming_back(url: str, ticket: Ticket) -> Sequence[Step]:
    """A handshake, `initialize`, and a request for all of a call, from its first message on."""
    return [*_opening(url), Step(_resuming(ticket), partial(_has_line, _ENDED))]


def _opening(url: str) -> Sequence[Step]:
    hello = _frame(_request(_HELLO_ID, "initialize", _HELLO))
    return [Step(_handshake(urlsplit(url).netloc), _is_open), Step(hello, partial(_has_line, b"}"))]


def _is_open(came: bytearray) -> bool:
    """Whether the handshake is answered. Raises `Lost` where it is refused."""
    if came.endswith(b"\r\n\r\n") and not came.startswith(b"HTTP/1.1 101 "):
        raise Lost(f"no WebSocket: {bytes(came)!r}")
    return came.endswith(b"\r\n\r\n")


def _has_line(word: bytes, came: bytearray) -> bool:
    """Whether a word has come, near the end, and the end of its line."""
    found = came.find(word, max(0, len(came) - _TAIL_BYTES))
    return found >= 0 and came.find(b"}\n", found) >= 0


def _resuming(ticket: Ticket) -> bytes:
    params = {"streamId": ticket.stream, "resumeToken": ticket.token, "after": 0}
    ready = _encode({"jsonrpc": "2.0", "method": "notifications/initialized"})
    return _frame(ready + _request(_RESUME_ID, "stream/resume", params))


def check(came: bytes | bytearray, ticket: Ticket, count: int) -> None:
    """Check the messages of a resume.

    Raises `Lost` unless `came` is each message of `fill` once and in order, each with its number,
    then the result, then the reply of the resume.
    """
    seq, left, is_answered, is_over = 0, 0, False, False
    for line in _lines(came):
        if left:
            seq, left = seq + 1, left - 1
            if seq <= count:
                if number_of(line) != seq - 1:
                    raise Lost(f"message {seq - 1} was expected: {line[:160]!r}")
            else:
                is_answered = _is_result(line, _CALL_ID)
            continue
        message = msgspec.json.decode(line)
        if message.get("method") == POSITION:
            told = message["params"]
            if (told["streamId"], told["seq"]) != (ticket.stream, seq + 1):
                raise Lost(f"seq {seq + 1} was expected: {line[:160]!r}")
            left = told["count"]
        else:
            is_over = is_over or _is_result(line, _RESUME_ID)
    if seq != count + 1 or not (is_answered and is_over):
        raise Lost(f"{seq} messages have come, {count + 1} were sent")


def _is_result(line: bytes, request_id: int) -> bool:
    message = msgspec.json.decode(line)
    result = message.get("result")
    return message.get("id") == request_id and result is not None and not result.get("isError")


def _lines(came: bytes | bytearray) -> Iterator[bytes]:
    for first, payload in _frames(came):
        if first & 0xF < _CONTROL:
            yield from payload.splitlines()


def _frames(came: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """The first bytes of frames as a server sends them, and what they carry (RFC 6455, 5.2)."""
    at = 0
    while at + 2 <= len(came):
        first, size = came[at], came[at + 1]
        at += 2
        if size == 126:
            (size,), at = struct.unpack_from("!H", came, at), at + 2
        elif size == 127:
            (size,), at = struct.unpack_from("!Q", came, at), at + 8
        yield first, bytes(came[at : at + size])
        at += size


def _handshake(netloc: str) -> bytes:
    lines: Sequence[str] = (
        "GET / HTTP/1.1",
        f"Host: {netloc}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: mcp-streams.v1",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def _request(request_id: int, method: str, params: Any) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def _encode(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _frame(payload: bytes) -> bytes:
    """A binary frame of a client; a mask of zeros is a mask."""
    if len(payload) > 125:
        return struct.pack("!BBHI", 0x82, 0x80 | 126, len(payload), 0) + payload
    return struct.pack("!BBI", 0x82, 0x80 | len(payload), 0) + payload
