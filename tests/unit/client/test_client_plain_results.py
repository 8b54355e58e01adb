"""A short call is answered by its response alone: no announcement, no seq, no event id.

The client numbers everything else over the same connection.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from streams import messages
from streams.client.client import Client
from streams.exchange import ClientChannel, Dialer
from streams.messages import POSITION
from tests.rigs.clients import Stepping, rest_of, said
from tests.rigs.scripted import Scripted, Stream
from tests.rigs.scripted_http import Asked, http_server
from transports import http, stdio, websocket
from transports.lines import open_fds

SHORT_CALLS = 5


async def echo(stream: Stream) -> Any:
    return {"content": [], "said": stream.arguments["text"]}


class Rig:
    """A server with `step`, which is announced and numbered, and `echo`, which is not."""

    def __init__(self) -> None:
        self.server = Scripted(key_memory="a memory")
        self.step = Stepping(self.server)
        self.server.tools["echo"] = echo
        self.server.plain.add("echo")
        self.dialer: Dialer


@asynccontextmanager
async def over_stdio(rig: Rig) -> AsyncIterator[None]:
    async with rig.server.serving(), trio.open_nursery() as nursery:

        @asynccontextmanager
        async def connect() -> AsyncIterator[ClientChannel]:
            (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
            nursery.start_soon(stdio.serve, rig.server.serve, (theirs_in, theirs_out))
            channel = open_fds(ours_in, ours_out, principal="server")
            try:
                yield channel
            finally:
                with trio.CancelScope(shield=True):
                    await channel.aclose()

        rig.dialer = connect
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def over_websocket(rig: Rig) -> AsyncIterator[None]:
    async with rig.server.serving(), trio.open_nursery() as nursery:
        serve = partial(websocket.serve, rig.server.serve, "127.0.0.1", 0)
        port = await nursery.start(serve)
        rig.dialer = partial(websocket.connect, f"ws://127.0.0.1:{port}")
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def over_http(rig: Rig) -> AsyncIterator[None]:
    async def script(asked: Asked) -> None:
        message = msgspec.json.decode(asked.body) if asked.body else {}
        request_id, method = message.get("id"), message.get("method")
        if method == "initialize":
            extension = {"mcp-streams/v1": {"positions": True, "idempotencyKeys": "a memory"}}
            hello = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"experimental": extension},
                "serverInfo": {},
            }
            await asked.start(extra="Mcp-Session-Id: abc\r\n")
            await asked.write(messages.result(request_id, hello))
            await asked.finish()
        elif method == "tools/call" and message["params"]["name"] == "echo":
            said = {"content": [], "said": message["params"]["arguments"]["text"]}
            await asked.respond("200 OK", messages.result(request_id, said).rstrip())
        elif method == "tools/call":
            nursery.start_soon(numbered, asked, request_id)
        else:
            await asked.respond()

    async def numbered(asked: Asked, request_id: str) -> None:
        stream = {"streamId": "s", "requestId": request_id, "resumeToken": "t"}
        interval = {"resumeInterval": {"min": 0, "max": 60}}
        await asked.start()
        await asked.write(
            messages.notification("notifications/stream/create", {"stream": stream | interval})
        )
        seq = 0
        async for text in rig.step.texts:
            seq += 1
            line = messages.notification("notifications/message", {"level": "info", "data": text})
            if text is None:
                line = messages.result(request_id, {"content": [], "done": True})
            position = {"streamId": "s", "seq": seq, "count": 1}
            await asked.write(messages.notification(POSITION, position) + line)
            if text is None:
                break
        await asked.finish()

    async with http_server(script) as server, trio.open_nursery() as nursery:
        rig.dialer = partial(http.connect, server.url)
        yield
        nursery.cancel_scope.cancel()


Over = Callable[[Rig], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize("over", [over_stdio, over_websocket, over_http])
async def test_a_response_alone_is_the_result_at_once_among_calls_with_numbers(over: Over) -> None:
    rig = Rig()
    found: list[Any] = []

    async def call_echo(client: Client, text: str) -> None:
        async with client.call("echo", {"text": text}) as call:
            assert [message async for message in call] == []
            found.append((await call.result())["said"])
            assert call.ticket is None, "there is nothing to resume"

    with trio.fail_after(100):  # a bound for a test that hangs
        async with over(rig), Client(rig.dialer) as client, client.call("step") as numbered:
            rig.step.say("1")
            assert said(await anext(numbered)) == "1"
            async with trio.open_nursery() as nursery:
                for number in range(SHORT_CALLS):
                    nursery.start_soon(call_echo, client, str(number))
            assert sorted(found) == [str(number) for number in range(SHORT_CALLS)]
            rig.step.say("2", None)
            assert await rest_of(numbered) == ["2"]
            assert numbered.ticket is not None
            assert numbered.ticket.after == 2
            assert (await numbered.result())["done"]


async def test_a_call_that_was_answered_so_is_not_sent_again() -> None:
    rig = Rig()
    with trio.fail_after(100):  # a bound for a test that hangs
        async with rig.server.serving(), Client(rig.server.memory.connect) as client:
            async with client.call("echo", {"text": "once"}) as call:
                assert (await call.result())["said"] == "once"
                rig.server.cut()
                await client.ping()
            assert len(rig.server.received) > len(rig.server.got("tools/call"))
    assert len(rig.server.got("tools/call")) == 1
    assert rig.server.got("stream/resume") == []


async def test_a_call_whose_response_alone_was_lost_is_sent_again() -> None:
    rig = Rig()
    with trio.fail_after(100):  # a bound for a test that hangs
        async with rig.server.serving(), Client(rig.server.memory.connect) as client:
            rig.server.memory.cables[-1].cut_after(to_near=1)
            async with client.call("echo", {"text": "twice"}) as call:
                assert (await call.result())["said"] == "twice"
    assert len(rig.server.got("tools/call")) == 2
