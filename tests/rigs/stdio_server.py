"""A small server of the official SDK over stdio, which a test wraps.

Run it: `python tests/rigs/stdio_server.py`. It says its name, its process and a variable of its
environment, so that a test sees which child answers.
"""

import os

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("small", version="1.5", instructions="Add numbers.")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """The process that answers."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment; empty where it is not set."""
    return os.environ.get(name, "")


@server.tool()
def folder() -> str:
    """The folder in which the process runs."""
    return os.getcwd()


@server.tool()
async def count(n: int, pause_s: float, context: Context) -> str:
    """Count to n with a pause before each number, which is reported as progress."""
    for number in range(1, n + 1):
        await anyio.sleep(pause_s)
        await context.report_progress(number, n)
    return f"counted {n}"


if __name__ == "__main__":
    server.run()
