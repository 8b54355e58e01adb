"""The official Python SDK's client: it makes one call after the other until its input ends.

Prints the number of calls and the errors as one line of JSON. Arguments: URL, tool, notes, name.
"""

import asyncio
import json
import sys
from typing import Any

from mcp import Client


async def main(url: str, tool: str, notes: str, name: str) -> None:
    """Call until the input ends."""
    seen: dict[str, Any] = {"calls": 0, "errors": []}
    count = 20 if tool == "lasting" else 5
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with Client(url) as client:
        while not ended.done():
            seen["calls"] += 1
            arguments: dict[str, Any] = {
                "name": f"{name}-{seen['calls']}",
                "count": count,
                "per_second": 10.0,
                "notes": notes,
            }
            if tool == "lasting":
                arguments["flush_every"] = 1
            try:
                result = await client.call_tool(tool, arguments)
                text = result.model_dump(by_alias=True, mode="json")["content"][0]["text"]
                assert json.loads(text) == {"messages": count}, text
            except Exception as error:  # every kind is a fault of the server here
                seen["errors"].append(f"{arguments['name']}: {error!r}")
    print(json.dumps(seen))


asyncio.run(main(*sys.argv[1:]))
