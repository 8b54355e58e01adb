"""Streamable HTTP as a stock client speaks it, by hand: one connection for each request, SSE."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec
import trio

READ_BYTES: Final = 256 * 1024
REVISION: Final = "2025-11-25"
_BOTH: Final = "application/json, text/event-stream"


class Event(NamedTuple):
    """What one event says. `id` is empty where it has none."""

    id: bytes
    data: bytes


class NotAnswered(Exception):
    """The server refused, or hung up."""


class Session:
    """One client's session. `opened` is the only way to have one."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = parts.hostname, parts.port
        self._target = parts.path
        self._headers = [("Host", parts.netloc), ("MCP-Protocol-Version", REVISION)]

    @classmethod
    async def opened(cls, url: str, capabilities: Mapping[str, Any]) -> "Session":
        """Introduce ourselves to the server."""
        session = cls(url)
        info = {"name": "benchmarks", "version": "1"}
        hello = {"protocolVersion": REVISION, "capabilities": capabilities, "clientInfo": info}
        response = await session.open(session.post(0, "initialize", hello))
        await response.read_all()
        session._headers.append(("Mcp-Session-Id", response.headers["mcp-session-id"]))
        said = session.post(None, "notifications/initialized", {})
        await (await session.open(said)).read_all()
        return session

    def post(
        self, request_id: int | None, method: str, params: Mapping[str, Any]
    ) -> tuple[h11.Request, bytes]:
        """A message on its way to the server; a notification has no id."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if request_id is not None:
            message["id"] = request_id
        body = msgspec.json.encode(message)
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return self._request("POST", _BOTH, fields), body

    def get(self, last_event_id: bytes) -> tuple[h11.Request, bytes]:
        """A request to go on after an event."""
        fields = [("Last-Event-ID", last_event_id.decode())]
        return self._request("GET", "text/event-stream", fields), b""

    def _request(
        self, method: str, accept: str, fields: Sequence[tuple[str, str]]
    ) -> h11.Request:
        headers = [*self._headers, ("Accept", accept), ("Connection", "close"), *fields]
        return h11.Request(method=method, target=self._target, headers=headers)

    async def open(self, request: tuple[h11.Request, bytes]) -> "Response":
        """Send a request over a connection of its own."""
        response = Response(*request)
        response.socket = trio.socket.socket()
        await response.socket.connect(self.address)
        await response.socket.send(response.sent)
        return response


class Response:
    """The answer to one request, on its way in."""

    socket: trio.socket.SocketType

    def __init__(self, request: h11.Request, body: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.is_over = False
        self._http = h11.Connection(h11.CLIENT)
        parts = [self._http.send(each) for each in (request, h11.Data(data=body), h11.EndOfMessage())]
        self.sent = b"".join(part or b"" for part in parts)
        self._parser = EventParser()

    async def read(self) -> list[Event]:
        """The next events. Raises `NotAnswered` when there are no more."""
        data = await self.socket.recv(READ_BYTES)
        return self.feed(data)

    async def read_all(self) -> list[Event]:
        """All of it, to the end; plain JSON is one event."""
        events: list[Event] = []
        while not self.is_over:
            events += await self.read()
        self.socket.close()
        return events

    def feed(self, data: bytes) -> list[Event]:
        self._http.receive_data(data)
        events: list[Event] = []
        while True:
            found = self._http.next_event()
            if isinstance(found, h11.Response):
                if found.status_code >= 300:
                    raise NotAnswered(f"HTTP {found.status_code}")
                self.headers = {name.decode(): value.decode() for name, value in found.headers}
            elif isinstance(found, h11.Data):
                events += self._events(bytes(found.data))
            elif found is h11.NEED_DATA:
                return events
            else:
                self.is_over = True
                return events

    def _events(self, data: bytes) -> list[Event]:
        if self.headers["content-type"].startswith("text/event-stream"):
            return self._parser.feed(data)
        return [Event(b"", data)]


class EventParser:
    """Bytes to server-sent events, as far as MCP uses them."""

    def __init__(self) -> None:
        self._rest = b""
        self._id = self._data = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that are whole now."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        events = []
        for line in lines:
            field, _, value = line.rstrip(b"\r\n").partition(b": ")
            if field == b"data":
                self._data = value
            elif field == b"id":
                self._id = value
            elif not field:
                if self._id or self._data:
                    events.append(Event(self._id, self._data))
                self._id = self._data = b""
        return events
