"""Our client as the official conformance suite starts it: with a URL, and a scenario's name.

The name is in `MCP_CONFORMANCE_SCENARIO`. Each scenario is a server whose tools are to be called.
"""

import os
import sys
from typing import Any

import trio

from streams import Client
from transports import dial

Json = dict[str, Any]


async def elicit(params: Json) -> Json:
    """Accept, with the defaults that the server's schema has."""
    properties: dict[str, Json] = params["requestedSchema"]["properties"]
    content = {name: each["default"] for name, each in properties.items() if "default" in each}
    return {"action": "accept", "content": content}


def arguments_for(schema: Json) -> Json:
    """A value of the right type for each required property."""
    values: Json = {"number": 2, "integer": 2, "string": "x", "boolean": True}
    properties = schema.get("properties", {})
    return {name: values[properties[name]["type"]] for name in schema.get("required", ())}


async def main(url: str) -> None:
    """Call every tool of the server."""
    client = Client(dial(url), name="mcp-streams", answers={"elicitation/create": elicit})
    async with client:
        if os.environ.get("MCP_CONFORMANCE_SCENARIO") == "initialize":
            return
        for tool in await client.list_tools():
            async with client.call(tool.name, arguments_for(tool.input_schema)) as call:
                print(tool.name, await call.result())


trio.run(main, sys.argv[-1])
