"""Requests to the operator's endpoint, without sockets and with them."""

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from streams.exchange import Endpoint, Headers, Request

TIMEOUT_S: Final = 20.0


class Answered:
    """A responder that keeps the response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        self.status, self.headers, self.body = status, dict(headers), body

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


async def asked_of(
    endpoint: Endpoint,
    target: str,
    method: str = "GET",
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> Answered:
    """Ask an endpoint directly."""
    answered = Answered()
    path, _, query = target.partition("?")
    request = Request(method, path, dict(headers or {}), body, query=query)
    await endpoint(request, answered)  # type: ignore[arg-type]
    return answered


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def fetched(
    connection: http.client.HTTPConnection,
    target: str,
    method: str = "GET",
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """The status and the body of one response."""
    try:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
