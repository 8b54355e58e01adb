"""The driver of short calls: one request and its result, from many clients at once.

One thread has all clients: non-blocking sockets, bytes that are prepared, and no library. It shares
the CPUs with the server, so its own CPU time is a figure as well. Every answer must have the id
and the text of its call.

Over HTTP each client has a session and a connection, and one call in flight. Over a WebSocket or
pipes one client has all calls in flight. All of it is one file because each kind of connection is
driven by the same loop and clock: a difference between two rows must not be one of drivers.
"""

import os
import re
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count, islice
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from benchmarks.numbered import FIRST, METHOD, Lost
from benchmarks.rawcheck import chunks_of, frames_of
from benchmarks.servers import spawn
from streams.messages import notification, request
from streams.protocol.extension import KEY

REVISION: Final = "2025-11-25"
TIMEOUT_S: Final = 30.0  # no answer takes as long: the server has hung
READ_BYTES: Final = 256 * 1024
# Calls over pipes are written at once: 256 calls of 150 bytes fit into a pipe's 64 KiB.
IN_FLIGHT_MAX: Final = 256

_TAIL_PIECES: Final = 4  # a response may be split between two reads, and chunked besides

_MARK: Final = b"%d" % FIRST  # stands for the number of a call until it is sent
_HELLO: Final = {
    "protocolVersion": REVISION,
    "capabilities": {},
    "clientInfo": {"name": "benchmarks", "version": "1"},
}
_INITIALIZE: Final = request(0, "initialize", _HELLO)
_READY: Final = notification("notifications/initialized")
_ACCEPTED: Final = b"HTTP/1.1 202 "  # a notification
_SESSION: Final = re.compile(rb"\r\nmcp-session-id: *(\S+)", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_EVENTS: Final = re.compile(rb"\r\ncontent-type: *text/event-stream", re.IGNORECASE)
_CPU_CLOCK_BITS, _CPU_CLOCK_KIND = 3, 2  # of a clock id: clock_getcpuclockid(3), CPUCLOCK_SCHED


class Plan(msgspec.Struct, frozen=True):
    """The seconds of one measurement, and the numbers of calls in flight."""

    ramp_s: float = 0.3  # before the clock starts
    timed_s: float = 1.0
    clients: tuple[int, ...] = (1, 32, 256)


QUICK: Final = Plan(ramp_s=0.0, timed_s=0.03, clients=(1, 4))


class Tool(msgspec.Struct, frozen=True):
    """A tool that returns its text, after so many log messages."""

    name: str = "echo"
    messages: int = 0
    is_keyed: bool = False  # each call has an idempotency key of its own

    def pieces(self) -> list[bytes]:
        """A request, cut at the places of its number: it is the id, the text, and in the key."""
        params: dict[str, Any] = {"name": self.name, "arguments": {"text": str(FIRST)}}
        if self.is_keyed:
            params["_meta"] = {KEY: f"{secrets.token_hex(8)}-{FIRST}"}
        return request(FIRST, "tools/call", params).split(_MARK)


ECHO: Final = Tool()
KEYED: Final = Tool(is_keyed=True)
NOTE: Final = Tool("note", messages=1)


class Took(NamedTuple):
    """The figures of one measurement. CPU times are those of one call."""

    per_s: float
    p50_ms: float
    p99_ms: float
    server_us: float
    driver_us: float


class Driver(Protocol):
    """Clients of one server, past their `initialize`."""

    def calls(self, in_flight: int, tool: Tool, plan: Plan) -> Took:
        """Call the tool for some time. Raises `Lost` and `TimeoutError`."""

    def close(self) -> None: ...


# Figures


def cpu_s(pid: int) -> float:
    """The CPU time of a process, with all of its threads, also those that have ended."""
    return time.clock_gettime((~pid << _CPU_CLOCK_BITS) | _CPU_CLOCK_KIND)


class _Window:
    """The time in which calls count: between the ramp and the end."""

    def __init__(self, plan: Plan, in_flight: int, pids: Sequence[int]) -> None:
        self._plan = plan
        self._pids = pids
        self._calls_min = in_flight  # however slow the machine
        self._seconds: list[float] = []
        self._opens_at = time.perf_counter() + plan.ramp_s
        self._is_open = False
        self._began: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._ended: tuple[float, float, float] | None = None

    def took(self, seconds: float, now: float) -> bool:
        """Count a call; returns whether another one is to follow it."""
        if self._ended:
            return False
        if self._is_open:
            self._seconds.append(seconds)
            since = now - self._began[0]
            if since >= self._plan.timed_s and len(self._seconds) >= self._calls_min:
                self._ended = self._clocks()
                return False
        elif now >= self._opens_at:
            self._is_open = True
            self._began = self._clocks()
        return True

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), sum(map(cpu_s, self._pids)), time.thread_time()

    def result(self) -> Took:
        assert self._ended is not None
        clocks = zip(self._ended, self._began, strict=True)
        return figures(self._seconds, *(end - begin for end, begin in clocks))


