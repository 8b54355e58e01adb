"""The installed package is the whole project, typed, and its command works."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.rigs import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("name", ["streams", "transports"])
def test_the_import_names_resolve_to_this_project(name: str) -> None:
    # Another distribution has a package of the same name as one of ours.
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin == str(ROOT / name / "__init__.py")


def test_the_wheel_holds_every_module_of_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        str(path.relative_to(ROOT))
        for package in ("streams", "transports")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == modules
    assert {"streams/py.typed", "transports/py.typed"} <= names


def test_the_command_of_an_installed_wheel_works_away_from_the_source(
    wheel: Path, tmp_path: Path
) -> None:
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run(
        [sys.executable, *install, tmp_path / "there", wheel],
        check=True,
        capture_output=True,
        timeout=60,
    )
    done = subprocess.run(
        [tmp_path / "there" / "bin" / "mcp-streams", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "there")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == version("mcp-streams")


WITHOUT_THE_COMMAND = """
import sys

for name in ("cryptography", "cyclopts", "jwt", "rich"):
    sys.modules[name] = None  # to import it fails

import trio
from streams import Call, Client, HttpEndpoint, Keyring, MemoryJournal, Server
from transports import dial, http, websocket

server = Server("bare")


@server.tool
async def echo(call: Call, text: str) -> str:
    await call.log("info", "said")
    return text


async def main():
    async with (
        server.open(MemoryJournal(), Keyring.load(None)) as running,
        trio.open_nursery() as nursery,
    ):
        endpoint = HttpEndpoint(running, "/mcp")
        port = await nursery.start(http.serve, endpoint, "127.0.0.1", 0)
        other = await nursery.start(websocket.serve, running.serve, "127.0.0.1", 0)
        for url in (f"http://127.0.0.1:{port}/mcp", f"ws://127.0.0.1:{other}"):
            async with Client(dial(url)) as client, client.call("echo", {"text": "hi"}) as call:
                print((await call.result())["content"][0]["text"])
        nursery.cancel_scope.cancel()


trio.run(main)
"""


def test_the_library_does_without_what_the_command_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_COMMAND],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "hi\nhi\n"), done.stderr


def test_every_public_name_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import streams; [getattr(streams, n) for n in streams.__all__]"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
