"""Agent frameworks as clients of a server: `calls.py FRAMEWORK URL` prints the tools, as the
framework lists them, and the result of one call. No model is needed.
"""

import asyncio
import json
import sys
from typing import Any


async def pydantic_ai(url: str) -> tuple[list[str], Any]:
    """An agent whose model is a fake: it calls the tool with the least arguments."""
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.models.test import TestModel

    model = TestModel(call_tools=["count"])
    answer = await Agent(model, toolsets=[MCPToolset(url)]).run("count")
    assert model.last_model_request_parameters is not None
    tools = [tool.name for tool in model.last_model_request_parameters.function_tools]
    return tools, json.loads(answer.output)["count"]


async def langchain(url: str) -> tuple[list[str], Any]:
    from langchain_mcp_adapters.client import MultiServerMCPClient

    client = MultiServerMCPClient({"mounted": {"url": url, "transport": "streamable_http"}})
    tools = {tool.name: tool for tool in await client.get_tools()}
    (block,) = await tools["count"].ainvoke({"rows": 3})
    return list(tools), block["text"]


async def openai_agents(url: str) -> tuple[list[str], Any]:
    from agents.mcp import MCPServerStreamableHttp

    async with MCPServerStreamableHttp(params={"url": url}) as server:
        tools = [tool.name for tool in await server.list_tools()]
        return tools, (await server.call_tool("count", {"rows": 3})).content[0].text


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](sys.argv[2]))))
