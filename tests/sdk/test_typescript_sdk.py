"""The official TypeScript SDK's client over WebSocket: it knows nothing of us either."""

import json
from typing import Any

import pytest

from tests.sdk.stock import Node
from tests.sdk.test_python_sdk import APP
from tests.wire.process import ServerProcess

# Installing the SDK has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def seen(node: Node, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client in websocket.mjs saw."""
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
