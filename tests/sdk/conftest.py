"""Requirements of the official clients: node, and the packages that package-lock.json names."""

import fcntl
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.rigs.needing import needed
from tests.sdk.stock import Node

HERE: Final = Path(__file__).parent
INSTALL_S: Final = 300  # 340 MB; it takes 20 s on two cores and a good network


@pytest.fixture(scope="session")
def node() -> Node:
    """Node.js 22 as an npm package: Debian's version is too old for some clients.

    The installation is kept, and is made again when the lock file has changed.
    """
    npm = needed("npm", "install the official clients")
    modules = HERE / "node_modules"
    stamp = modules / "installed-from"
    lock = HERE / "package-lock.json"
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run of the tests may install at the same time
        wanted = file.read()
        if not stamp.exists() or stamp.read_bytes() != wanted:
            install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(install, cwd=HERE, check=True, timeout=INSTALL_S, capture_output=True)
            stamp.write_bytes(wanted)
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    packaged = modules / f"node-{sys.platform}-{machine}" / "bin" / "node"
    # Where there is no such package, the machine's own node is used.
    path = packaged if packaged.exists() else Path(needed("node", "run the official clients"))
    return Node(modules, path)


@pytest.fixture(scope="session")
def nginx() -> str:
    return needed("nginx", "serve behind it")


@pytest.fixture(scope="session")
def haproxy() -> str:
    return needed("haproxy", "serve behind it")
