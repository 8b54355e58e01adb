"""The lifespan of a server that `mcp-streams serve` runs."""

import signal
from pathlib import Path

import pytest

from tests.acceptance.launch import owners, wait_for_end
from tests.rigs.command import run
from tests.wire.process import ServerProcess, wait_until

APP = """
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from streams import Call, Server

FOLDER = Path(__file__).parent


def note(what):
    with (FOLDER / "events").open("a") as file:
        file.write(what + "\\n")


@asynccontextmanager
async def lifespan(server):
    if (FOLDER / "fail at the start").exists():
        raise ConnectionError("no database")
    note("begin")
    try:
        yield "state"
    finally:
        await trio.sleep(0.05)
        note("end")
        if (FOLDER / "fail at the end").exists():
            raise ConnectionError("no database")


server = Server("tested", lifespan=lifespan)


@server.tool
async def wait(call: Call) -> str:
    note(f"call with {call.state}")
    try:
        await trio.sleep_forever()
    finally:
        note("call ended")
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    path = tmp_path / "living_server.py"
    path.write_text(APP)
    return f"{path}:server"


def events(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_left_when_a_signal_ends_the_server(
    app: str, tmp_path: Path, number: signal.Signals
) -> None:
    with ServerProcess(tmp_path, app=app) as server, server.connect("ws-streams") as peer:
        peer.initialize()
        peer.call("wait")
        wait_until("the call began", lambda: "call with state" in events(tmp_path))
        assert server.stop(number) == 0
    assert events(tmp_path) == ["begin", "call with state", "call ended", "end"]


@pytest.mark.parametrize("options", [(), ("--ws", "127.0.0.1:0"), ("--journal", "{}/own.db")])
def test_a_failure_at_the_start_is_one_sentence(
    app: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "fail at the start").touch()
    done = run("serve", app, *(each.format(tmp_path) for each in options))
    assert (done.returncode, done.stdout) == (2, ""), done
    text = " ".join(done.shown)
    assert "The server's lifespan failed at its start: ConnectionError: no database" in text
    assert "living_server.py, line 20" in text
    assert "Traceback" not in done.stderr
    for pid in owners(tmp_path / "own.db"):
        wait_for_end(pid)


def test_a_failure_at_the_end_is_told_too(app: str, tmp_path: Path) -> None:
    (tmp_path / "fail at the end").touch()
    done = run("serve", app)  # standard input ends at once
    assert done.returncode == 2
    assert "The server's lifespan failed at its end: ConnectionError: no database" in done.stderr
