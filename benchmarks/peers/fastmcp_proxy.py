"""FastMCP's proxy of a server of stdio, over HTTP.

python -m benchmarks.peers.fastmcp_proxy PORT COMMAND…
"""

import sys

from fastmcp.server import create_proxy

if __name__ == "__main__":
    port, command, *arguments = sys.argv[1:]
    child = {"command": command, "args": arguments}
    proxy = create_proxy({"mcpServers": {"child": child}}, name="proxy")
    proxy.run(
        "http", host="127.0.0.1", port=int(port), path="/mcp", show_banner=False, log_level="ERROR"
    )
