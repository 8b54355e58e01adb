"""The official suite and an official client of each language, with three replicas behind HAProxy.

All other tests of this folder run so with `pytest --over replicas`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.sdk import test_conformance, test_http_cuts
from tests.sdk.cutting import Cutter
from tests.sdk.stock import Journey, Node, StockClient
from tests.wire.process import ServerProcess

SCENARIOS: Final = test_conformance.SCENARIOS
CASES: Final = {
    name: test_http_cuts.CASES[name]
    for name in ("nowhere", "between events", "in the middle of the GET", "three times in a row")
}

pytestmark = [
    pytest.mark.over_stores("replicas"),
    pytest.mark.timeout(200, func_only=True),  # the installation has a bound of its own
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    app = test_conformance.APPS["ours"]
    with ServerProcess(tmp_path_factory.mktemp("conformance"), app=app) as server:
        yield server


@pytest.mark.parametrize(("suite", "scenario"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_replicas_conform(
    suite: str, scenario: str, server: ServerProcess, node: Node, tmp_path: Path
) -> None:
    test_conformance.test_the_server_conforms(suite, scenario, server, node, tmp_path)


@pytest.mark.parametrize("client", ["python", "typescript-2"])
def test_a_client_whose_connections_are_cut_gets_each_message_once(
    client: str, node: Node, tmp_path: Path
) -> None:
    with (
        ServerProcess(tmp_path, app=test_http_cuts.APP) as server,
        contextlib.ExitStack() as stack,
    ):
        cutters, calls = [], []
        for name, cuts in CASES.items():
            journey = Journey(tmp_path / name)
            journey.gates.mkdir()
            opening = test_http_cuts.opening(journey, cuts)
            cutter = Cutter(server.http_port, cuts, on_cut=opening)
            stack.callback(cutter.close)
            cutters.append(cutter)
            calls.append(journey.to(cutter.port))
        seen = stack.enter_context(StockClient(client, node, calls)).finish()
    steps = test_http_cuts.STEPS
    for name, call, cutter in zip(CASES, seen, cutters, strict=True):
        assert (call["result"], call["error"]) == (f"{len(steps)} steps", None), name
        assert (call["progress"], cutter.results, cutter.cuts_left) == (steps, 1, 0), name
        assert [log["step"] for log in call["logs"]] == steps, name
