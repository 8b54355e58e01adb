"""An HTTP server for the client's tests: the test answers each request, byte by byte.

It shares no code with the project's own listener.
"""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
JSON = "application/json"


class Asked:
    """One request, and the connection to answer it on."""

    def __init__(self, stream: trio.abc.Stream, head: bytes, body: bytes) -> None:
        start, *fields = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = start.split(" ")
        self.headers = {
            name.lower(): value for name, _, value in (field.partition(": ") for field in fields)
        }
        self.body = body
        self.stream = stream

    async def respond(
        self, status: str = "202 Accepted", body: bytes = b"", kind: str = JSON, extra: str = ""
    ) -> None:
        """A whole response."""
        await self.stream.send_all(
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    async def start(self, kind: str = NDJSON, extra: str = "") -> None:
        """The head of a response in chunks."""
        await self.stream.send_all(
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{extra}"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(chunk(data))

    async def finish(self) -> None:
        await self.stream.send_all(b"0\r\n\r\n")

    async def cut(self) -> None:
        await trio.aclose_forcefully(self.stream)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Script = Callable[[Asked], Awaitable[object]]


class HttpServer:
    """The requests that came, in the order in which they were complete."""

    def __init__(self, script: Script, scheme: str) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self._serving = trio.CancelScope()
        self._scheme = scheme
        self._port = 0

    @property
    def url(self) -> str:
        return f"{self._scheme}://localhost:{self._port}"

    @property
    def posted(self) -> list[bytes]:
        return [asked.body for asked in self.asked if asked.method == "POST"]

    def stop(self) -> None:
        """Close all connections, and listen no more."""
        self._serving.cancel()

    async def listen(
        self, context: ssl.SSLContext | None, *, task_status: trio.TaskStatus[None]
    ) -> None:
        listeners = await trio.open_tcp_listeners(0, host="localhost", backlog=2048)
        self._port = listeners[0].socket.getsockname()[1]
        del listeners[1:]  # one listener for each address, at different ports: the first is used

        async def welcome(tcp: trio.SocketStream) -> None:
            stream: trio.abc.Stream = tcp
            if context is not None:
                stream = trio.SSLStream(tcp, context, server_side=True, https_compatible=True)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._serve(stream)

        task_status.started()
        with self._serving:
            await trio.serve_listeners(welcome, listeners)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        buffer = b""
        while data := await stream.receive_some(64 * 1024):
            buffer += data
            while b"\r\n\r\n" in buffer:
                head, _, rest = buffer.partition(b"\r\n\r\n")
                asked = Asked(stream, head, b"")
                size = int(asked.headers.get("content-length", 0))
                if len(rest) < size:
                    break
                asked.body, buffer = rest[:size], rest[size:]
                self.asked.append(asked)
                await self.script(asked)


async def accept(asked: Asked) -> None:
    """Answer 202."""
    await asked.respond()


@asynccontextmanager
async def http_server(
    script: Script = accept, context: ssl.SSLContext | None = None
) -> AsyncIterator[HttpServer]:
    server = HttpServer(script, "http" if context is None else "https")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.listen, context)
        yield server
        server.stop()
