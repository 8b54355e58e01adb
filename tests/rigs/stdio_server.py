"""A small server of the official SDK over stdio, which tests wrap.

Its tools describe the process that answers, so that a test sees which child that is.
"""

import os
import sys

import anyio
from mcp.server.mcpserver import Context, MCPServer

INHERITED = [
    os.readlink(f"/proc/self/fd/{fd}")
    for fd in range(3, 256)
    if os.path.islink(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
]

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
def descriptors() -> str:
    """The files that the process had open when it was started, besides its standard streams."""
    return "\n".join(INHERITED)


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
    async with await anyio.open_file(f"{file}.calls", "a") as calls:
        await calls.write(f"{os.getpid()}\n")
    while not await anyio.Path(file).exists():
        await anyio.sleep(0.01)
    return "waited"


if __name__ == "__main__":
    server.run()
