"""Requests, handlers, typed results and servers in process, under asyncio."""

import asyncio
from typing import Any

import pytest

from streams import Call, CallFailed, Server, ToolFailed
from streams.aio import Client, RunningCall

LOG = "notifications/message"


def asking() -> Server:
    server = Server("asking", instructions="Ask.", resume_min_s=0)

    @server.tool
    async def ask(call: Call, what: str) -> dict[str, str]:
        """Ask the user."""
        await call.log("info", f"about {what}")
        await call.progress(1, total=2, message=what)
        answer = await call.request("elicitation/create", {"message": what, "requestedSchema": {}})
        return {"answer": answer["action"]}

    @server.tool
    async def count(call: Call, n: int) -> int:
        """Count."""
        for number in range(1, n + 1):
            await call.progress(number)
        return n

    return server


def test_a_client_of_a_server_in_process_does_all_under_asyncio() -> None:
    asyncio.run(everything())


async def everything() -> None:
    logs: list[Any] = []
    progress: list[Any] = []
    asked: list[str] = []

    async def agree(params: dict[str, Any], call: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        assert isinstance(call, RunningCall)
        asked.append(f"{call.name} {call.arguments['what']}")
        return {"action": "accept"}

    async def logged(params: dict[str, Any], call: Any) -> None:
        await asyncio.sleep(0)
        logs.append((params["data"], call.name))

    async def progressed(now: float, total: float | None, message: str | None) -> None:
        await asyncio.sleep(0)
        progress.append((now, total, message))

    async with Client(asking(), answers={"elicitation/create": agree}) as client:
        client.on_notification(LOG, logged)
        assert client.instructions == "Ask."
        assert [tool.name for tool in await client.tools()] == ["ask", "count"]
        result = await client.call_tool("ask", {"what": "x"}, on_progress=progressed)
        assert result.structured_content == {"answer": "accept"}
        shown = await client.call_tool("ask", {"what": "y"}, type=dict[str, str])
        assert shown == {"answer": "accept"}
        assert (asked, logs) == (["ask x", "ask y"], [("about x", "ask"), ("about y", "ask")])
        assert progress == [(1.0, 2.0, "x")]
        with pytest.raises(ToolFailed, match="Bad arguments"):
            await client.call_tool("count", {"n": "three"}, type=int)
        with pytest.raises(CallFailed, match="Unknown method"):
            await client.request("nothing/here")


@pytest.mark.parametrize("cuts_at", [1, 10])
def test_a_cut_loses_nothing_under_asyncio(cuts_at: int) -> None:
    async def main() -> None:
        seen = 0
        async with Client(asking()) as client, client.call("count", {"n": 50}) as call:
            async for _ in call:
                seen += 1
                if seen % cuts_at == 0:
                    client.cut()
            assert await call.result(int) == 50
        assert seen == 50

    asyncio.run(main())


def test_the_errors_of_the_block_and_of_the_servers_start_are_raised_as_they_were() -> None:
    class Failing(Server):
        def open(self, *given: Any) -> Any:
            raise LookupError("no database")

    async def fail(server: Server) -> None:
        async with Client(server):
            raise ZeroDivisionError

    with pytest.raises(LookupError, match="no database"):
        asyncio.run(fail(Failing("s")))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail(asking()))
