"""The official Python SDK's server with a tool that returns its text.

    python -m benchmarks.peers.python_sdk_echo sessions|json|stateless|stdio

Over HTTP it prints its address. `sessions` is the SDK's default: each response is an event stream.
"""

import sys

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("echo", version="1", log_level="WARNING")


@server.tool()
async def echo(text: str) -> str:
    """Return the text."""
    return text


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "stdio":
        server.run("stdio")
    else:
        is_stateless = mode == "stateless"
        app = server.streamable_http_app(
            json_response=mode == "json" or is_stateless, stateless_http=is_stateless
        )
        uvicorn.run(app, host="127.0.0.1", port=0, access_log=False, timeout_graceful_shutdown=1)
