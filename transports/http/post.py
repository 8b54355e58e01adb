"""One POST to an address that was checked before, for webhooks: the head of the answer is all.

`transports.http.client` is made for streams over connections that are kept. Here each request has a
connection of its own, to an address that the caller has chosen, and the answer's body is not read.
"""

import ssl
from collections.abc import Mapping, Sequence
from typing import Final

import h11
import msgspec
import trio

from transports.net.dialing import Address, ClientStream, Scheme, reach
from transports.net.sockets import close_at_once

CONNECT_S: Final = 5.0  # to one address: another one may be better
READ_BYTES: Final = 4096
HEAD_BYTES_MAX: Final = 16 * 1024
# Before the response. A receiver that sends them without end would cost a processor.
INTERIM_MAX: Final = 8
HEADS_BYTES_MAX: Final = 32 * 1024  # of all of them and the response
USER_AGENT: Final = "mcp-streams"

_HTTP: Final = Scheme("http", "HTTP", "/")


class PostAnswer(msgspec.Struct, frozen=True):
    """The head of an answer. Names of `fields` are lower-case."""

    status: int
    fields: dict[str, str]


async def post(
    url: str,
    places: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    ssl_context: ssl.SSLContext | None = None,
) -> PostAnswer:
    """Post to the first of some IP addresses that can be reached.

    Raises `OSError`, or `ValueError` where no request can be made of what is given. With TLS the
    certificate is that of the URL's host. A redirect is an answer like any other.
    """
    address = Address(url, _HTTP)
    request = _request(address, headers, body)
    failure: OSError = OSError(f"{address.host} has no address")
    for place in places:
        try:
            connect_by = trio.current_time() + CONNECT_S
            tcp, stream = await reach(address, ssl_context, connect_by, place=place)
        except OSError as error:
            failure = error
            continue
        try:
            return await _exchanged(stream, address.host, request, body)
        finally:
            await close_at_once(tcp)
    raise failure


def _request(address: Address, headers: Mapping[str, str], body: bytes) -> h11.Request:
    """Raises `ValueError` for headers that HTTP does not allow."""
    fields = {
        "host": address.host_header,
        "user-agent": USER_AGENT,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **headers,
    }
    try:
        return h11.Request(method="POST", target=address.target, headers=list(fields.items()))
    except h11.LocalProtocolError as error:
        raise ValueError(str(error)) from error


async def _exchanged(
    stream: ClientStream, host: str, request: h11.Request, body: bytes
) -> PostAnswer:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
    parts = (connection.send(each) for each in (request, h11.Data(body), h11.EndOfMessage()))
    try:
        await stream.send_all(b"".join(part or b"" for part in parts))
        return await _head(stream, connection)
    except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
        raise ConnectionError(f"{host}: no answer: {error}") from error


async def _head(stream: ClientStream, connection: h11.Connection) -> PostAnswer:
    interim = received = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if received > HEADS_BYTES_MAX:
                raise h11.RemoteProtocolError(
                    "too many bytes before the end of the response's head"
                )
            data = bytes(await stream.receive_some(READ_BYTES))
            if not data:
                raise h11.RemoteProtocolError("it hung up and gave no response")
            received += len(data)
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            fields = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            return PostAnswer(event.status_code, fields)
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("it sent something else than a response")
        else:
            interim += 1
            if interim > INTERIM_MAX:
                raise h11.RemoteProtocolError(f"more than {INTERIM_MAX} interim responses")
