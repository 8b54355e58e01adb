"""The opening handshake of a WebSocket (RFC 6455, section 4), from either side.

trio-websocket makes every handshake that succeeds. What a server refuses is refused before
trio-websocket sees it: its public API does not tell the `Host`, it answers what is no handshake
without a word and then waits for ever, a header that is not ASCII ends its reader, and nothing
bounds the request. Each refusal is one HTTP response with a JSON-RPC error in it.
"""

import json
from collections.abc import Sequence
from typing import Final, cast

import trio
from trio_websocket import WebSocketConnection, wrap_client_stream
from wsproto import ConnectionType, WSConnection
from wsproto.events import RejectConnection, RejectData, Request
from wsproto.utilities import RemoteProtocolError

from transports.address import Address, too_late
from transports.lines import READ_BYTES
from transports.listening import Refused
from transports.wire import Wire

HEAD_BYTES_MAX: Final = 16 * 1024  # of a request, and of what a refusal may say


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
    """The request to open a WebSocket, and what answers it. Raises `Refused` if it is none."""
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


# -- the client's side


async def ask(
    stream: Wire,
    nursery: trio.Nursery,
    address: Address,
    subprotocols: Sequence[str],
    *,
    message_size_max: int,
    deadline: float,
) -> WebSocketConnection:
    """Ask for a WebSocket. Raises `OSError` when refused, cut off, or late."""
    with stream.until_ended(deadline):
        return await wrap_client_stream(
            nursery,
            cast(trio.SocketStream, stream),  # any stream will do, says its documentation
            address.host_header,
            address.target,
            subprotocols=subprotocols,
            message_queue_size=0,
            max_message_size=message_size_max,
            receive_buffer_size=READ_BYTES,
        )
    if stream.is_open:
        raise too_late(address)
    raise _refusal(address, stream) from stream.failure


def _refusal(address: Address, stream: Wire) -> OSError:
    """Why there is no WebSocket: trio-websocket tells only of a body whose length was announced."""
    if not stream.answer:
        return ConnectionResetError(f"{address.url}: the server hung up during the handshake")
    protocol = WSConnection(ConnectionType.CLIENT)
    protocol.send(Request(host=address.host_header, target=address.target))
    body = b""
    rejected: RejectConnection | None = None
    try:
        protocol.receive_data(stream.answer)
    except (RemoteProtocolError, ValueError) as error:
        return ConnectionRefusedError(f"{address.url} speaks no WebSocket: {error}")
    for event in protocol.events():
        if isinstance(event, RejectConnection):
            rejected = event
        elif isinstance(event, RejectData):
            body += event.data
    if rejected is None:
        return ConnectionResetError(f"{address.url}: the server hung up during the handshake")
    return ConnectionRefusedError(f"{address.url}: HTTP {rejected.status_code}{_reason(body)}")


def _reason(body: bytes) -> str:
    """What the body of a refusal says, be it JSON-RPC's error or text."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = body.decode(errors="replace").strip()
    return f": {said[:200]}" if said else ""
