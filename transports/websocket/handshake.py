"""The opening handshake of a WebSocket (RFC 6455, section 4), on a server.

A usual request is read without wsproto, which saves an eighth of the CPU time that a returning
client costs the server. wsproto reads all other requests, and says what is wrong with them.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import RejectConnection, Request
from wsproto.utilities import (
    RemoteProtocolError,
    generate_accept_token,
)

from streams.exchange import Head, HttpError
from transports.net.heads import plain_head
from transports.net.sockets import ServerStream, receive_some

HEAD_BYTES_MAX: Final = 16 * 1024
FIELDS_MAX: Final = 128

_NO_WEBSOCKET: Final = ": this port speaks WebSocket, so dial it with ws:// or wss://."
_TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS connection

_KEY: Final = re.compile(r"[0-9A-Za-z+/]{22}==")  # 16 bytes in base64


class Opening(NamedTuple):
    """A request to open a WebSocket: its head, and the key for the answer."""

    head: Head
    origins: Sequence[str]
    subprotocols: Sequence[str]
    key: bytes

    @property
    def host(self) -> str:
        return self.head.headers["host"]

    def accept(self, subprotocol: str | None) -> bytes:
        """The response that opens the WebSocket."""
        lines = [
            b"HTTP/1.1 101 Switching Protocols",
            b"Upgrade: WebSocket",
            b"Connection: Upgrade",
            b"Sec-WebSocket-Accept: " + generate_accept_token(self.key),
        ]
        if subprotocol is not None:
            lines.append(b"Sec-WebSocket-Protocol: " + subprotocol.encode())
        return b"\r\n".join([*lines, b"", b""])


async def read_head(stream: ServerStream) -> tuple[bytes, bytes]:
    """Read the request; return it, and the bytes that came behind it.

    Raises `HttpError`, or `trio.BrokenResourceError` when the peer hangs up.
    """
    head = bytearray()
    while b"\r\n\r\n" not in head and len(head) <= HEAD_BYTES_MAX:
        data = await receive_some(stream, HEAD_BYTES_MAX)
        if not data:
            raise trio.BrokenResourceError("the peer is gone")
        head += data
        if head[0] == _TLS_HANDSHAKE:
            raise HttpError(400, "This port speaks no TLS: dial it with ws://.")
    request, end, early = bytes(head).partition(b"\r\n\r\n")
    if len(request) > HEAD_BYTES_MAX:
        raise HttpError(431, f"The request is longer than {HEAD_BYTES_MAX} bytes.")
    return request + end, early


def parse_head(head: bytes) -> Opening:
    """Parse a request to open a WebSocket. Raises `HttpError` for any other request."""
    return _plain_opening(head) or _any_opening(head)


def _plain_opening(head: bytes) -> Opening | None:
    """A usual request; None for one that is left to wsproto."""
    found = plain_head(head, HEAD_BYTES_MAX, FIELDS_MAX)
    if found is None or found.method != "GET" or found.body_bytes:
        return None
    fields = found.headers
    key = fields.get("sec-websocket-key", "")
    is_opening = (
        "upgrade" in _listed(fields.get("connection", "").lower())
        and fields.get("upgrade", "").lower() == "websocket"
        and fields.get("sec-websocket-version") == "13"
        and _KEY.fullmatch(key)
        and "xn--" not in fields["host"].lower()  # wsproto decodes such names
    )
    if not is_opening:
        return None
    subprotocols = _listed(fields.get("sec-websocket-protocol", ""))
    told = Head(found.method, found.target.partition("?")[0], fields)
    return Opening(told, found.fields.get("origin", ()), subprotocols, key.encode())


def _any_opening(head: bytes) -> Opening:
    protocol = WSConnection(ConnectionType.SERVER)
    try:
        protocol.receive_data(head)
        request = next(protocol.events(), None)
    except RemoteProtocolError as error:
        hint = error.event_hint
        if isinstance(hint, RejectConnection):
            headers = [(name.decode(), value.decode()) for name, value in hint.headers]
            raise HttpError(hint.status_code, f"{error}{_NO_WEBSOCKET}", headers) from None
        raise HttpError(400, f"{error}{_NO_WEBSOCKET}") from None
    except ValueError:  # wsproto does not catch errors when it decodes headers
        raise HttpError(400, "A header is not in ASCII.") from None
    if not isinstance(request, Request):
        raise HttpError(400, "This is not an HTTP request.")
    fields: dict[str, list[str]] = {"host": [request.host]}
    for name, value in request.extra_headers:
        fields.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    told = {name: ", ".join(values) for name, values in fields.items()}
    return Opening(
        Head("GET", request.target.partition("?")[0], told),
        fields.get("origin", ()),
        list(filter(None, request.subprotocols)),  # empty elements of a list do not count
        told["sec-websocket-key"].encode(),
    )


def _listed(value: str) -> list[str]:
    return [piece for piece in map(str.strip, value.split(",")) if piece]
