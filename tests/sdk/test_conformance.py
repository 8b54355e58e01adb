"""The official conformance suite, scenario by scenario: a server with the tools that it names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sdk.stock import Node
from tests.wire.process import ServerProcess

APP: Final = f"{Path(__file__).parent / 'conformance_server.py'}:server"
SUITE: Final = "@modelcontextprotocol/conformance"
NEXT_SUITE: Final = "conformance-next"  # a draft version, for scenarios that the released one lacks

# All scenarios for tools over Streamable HTTP; we serve neither resources nor prompts.
SCENARIOS: Final = (
    (SUITE, "server-initialize"),
    (SUITE, "ping"),
    (SUITE, "logging-set-level"),
    (SUITE, "tools-list"),
    (SUITE, "tools-call-simple-text"),
    (SUITE, "tools-call-image"),
    (SUITE, "tools-call-audio"),
    (SUITE, "tools-call-embedded-resource"),
    (SUITE, "tools-call-mixed-content"),
    (SUITE, "tools-call-with-logging"),
    (SUITE, "tools-call-error"),
    (SUITE, "tools-call-with-progress"),
    (SUITE, "tools-call-sampling"),
    (SUITE, "tools-call-elicitation"),
    (SUITE, "json-schema-2020-12"),
    (SUITE, "elicitation-sep1034-defaults"),
    (SUITE, "elicitation-sep1330-enums"),
    (SUITE, "server-sse-polling"),
    (SUITE, "server-sse-multiple-streams"),
    (SUITE, "dns-rebinding-protection"),
    (NEXT_SUITE, "server-session-lifecycle"),
)
_ALL_PASSED: Final = re.compile(r"^Passed: ([1-9]\d*)/\1, 0 failed, 0 warnings$", re.MULTILINE)

# The installation of the suite has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("conformance"), app=APP) as server:
        yield server


@pytest.mark.parametrize(("suite", "scenario"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_the_server_conforms(
    suite: str, scenario: str, server: ServerProcess, node: Node, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{server.http_port}/mcp"
    script = str(node.modules / suite / "dist" / "index.js")
    run = node.run(script, "server", "--url", url, "--scenario", scenario, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert _ALL_PASSED.search(run.stdout), run.stdout
    assert server.is_alive()
