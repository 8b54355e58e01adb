"""The MCP Inspector's command line: it lists the tools and calls one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sdk.stock import Node
from tests.wire.process import CLI, ServerProcess

APP: Final = f"{Path(__file__).parent / 'sdk_server.py'}:server"
SCRIPT: Final = "@modelcontextprotocol/inspector/clients/launcher/build/index.js"

# The installation of the Inspector has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


class Inspector:
    """The Inspector with one server."""

    def __init__(self, node: Node, home: Path, target: tuple[str, ...]) -> None:
        self._node = node
        self._home = home
        self._target = target

    def ask(self, method: str, *options: str) -> dict[str, Any]:
        """The result of a request, as the Inspector prints it."""
        script = str(self._node.modules / SCRIPT)
        request = ("--method", method, *options)
        # The Inspector keeps files in the home folder.
        run = self._node.run(script, "--cli", *self._target, *request, HOME=str(self._home))
        assert run.returncode == 0, run.stdout + run.stderr
        result: dict[str, Any] = json.loads(run.stdout)
        return result


@pytest.fixture(scope="module", params=("http", "stdio"))
def inspector(
    request: pytest.FixtureRequest, node: Node, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Inspector]:
    home = tmp_path_factory.mktemp("home")
    if request.param == "stdio":
        yield Inspector(node, home, (*CLI, "serve", APP, "--stdio"))
        return
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        url = f"http://127.0.0.1:{server.http_port}/mcp"
        yield Inspector(node, home, (url, "--transport", "http"))


def test_it_lists_the_tools(inspector: Inspector) -> None:
    tools = inspector.ask("tools/list")["tools"]
    assert {tool["name"] for tool in tools} == {"work", "ask", "fail", "measure", "outlast"}


def test_it_calls_a_tool(inspector: Inspector) -> None:
    call = ("--tool-name", "measure", "--tool-arg", "values=[1, 2.5]")
    result = inspector.ask("tools/call", *call)
    assert result["structuredContent"] == {"sum": 3.5, "largest": 2.5}
