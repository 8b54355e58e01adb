"""The official TypeScript SDK's client over WebSocket: it knows nothing of us either."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sdk.test_python_sdk import APP
from tests.wire.process import ServerProcess

HERE: Final = Path(__file__).parent
INSTALL_S: Final = 110
NPM: Final = shutil.which("npm")

pytestmark = pytest.mark.skipif(NPM is None, reason="there is no npm, which brings the SDK")


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder that the SDK is installed in."""
    lock = (HERE / "package-lock.json").read_bytes()
    installed = HERE / "node_modules" / "installed-from"
    if not installed.exists() or installed.read_bytes() != lock:
        assert NPM is not None
        install = [NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(install, cwd=HERE, check=True, timeout=INSTALL_S, capture_output=True)
        installed.write_bytes(lock)
    return HERE


@pytest.fixture(scope="module")
def seen(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client in websocket.mjs saw."""
    with ServerProcess(tmp_path_factory.mktemp("typescript"), app=APP) as server:
        run = subprocess.run(
            ["node", "websocket.mjs", server.url],
            cwd=package,
            env={**os.environ, "NODE_NO_WARNINGS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
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
