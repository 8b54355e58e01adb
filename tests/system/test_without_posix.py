"""Windows, as far as Linux can show it: a client works there, and a server says what it needs."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.rigs import ROOT
from tests.rigs.without_posix import MODULES
from tests.wire.process import ServerProcess

RIG: Final = ROOT / "tests" / "rigs" / "without_posix.py"
LIMIT_S: Final = 60.0

CLIENT: Final = """
import sys
import trio
import streams
from streams import Client
from transports import dial

async def main():
    async with Client(dial(sys.argv[1])) as client:
        assert "count" in [tool.name for tool in await client.tools()]
        async with client.call("count", {"n": 500}) as call:
            messages = [message async for message in call]
            result = await call.result()
        print(len(messages), bool(result["content"]))

trio.run(main)
assert not any(sys.modules.get(name) for name in %r), "imported in spite of all"
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(RIG), code, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_client_connects_and_calls(scheme: str, tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        port = server.port if scheme == "ws" else server.http_port
        path = "" if scheme == "ws" else "/mcp"
        done = run(CLIENT % (MODULES,), f"{scheme}://127.0.0.1:{port}{path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "500 True\n"


NEEDED: Final = "needs POSIX (Linux or macOS): without it, only a client works"


@pytest.mark.parametrize(
    "code",
    [
        "from streams import Server",
        "import streams; streams.Server('x')",
        "from streams import HttpEndpoint",
        "from streams import open_sqlite_journal",
        "from transports import http; http.serve",
        "from transports.websocket import serve",
    ],
)
def test_a_server_says_in_one_sentence_that_it_needs_posix(code: str) -> None:
    done = run(code)
    assert done.returncode == 1
    assert NEEDED in done.stderr.splitlines()[-1]


def test_the_command_says_so_without_a_traceback() -> None:
    code = (
        "import sys; sys.argv[1:] = ['serve', 'app.py:server']; import streams.cli as c; c.main()"
    )
    done = run(code)
    assert done.returncode == 2
    assert done.stderr == f"This command of mcp-streams {NEEDED}, over ws:// and http://.\n"


def test_the_names_of_the_package_are_those_that_work() -> None:
    code = "import pydoc, streams; pydoc.render_doc(streams); print(*dir(streams))"
    done = run(code)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert {"Client", "RunningCall", "Tool", "Text"} <= names
    assert names.isdisjoint({"Server", "HttpEndpoint", "open_sqlite_journal"})
