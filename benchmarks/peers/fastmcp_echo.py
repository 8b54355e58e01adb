"""FastMCP's server with a tool that returns its text.

    python -m benchmarks.peers.fastmcp_echo http|stdio

Over HTTP it prints its address.
"""

import sys

import uvicorn
from fastmcp import FastMCP

server = FastMCP("echo", version="1")


async def echo(text: str) -> str:
    """Return the text."""
    return text


server.tool(echo)

if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio", show_banner=False)
    else:
        app = server.http_app()
        uvicorn.run(app, host="127.0.0.1", port=0, access_log=False, timeout_graceful_shutdown=1)
