"""One interface to every transport, for the suite that all of them must pass.

A `Rig` is a transport with a handler at its far end. `connect` opens a channel as a client would,
`knock` a bare connection of bytes, which a test can cut at any byte. The far end of stdio and of
the relay is a real child process (`tests.rigs.peer`) for `connect`, and real pipes and sockets for
`knock`.
"""

import abc
import contextlib
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
import trustme
from wsproto.events import (
    BytesMessage,
    TextMessage,
)

from streams import messages
from streams.errors import refusal
from streams.exchange import ClientChannel, Handler
from tests.rigs import ROOT
from tests.rigs.bare_http import answers, asking
from tests.rigs.bare_websocket import open_bare_websocket, shake_hands
from tests.rigs.echo import LIMIT, echo
from tests.rigs.http_sessions import HELLO as HTTP_HELLO
from tests.rigs.http_sessions import SESSION, WELCOME, Sessions
from transports import http, stdio, websocket
from transports.http import client
from transports.memory import MemoryServer
from transports.relay import owner
from transports.websocket.frames import MCP_STREAMS

HELLO: Final = {"app": "file.py:server", "version": "1"}


class Bare:
    """A connection as bytes: frames messages, and reads the messages that came back."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        frame: Callable[[bytes], bytes],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.stream = stream
        self.frame = frame
        self._ended = ended

    async def read_all(self) -> bytes:
        """All bytes up to the end of the far end's output."""
        read = b""
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await self.stream.receive_some():
                read += data
        return read

    async def close(self) -> None:
        await trio.aclose_forcefully(self.stream)
        self._ended()


class Rig(abc.ABC):
    """A transport. `connect` and `knock` reach `echo`, or the handler that `serving` was given."""

    can_half_close = True
    survives_oversize = True
    oversize_answer = b'{"tooLarge": %d}' % LIMIT  # the echo of an oversize message's substitute
    can_ping = False
    sends = 10_000  # how many messages are many in a test
    knows_unsent = True
    client_principal: str | None = f"os({os.getuid()})"

    @asynccontextmanager
    async def serving(self, handler: Handler = echo) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.serve, handler)
            yield
            nursery.cancel_scope.cancel()

    @abc.abstractmethod
    async def serve(self, handler: Handler, *, task_status: Any) -> None: ...

    @abc.abstractmethod
    def connect(self) -> AbstractAsyncContextManager[ClientChannel]: ...

    @abc.abstractmethod
    async def knock(self) -> Bare: ...


def newline_frame(message: bytes) -> bytes:
    return message + b"\n"


class MemoryRig(Rig):
    client_principal = "memory"

    def __init__(self, folder: Path) -> None:
        self.server = MemoryServer(message_bytes_max=LIMIT)

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        await self.server.serve(handler, task_status=task_status)

    def connect(self) -> AbstractAsyncContextManager[ClientChannel]:
        return self.server.connect()

    async def knock(self) -> Bare:
        return Bare(self.server.open_cable().near_end, newline_frame)


class StdioRig(Rig):
    """`connect` starts a child process; `knock` serves a pair of pipes in this process."""

    def __init__(self, folder: Path) -> None:
        self._serve: Callable[[int, int], None]

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        async with trio.open_nursery() as nursery:

            async def serve(fds: tuple[int, int]) -> None:
                await stdio.serve(handler, fds, message_bytes_max=LIMIT)

            self._serve = lambda *fds: nursery.start_soon(serve, fds)
            task_status.started()
            await trio.sleep_forever()

    def connect(self) -> AbstractAsyncContextManager[ClientChannel]:
        command = [sys.executable, "-m", "tests.rigs.peer", "serve"]
        return stdio.connect(command, cwd=ROOT, message_bytes_max=LIMIT)

    async def knock(self) -> Bare:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self._serve(theirs_in, theirs_out)
        return Bare(pipes(ours_out, ours_in), newline_frame)


def pipes(write_fd: int, read_fd: int) -> trio.StapledStream[Any, Any]:
    return trio.StapledStream(trio.lowlevel.FdStream(write_fd), trio.lowlevel.FdStream(read_fd))


