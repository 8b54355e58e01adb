"""A client of Streamable HTTP written by hand, without knowledge of our extensions.

No client library can be the slower part, and the client checks every event.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from benchmarks.numbered import Lost, number_of

PATH: Final = "/mcp"
REVISION: Final = "2025-11-25"
READ_BYTES: Final = 64 * 1024

_BOTH: Final = "application/json, text/event-stream"
_INFO: Final = {"name": "benchmarks", "version": "1"}


class Event(NamedTuple):
    """One event; `id` is empty where it has none."""

    id: bytes
    data: bytes


def fill(count: int, size: int) -> dict[str, Any]:
    """The params of a call of the measured tool."""
    return {"name": "fill", "arguments": {"count": count, "size": size}}


WAITING: Final[Mapping[str, Any]] = {"name": "wait", "arguments": {}}


class Session:
    """One client's session, over any number of connections."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self._headers = [("Host", parts.netloc), ("MCP-Protocol-Version", REVISION)]
        self.id = ""  # until the server has assigned one

    @classmethod
    async def opened(cls, url: str, capabilities: Mapping[str, Any]) -> "Session":
        """Open a session with a server."""
        session = cls(url)
        hello = {
            "protocolVersion": REVISION,
            "capabilities": capabilities,
            "clientInfo": _INFO,
        }
        with await session.post("initialize", hello, request_id=0) as response:
            await response.rest()
            session.id = response.headers["mcp-session-id"]
            session._headers.append(("Mcp-Session-Id", session.id))
        with await session.post("notifications/initialized", {}) as response:
            await response.rest()
        return session

    async def post(
        self, method: str, params: Mapping[str, Any], *, request_id: int | None = None
    ) -> "Response":
        """Send a message; without an id it is a notification."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if request_id is not None:
            message["id"] = request_id
        body = msgspec.json.encode(message)
        fields = [
            ("Accept", _BOTH),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
        ]
        response = Response(self._address, self._request("POST", fields), body)
        await response.connect()
        await response.ask()
        return response

    async def ask(self, method: str, params: Mapping[str, Any], *, request_id: int) -> Any:
        """Send a request and return its result, after any other messages. Raises `Lost`."""
        with await self.post(method, params, request_id=request_id) as response:
            told = [each.data for each in await response.rest() if each.data]
        for message in map(msgspec.json.decode, told):
            if message.get("id") == request_id and "result" in message:
                return message["result"]
        raise Lost(f"{method} has no result: {told}")

    async def leave(self, count: int, size: int) -> tuple[str, bytes]:
        """Call `fill`, hang up after its first message; returns the ids of the stream and of the
        event.
        """
        stream = ""
        with await self.post("tools/call", fill(count, size), request_id=1) as response:
            while True:
                for event in response.take(await response.read()):
                    if event.id and event.data:
                        return stream, event.id
                    if event.data:
                        told = msgspec.json.decode(event.data)
                        stream = told["params"]["stream"]["streamId"]

    async def wait(self) -> "Response":
        """Call `wait` and read its first message; the response is open."""
        response = await self.post("tools/call", WAITING, request_id=1)
        while not any(event.data for event in response.take(await response.read())):
            pass
        return response

    async def poll(self, stream: str) -> Any:
        """The stream's status."""
        return await self.ask("stream/poll", {"streamId": stream}, request_id=2)

    async def drop(self, stream: str, last: int) -> None:
        """Acknowledge all of a stream, so that the server need not keep it."""
        await self.ask("stream/resume", {"streamId": stream, "after": last}, request_id=3)

    def get(self, last_event_id: bytes) -> "Response":
        """Prepare a request that continues after an event; it is not sent yet."""
        fields = [("Accept", "text/event-stream"), ("Last-Event-ID", last_event_id.decode())]
        return Response(self._address, self._request("GET", fields))

    def _request(self, method: str, fields: Sequence[tuple[str, str]]) -> h11.Request:
        headers = [*self._headers, *fields, ("Connection", "close")]
        return h11.Request(method=method, target=PATH, headers=headers)