def figures(each_s: Sequence[float], real: float, server: float = 0, driver: float = 0) -> Took:
    """The figures of so many calls, in so many seconds, and so many of CPU time."""
    taken = sorted(each_s)
    return Took(
        per_s=len(taken) / real,
        p50_ms=1e3 * taken[len(taken) // 2],
        p99_ms=1e3 * taken[len(taken) * 99 // 100],
        server_us=1e6 * server / len(taken),
        driver_us=1e6 * driver / len(taken),
    )


# Checks


class _Content(msgspec.Struct, gc=False):
    text: str


class _Result(msgspec.Struct, gc=False):
    content: list[_Content]
    is_error: bool = msgspec.field(default=False, name="isError")


class _Message(msgspec.Struct, gc=False):
    id: int | None = None
    method: str = ""
    result: _Result | None = None


_decode: Final = msgspec.json.Decoder(_Message).decode


def answered(line: bytes) -> int | None:
    """The number of the call that a message answers, or None where it is a log message.

    Raises `Lost` for any other answer than that of `echo`.
    """
    try:
        message = _decode(line)
    except msgspec.DecodeError as error:
        raise Lost(f"an answer was expected: {error}: {line[:160]!r}") from None
    if message.method:
        return None
    result = message.result
    if (
        message.id is None
        or result is None
        or result.is_error
        or [each.text for each in result.content] != [str(message.id)]
    ):
        raise Lost(f"the text of the call was expected: {line[:160]!r}")
    return message.id


def is_log(line: bytes) -> bool:
    return METHOD.encode() in line


def check_answer(messages: Sequence[bytes], number: int, tool: Tool) -> None:
    """Check all messages of a call. Raises `Lost`."""
    answers = [found for line in messages if (found := answered(line)) is not None]
    if answers != [number]:
        raise Lost(f"an answer to {number} was expected: {messages!r}")
    if tool.messages and sum(map(is_log, messages)) != tool.messages:
        raise Lost(f"{tool.messages} log messages were expected: {messages!r}")


# Over HTTP


class Response(NamedTuple):
    """A whole response; `closes` where its connection ends with it."""

    messages: Sequence[bytes]
    closes: bool


def response_in(came: bytes, *, is_ended: bool = False) -> Response | None:
    """The response, as soon as all of it has come. Raises `Lost` for a refusal."""
    head, is_whole, body = came.partition(b"\r\n\r\n")
    if not is_whole:
        if is_ended:
            raise Lost(f"the server hung up: {came!r}")
        return None
    if head.startswith(_ACCEPTED):
        return Response([], closes=True)
    if not head.startswith(b"HTTP/1.1 200 "):
        raise Lost(f"the server refused: {came[:300]!r}")
    if length := _LENGTH.search(head):
        if len(body) < int(length[1]):
            return None
    elif _CHUNKED.search(head):
        if not body.endswith(b"0\r\n\r\n"):
            return None
        body = b"".join(chunks_of(body))
    elif not is_ended:
        return None
    closes = is_ended or _CLOSES.search(head) is not None
    return Response(_events(body) if _EVENTS.search(head) else [body], closes)


def is_followed(pieces: Sequence[bytes]) -> bool:
    """Whether the pieces of a stream of messages end with its response, which is short."""
    tail = b"".join(pieces[-_TAIL_PIECES:])[-READ_BYTES:]
    return tail.endswith(b"\n") and any(word in tail for word in (b'"result"', b'"error"'))


def _events(body: bytes) -> list[bytes]:
    """The data of all events but empty ones."""
    lines = [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")]
    return [line for line in lines if line]


class _Client:
    """One client: a connection, its call in flight, and the bytes that have come of the answer."""

    def __init__(self, address: tuple[str, int], head: bytes, tool: Tool) -> None:
        self._address = address
        pieces = tool.pieces()
        size = sum(map(len, pieces)) + len(_MARK) * (len(pieces) - 1)
        head += b"Content-Length: %d\r\n\r\n" % size
        self._pieces = [head + pieces[0], *pieces[1:]]
        self._tool = tool
        self._number = 0
        self._came = b""
        self.connection: socket.socket | None = None
        self.called_at = 0.0

    def connect(self) -> int:
        self.connection = _dial(self._address)
        self.connection.setblocking(False)
        return self.connection.fileno()

    def call(self, number: int) -> None:
        """Send a request, which is small enough to go out at once."""
        assert self.connection is not None
        self._number = number
        self._came = b""
        asked = (b"%d" % number).join(self._pieces)
        if self.connection.send(asked) != len(asked):
            raise Lost("the server does not read")

    def is_answered(self) -> bool:
        """Read once. Returns whether the answer is whole; the connection may have ended with it."""
        assert self.connection is not None
        data = self.connection.recv(READ_BYTES)
        self._came += data
        response = response_in(self._came, is_ended=not data)
        if response is None:
            return False
        check_answer(response.messages, self._number, self._tool)
        if response.closes:
            self.close()
        return True

    def wait(self) -> None:
        """Wait for the answer. Raises `TimeoutError`."""
        assert self.connection is not None
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        while True:
            if not readable.poll(TIMEOUT_S * 1e3):
                raise TimeoutError("a call has no answer")
            if self.is_answered():
                return

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class HttpDriver:
    """So many clients, each with a session of its own unless the server `has_sessions` not."""

    def __init__(
        self, url: str, pids: Sequence[int], clients: int, *, has_sessions: bool = True
    ) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 0
        self._pids = pids
        self._numbers = count(FIRST)
        fields = (
            f"POST /mcp HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
        ).encode()
        self._heads = [self._introduced(fields) if has_sessions else fields for _ in range(clients)]

    def _introduced(self, fields: bytes) -> bytes:
        """The fields of a client that has a session. Raises `Lost`."""
        came = self._said(fields, _INITIALIZE)
        session = _SESSION.search(came)
        if session is None:
            raise Lost(f"no session: {came!r}")
        fields += b"Mcp-Session-Id: %b\r\nMCP-Protocol-Version: %b\r\n" % (
            session[1],
            REVISION.encode(),
        )
        came = self._said(fields, _READY)
        if not came.startswith(_ACCEPTED):
            raise Lost(f"the session is not open: {came!r}")
        return fields

    def _said(self, fields: bytes, body: bytes) -> bytes:
        """A response over a connection of its own."""
        with _dial(self._address) as connection:
            connection.sendall(fields + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            came, is_ended = b"", False
            while response_in(came, is_ended=is_ended) is None:
                data = connection.recv(READ_BYTES)
                came += data
                is_ended = not data
        return came

    def followed(self, body: bytes) -> list[bytes]:
        """The messages of a long response, up to its result. Raises `Lost` and `TimeoutError`."""
        pieces: list[bytes] = []
        with _dial(self._address) as connection:
            connection.sendall(self._heads[0] + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not is_followed(pieces):
                data = connection.recv(READ_BYTES)
                if not data:
                    break  # too early: the check will find the result missing
                pieces.append(data)
        head, _, came = b"".join(pieces).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise Lost(f"the server refused: {head[:300]!r}")
        if _CHUNKED.search(head):
            came = b"".join(chunks_of(came))
        return _events(came) if _EVENTS.search(head) else [came]

    def calls(self, in_flight: int, tool: Tool, plan: Plan) -> Took:
        """Call the tool for some time. Raises `Lost` and `TimeoutError`."""
        clients = [_Client(self._address, head, tool) for head in self._heads[:in_flight]]
        assert len(clients) == in_flight
        try:
            return self._calls(clients, plan)
        finally:
            for client in clients:
                client.close()

    def _calls(self, clients: Sequence[_Client], plan: Plan) -> Took:
        with select.epoll() as readable:
            by_fd: dict[int, _Client] = {}

            def call(client: _Client) -> None:
                client.called_at = time.perf_counter()
                if client.connection is None:
                    fd = client.connect()
                    by_fd[fd] = client
                    readable.register(fd, select.EPOLLIN)
                client.call(next(self._numbers))

            # A busy server may accept slowly: each connection has an answer before the clock runs.
            for client in clients:
                call(client)
                client.wait()
            window = _Window(plan, len(clients), self._pids)
            for client in clients:
                call(client)
            left = len(clients)
            while left:
                ready = readable.poll(TIMEOUT_S)
                if not ready:
                    raise TimeoutError(f"{left} calls have no answer")
                for fd, _ in ready:
                    client = by_fd[fd]
                    if not client.is_answered():
                        continue
                    now = time.perf_counter()
                    if window.took(now - client.called_at, now):
                        call(client)
                    else:
                        left -= 1
        return window.result()

    def close(self) -> None:
        """Nothing is open between measurements."""


def _dial(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# Over a WebSocket or pipes


class Pipes:
    """A server that is spawned, and its standard streams."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process, self._in, self._out = spawn(command)
        self._readable = select.poll()
        self._readable.register(self._out, select.POLLIN)
        self._rest = b""
        self.pid = self._process.pid

    def send(self, lines: bytes) -> None:
        """Write them, each with its newline."""
        os.write(self._in.fileno(), lines)

    def receive(self) -> list[bytes]:
        """The next whole lines; may be empty. Raises `Lost` and `TimeoutError`."""
        if not self._readable.poll(TIMEOUT_S * 1e3):
            raise TimeoutError("the server is silent")
        data = os.read(self._out.fileno(), READ_BYTES)
        if not data:
            raise Lost("the server has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def close(self) -> None:
        """End the server."""
        self._in.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # a peer that stays when its client has gone
            self._process.wait()
        self._out.close()


class WebSocket:
    """A WebSocket with our own subprotocol, whose frames are masked with zeros."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = _dial((parts.hostname or "", parts.port or 0))
        self._connection.sendall(
            f"GET / HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mcp-streams.v1\r\n\r\n".encode()
        )
        self._rest = b""
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._read()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101 "):
            raise Lost(f"no WebSocket: {head!r}")

    def send(self, lines: bytes) -> None:
        """Write them as one frame, each with its newline."""
        size = len(lines)
        if size < 126:
            length = bytes([0x80 | size])
        elif size < 1 << 16:
            length = b"\xfe" + size.to_bytes(2, "big")
        else:
            length = b"\xff" + size.to_bytes(8, "big")
        self._connection.sendall(b"\x82" + length + bytes(4) + lines)

    def receive(self) -> list[bytes]:
        """The next whole lines; may be empty. Raises `Lost` and `TimeoutError`."""
        frames, self._rest = frames_of(self._rest + self._read())
        return [line for frame in frames for line in frame.splitlines()]

    def _read(self) -> bytes:
        data = self._connection.recv(READ_BYTES)
        if not data:
            raise Lost("the server hung up")
        return data

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class PipeDriver:
    """One client of a server that is spawned. `pids` are asked for after `initialize`."""

    def __init__(
        self, command: Sequence[str], more_pids: Callable[[], Sequence[int]] = tuple
    ) -> None:
        self._pipes = Pipes(command)
        self._numbers = count(FIRST)
        try:
            introduce(self._pipes)
            self._pids = [self._pipes.pid, *more_pids()]
        except BaseException:
            self._pipes.close()
            raise

    def calls(self, in_flight: int, tool: Tool, plan: Plan) -> Took:
        """Call the tool for some time. Raises `Lost` and `TimeoutError`."""
        return _calls_in_lines(self._pipes, self._numbers, in_flight, tool, plan, self._pids)

    def close(self) -> None:
        """End the server."""
        self._pipes.close()


class WebSocketDriver:
    """One client, with a new connection for each measurement: an idle one would have to answer
    pings.
    """

    def __init__(self, url: str, pids: Sequence[int]) -> None:
        self._url = url
        self._pids = pids

    def calls(self, in_flight: int, tool: Tool, plan: Plan) -> Took:
        """Call the tool for some time. Raises `Lost` and `TimeoutError`."""
        with closing(WebSocket(self._url)) as link:
            introduce(link)
            return _calls_in_lines(link, count(FIRST), in_flight, tool, plan, self._pids)

    def close(self) -> None:
        """Nothing is open between measurements."""


def introduce(link: Pipes | WebSocket) -> None:
    link.send(_INITIALIZE)
    while not any(b'"serverInfo"' in line for line in link.receive()):
        pass
    link.send(_READY)


def _calls_in_lines(
    link: Pipes | WebSocket,
    numbers: Iterator[int],
    in_flight: int,
    tool: Tool,
    plan: Plan,
    pids: Sequence[int],
) -> Took:
    if in_flight > IN_FLIGHT_MAX:
        raise ValueError(f"{IN_FLIGHT_MAX} calls at most can be in flight, not {in_flight}")
    pieces = tool.pieces()
    window = _Window(plan, in_flight, pids)
    called: dict[int, float] = {}
    total, logged, following = 0, 0, in_flight
    while True:
        if following:
            total += following
            batch = []
            now = time.perf_counter()
            for number in islice(numbers, following):
                called[number] = now
                batch.append((b"%d" % number).join(pieces))
            link.send(b"".join(batch))
        if not called:
            break
        following = 0
        lines = link.receive()
        now = time.perf_counter()
        for line in lines:
            answer = answered(line)
            if answer is None:
                logged += is_log(line)
            elif (called_at := called.pop(answer, None)) is None:
                raise Lost(f"no answer to {answer} was expected: {line[:160]!r}")
            else:
                following += window.took(now - called_at, now)
    if tool.messages and logged != total * tool.messages:
        raise Lost(f"{logged} log messages have come of {total} calls")
    return window.result()
