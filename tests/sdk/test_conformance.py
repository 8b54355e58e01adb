"""The official conformance suite, scenario by scenario: a server with all that it names.

It is served twice: as our `Server`, and as a server object of the official SDK.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sdk.stock import Node
from tests.wire.process import ServerProcess

APPS: Final = {
    "ours": f"{Path(__file__).parent / 'conformance_server.py'}:server",
    "sdk": f"{Path(__file__).parent / 'conformance_sdk_server.py'}:server",
}
SUITE: Final = "@modelcontextprotocol/conformance"
NEXT_SUITE: Final = "conformance-next"  # a draft version, for scenarios that the released one lacks

# All 32 of the released suite, and one that only the draft has.
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
    (SUITE, "resources-list"),
    (SUITE, "resources-read-text"),
    (SUITE, "resources-read-binary"),
    (SUITE, "resources-templates-read"),
    (SUITE, "resources-subscribe"),
    (SUITE, "resources-unsubscribe"),
    (SUITE, "prompts-list"),
    (SUITE, "prompts-get-simple"),
    (SUITE, "prompts-get-with-args"),
    (SUITE, "prompts-get-embedded-resource"),
    (SUITE, "prompts-get-with-image"),
    (SUITE, "completion-complete"),
    (SUITE, "dns-rebinding-protection"),
    (NEXT_SUITE, "server-session-lifecycle"),
)
_ALL_PASSED: Final = re.compile(r"^Passed: ([1-9]\d*)/\1, 0 failed, 0 warnings$", re.MULTILINE)

# The installation of the suite has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module", params=APPS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("conformance")
    with ServerProcess(folder, app=APPS[request.param]) as server:
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


def test_no_scenario_for_servers_is_left_out(node: Node, tmp_path: Path) -> None:
    script = str(node.modules / SUITE / "dist" / "index.js")
    listed = node.run(script, "list", cwd=tmp_path).stdout.partition("Client scenarios")[0]
    named = set(re.findall(r"^  - (\S+)", listed, re.MULTILINE))
    assert named == {name for suite, name in SCENARIOS if suite == SUITE}
    assert len(named) == 32
