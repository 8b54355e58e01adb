"""An MCP client over HTTP that keeps a session only: each request is the test's own."""

import json
import select
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Self

from tests.wire.raw import DEADLINE_S, Id, Message, PeerGone
from tests.wire.rawhttp import BOTH, EVENTS, JSON, Exchange

PATH: Final = "/mcp"

Headers = Mapping[str, str | None]


class HttpClient:
    """The state between a client's requests: the address, a session, and the types that it accepts.

    A connection is used again where the server leaves it open. `close` cuts all that are left.
    """

    def __init__(self, port: int, accept: str = BOTH) -> None:
        self.port = port
        self.accept = accept
        self.session: str | None = None
        self.revision: str | None = None
        self._idle: deque[socket.socket] = deque()
        self._open: list[Exchange] = []

    def head(self, method: str, more: Headers | None = None, *, path: str = PATH) -> bytes:
        """A request's head; `more` adds and replaces headers, None takes one away."""
        headers: dict[str, str | None] = {
            "Host": f"127.0.0.1:{self.port}",
            "Accept": self.accept,
            "Mcp-Session-Id": self.session,
            "MCP-Protocol-Version": self.revision,
            **(more or {}),
        }
        lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()

    def post_bytes(self, body: bytes, more: Headers | None = None) -> bytes:
        length = {"Content-Type": JSON, "Content-Length": str(len(body))}
        return self.head("POST", {**length, **(more or {})}) + body

    def start(self, *, is_head: bool = False) -> Exchange:
        """A connection that is ready for a request."""
        for exchange in [one for one in self._open if one.is_over]:
            self._open.remove(exchange)
            if exchange.can_go_on:
                self._idle.append(exchange.connection)
            else:
                exchange.connection.close()
        exchange = Exchange(self._connection(), is_head=is_head)
        self._open.append(exchange)
        return exchange

    def _connection(self) -> socket.socket:
        while self._idle:
            connection = self._idle.pop()
            if connection.fileno() >= 0 and not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()  # the server has closed it
        try:
            return socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
        except ConnectionError as gone:
            raise PeerGone(str(gone)) from gone

    def send(self, data: bytes) -> Exchange:
        """Send a request, valid or not."""
        exchange = self.start(is_head=data.startswith(b"HEAD "))
        exchange.send(data)
        return exchange

    def post(self, message: object, more: Headers | None = None) -> Exchange:
        """POST a message, or bytes as they are."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.send(self.post_bytes(body, more))

    def request(
        self, method: str, params: object = None, *, id: Id = 1, more: Headers | None = None
    ) -> Exchange:
        body = {"jsonrpc": "2.0", "id": id, "method": method}
        return self.post(body if params is None else {**body, "params": params}, more)

    def ask(self, method: str, params: object = None, *, id: Id = 1) -> Message:
        """Send a request whose answer comes alone; any JSON-RPC answer is a 200."""
        exchange = self.request(method, params, id=id).head()
        assert exchange.status == 200, exchange.body()
        return exchange.message()

    def call(
        self, tool: str, id: Id = 1, *, more: Headers | None = None, **arguments: object
    ) -> Exchange:
        return self.request("tools/call", {"name": tool, "arguments": arguments}, id=id, more=more)

    def notify(self, method: str, params: object = None) -> Exchange:
        """Send a notification, which is accepted."""
        body = {"jsonrpc": "2.0", "method": method}
        exchange = self.post(body if params is None else {**body, "params": params}).head()
        assert exchange.status == 202, exchange.body()
        return exchange

    def get(self, last_event_id: str | None = None, more: Headers | None = None) -> Exchange:
        return self.send(self.head("GET", {"Last-Event-ID": last_event_id, **(more or {})}))

    def delete(self) -> Exchange:
        return self.send(self.head("DELETE"))

    def initialize(self, capabilities: dict[str, Any], *, revision: str = "2025-11-25") -> Message:
        """Open a session; from then on every request names it and its revision."""
        params = {
            "protocolVersion": revision,
            "capabilities": capabilities,
            "clientInfo": {"name": "raw", "version": "0"},
        }
        exchange = self.request("initialize", params, id="initialize").head()
        assert exchange.status == 200, exchange.body()
        response = self.read_one(exchange)
        self.session = exchange.headers["mcp-session-id"]
        self.revision = response.result["protocolVersion"]
        self.notify("notifications/initialized")
        return response

    @staticmethod
    def read_one(exchange: Exchange) -> Message:
        """The first message of a response, whichever of the three forms it has."""
        exchange.head()
        if exchange.media_type == EVENTS:
            while not (event := exchange.next_event()).data:
                pass
            return event.message
        return Message(exchange.body())

    def close(self) -> None:
        for exchange in self._open:
            exchange.connection.close()
        for connection in self._idle:
            connection.close()
        self._open.clear()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