class UnixRig(Rig):
    """`connect` starts a relay as a child process; `knock` passes pipes as a relay does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.sock"

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        await owner.serve(
            handler,
            self.path,
            hello_check=lambda hello: None if hello == HELLO else "another app",
            message_bytes_max=LIMIT,
            task_status=task_status,
        )

    def connect(self) -> AbstractAsyncContextManager[ClientChannel]:
        command = [sys.executable, "-m", "tests.rigs.peer", "relay", str(self.path)]
        return stdio.connect(command, cwd=ROOT, message_bytes_max=LIMIT)

    async def knock(self) -> Bare:
        relay = socket.socket(socket.AF_UNIX)
        relay.connect(str(self.path))
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        socket.send_fds(relay, [json.dumps(HELLO).encode() + b"\n"], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        return Bare(pipes(ours_out, ours_in), newline_frame, relay.close)


class TCPRig(Rig):
    """`connect` goes to `port`, which may be that of a proxy."""

    message_end = b"\n"  # the byte that completes a message
    is_encrypted = False

    def __init__(self, folder: Path) -> None:
        self.port = 0


class WebSocketRig(TCPRig):
    can_half_close = False
    survives_oversize = False
    can_ping = True
    client_principal = "conn("
    subprotocol = MCP_STREAMS

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        serve = partial(websocket.serve, handler, "127.0.0.1", 0, message_bytes_max=LIMIT)
        async with trio.open_nursery() as nursery:
            self.port = await nursery.start(serve)
            task_status.started()

    def connect(self) -> AbstractAsyncContextManager[ClientChannel]:
        return websocket.connect(
            f"ws://127.0.0.1:{self.port}",
            subprotocols=[self.subprotocol],
            message_bytes_max=LIMIT,
        )

    async def knock(self) -> Bare:
        stream, connection = await open_bare_websocket(self.port, self.subprotocol)

        def frame(message: bytes) -> bytes:
            if self.subprotocol == MCP_STREAMS:
                return connection.send(BytesMessage(data=message + b"\n"))
            return connection.send(TextMessage(data=message.decode()))

        return Bare(stream, frame)


class SecureRig(WebSocketRig):
    """A WebSocket over TLS."""

    is_encrypted = True
    sends = 1_000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._theirs, self._ours = tls_contexts()

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        settings: Any = {"message_bytes_max": LIMIT, "ssl_context": self._theirs}
        async with trio.open_nursery() as nursery:
            self.port = await nursery.start(
                partial(websocket.serve, handler, "localhost", 0, **settings)
            )
            task_status.started()

    def connect(self) -> AbstractAsyncContextManager[ClientChannel]:
        return websocket.connect(
            f"wss://localhost:{self.port}",
            subprotocols=[self.subprotocol],
            message_bytes_max=LIMIT,
            ssl_context=self._ours,
        )

    async def knock(self) -> Bare:
        tcp = await trio.open_tcp_stream("localhost", self.port)
        stream = trio.SSLStream(tcp, self._ours, server_hostname="localhost", https_compatible=True)
        connection = await shake_hands(stream, self.port, self.subprotocol)
        return Bare(stream, lambda line: connection.send(BytesMessage(data=line + b"\n")))


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for localhost, and the context of a client that trusts it."""
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    return theirs, ours


class McpRig(WebSocketRig):
    subprotocol = "mcp"
    message_end = b""


class HttpRig(TCPRig):
    """A session stands for a channel, and a POST for each message from the client."""

    # The listener itself answers an oversize request: the endpoint never sees it.
    oversize_answer = messages.error(None, refusal("too_large", limit=LIMIT)).rstrip()
    sends = 1_000  # each is a request and its response: 10,000 would take half a minute
    knows_unsent = False  # a client's messages use several connections, or none
    client_principal = None  # the endpoint does the authentication

    async def serve(self, handler: Handler, *, task_status: Any) -> None:
        async with trio.open_nursery() as nursery:
            endpoint = Sessions(handler, nursery)
            serve = partial(http.serve, endpoint, "127.0.0.1", 0, body_bytes_max=LIMIT)
            self.port = await nursery.start(serve)
            task_status.started()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientChannel]:
        url = f"http://127.0.0.1:{self.port}"
        async with client.connect(url, message_bytes_max=LIMIT) as channel:
            await channel.send(HTTP_HELLO)
            assert await channel.receive() == [WELCOME.rstrip()]
            yield channel

    async def knock(self) -> Bare:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        bare = HttpBare(stream, self.port)
        await bare.open()
        return bare


class HttpBare(Bare):
    """A session over one connection; each message is a POST."""

    def __init__(self, stream: trio.SocketStream, port: int) -> None:
        super().__init__(stream, self._post)
        self._tcp = stream
        self._port = port
        self._fields: list[str] = []
        self._posts = 0
        self._read = b""

    def _post(self, message: bytes) -> bytes:
        self._posts += 1
        length = f"Content-Length: {len(message)}"
        return asking(length, *self._fields, body=message)

    async def open(self) -> None:
        """Open a session."""
        await self.stream.send_all(self._post(HTTP_HELLO.rstrip()))
        while WELCOME not in self._read:
            self._read += await self.stream.receive_some()
        head = self._read.partition(b"\r\n\r\n")[0].decode()
        self._fields = [line for line in head.splitlines() if line.startswith(SESSION)]

    async def read_all(self) -> bytes:
        """The bodies of all responses, up to the end of the last one."""
        await self._tcp.send_eof()
        self._read += await super().read_all()
        bodies = [body for _, body in answers(self._read, *["POST"] * self._posts)]
        return b"".join(bodies).removeprefix(WELCOME)

    async def close(self) -> None:
        """Read the answers to whole requests, hang up, then end the session."""
        await self._tcp.send_eof()
        await super().read_all()
        await super().close()
        farewell = asking(*self._fields, "Connection: close", start="DELETE /mcp HTTP/1.1")
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as last:
            await last.send_all(farewell)
            await Bare(last, newline_frame).read_all()


RIGS: Final[dict[str, Callable[[Path], Rig]]] = {
    "memory": MemoryRig,
    "stdio": StdioRig,
    "relay": UnixRig,
    "websocket mcp": McpRig,
    "websocket mcp-streams.v1": WebSocketRig,
    "websocket over TLS": SecureRig,
    "http": HttpRig,
}
