"""Scopes and nurseries that a tool leaves open: they concern its own call alone."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
import trio

from streams import Call, Client, Server

# trio's own advice to the author, when such a generator is collected.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator .*:ResourceWarning")


async def rows() -> AsyncIterator[int]:
    with trio.move_on_after(60):
        yield 1


async def lines(ended: trio.Event) -> AsyncIterator[int]:
    async def read() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.lowlevel.checkpoint()
        yield 2


@pytest.fixture
def server() -> Server:
    server = Server("tested")

    @server.tool
    async def fine(call: Call) -> str:
        await call.log("info", "still here")
        return "fine"

    return server


async def is_alive(client: Client) -> bool:
    return (await client.call_tool("fine", type=str)) == "fine"


@pytest.mark.parametrize("settings", [{}, {"timeout_s": 5.0}], ids=["", "with a timeout"])
async def test_a_scope_that_a_tool_leaves_open_ends_neither_its_call_nor_the_server(
    server: Server, settings: Any
) -> None:
    @server.tool(**settings)
    async def first() -> int:
        async for row in rows():
            return row
        return -1

    with structlog.testing.capture_logs() as logs:
        async with Client(server) as client:
            assert await client.call_tool("first", type=int) == 1
            assert await is_alive(client)
    warnings = [each["tool"] for each in logs if each["log_level"] == "warning"]
    assert warnings == ["first"]


async def test_the_tasks_of_a_nursery_that_a_tool_leaves_open_are_cancelled(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    ended = trio.Event()
    kept = []  # so that the generator is not closed with the tool

    @server.tool
    async def first() -> int:
        opened = lines(ended)
        kept.append(opened)
        return await anext(opened)

    async with Client(server) as client:
        assert await client.call_tool("first", type=int) == 2
        with trio.fail_after(1):
            await ended.wait()
        assert await is_alive(client)


async def test_a_tool_that_a_scope_left_open_cancels_has_failed(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    @server.tool
    async def first() -> int:
        async for row in rows():
            await trio.sleep(120)
            return row
        return -1

    @server.tool
    async def second() -> int:
        opened = rows()
        await anext(opened)
        await trio.sleep(120)
        return 0

    async with Client(server) as client:
        for name in ("first", "second"):
            result = await client.call_tool(name)
            assert result.is_error
            assert result.text.startswith("Cancelled")
        assert await is_alive(client)


async def test_methods_and_resources_may_leave_scopes_open_too(server: Server) -> None:
    @server.method("tested/first")
    async def first(call: Call) -> dict[str, int]:
        async for row in rows():
            return {"row": row}
        return {}

    @server.resource("tested://first")
    async def read() -> str:
        async for row in rows():
            return f"row {row}"
        return ""

    async with Client(server) as client:
        assert await client.request("tested/first") == {"row": 1}
        assert (await client.read_resource("tested://first"))[0].text == "row 1"
        assert await is_alive(client)
