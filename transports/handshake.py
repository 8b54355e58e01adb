"""The opening handshake of a WebSocket (RFC 6455, section 4), from either side.

The server's refusals are written by hand: each is one HTTP response with a JSON-RPC error in it.
"""

import http
import json
import re
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, RejectConnection, RejectData, Request
from wsproto.utilities import RemoteProtocolError

from streams import messages
from streams.errors import INVALID_REQUEST, Refusal
from transports.lines import CLOSE_S
from transports.wschannel import linger

HEAD_BYTES_MAX: Final = 16 * 1024  # of a request, and of what a refusal may say

_TARGET: Final = re.compile(r"[\x21-\x7e]+")

ClientStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


class Refused(Exception):
    """A handshake that ends with an HTTP error."""

    def __init__(self, status: int, why: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.headers = headers

    def response(self) -> bytes:
        phrase = http.HTTPStatus(self.status).phrase
        body = messages.error(None, Refusal(INVALID_REQUEST, self.why))
        fields = [
            *self.headers,
            (b"Content-Type", b"application/json"),
            (b"Content-Length", str(len(body)).encode()),
            (b"Connection", b"close"),
        ]
        lines = [f"HTTP/1.1 {self.status} {phrase}".encode()]
        lines += [name + b": " + value for name, value in fields]
        return b"\r\n".join([*lines, b"", body])


async def read_head(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    """The request, and what came after it. Raises `Refused`, or `BrokenResourceError` at EOF."""
    head = bytearray()
    while b"\r\n\r\n" not in head and len(head) <= HEAD_BYTES_MAX:
        data = await stream.receive_some(HEAD_BYTES_MAX)
        if not data:
            raise trio.BrokenResourceError("the peer is gone")
        head += data
    request, end, early = bytes(head).partition(b"\r\n\r\n")
    if len(request) > HEAD_BYTES_MAX:
        raise Refused(431, f"The request is longer than {HEAD_BYTES_MAX} bytes.")
    return request + end, early


def parse_head(head: bytes) -> tuple[WSConnection, Request]:
    """The request to open a WebSocket. Raises `Refused` when it is none."""
    protocol = WSConnection(ConnectionType.SERVER)
    try:
        protocol.receive_data(head)
        request = next(protocol.events(), None)
    except RemoteProtocolError as error:
        hint = error.event_hint
        if isinstance(hint, RejectConnection):
            raise Refused(hint.status_code, f"{error}.", hint.headers) from None
        raise Refused(400, f"{error}.") from None
    except ValueError:  # wsproto decodes header values without a doubt
        raise Refused(400, "A header is not in ASCII.") from None
    if not isinstance(request, Request):
        raise Refused(400, "This is no HTTP request.")
    return protocol, request


async def turn_away(stream: trio.SocketStream, refused: Refused) -> None:
    """Send the refusal and hang up, within a second."""
    with trio.move_on_after(CLOSE_S):
        try:
            await stream.send_all(refused.response())
        except trio.BrokenResourceError:
            return  # it did not wait for the answer
        await linger(stream)


# -- the client's side


class Address:
    """A WebSocket URL taken apart. Raises `ValueError` with a sentence when it is none."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"{url!r} is no WebSocket URL: write ws://HOST:PORT or wss://HOST")
        self.url = url
        self.is_tls = parts.scheme == "wss"
        self.host = parts.hostname
        self.port = parts.port or (443 if self.is_tls else 80)
        self.target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{url!r} has characters that must be percent-encoded")
        self.host.encode("idna")  # raises UnicodeError, which is a ValueError

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


async def secure(
    tcp: trio.SocketStream, address: Address, ssl_context: ssl.SSLContext | None
) -> trio.SSLStream[trio.SocketStream]:
    """Put TLS over `tcp`. Raises `trio.BrokenResourceError` from what is wrong with it."""
    context = ssl_context or ssl.create_default_context()
    stream = trio.SSLStream(tcp, context, server_hostname=address.host, https_compatible=True)
    await stream.do_handshake()
    return stream


async def ask(
    stream: ClientStream, address: Address, subprotocols: Sequence[str]
) -> tuple[WSConnection, AcceptConnection]:
    """Ask for a WebSocket. Raises `OSError` when refused, `trio.BrokenResourceError` when cut off,
    `RemoteProtocolError` or `ValueError` when the answer is none.
    """
    protocol = WSConnection(ConnectionType.CLIENT)
    request = Request(
        host=address.host_header, target=address.target, subprotocols=list(subprotocols)
    )
    await stream.send_all(protocol.send(request))
    rejected: RejectConnection | None = None
    body = b""
    while True:
        data = await stream.receive_some(HEAD_BYTES_MAX)
        if not data and rejected is None:
            raise trio.BrokenResourceError
        if data:
            protocol.receive_data(bytes(data))
        for event in protocol.events():
            match event:
                case AcceptConnection():
                    return protocol, event
                case RejectConnection():
                    rejected = event
                case RejectData():
                    body += event.data
        is_over = protocol.state is ConnectionState.CLOSED or len(body) > HEAD_BYTES_MAX
        if rejected and (is_over or not data):
            why = _reason(body)
            raise ConnectionRefusedError(f"{address.url}: HTTP {rejected.status_code}{why}")


def _reason(body: bytes) -> str:
    """What the body of a refusal says, be it JSON-RPC's error or text."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = body.decode(errors="replace").strip()
    return f": {said[:200]}" if said else ""
