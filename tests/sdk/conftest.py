"""Requirements of the official clients, and of other servers: node, its packages, FastMCP."""

import fcntl
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.rigs.needing import needed
from tests.sdk.stock import Node

HERE: Final = Path(__file__).parent
INSTALL_S: Final = 300  # 340 MB; it takes 20 s on two cores and a good network


@contextmanager
def _outdated(folder: Path, lock: Path) -> Iterator[bool]:
    """Whether `folder` must be installed anew, as the lock file has changed.

    The installation is kept. Another run of the tests may install at the same time, and is waited
    for.
    """
    stamp = folder / "installed-from"
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wanted = file.read()
        is_outdated = not stamp.exists() or stamp.read_bytes() != wanted
        yield is_outdated
        if is_outdated:
            stamp.write_bytes(wanted)


@pytest.fixture(scope="session")
def node() -> Node:
    """Node.js 22 as an npm package: Debian's version is too old for some clients."""
    npm = needed("npm", "install the official clients")
    modules = HERE / "node_modules"
    with _outdated(modules, HERE / "package-lock.json") as is_outdated:
        if is_outdated:
            _install(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    packaged = modules / f"node-{sys.platform}-{machine}" / "bin" / "node"
    # Where there is no such package, the machine's own node is used.
    path = packaged if packaged.exists() else Path(needed("node", "run the official clients"))
    return Node(modules, path)


@pytest.fixture(scope="session")
def fastmcp() -> Path:
    """An interpreter that has FastMCP, whose 70 packages are no dependencies of ours."""
    folder = HERE / ".venv"
    python = folder / "bin" / "python"
    pins = HERE / "fastmcp.txt"
    with _outdated(folder, pins) as is_outdated:
        if is_outdated:
            _install(sys.executable, "-m", "venv", "--clear", str(folder))
            # All packages are pinned, and few of them are imported.
            quickly = ("--no-deps", "--no-compile", "--disable-pip-version-check", "--no-input")
            _install(str(python), "-m", "pip", "install", *quickly, "--requirement", str(pins))
    return python


def _install(*command: str) -> None:
    subprocess.run(command, cwd=HERE, check=True, timeout=INSTALL_S, capture_output=True)


@pytest.fixture(scope="session")
def nginx() -> str:
    return needed("nginx", "serve behind it")


@pytest.fixture(scope="session")
def haproxy() -> str:
    return needed("haproxy", "serve behind it")
