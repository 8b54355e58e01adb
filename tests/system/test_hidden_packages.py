"""A file of the user's with the name of one of our packages is named, before it confuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs import ROOT

LIMIT_S = 60.0
SERVER = "from streams import Server\nserver = Server('s')\n"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("file", ["transports.py", "transports/__init__.py"])
@pytest.mark.parametrize("program", ["import streams", "import transports\nimport streams"])
def test_streams_warns_of_another_transports(tmp_path: Path, file: str, program: str) -> None:
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    (tmp_path / "app.py").write_text(program)
    done = run(tmp_path, "app.py")
    assert done.returncode == 0, done.stderr
    assert f"RuntimeWarning: {place} hides the package transports of mcp-streams" in done.stderr
    assert "rename it" in done.stderr
    assert "app.py:" in done.stderr, "the warning is shown at the import"


@pytest.mark.parametrize("file", ["streams.py", "streams/__init__.py"])
def test_transports_warns_of_another_streams(tmp_path: Path, file: str) -> None:
    place = tmp_path / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("")
    (tmp_path / "app.py").write_text("import transports")
    done = run(tmp_path, "app.py")
    assert f"{place} hides the package streams of mcp-streams: rename it" in done.stderr


@pytest.mark.parametrize(
    "program", ["import streams", "import transports", "import streams.client"]
)
def test_there_is_no_warning_without_a_reason(tmp_path: Path, program: str) -> None:
    (tmp_path / "transports").mkdir()  # a folder of data, which hides nothing
    (tmp_path / "app.py").write_text(program)
    assert run(tmp_path, "-W", "error", "app.py").stderr == ""
    assert run(ROOT, "-W", "error", "-c", program).stderr == ""


def test_the_command_warns_of_a_file_that_the_server_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SERVER)
    (tmp_path / "transports.py").write_text("")
    (tmp_path / "streams.py").write_text("")
    done = run(tmp_path, "-P", "-m", "streams.cli", "serve", "app.py:server", "--stdio")
    assert done.returncode == 0, done.stderr
    for name in ("streams", "transports"):
        assert f"{tmp_path / name}.py" in done.stderr
    assert "mcp-streams has a package of that name: rename it" in done.stderr


def test_the_command_refuses_a_server_in_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "streams.py").write_text(SERVER)
    done = run(tmp_path, "-P", "-m", "streams.cli", "serve", "streams.py:server", "--stdio")
    assert done.returncode == 2
    assert "streams.py: mcp-streams has a package streams: rename the file." in done.stderr
