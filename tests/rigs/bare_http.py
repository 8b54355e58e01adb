"""HTTP clients made of sockets and h11, without our client, and a server for them."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import h11
import trio
import trio.testing

from streams.exchange import Endpoint, Request, Responder
from streams.turns import BUSY_AT_ONCE, busy
from transports import http

LIMIT = 100_000
PATIENT_S = 30  # a bound for a test that hangs


async def echo(request: Request, responder: Responder) -> None:
    """Answer with the request itself; `/stream` in two chunks, `/404` as not found."""
    seen = json.dumps([request.method, request.path, request.body.decode("latin-1")]).encode()
    if request.path == "/stream":
        await responder.start(200, [("Content-Type", "text/plain")], b"")
        await responder.write(seen)
        await responder.finish()
    else:
        await responder.respond(404 if request.path == "/404" else 200, (), seen)


@asynccontextmanager
async def serving(
    endpoint: Endpoint = echo, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[int]:
    settings = {"body_bytes_max": LIMIT, **settings}
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(http.serve, endpoint, host, 0, **settings))
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def all_turns_taken() -> AsyncIterator[None]:
    """Busy connections have their turns, as many as may have them at a time."""
    async with AsyncExitStack() as stack:
        for _ in range(BUSY_AT_ONCE):
            await stack.enter_async_context(busy())
        yield


async def to_the_end(stream: trio.abc.ReceiveStream) -> bytes:
    answer = b""
    while data := await stream.receive_some():
        answer += data
    return answer


async def tell(port: int, *pieces: bytes, host: str = "127.0.0.1") -> bytes:
    """Send `pieces`; return all bytes up to the end of the connection."""
    with trio.fail_after(PATIENT_S):
        async with await trio.open_tcp_stream(host, port) as stream:
            for piece in pieces:
                await stream.send_all(piece)
            return await to_the_end(stream)


def asking(
    *fields: str, start: str = "POST /mcp HTTP/1.1", host: str = "localhost", body: bytes = b""
) -> bytes:
    lines = [start, *([f"Host: {host}"] if host else []), *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"


def answers(wire: bytes, *methods: str) -> list[tuple[int, bytes]]:
    """Status and body of each response in `wire`, as h11 reads them; one for each of `methods`."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(wire)
    client.receive_data(b"")
    found: list[tuple[int, bytes]] = []
    for method in methods:
        client.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        status, body = 0, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
        found.append((status, body))
        if client.their_state is h11.DONE and client.our_state is h11.DONE:
            client.start_next_cycle()
    return found


def refused(wire: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the JSON-RPC error of a refusal, which must be one whole response."""
    head, _, body = wire.partition(b"\r\n\r\n")
    fields = head.decode().lower().split("\r\n")
    assert "connection: close" in fields
    assert "content-type: application/json" in fields
    assert f"content-length: {len(body)}" in fields
    message = json.loads(body)
    assert message["jsonrpc"] == "2.0"
    assert message["id"] is None
    assert message["error"]["message"].endswith(".")
    return int(head.split(b" ")[1]), message["error"]


Talk = Callable[[Responder], Awaitable[None]]


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[trio.SocketStream]:
    """A client whose one request `talk` answers."""

    async def endpoint(request: Request, responder: Responder) -> None:
        await talk(responder)

    async with serving(endpoint) as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(PATIENT_S):
            await stream.send_all(asking())
            yield stream
