"""A server and a client of the official SDK: both unchanged, and no cut ends a call.

`mcp-streams serve` takes the server object in place of `server.run()`, and the client takes
`over(url)` in place of its own transport.

    $ mcp-streams serve official_sdk.py:server --ws 127.0.0.1:8765 &
    $ python official_sdk.py ws://127.0.0.1:8765
    1 of 5
    2 of 5
    3 of 5
    4 of 5
    5 of 5
    Built 5 targets for Ada.
"""

import asyncio
import sys
from typing import Any

import anyio
from mcp.client import Client
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ElicitResult
from pydantic import BaseModel

from transports.sdk import over

server = MCPServer("builder")


class Author(BaseModel):
    """The answer to the question of `build`."""

    name: str


@server.tool()
async def build(targets: int, ctx: Context) -> str:
    """Build so many targets, for an author that the user names."""
    author = await ctx.elicit("Who is the author?", Author)
    for target in range(1, targets + 1):
        await anyio.sleep(0.1)  # the work; this server runs on trio, so `asyncio.sleep` would fail
        await ctx.report_progress(target, targets)
    name = author.data.name if author.action == "accept" else "nobody"
    return f"Built {targets} targets for {name}."


async def answer(context: Any, question: Any) -> ElicitResult:
    """Answer as the user would."""
    return ElicitResult(action="accept", content={"name": "Ada"})


async def show(progress: float, total: float | None, message: str | None) -> None:
    """Print the progress of the call."""
    print(f"{progress:.0f} of {total:.0f}")


async def main(url: str) -> None:
    """Call the tool, through any number of cuts."""
    async with Client(over(url), elicitation_callback=answer) as client:
        result = await client.call_tool("build", {"targets": 5}, progress_callback=show)
        print(result.content[0].text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
