"""The official conformance suite against a server of the official SDK behind `mcp-streams wrap`.

All scenarios of `--suite active` pass, so each that passes against the bare server does.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sdk.stock import Node
from tests.sdk.test_conformance import SCENARIOS, SUITE
from tests.sdk.test_wrapped_servers import wrapped
from tests.sdk.transcripts import sdk_server

ACTIVE: Final = tuple(name for suite, name in SCENARIOS if suite == SUITE)

_NONE_FAILED: Final = re.compile(r"^Passed: ([1-9]\d*)/\1, 0 failed", re.MULTILINE)

# The installation of the suite has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def url(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("conformance")
    with wrapped(sdk_server(), "http", node, folder) as where:
        yield where["url"]


@pytest.mark.parametrize("scenario", ACTIVE)
def test_a_wrapped_server_conforms(scenario: str, url: str, node: Node, tmp_path: Path) -> None:
    script = str(node.modules / SUITE / "dist" / "index.js")
    run = node.run(script, "server", "--url", url, "--scenario", scenario, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert _NONE_FAILED.search(run.stdout), run.stdout


def test_all_scenarios_of_the_suite_are_run() -> None:
    assert len(ACTIVE) == len(set(ACTIVE)) == 32
