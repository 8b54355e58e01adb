"""A tool that survives its server, for asyncio clients and mounted servers."""

import trio

from streams import Call, Server

server = Server("counting", resume_min_s=0)


@server.tool(restart=True)
async def count(call: Call, rows: int) -> str:
    """Report the numbers up to `rows`."""
    for row in range(call.restored or 0, rows):
        await call.progress(row + 1, total=rows)
        await call.checkpoint(row + 1)
        await trio.sleep(0.002)
    return f"{rows} rows"
