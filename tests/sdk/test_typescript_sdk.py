"""The official TypeScript SDK's clients over WebSocket and stdio, which know nothing of us."""

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from tests.rigs import setups
from tests.sdk.stock import RUN_S, Node
from tests.sdk.test_python_sdk import APP
from tests.wire.process import CLI, ServerProcess

# How many calls with progress each client makes. For runs by hand: 1000.
CALLS: Final = int(os.environ.get("PROGRESS_CALLS", "20"))
STEPS: Final = 20
CALL_S: Final = 0.5  # the bound for one call on average, on a busy machine

# The installation of the SDK has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def seen(node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of the client in websocket.mjs."""
    with ServerProcess(tmp_path_factory.mktemp("typescript"), app=APP) as server:
        run = node.run("websocket.mjs", server.url)
        assert run.returncode == 0, run.stderr
        assert server.is_alive()
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def text_of(result: dict[str, Any]) -> str:
    text: str = result["content"][0]["text"]
    return text


def test_tools_are_listed(seen: dict[str, Any]) -> None:
    assert seen["server"] == {"name": "sdk-tests", "version": "1.0"}
    assert set(seen["tools"]) == {"work", "ask", "fail", "measure", "outlast"}


def test_progress_and_logs_reach_their_handlers(seen: dict[str, Any]) -> None:
    steps = [{"progress": n, "total": 3, "message": f"step {n}"} for n in (1, 2, 3)]
    assert seen["progress"] == steps
    assert seen["logs"][:3] == [{"step": n} for n in (1, 2, 3)]
    assert text_of(seen["worked"]) == "3 steps"


def test_structured_content_fits_its_schema(seen: dict[str, Any]) -> None:
    assert seen["measured"]["structuredContent"] == {"sum": 3.5, "largest": 2.5}


def test_failures_are_results_that_say_why(seen: dict[str, Any]) -> None:
    assert seen["failed"]["isError"]
    assert text_of(seen["failed"]) == "the tool says no"
    assert seen["misused"]["isError"]
    assert "steps" in text_of(seen["misused"])
    assert seen["unknown"]["code"] == -32602
    assert "nobody" in seen["unknown"]["message"]


def test_an_elicitation_is_answered(seen: dict[str, Any]) -> None:
    assert seen["asked"] == "Who is it?"
    answer = {"action": "accept", "content": {"name": "ts"}}
    assert seen["answered"]["structuredContent"] == answer


def test_many_calls_at_once_are_told_apart(seen: dict[str, Any]) -> None:
    assert [text_of(result) for result in seen["many"]] == [f"{n} steps" for n in range(50)]


def test_the_client_has_nothing_to_complain_about(seen: dict[str, Any]) -> None:
    assert seen["problems"] == []


# Progress. These clients forget a call's progress handler with its response, and lose progress that
# they read together with it (`streams.engine.receipts`).


def progress_seen(node: Node, generation: str, **given: Any) -> dict[str, Any]:
    """The records of the client in progress.mjs: calls that take `STEPS` steps."""
    given["arguments"] = {"steps": STEPS, "pause_s": given.pop("pause_s")}
    timeout_s = RUN_S + CALL_S * given["rounds"] * given["abreast"]
    run = node.run("progress.mjs", generation, json.dumps(given), timeout_s=timeout_s)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def check_whole(found: dict[str, Any], calls: int) -> None:
    """Every call reported every step before its result, and the client reports no problem."""
    whole = {"seen": list(range(1, STEPS + 1)), "text": f"{STEPS} steps"}
    seen = [{name: call[name] for name in whole} for call in found["calls"]]
    assert seen == [whole] * calls
    assert found["logs"] == calls * STEPS
    assert found["problems"] == []


@pytest.fixture(params=["stdio", "relay", "node", "ws"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """How a client reaches the server: it starts it, or uses one of two WebSockets."""
    serve = [*CLI[1:], "serve", APP, "--stdio"]
    if request.param == "stdio":
        yield {"command": CLI[0], "args": serve}
    elif request.param == "relay":
        at = setups.current.place(tmp_path)
        command, *words = at.command([CLI[0], *serve])
        yield {"command": command, "args": words}
        at.end_owner()
    else:
        with ServerProcess(tmp_path, app=APP) as server:
            yield {"url": server.url, "socket": request.param}


@pytest.mark.timeout(RUN_S + 2 * CALL_S * CALLS, func_only=True)
@pytest.mark.parametrize("generation", ["1", "2"])
@pytest.mark.parametrize("pause_s", [0, 0.001])
def test_progress_arrives_whole(
    node: Node, place: dict[str, Any], generation: str, pause_s: float
) -> None:
    found = progress_seen(node, generation, pause_s=pause_s, rounds=CALLS, abreast=1, **place)
    check_whole(found, CALLS)


@pytest.mark.parametrize("generation", ["1", "2"])
def test_progress_of_many_calls_at_once_arrives_whole(
    node: Node, place: dict[str, Any], generation: str
) -> None:
    check_whole(progress_seen(node, generation, pause_s=0, rounds=1, abreast=50, **place), 50)
