"""The peers whose short calls are measured: servers with a tool that returns its text."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

import msgspec

from benchmarks.peers import Missing
from benchmarks.peers.children import HERE, executable, node_module


class Echo(msgspec.Struct, frozen=True):
    """How a peer is started, with this command.

    Over HTTP it prints its address; over stdio it is spawned for a client.
    """

    command: Sequence[str]
    version: str
    transport: Literal["HTTP", "stdio"]
    has_sessions: bool = True


def _python(module: str, package: str, mode: str) -> Echo:
    """A server in Python. Raises `Missing` where its package is not installed."""
    try:
        found = f"{package} {version(package)}"
    except PackageNotFoundError:
        raise Missing(f"no {package} here; make bench-peers installs it") from None
    return Echo(
        [sys.executable, "-m", f"benchmarks.peers.{module}", mode],
        found,
        "stdio" if mode == "stdio" else "HTTP",
        has_sessions=mode != "stateless",
    )


def _python_sdk(mode: str) -> Echo:
    return _python("python_sdk_echo", "mcp", mode)


def _fastmcp(mode: str) -> Echo:
    return _python("fastmcp_echo", "fastmcp", mode)


def _typescript_sdk(mode: Literal["http", "stdio"]) -> Echo:
    package = "@modelcontextprotocol/sdk"
    found = f"{package} {node_module(package)}"
    command = [executable("node", "Node.js"), str(HERE / "typescript_sdk_echo.mjs"), mode]
    return Echo(command, found, "stdio" if mode == "stdio" else "HTTP")


# By the names of their rows. Each raises `Missing` where the peer is not installed.
ECHOES: Final[Mapping[str, Callable[[], Echo]]] = {
    "Python SDK, HTTP, event streams": lambda: _python_sdk("sessions"),
    "Python SDK, HTTP, json_response": lambda: _python_sdk("json"),
    "Python SDK, HTTP, stateless": lambda: _python_sdk("stateless"),
    "Python SDK, stdio": lambda: _python_sdk("stdio"),
    "TypeScript SDK, HTTP": lambda: _typescript_sdk("http"),
    "TypeScript SDK, stdio": lambda: _typescript_sdk("stdio"),
    "FastMCP, HTTP": lambda: _fastmcp("http"),
    "FastMCP, stdio": lambda: _fastmcp("stdio"),
}