class Response:
    """The response to one request, and its connection, which it has to itself."""

    def __init__(self, address: tuple[str, int], request: h11.Request, body: bytes = b"") -> None:
        self.headers: dict[str, str] = {}
        self.is_over = False
        self.address = address
        self._connection: trio.socket.SocketType  # from `connect` on
        self._http = h11.Connection(h11.CLIENT)
        sent = [request, h11.Data(data=body), h11.EndOfMessage()]
        self.asked = b"".join(self._http.send(each) or b"" for each in sent)
        self._parser = EventParser()

    def __enter__(self) -> "Response":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    async def connect(self) -> None:
        """Connect to the server."""
        self._connection = trio.socket.socket()
        await self._connection.connect(self.address)

    async def ask(self) -> None:
        """Send the request; it is small enough to go out at once."""
        await self._connection.send(self.asked)

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the connection."""
        return await self._connection.recv(READ_BYTES)

    async def rest(self) -> list[Event]:
        """All events that follow, up to the end of the response."""
        events: list[Event] = []
        while not self.is_over:
            events += self.take(await self.read())
        return events

    def take(self, data: bytes) -> list[Event]:
        """The events that `data` completes.

        Raises `Lost` for a refusal, `h11.RemoteProtocolError` for half a response.
        """
        self._http.receive_data(data)
        events: list[Event] = []
        while (found := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(found, h11.Response):
                self.headers = {name.decode(): value.decode() for name, value in found.headers}
                if found.status_code >= 300:
                    raise Lost(f"the server answered with HTTP {found.status_code}")
            elif isinstance(found, h11.Data):
                events += self._events(bytes(found.data))
            else:
                self.is_over = True
                break
        return events

    def _events(self, data: bytes) -> list[Event]:
        if self.headers["content-type"].startswith("text/event-stream"):
            return self._parser.feed(data)
        return [Event(b"", data)]  # small, and in one piece


class EventParser:
    """Server-sent events, as far as MCP needs them: one line of data each."""

    def __init__(self) -> None:
        self._rest = b""
        self._id = self._data = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        events = []
        for line in lines:
            field, _, value = line.rstrip(b"\r\n").partition(b":")
            if field == b"data":
                self._data = value.removeprefix(b" ")
            elif field == b"id":
                self._id = value.removeprefix(b" ")
            elif not field and not value:
                events.append(Event(self._id, self._data))
                self._id = self._data = b""
        return events


class Check:
    """Checks the events after the first of a call of `fill`.

    Each message comes once and in order, its id one above the id before it, and then the result.
    """

    def __init__(self, last_event_id: bytes, count: int) -> None:
        key, _, seq = last_event_id.rpartition(b"_")
        self._key = key
        self._seq = self._first = int(seq)
        self._count = count

    def take(self, events: Sequence[Event]) -> None:
        """Check these events. Raises `Lost`."""
        for event in events:
            if not (event.id and event.data):
                continue  # an announcement, or an id alone
            self._seq += 1
            if event.id != b"%b_%d" % (self._key, self._seq):
                raise Lost(f"event {self._seq} was expected: {event.id!r}")
            if self._seq <= self._count:
                if number_of(event.data) != self._seq - 1:
                    raise Lost(f"message {self._seq - 1} was expected: {event.data[:160]!r}")
            else:
                self._check_result(event.data)

    def _check_result(self, data: bytes) -> None:
        result = msgspec.json.decode(data).get("result")
        if result is None or result.get("isError"):
            raise Lost(f"a result was expected: {data[:160]!r}")

    def end(self) -> int:
        """The number of messages that came, the result included. Raises `Lost` where any is
        missing.
        """
        if self._seq != self._count + 1:
            raise Lost(f"{self._seq} events have come, {self._count + 1} were sent")
        return self._seq - self._first
