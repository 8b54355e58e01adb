"""A user's program passes the strictest settings of mypy and pyright, and does what it says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sdk.stock import HERE, Node

PROGRAM: Final = HERE / "typed_program.py"
ASYNCIO: Final = HERE / "typed_asyncio_program.py"
CHECK_S: Final = 300.0

# The installation of pyright, with the other packages of npm, has a bound of its own.
pytestmark = pytest.mark.timeout(400, func_only=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A copy in a folder of its own, as a user has it: none of our settings apply."""
    copy = tmp_path / "program.py"
    copy.write_text(PROGRAM.read_text())
    return copy


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        check=False,
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=CHECK_S,
    )


def mypy(program: Path) -> subprocess.CompletedProcess[str]:
    options = ("--strict", "--warn-unreachable", "--disallow-any-unimported")
    return run(program, "-m", "mypy", *options, program.name)


def pyright(program: Path, node: Node) -> list[dict[str, Any]]:
    """The findings of pyright in its strict mode."""
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": [program.name]}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    script = str(node.modules / "pyright" / "index.js")
    words = ("--outputjson", "--pythonpath", sys.executable)
    done = node.run(script, *words, cwd=program.parent, timeout_s=CHECK_S)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    said: list[dict[str, Any]] = report["generalDiagnostics"]
    return said


@pytest.mark.parametrize("source", [PROGRAM, ASYNCIO], ids=["trio", "asyncio"])
def test_mypy_has_nothing_to_say(source: Path, program: Path) -> None:
    program.write_text(source.read_text())
    done = mypy(program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("source", [PROGRAM, ASYNCIO], ids=["trio", "asyncio"])
def test_pyright_has_nothing_to_say(source: Path, program: Path, node: Node) -> None:
    program.write_text(source.read_text())
    assert pyright(program, node) == []


MISTAKES: Final = (
    ('client.call_tool("total", {"prices": [1, 2]}, type=Total)', "client.call_tool(3)"),
    ("order: Total = await", "order: str = await"),
    ("@server.tool(pages=True, expected_s=1)", "@server.tool(page=True)"),
    ("Client(dialer, on_notification=heard", 'Client("ws://x", on_notification=heard'),
    ("tool.input_schema", "tool.schema"),
    ('overflow="fail"', 'overflow="drop"'),
)


def test_both_find_mistakes(program: Path, node: Node) -> None:
    """The types say something: each mistake is found, at its line."""
    text = program.read_text()
    lines = set()
    for right, wrong in MISTAKES:
        assert right in text
        lines.add(text[: text.index(right)].count("\n") + 1)
        text = text.replace(right, wrong)
    program.write_text(text)
    found = {
        int(line.split(":")[1]) for line in mypy(program).stdout.splitlines() if ": error" in line
    }
    assert lines <= found
    assert lines <= {each["range"]["start"]["line"] + 1 for each in pyright(program, node)}


def test_the_program_runs(program: Path) -> None:
    done = run(program, "-W", "error", program.name)
    assert done.returncode == 0, done.stderr
    assert "4 shipped" in done.stdout
    assert "ship {'order': 'A-2'}: A-2" in done.stdout


def test_the_asyncio_program_runs(program: Path) -> None:
    program.write_text(ASYNCIO.read_text())
    done = run(program, "-W", "error", program.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 3\n"
