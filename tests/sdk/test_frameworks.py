"""pydantic-ai, langchain and openai-agents as clients of a server that is mounted in FastAPI."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.asgi import AsgiServer
from tests.rigs.needing import lacking

HERE = Path(__file__).parent / "frameworks"
PACKAGES = ("pydantic-ai-slim[mcp]", "langchain-mcp-adapters", "openai-agents")
INSTALL_S = 300  # 240 MB; it takes 30 s on two cores and a good network
RUN_S = 90

# The installation has a bound of its own.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment with the frameworks, which is kept while their versions stay."""
    place = HERE / ".venv"
    stamp = place / "installed-from"
    wanted = HERE / "constraints.txt"
    with wanted.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run of the tests may install at the same time
        if not stamp.exists() or stamp.read_bytes() != wanted.read_bytes():
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            pip = [place / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, "--no-input", "--constraint", wanted, *PACKAGES],
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                check=False,
            )
            if done.returncode:
                lacking(f"the frameworks cannot be installed: {done.stderr[-500:]}")
            stamp.write_bytes(wanted.read_bytes())
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsgiServer]:
    with AsgiServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize(
    ("framework", "result"),
    [("pydantic_ai", "0 rows"), ("langchain", "3 rows"), ("openai_agents", "3 rows")],
)
def test_a_framework_lists_and_calls_the_tools(
    framework: str, result: str, python: Path, server: AsgiServer
) -> None:
    url = f"http://127.0.0.1:{server.port}/tools/mcp"
    done = subprocess.run(
        [python, HERE / "calls.py", framework, url],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tools, called = json.loads(done.stdout.splitlines()[-1])
    assert set(tools) == {"count", "wait", "flood", "in_asyncio", "held"}
    assert called == result
