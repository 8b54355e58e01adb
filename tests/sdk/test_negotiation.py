"""Clients that try an unknown revision: those that may fall back do; others get the reason.

Since 2026-07-28 the official SDKs can begin with `server/discover` instead of `initialize`. The
condition for the fallback is in the source of each; `streams.server.peer.check_revision` names the
pitfalls.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters

from tests.sdk.stock import Node
from tests.sdk.test_python_sdk import APP, LATEST
from tests.wire.process import CLI, ServerProcess

MODERN: Final = "2026-07-28"
COMMAND: Final = [*CLI, "serve", APP, "--stdio"]
TOOLS: Final = 5
TALK_S: Final = 60

# The installation of the SDK has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("negotiation"), app=APP) as server:
        yield server


def way(server: ServerProcess, name: str) -> dict[str, Any]:
    """A client's way to the server."""
    if name == "stdio":
        return {"command": COMMAND}
    return {"url": server.url if name == "ws" else f"http://127.0.0.1:{server.http_port}/mcp"}


# -- TypeScript 2.x


def negotiated(node: Node, server: ServerProcess, name: str, mode: Any) -> dict[str, Any]:
    run = node.run("negotiating.mjs", json.dumps({"mode": mode, **way(server, name)}))
    assert run.returncode == 0, run.stderr
    seen: dict[str, Any] = json.loads(run.stdout)
    return seen


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("name", ["http", "stdio", "ws"])
def test_the_typescript_client_falls_back(
    node: Node, server: ServerProcess, name: str, mode: str
) -> None:
    seen = negotiated(node, server, name, mode)
    assert seen == {"revision": LATEST, "tools": TOOLS, "problems": []}


@pytest.mark.parametrize("name", ["http", "stdio", "ws"])
def test_the_typescript_client_that_wants_no_other_is_told(
    node: Node, server: ServerProcess, name: str
) -> None:
    seen = negotiated(node, server, name, {"pin": MODERN})
    assert "did not offer pinned protocol version 2026-07-28" in seen["error"]


# -- Python 2.x


def target(server: ServerProcess, name: str) -> Any:
    found = way(server, name)
    if "url" in found:
        return found["url"]
    return StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], cwd=str(Path.cwd()))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("name", ["http", "stdio"])
def test_the_python_client_falls_back(server: ServerProcess, name: str, mode: str) -> None:
    async def main() -> tuple[str | None, int]:
        async with asyncio.timeout(TALK_S), Client(target(server, name), mode=mode) as client:
            return client.protocol_version, len((await client.list_tools()).tools)

    assert asyncio.run(main()) == (LATEST, TOOLS)


@pytest.mark.parametrize("name", ["http", "stdio"])
def test_the_python_client_that_wants_no_other_is_told(server: ServerProcess, name: str) -> None:
    """A client pinned to one revision sends its requests without a probe."""

    async def main() -> MCPError:
        async with asyncio.timeout(TALK_S), Client(target(server, name), mode=MODERN) as client:
            with pytest.raises(MCPError) as refused:
                await client.call_tool("measure", {"values": [1]})
            return refused.value

    error = asyncio.run(main())
    assert error.code == -32602
    assert "Unsupported protocol version '2026-07-28'" in error.message
    data: Any = error.data
    assert (data["requested"], data["supported"][0]) == (MODERN, LATEST)
