"""Messages and checks of the tests of the HTTP client, over a scripted server."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from streams import messages
from streams.exchange import Channel
from streams.messages import POSITION, Incoming
from tests.rigs.scripted_http import NDJSON, Asked, HttpServer, Script, accept, http_server
from transports.http import client

LIMIT = 64 * 1024
HELLO = messages.request(0, "initialize", {"protocolVersion": "2025-11-25"})
WELCOME = messages.result(0, {"protocolVersion": "2025-06-18", "capabilities": {}})


@asynccontextmanager
async def connected(
    script: Script = accept, *, limit: int = LIMIT
) -> AsyncIterator[tuple[HttpServer, Channel]]:
    with trio.fail_after(100):  # a bound for a test that hangs
        async with (
            http_server(script) as server,
            client.connect(server.url, message_bytes_max=limit) as channel,
        ):
            yield server, channel


def call(request_id: int | str) -> bytes:
    return messages.request(request_id, "tools/call", {})


def answer(request_id: int | str) -> bytes:
    return messages.result(request_id, {})


def cancelling(request_id: int | str) -> bytes:
    return messages.notification("notifications/cancelled", {"requestId": request_id})


def header(count: int, stream: str) -> bytes:
    return messages.notification(POSITION, {"streamId": stream, "seq": 1, "count": count})


async def receive(channel: Channel, count: int) -> list[Incoming]:
    received: list[Incoming] = []
    while len(received) < count:
        received += await channel.receive()
    return received


async def receive_all(channel: Channel) -> list[Incoming]:
    received: list[Incoming] = []
    with contextlib.suppress(trio.EndOfChannel):
        while True:
            received += await channel.receive()
    return received


async def assert_over(channel: Channel, received: Sequence[Incoming] = ()) -> None:
    assert await receive_all(channel) == list(received)
    assert not channel.is_writable()
    with pytest.raises(trio.BrokenResourceError):
        await channel.send(b"{}\n")


async def assert_alive(channel: Channel) -> None:
    """Check that the channel still carries lines, in a POST of their own, after any answer."""
    assert channel.is_writable()
    await channel.send(messages.notification("still/here"))
    assert channel.is_writable()


def answering(body: bytes, kind: str = NDJSON, status: str = "200 OK") -> Script:
    """Answer calls with `body`, all other requests with 202."""

    async def script(asked: Asked) -> None:
        if b"tools/call" in asked.body:
            await asked.respond(status, body, kind)
        else:
            await asked.respond()

    return script


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await trio.testing.wait_all_tasks_blocked()
