"""Peers from outside the project: a WebSocket client of another library, and a pair of pipes.

They know JSON-RPC and the wire's framings and none of this project's code, so they see the server
as any other program does. Reading is selective: `expect` takes the first message that fits and
leaves the others in their order, `read_until` takes all messages up to one that fits. Every wait
ends after `DEADLINE_S` without a byte: that is a bound for a test that hangs, and no measurement.
"""

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, cast

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

DEADLINE_S: Final = 90.0
FRAME_BYTES_MAX: Final = 256 * 1024  # WIRE §7: at most 256 KiB unless one message alone is longer

Id = int | str

# No two peers use the same id unless a test chooses it. A stream's original response comes to the
# client that resumes it, under the call's id, which must be free there. Tests choose small ids.
_ids = itertools.count(1000)


class PeerGone(Exception):
    """The other side has ended the connection."""


class Message(dict[str, Any]):
    """One message, with the bytes that it came in (without the newline of a framing)."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(json.loads(raw))
        self.raw = raw

    @property
    def method(self) -> str | None:
        return self.get("method")

    @property
    def params(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self["params"])

    @property
    def error(self) -> dict[str, Any]:
        assert "error" in self, f"a result where an error is due: {self}"
        return cast("dict[str, Any]", self["error"])

    @property
    def reason(self) -> str | None:
        """The `data.reason` of an error."""
        data: dict[str, str] = self.error.get("data", {})
        return data.get("reason")

    @property
    def result(self) -> Any:
        assert "result" in self, f"an error where a result is due: {self}"
        return self["result"]

    def answers(self, id: Id | None) -> bool:
        """Whether this is the response to `id`, of the same JSON type: `"1"` is not `1`."""
        return "method" not in self and _same(self.get("id"), id)


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


Fits = Callable[[Message], bool]


def method_is(*methods: str) -> Fits:
    return lambda message: message.method in methods


def answers_to(id: Id | None) -> Fits:
    return lambda message: message.answers(id)


class Peer:
    """The common part of all peers; a subclass adds the framing."""

    def __init__(self) -> None:
        self._inbox: deque[Message] = deque()

    def send_raw(self, data: bytes) -> None:
        """Send one message with exactly these bytes."""
        raise NotImplementedError  # a subclass adds the framing

    def receive_raw(self) -> bytes:
        """Wait for one message. Raises `PeerGone`, or `TimeoutError` after `DEADLINE_S`."""
        raise NotImplementedError  # a subclass adds the framing

    def cut(self) -> None:
        """End the connection without a close handshake."""
        raise NotImplementedError  # a subclass adds the framing

    def send(self, message: object) -> None:
        self.send_raw(json.dumps(message).encode())

    def request(self, method: str, params: object = None, *, id: Id | None = None) -> Id:
        """Send a request and return its id; `id` chooses one."""
        chosen = next(_ids) if id is None else id
        body = {"jsonrpc": "2.0", "id": chosen, "method": method}
        self.send(body if params is None else {**body, "params": params})
        return chosen

    def notify(self, method: str, params: object = None) -> None:
        body = {"jsonrpc": "2.0", "method": method}
        self.send(body if params is None else {**body, "params": params})

    def answer(self, id: object, result: object) -> None:
        self.send({"jsonrpc": "2.0", "id": id, "result": result})

    def receive(self) -> Message:
        """The next message, in order."""
        return self._inbox.popleft() if self._inbox else Message(self.receive_raw())

    def expect(self, fits: Fits) -> Message:
        """The first message that fits; the messages before it stay where they are."""
        for index, message in enumerate(self._inbox):
            if fits(message):
                del self._inbox[index]
                return message
        while True:
            message = Message(self.receive_raw())
            if fits(message):
                return message
            self._inbox.append(message)

    def read_until(self, fits: Fits) -> list[Message]:
        """All messages up to the first that fits, that one included, in order."""
        taken = [self.receive()]
        while not fits(taken[-1]):
            taken.append(self.receive())
        return taken

    def response(self, id: Id | None) -> Message:
        """The response to `id`; the other messages stay in their order."""
        return self.expect(answers_to(id))

    def ask(self, method: str, params: object = None, *, id: Id | None = None) -> Message:
        """Send a request and wait for its response."""
        return self.response(self.request(method, params, id=id))

    def settle(self) -> list[Message]:
        """All messages that came before the answer to a ping that is sent now.

        When this returns, the server has answered all earlier requests of ours: the first ping
        shows that it has read them, the second that its sender has run once more.
        """
        self.ask("ping")
        self.ask("ping")
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def initialize(
        self, capabilities: dict[str, Any] | None = None, *, revision: str = "2025-11-25"
    ) -> Message:
        """Open the session as every client does; returns the response to `initialize`."""
        response = self.ask(
            "initialize",
            {
                "protocolVersion": revision,
                "capabilities": capabilities or {},
                "clientInfo": {"name": "raw", "version": "0"},
            },
        )
        if "result" in response:
            self.negotiated(response.result["protocolVersion"])
        self.notify("notifications/initialized")
        return response

    def negotiated(self, revision: str) -> None:
        """Use this revision of MCP from now on; most transports do not repeat it."""

    def arrived(self) -> None:
        """Wait until the server has begun with every request that was sent.

        On one connection it takes them in their order anyway.
        """

    def call(self, tool: str, id: Id | None = None, **arguments: object) -> Id:
        """Send a `tools/call` and return its id."""
        return self.request("tools/call", {"name": tool, "arguments": arguments}, id=id)

    def close(self) -> None:
        """End the connection and free its resources; a second call does nothing."""
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WebSocketPeer(Peer):
    """The `websockets` library with one of our subprotocols, or with those of `offered`."""

    def __init__(
        self,
        url: str,
        offered: Sequence[str] | None = ("mcp",),
        *,
        headers: dict[str, str] | None = None,
        queue_max: int | None = None,
    ) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._stack = contextlib.ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(
            connect(
                url,
                subprotocols=[Subprotocol(name) for name in offered] if offered else None,
                additional_headers=headers,
                compression=None,
                proxy=None,
                open_timeout=DEADLINE_S,
                close_timeout=1,
                ping_interval=None,
                max_size=None,
                max_queue=queue_max,
            )
        )
        self.subprotocol = self.socket.subprotocol

    def send_raw(self, data: bytes) -> None:
        if self.subprotocol == "mcp-streams.v1":
            self.send_frame(data + b"\n")
        else:
            self.send_frame(data.decode())

    def send_frame(self, frame: bytes | str) -> None:
        """Send one frame as it is: bytes make a binary one, a string a text one."""
        with _gone_when_closed():
            self.socket.send(frame)

    def receive_raw(self) -> bytes:
        while not self._lines:
            with _gone_when_closed():
                frame = self.socket.recv(timeout=DEADLINE_S)
            self._lines.extend(self._unframe(frame))
        return self._lines.popleft()

    def _unframe(self, frame: bytes | str) -> list[bytes]:
        if self.subprotocol != "mcp-streams.v1":
            assert isinstance(frame, str), "W§7: `mcp` = one JSON message per text frame"
            return [frame.encode()]
        assert isinstance(frame, bytes), "W§7: `mcp-streams.v1` = a binary frame"
        assert frame.endswith(b"\n"), "W§7: one or more messages, each ended by a newline"
        lines = frame[:-1].split(b"\n")
        assert len(frame) <= FRAME_BYTES_MAX or len(lines) == 1, (
            f"W§7: at most 256 KiB unless one message alone is longer, not {len(frame)} bytes"
        )
        return lines

    def wait_closed(self) -> int | None:
        """Read until the server has closed; returns the close code, None or 1006 without a close
        frame.
        """
        with contextlib.suppress(PeerGone):
            while True:
                self.receive_raw()
        return self.socket.close_code

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # either side may have closed it already
            self.socket.socket.shutdown(socket.SHUT_RDWR)
        self._stack.close()


@contextlib.contextmanager
def _gone_when_closed() -> Any:
    try:
        yield
    except ConnectionClosed as closed:
        raise PeerGone(str(closed)) from closed


class PipePeer(Peer):
    """A child process on the other end of two pipes, one message a line."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self._buffer = bytearray()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self._stdout = self.process.stdout

    def send_raw(self, data: bytes) -> None:
        self.send_bytes(data + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Write exactly these bytes."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._stdin.write(rest) :]
        except (BrokenPipeError, ValueError) as gone:  # ValueError: closed by ourselves
            raise PeerGone(str(gone)) from gone

    def receive_raw(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if not select.select([self._stdout], [], [], DEADLINE_S)[0]:
                raise TimeoutError("nothing on standard output")
            chunk = os.read(self._stdout.fileno(), 1 << 20)
            if not chunk:
                assert not self._buffer, f"half a message at the end: {bytes(self._buffer[:200])!r}"
                raise PeerGone("end of output")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def half_close(self) -> None:
        """Send the end of input: no more requests."""
        self._stdin.close()

    def close_output(self) -> None:
        """Hang up: later writes of the process fail."""
        self._stdout.close()

    def read_to_the_end(self) -> list[Message]:
        """All further messages, until the process closes its output."""
        taken = []
        with contextlib.suppress(PeerGone):
            while True:
                taken.append(self.receive())
        return taken

    def exit_code(self) -> int:
        """Wait for the process to end by itself; returns its exit code."""
        return self.process.wait(DEADLINE_S)

    def cut(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()
