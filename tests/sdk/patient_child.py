"""The server of patient_server.py as one of the official SDK, for a test that wraps it."""

from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

server = MCPServer("patient", version="1.0")


class Built(BaseModel):
    files: int
    target: str


@server.tool()
async def build(context: Context, folder: str, target: str = "all") -> Built:
    """Build it: each run adds a line to `runs`, and waits for the file `gate`."""
    async with await anyio.open_file(Path(folder, "runs"), "a") as runs:
        await runs.write(f"{target}\n")
    for number in range(1, 4):
        await context.report_progress(number, 40, "compiling")
    while not await anyio.Path(folder, "gate").exists():
        await anyio.sleep(0.02)
    return Built(files=40, target=target)


if __name__ == "__main__":
    server.run()
