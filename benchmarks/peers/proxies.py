"""The peers of `mcp-streams wrap`: proxies that put a server of stdio on HTTP, or the other way."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from benchmarks.peers import Missing
from benchmarks.peers.children import HERE, executable, free_port, node_module, said_by

# It needs an older `mcp` than the one beside it, so it has an environment of its own.
_MCP_PROXY: Final = HERE / ".venv" / "bin" / "mcp-proxy"


class Proxy(msgspec.Struct, frozen=True):
    """A proxy that listens on `port`, or with port 0 is spawned for a client over stdio."""

    command: Sequence[str]
    version: str
    port: int = 0


def supergateway(child: Sequence[str]) -> Proxy:
    """A child for each session. Raises `Missing`."""
    port = free_port()
    options = ["--outputTransport", "streamableHttp", "--stateful", "--logLevel", "none"]
    return Proxy(
        [*_npm("supergateway"), "--stdio", " ".join(child), *options, "--port", str(port)],
        f"supergateway {node_module('supergateway')}",
        port,
    )


def mcp_proxy(child: Sequence[str]) -> Proxy:
    """One child for all sessions. Raises `Missing`."""
    if not _MCP_PROXY.exists():
        raise Missing(f"no {_MCP_PROXY.relative_to(HERE.parent)}; make bench-peers puts it there")
    port = free_port()
    options = ["--port", str(port), "--log-level", "ERROR", "--pass-environment"]
    return Proxy(
        [str(_MCP_PROXY), *options, "--", *child], said_by(str(_MCP_PROXY), "--version"), port
    )


def fastmcp(child: Sequence[str]) -> Proxy:
    """FastMCP's proxy, with its own defaults. Raises `Missing`."""
    try:
        found = f"fastmcp {version('fastmcp')}"
    except PackageNotFoundError:
        raise Missing("no fastmcp here; make bench-peers installs it") from None
    port = free_port()
    module = "benchmarks.peers.fastmcp_proxy"
    return Proxy([sys.executable, "-m", module, str(port), *child], found, port)


def mcp_remote(url: str) -> Proxy:
    """A server over HTTP for a host of stdio. Raises `Missing`."""
    options = ["--allow-http", "--transport", "http-only", "--silent"]
    return Proxy([*_npm("mcp-remote"), url, *options], f"mcp-remote {node_module('mcp-remote')}")


def _npm(name: str) -> list[str]:
    node_module(name)
    return [executable("node", "Node.js"), str(HERE / "node_modules" / ".bin" / name)]


# By the names of their rows.
GATEWAYS: Final[Mapping[str, Callable[[Sequence[str]], Proxy]]] = {
    "supergateway, HTTP": supergateway,
    "mcp-proxy, HTTP": mcp_proxy,
    "FastMCP's proxy, HTTP": fastmcp,
}
MCP_REMOTE: Final = "mcp-remote in front of ours, stdio"
