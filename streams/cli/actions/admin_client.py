"""Requests to the operator's endpoint of a server, over TCP, TLS or a Unix socket.

Each request has a connection of its own: a command makes few of them, and a server that restarts
meanwhile is asked again.
"""

import os
import re
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import h11
import msgspec
import trio

from streams.errors import UnsafeFile
from streams.permissions import check_socket
from streams.process.addresses import is_host
from transports.relay.handover import socket_address

TIMEOUT_S: Final = 15.0
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
READ_BYTES: Final = 64 * 1024
UNIX: Final = "unix:"
TOKEN_VARIABLE: Final = "MCP_STREAMS_ADMIN_TOKEN"

_TOKEN: Final = re.compile(r"[!-~]+", re.ASCII)


class CannotAsk(Exception):
    """The server does not answer, or refuses. The message says what to do."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of the response; 0 without one


class AdminClient:
    """Asks one operator's endpoint: `http://HOST:PORT`, `https://…` or `unix:PATH`."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """Raises `ValueError` for an address of another form, or a token that cannot be sent."""
        self.address = address
        self._path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        self._is_tls = False
        if self._path is None:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            self._is_tls = parts.scheme == "https"
            if parts.username is not None:
                raise ValueError("A URL must not have a password: leave out the part before the @.")
            if parts.scheme not in ("http", "https") or not is_host(parts.hostname or ""):
                raise ValueError(f"{address}: write http://HOST:PORT, or unix:PATH.")
            assert parts.hostname is not None
            self._host, self._netloc = parts.hostname, parts.netloc
            self._port = parts.port or (443 if self._is_tls else 80)
        else:
            self._host = self._netloc = "localhost"
        if token is not None and not _TOKEN.fullmatch(token):
            raise ValueError("The operator's token is not one line of letters, digits and signs.")
        self._token = token

    async def get(self, *parts: str, kind: Any, **query: Any) -> Any:
        """The answer to a GET, as `kind`. Raises `CannotAsk`."""
        told = {name: value for name, value in query.items() if value not in (None, "")}
        target = _target(parts) + (f"?{urlencode(told)}" if told else "")
        return _decoded(await self._ask("GET", target, b""), kind)

    async def post(self, *parts: str, value: Any = None) -> Any:
        """The answer to a POST with a value as JSON. Raises `CannotAsk`."""
        body = b"" if value is None else msgspec.json.encode(value)
        return _decoded(await self._ask("POST", _target(parts), body), Any)

    async def _ask(self, method: str, target: str, body: bytes) -> bytes:
        try:
            with trio.fail_after(TIMEOUT_S):
                stream = await self._connect()
                async with stream:
                    status, answer = await self._exchange(stream, method, target, body)
        except trio.TooSlowError:
            raise CannotAsk(f"{self.address} did not answer within {TIMEOUT_S:g} s.") from None
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            why = getattr(error, "strerror", None) or str(error) or "it has closed the connection"
            raise CannotAsk(f"{self.address} cannot be asked: {why}.") from None
        if status not in (200, 202):
            raise self._refused(status, answer)
        return answer

    def _refused(self, status: int, body: bytes) -> CannotAsk:
        try:
            if status == 401:
                msgspec.json.decode(body, type=_Body)
                return CannotAsk(self._without_token, status)
            # A listener without room for a connection answers as to a client.
            kind = _AnyBody if status == 503 else _Body
            return CannotAsk(msgspec.json.decode(body, type=kind).error.message, status)
        except (ValueError, RecursionError):
            return CannotAsk(
                f"{self.address} answers {status}, and not as an operator's endpoint: name that of "
                "the server's --admin."
            )

    @property
    def _without_token(self) -> str:
        what = (
            "needs the operator's token" if self._token is None else "refused the operator's token"
        )
        return (
            f"{self.address} {what}: name the file with --token-file, or set {TOKEN_VARIABLE}. The "
            "server's log named its file; a client's token does not work here."
        )

    async def _connect(self) -> trio.abc.Stream:
        if self._path is not None:
            try:
                check_socket(Path(self._path))
            except UnsafeFile as error:
                raise CannotAsk(f"{error}.") from None
            with socket_address(self._path) as address:
                return await trio.open_unix_socket(address)
        if self._is_tls:
            context = ssl.create_default_context()
            return await trio.open_ssl_over_tcp_stream(
                self._host, self._port, https_compatible=True, ssl_context=context
            )
        return await trio.open_tcp_stream(self._host, self._port)

    async def _exchange(
        self, stream: trio.abc.Stream, method: str, target: str, body: bytes
    ) -> tuple[int, bytes]:
        protocol = h11.Connection(h11.CLIENT)
        headers = [("host", self._netloc), ("content-length", str(len(body)))]
        if self._token is not None:
            headers.append(("authorization", f"Bearer {self._token}"))
        sent = [
            protocol.send(h11.Request(method=method, target=target, headers=headers)),
            protocol.send(h11.Data(body)) if body else b"",
            protocol.send(h11.EndOfMessage()),
        ]
        await stream.send_all(b"".join(each or b"" for each in sent))
        status, answer = 0, bytearray()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                protocol.receive_data(bytes(await stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                answer += event.data
                if len(answer) > BODY_BYTES_MAX:
                    raise CannotAsk(f"{self.address} answers with more than can be shown.")
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return status, bytes(answer)


def _target(parts: tuple[str, ...]) -> str:
    return "/api/" + "/".join(quote(part, safe="") for part in parts)


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise CannotAsk(
            f"The answer cannot be read ({error}): is it mcp-streams of the same version?"
        ) from None


class _Refused(msgspec.Struct):
    message: str


class _AnyBody(msgspec.Struct):
    error: _Refused


class _Body(_AnyBody, forbid_unknown_fields=True):  # unlike a JSON-RPC error
    pass


def is_socket(path: Path) -> bool:
    """Whether there is a Unix socket at this path."""
    return path.is_socket() and os.access(path, os.R_OK | os.W_OK)
