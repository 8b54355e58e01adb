"""Our client asks a server of the official SDK for all that it offers, over stdio and HTTP."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from streams import CallFailed, CallToolResult, Client, RunningCall, ToolFailed
from tests.sdk.stock import HERE
from transports import dial

PROGRAM = HERE / "offering_server.py"


@pytest.fixture(params=["stdio", "http"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "stdio":
        yield f"stdio:{sys.executable} {PROGRAM}"
        return
    words = [sys.executable, str(PROGRAM), "--http"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    finally:
        process.kill()
        process.communicate()


class Weather(BaseModel):
    city: str
    degrees: float


async def test_everything_that_the_server_offers(url: str) -> None:
    async with Client(dial(url)) as client:
        assert (client.instructions, client.server_info["version"]) == ("Ask.", "3")
        tools = {tool.name: tool for tool in await client.tools()}
        assert (tools["weather"].title, tools["weather"].description) == (
            "The weather",
            "Look outside.",
        )
        assert tools["weather"].output_schema is not None

        (index,) = await client.resources()
        assert (index.uri, index.mime_type) == ("reports://index", "text/plain")
        (text,) = await client.read_resource(index.uri)
        assert (text.text, text.blob) == ("one", None)
        (template,) = await client.resource_templates()
        assert template.uri_template == "reports://{name}"
        (binary,) = await client.read_resource("reports://may")
        assert (binary.text, binary.blob) == (None, b"may")

        (prompt,) = await client.prompts()
        assert [(each.name, each.required) for each in prompt.arguments] == [
            ("language", True),
            ("style", False),
        ]
        filled = await client.prompt("review", {"language": "C"})
        assert [(each.role, each.text) for each in filled.messages] == [
            ("user", "Review this C, be kind.")
        ]
        assert (await client.complete("language", "py", prompt="review")).values == [
            "python",
            "pytorch",
        ]
        found = await client.complete("name", "r", resource="reports://{name}")
        assert found.values == ["rust"]
        with pytest.raises(CallFailed):
            await client.read_resource("nothing://here")


async def test_results_as_types(url: str) -> None:
    async with Client(dial(url)) as client:
        shown = await client.call_tool("weather", {"city": "Bonn"}, type=Weather)
        assert shown == Weather(city="Bonn", degrees=3.5)
        assert await client.call_tool("numbers", {"below": 3}, type=list[int]) == [0, 1, 2]
        assert await client.call_tool("numbers", {"below": 0}, type=list[int]) == []
        with pytest.raises(ToolFailed, match="Error executing tool fail"):
            await client.call_tool("fail", type=str)
        whole = await client.call_tool("fail")
        assert isinstance(whole, CallToolResult)
        assert whole.is_error


async def test_a_handler_knows_the_one_call_that_asks(url: str) -> None:
    asked: list[tuple[str, str]] = []
    logs: list[Any] = []
    progress: list[Any] = []

    async def agree(params: dict[str, Any], call: RunningCall | None) -> dict[str, Any]:
        assert call is not None
        asked.append((call.name, params["message"]))
        return {"action": "accept", "content": {"yes": True}}

    async with Client(dial(url), answers={"elicitation/create": agree}) as client:
        client.on_notification("notifications/message", lambda params: logs.append(params["data"]))
        result = await client.call_tool(
            "ask", {"what": "Really?"}, type=str, on_progress=lambda *now: progress.append(now)
        )
    assert result == "accept"
    assert asked == [("ask", "Really?")]
    assert progress == [(1.0, 2.0, "Really?")]
    assert logs == ["about Really?"]


async def test_a_server_that_offers_tools_alone() -> None:
    async with Client(dial(f"stdio:{sys.executable} {PROGRAM} --bare")) as client:
        for ask in (client.complete("a", "b", prompt="p"), client.subscribe("reports://index")):
            with pytest.raises(CallFailed, match="does not offer"):
                await ask
