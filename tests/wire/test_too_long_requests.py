"""Messages that are longer than the server accepts, over a WebSocket: it ends the connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio_websocket
from mcp.client import Client as SdkClient
from mcp.shared.exceptions import MCPError

from streams import Call, Server
from streams import messages as lines
from streams.client.client import Client
from streams.errors import CallFailed
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.messages import Kind, decode, look
from tests.rigs.remote import attached
from transports import dial, websocket
from transports.sdk import over

Json = dict[str, Any]

LIMIT = 100_000  # of the server, in bytes
LONG = "x" * (2 * LIMIT)
HUGE = "x" * (40 * LIMIT)  # does not fit into the buffers of sockets

# A bound for a test that hangs.
PATIENCE_S = 60.0


class Asking:
    """A server with a call that waits while others are made."""

    def __init__(self) -> None:
        self.server = Server("limited")
        self.is_begun = trio.Event()
        self.may_end = trio.Event()
        self.runs = 0

        @self.server.tool
        async def wait(call: Call) -> str:
            self.runs += 1
            await call.log("info", "begun")
            self.is_begun.set()
            await self.may_end.wait()
            return "waited"

        @self.server.tool
        async def length(text: str) -> int:
            return len(text)

        @self.server.tool
        async def ask(call: Call) -> str:
            try:
                await call.elicit("How long?")
            except CallFailed as failed:
                return failed.message
            return "answered"


@asynccontextmanager
async def limited() -> AsyncIterator[tuple[Asking, str]]:
    asking = Asking()
    with trio.fail_after(PATIENCE_S):
        async with (
            asking.server.open(MemoryJournal(), Keyring.load(None)) as running,
            trio.open_nursery() as nursery,
        ):
            serve = partial(websocket.serve, running.serve, message_bytes_max=LIMIT)
            port = await nursery.start(serve, "127.0.0.1", 0)
            yield asking, f"ws://127.0.0.1:{port}"
            nursery.cancel_scope.cancel()


async def refused(client: Client, text: str) -> None:
    with pytest.raises(CallFailed, match="longer than the server accepts") as failed:
        await client.call_tool("length", {"text": text})
    assert failed.value.data["reason"] == "too_large"


async def use(client: Client, asking: Asking) -> None:
    """Long calls fail, and the others go on."""
    waited: list[Any] = []

    async def wait() -> None:
        waited.append(await client.call_tool("wait", type=str))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await asking.is_begun.wait()
        for text in (LONG, LONG, HUGE):
            nursery.start_soon(refused, client, text)
        nursery.start_soon(partial(client.call_tool, "length", {"text": "short"}))
        await refused(client, LONG)
        asking.may_end.set()
    assert waited == ["waited"]
    assert asking.runs == 1
    assert await client.call_tool("length", {"text": LONG[: LIMIT // 2]}, type=int) == LIMIT // 2


async def test_a_call_that_is_too_long_fails_alone() -> None:
    async with limited() as (asking, url), Client(dial(url)) as client:
        await use(client, asking)


async def test_so_does_another_request() -> None:
    async with limited() as (_, url), Client(dial(url)) as client:
        with pytest.raises(CallFailed, match="longer than the server accepts"):
            await client.read_resource(f"memo://{LONG}")
        await client.ping()


async def test_so_does_a_call_through_attach() -> None:
    async with limited() as (asking, url), attached(url) as running, Client(running) as client:
        await use(client, asking)


async def test_a_call_may_be_too_long_by_what_attach_adds() -> None:
    async with limited() as (_, url), attached(url) as running, Client(running) as client:
        found: list[Any] = []
        for short_of_limit in range(0, 600, 50):
            text = LONG[: LIMIT - short_of_limit]
            try:
                found.append(await client.call_tool("length", {"text": text}, type=int))
            except CallFailed as failed:
                found.append(failed.data["reason"])
        fitting = found[found.count("too_large") :]
        assert fitting
        assert len(fitting) < len(found)
        assert fitting == [LIMIT - 50 * place for place in range(len(found) - len(fitting), 12)]


async def test_so_does_a_call_of_the_official_sdk() -> None:
    async with limited() as (_, url), SdkClient(over(url)) as client:
        for text in (LONG, HUGE):
            with pytest.raises(MCPError, match="longer than the server accepts") as failed:
                await client.call_tool("length", {"text": text})
            assert failed.value.error.data["reason"] == "too_large"
        result = await client.call_tool("length", {"text": "four"})
        assert result.structured_content == {"result": 4}


async def test_the_server_is_told_of_an_answer_that_is_too_long() -> None:
    async def elicit(_: Json) -> Json:
        return {"action": "accept", "content": {"text": LONG}}

    async with limited() as (_, url):
        answers = {"elicitation/create": elicit}
        async with Client(dial(url), answers=answers) as client:
            told = await client.call_tool("ask")
            assert "longer than the server accepts" in str(told)


HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "serverInfo": {"name": "other", "version": "1"},
}


async def answer_all(request: trio_websocket.WebSocketRequest) -> None:
    connection = await request.accept(subprotocol="mcp")
    async with connection:
        while True:
            try:
                message = look((await connection.get_message()).encode())
            except trio_websocket.ConnectionClosed:
                return
            if message.kind is not Kind.REQUEST:
                continue
            assert isinstance(message.id, int | str)
            size = len(decode(message.params, Json).get("arguments", {}).get("text", ""))
            result = HELLO if message.method == "initialize" else {"content": [], "size": size}
            await connection.send_message(lines.result(message.id, result).decode())


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
async def test_another_server_says_the_same(text: str) -> None:
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            serve = partial(trio_websocket.serve_websocket, answer_all, max_message_size=LIMIT)
            listening = await nursery.start(partial(serve, "127.0.0.1", 0, ssl_context=None))
            async with Client(dial(f"ws://127.0.0.1:{listening.port}")) as client:
                await refused(client, text)
                async with client.call("length", {"text": "four"}) as call:
                    assert (await call.result())["size"] == 4
            nursery.cancel_scope.cancel()
