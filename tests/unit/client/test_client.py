"""The promises of `Client` while the connection holds."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from streams.client.client import Client
from streams.errors import (
    CallFailed,
    ClientError,
    Refusal,
)
from tests.rigs.clients import Params, Stepping, connected, count, counting, rest_of, said
from tests.rigs.scripted import Scripted, Stream


async def test_every_message_comes_once_and_in_order_and_then_the_result() -> None:
    async with connected(counting()) as client, client.call("count", {"n": 2_500}) as call:
        assert await rest_of(call) == [str(n) for n in range(1, 2_501)]
        assert await call.result() == {"content": [], "counted": 2_500}
        assert await call.result() == {"content": [], "counted": 2_500}


async def test_the_result_can_be_had_without_reading_the_messages() -> None:
    async with connected(counting()) as client, client.call("count", {"n": 30_000}) as call:
        assert (await call.result())["counted"] == 30_000


async def test_the_client_opts_in_and_declares_what_it_answers() -> None:
    async def answer(params: Params) -> Params:
        return params

    server = counting()
    client = Client(server.memory.connect, name="n", version="v", answers={"roots/list": answer})
    client.on_request("elicitation/create", answer)
    async with server.serving(), client:
        assert client.server_info["name"] == "scripted"
        assert client.protocol_version == "2025-11-25"
        assert "tools" in client.capabilities
        await client.ping()
    assert server.got("initialize") == [
        {
            "protocolVersion": "2025-11-25",
            "capabilities": {
                "streams": {},
                "experimental": {
                    "mcp-streams/v1": {
                        "dialects": ["streams", "resumableRequests"],
                        "positions": True,
                        "replayResponse": True,
                    }
                },
                "resumableRequests": {},
                "roots": {},
                "elicitation": {},
            },
            "clientInfo": {"name": "n", "version": "v"},
        }
    ]
    assert server.got("notifications/initialized") == [{}]


async def test_no_two_clients_use_the_same_request_id() -> None:
    server = counting()
    async with server.serving():
        for _ in range(2):
            async with Client(server.memory.connect) as client:
                for _ in range(2):
                    async with client.call("count", {"n": 1}) as call:
                        await call.result()
    ids = [message["id"] for _, message in server.received if "id" in message]
    assert len(set(ids)) == len(ids) == 6
    assert all(isinstance(request_id, str) for request_id in ids)
    tokens = [params["_meta"]["progressToken"] for params in server.got("tools/call")]
    assert len(set(tokens)) == 4


async def test_calls_run_side_by_side_and_do_not_mix() -> None:
    server = counting()
    server.run_lines_max = 7
    async with connected(server) as client:
        found: dict[int, list[Any]] = {}

        async def follow(n: int) -> None:
            async with client.call("count", {"n": n}) as call:
                found[n] = await rest_of(call)
                assert (await call.result())["counted"] == n

        async with trio.open_nursery() as nursery:
            for n in range(1, 40):
                nursery.start_soon(follow, n)
    assert found == {n: [str(i) for i in range(1, n + 1)] for n in range(1, 40)}


async def test_lists_are_followed_to_their_last_page() -> None:
    server = counting()
    server.tools |= {f"tool-{n}": count for n in range(4)}
    async with connected(server) as client:
        assert [tool.name for tool in await client.list_tools()] == list(server.tools)
        for n in range(5):
            async with client.call("count", {"n": n}) as call:
                await call.result()
        statuses = await client.poll_all()
        assert [status.stream_id for status in statuses] == list(server.streams)
        assert (await client.poll(statuses[0].stream_id)).status == "completed"
        assert call.ticket is not None
        assert (await client.poll(call.ticket)).status == "completed"


async def test_a_failed_call_raises_what_the_server_said() -> None:
    async def fail(stream: Stream) -> Any:
        stream.say("before")
        raise Refusal(-32000, "Out of order.", {"why": "rust"})

    server = Scripted()
    server.tools["fail"] = fail
    async with connected(server) as client, client.call("fail") as call:
        assert await rest_of(call) == ["before"]
        with pytest.raises(CallFailed, match="Out of order") as caught:
            await call.result()
    assert (caught.value.code, caught.value.data) == (-32000, {"why": "rust"})


async def test_errors_of_the_body_come_out_as_they_were_raised() -> None:
    server = counting()
    async with server.serving():
        with pytest.raises(ZeroDivisionError):
            async with (
                Client(server.memory.connect) as client,
                client.call("count", {"n": 1}),
            ):
                _ = 1 / 0


async def test_errors_of_the_body_come_out_alone_where_it_was_cancelled_too() -> None:
    def fail(scope: trio.CancelScope) -> None:
        scope.cancel()
        raise ZeroDivisionError

    server = counting()
    async with server.serving():
        with trio.CancelScope() as scope, pytest.raises(ZeroDivisionError):
            async with Client(server.memory.connect):
                fail(scope)


async def test_a_client_can_be_cancelled_at_any_moment() -> None:
    server = Scripted()
    Stepping(server)
    async with server.serving():
        with trio.CancelScope() as scope:
            async with Client(server.memory.connect) as client, client.call("step") as call:
                scope.cancel()
                await call.result()
        assert scope.cancelled_caught


async def test_closing_a_client_ends_what_other_tasks_wait_for() -> None:
    server = Scripted()
    step = Stepping(server)
    ended: list[ClientError] = []

    async def wait(act: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(ClientError) as caught:
            await act()
        ended.append(caught.value)

    async def read(client: Client) -> None:
        async with client.call("step") as call:
            assert said(await anext(call)) == "a"
            await call.result()

    async with (
        server.serving(),
        trio.open_nursery() as nursery,
        Client(server.memory.connect) as client,
    ):
        nursery.start_soon(wait, partial(read, client))
        step.say("a")
        await wait_all_tasks_blocked()
        server.is_deaf = True
        nursery.start_soon(wait, client.ping)
        await wait_all_tasks_blocked()
    assert sorted(map(str, ended)) == [
        "The client was closed: enter another one.",
        "The client was closed: resume the call's ticket with another one.",
    ]


@pytest.mark.parametrize("cursor", ["the same", "another"])
async def test_a_listing_without_an_end_is_an_error(cursor: str) -> None:
    class Endless(Scripted):
        def _page(self, params: Params) -> Params:
            following = cursor if cursor == "the same" else f"{params.get('cursor', '')}x"[:20]
            return {"tools": [], "nextCursor": following}

    async with connected(Endless()) as client:
        with pytest.raises(ClientError, match="tools/list have no end below 10000 pages"):
            await client.list_tools()


async def test_a_listing_that_is_too_large_is_an_error() -> None:
    class Large(Scripted):
        def _page(self, params: Params) -> Params:
            tool = {"name": "x", "description": "y" * 4_000_000}
            return {"tools": [tool], "nextCursor": f"{params.get('cursor', '')}x"}

    server = Large()
    async with connected(server) as client:
        with pytest.raises(ClientError, match="67108864 bytes"):
            await client.list_tools()
    assert len(server.got("tools/list")) == 17
