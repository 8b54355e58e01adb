"""A small server of the official SDK over stdio, which tests wrap.

Its tools describe the process that answers, so that a test sees which child that is.
"""

import os
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("small", version="1.5", instructions="Add numbers.")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def process() -> str:
    """The id of the process, its folder and its arguments, one a line."""
    return "\n".join([str(os.getpid()), os.getcwd(), *sys.argv[1:]])


@server.tool()
def descriptors() -> list[str]:
    """The open file descriptors that were not opened by Python itself."""
    kinds = ("pipe:", "socket:", "/")
    places = [str(place.readlink()) for place in Path("/proc/self/fd").iterdir() if place.exists()]
    return sorted(place for place in places if place.startswith(kinds))


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment; empty where it is not set."""
    return os.environ.get(name, "")


@server.tool()
async def count(n: int, pause_s: float, context: Context) -> str:
    """Count to n with a pause before each number, which is reported as progress."""
    for number in range(1, n + 1):
        await anyio.sleep(pause_s)
        await context.report_progress(number, n)
    return f"counted {n}"


@server.tool()
async def wait(file: str) -> str:
    """Wait until the file is there; count, in another file, how often this was called."""
    with open(f"{file}.calls", "a", encoding="utf-8") as calls:
        calls.write(f"{os.getpid()}\n")
    while not await anyio.Path(file).exists():
        await anyio.sleep(0.01)
    return "waited"


if __name__ == "__main__":
    server.run()
