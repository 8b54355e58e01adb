"""A server object of the official SDK, for tests that need it in a process of its own."""

import time

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("objects")


@server.tool()
def blocks(ctx: Context) -> str:
    """Block a thread for an hour: nothing can stop it."""
    anyio.from_thread.run(ctx.report_progress, 1.0)
    time.sleep(3600)
    return "never"


@server.tool()
async def counts(rows: int, ctx: Context) -> str:
    """Report the numbers up to `rows`, without end if it is 0."""
    row = 0
    while row < rows or not rows:
        row += 1
        await ctx.report_progress(row)
        await anyio.sleep(0.002)
    return f"{rows} rows"


@server.tool()
async def holds(seconds: float) -> str:
    """Hold up the event loop."""
    time.sleep(seconds)  # noqa: ASYNC251 (that is what it is for)
    return "held"
