"""A stdio server whose work outlives its host: relays, the journal's owner, and their ends.

All of them are real processes; the peers know JSON-RPC and none of this project's code.
"""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance.launch import (
    LINGER,
    Spawned,
    failed_start,
    owner_pid,
    owners,
    wait_for_end,
)
from tests.wire.process import APP, CLI, Gate, ServerProcess, gate_in
from tests.wire.raw import Message, PeerGone, answers_to
from tests.wire.verbs import COMPLETED, PLAIN, STREAMS, Started, counted, resume, start, up_to

Spawn = Callable[..., Spawned]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    """A journal's path; an owner that a test has left on it is ended."""
    path = tmp_path / "journal.db"
    yield path
    for pid in owners(path):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)


@pytest.fixture
def spawn(journal: Path) -> Iterator[Spawn]:
    """Spawn a server on the journal, with an open session."""
    with ExitStack() as stack:

        def spawn(*options: str, capabilities: dict[str, object] = STREAMS) -> Spawned:
            spawned = stack.enter_context(Spawned(journal, *(options or LINGER)))
            spawned.initialize(capabilities)
            return spawned

        yield spawn


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


def began(peer: Spawned, gate: Gate, n: int = 5) -> Started:
    """Start a call that has sent n messages and waits at the gate."""
    started = start(peer, "count", n=n, gate=gate.path)
    gate.wait_for("sent")
    return started


def final(messages: list[Message], started: Started) -> Message:
    (response,) = filter(answers_to(started.id), messages)
    return response


def assert_complete(messages: list[Message], started: Started, n: int = 5) -> None:
    """Check that all messages of the call came, once, in order, and the resume's reply last."""
    assert counted(messages) == up_to(n)
    assert final(messages, started).result["content"][0]["text"] == f"counted {n}"
    assert messages[-1].result == COMPLETED


def assert_interrupted(messages: list[Message], started: Started, n: int = 5) -> None:
    assert counted(messages) == up_to(n)
    error = final(messages, started)
    assert (error.error["code"], error.reason) == (-32603, "interrupted")
    assert messages[-1].result == COMPLETED


# The client's host goes away


def test_a_call_is_taken_up_while_it_runs_after_its_host_has_gone(spawn: Spawn, gate: Gate) -> None:
    first = spawn()
    started = began(first, gate)
    first.end_as_sdks_do(grace_s=0.2)
    second = spawn()
    gate.release()
    assert_complete(resume(second, started.with_token), started)


def test_a_call_is_taken_up_after_its_owner_has_gone(
    spawn: Spawn, gate: Gate, journal: Path
) -> None:
    first = spawn()
    started = began(first, gate)
    first.end_as_sdks_do(grace_s=0.2)
    owner = owner_pid(journal)
    assert owners(journal) == [owner], "it waits for the call"
    gate.release()
    wait_for_end(owner)
    second = spawn()
    assert owner_pid(journal) != owner
    assert_complete(resume(second, started.with_token), started)


def test_a_relay_with_nothing_owed_ends_when_its_input_does(spawn: Spawn) -> None:
    assert spawn().end_as_sdks_do(grace_s=30) == 0


def test_what_is_owed_is_written_after_the_end_of_the_input(spawn: Spawn, gate: Gate) -> None:
    peer = spawn()
    started = began(peer, gate)
    peer.half_close()
    gate.release()
    messages = peer.read_to_the_end()
    assert counted(messages) == up_to(5)
    assert final(messages, started).result["content"][0]["text"] == "counted 5"
    assert peer.exit_code() == 0


def test_a_host_that_kills_its_group_ends_the_relay_alone(
    spawn: Spawn, gate: Gate, journal: Path
) -> None:
    first = spawn()
    started = began(first, gate)
    os.killpg(first.process.pid, signal.SIGKILL)
    assert first.exit_code() == -signal.SIGKILL
    gate.release()
    assert_complete(resume(spawn(), started.with_token), started)


def test_the_owner_notices_at_once_that_a_relay_was_killed(spawn: Spawn, gate: Gate) -> None:
    peer = spawn(capabilities=PLAIN)
    peer.call("count", n=1, gate=gate.path)
    gate.wait_for("sent")
    peer.process.kill()
    gate.wait_for("cancelled")  # a call that was never announced cannot be resumed


# One owner


@pytest.mark.parametrize("_", range(int(os.environ.get("OWNER_RUNS", "3"))))
def test_of_eight_that_start_at_once_one_owns_and_all_are_served(journal: Path, _: int) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(Spawned(journal, *LINGER)) for _ in range(8)]
        for peer in peers:
            assert peer.initialize(STREAMS).result["serverInfo"]["name"] == "wire-tests"
        assert owners(journal) == [owner_pid(journal)]
        for peer in peers:
            call = peer.call("count", n=3)
            assert peer.response(call).result["content"][0]["text"] == "counted 3"


def test_a_relay_of_another_app_is_refused(spawn: Spawn, journal: Path, tmp_path: Path) -> None:
    spawn()
    other = tmp_path / "other_server.py"
    shutil.copy(APP.rpartition(":")[0], other)
    command = [*CLI, "serve", f"{other}:server", "--stdio", "--journal", str(journal)]
    code, said = failed_start(command)
    assert code == 2
    assert str(other) in said
    assert APP in said, "it says what the owner serves instead"


def test_a_relay_of_another_version_is_refused(spawn: Spawn, journal: Path) -> None:
    spawn()
    pretend = (
        "import streams.process.version as here; here.VERSION = '0.0.1'; "
        "import streams.cli; streams.cli.main()"
    )
    command = [sys.executable, "-c", pretend, "serve", APP, "--stdio", "--journal", str(journal)]
    code, said = failed_start(command)
    assert code == 2
    assert "0.0.1" in said


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_to_be_found", "nowhere_to_be_found"),
        ("raise RuntimeError('no licence')", "no licence"),
        ("from streams import Server", "no Server named 'server'"),
        ("server = (", "was never closed"),
    ],
)
def test_a_relay_says_why_its_owner_does_not_start(
    journal: Path, tmp_path: Path, source: str, reason: str
) -> None:
    app = tmp_path / "broken_server.py"
    app.write_text(source)
    command = [*CLI, "serve", f"{app}:server", "--stdio", "--journal", str(journal)]
    code, said = failed_start(command)
    assert code == 2
    assert reason in said
    for owner in owners(journal):  # it prints the reason, and then it ends
        wait_for_end(owner)
    assert not owners(journal)


def test_a_socket_that_somebody_has_left_is_no_obstacle(spawn: Spawn, journal: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(journal) + ".sock")
    assert spawn().ask("ping").result == {}


def test_nobody_else_can_read_the_files(spawn: Spawn, gate: Gate, journal: Path) -> None:
    began(spawn(), gate)
    modes = {
        path.name.removeprefix(journal.name): path.stat().st_mode & 0o777
        for path in journal.parent.glob(f"{journal.name}*")
    }
    names = ("", "-wal", "-shm", ".key", ".lock", ".log", ".sock", ".ops")
    assert modes == dict.fromkeys(names, 0o600)


# The owner goes away


def test_an_owner_that_is_told_to_end_leaves_interrupted_calls(
    spawn: Spawn, gate: Gate, journal: Path
) -> None:
    first = spawn()
    started = began(first, gate)
    owner = owner_pid(journal)
    os.kill(owner, signal.SIGTERM)
    messages = first.read_to_the_end()
    assert counted(messages) == up_to(5), "who is attached is told"
    assert final(messages, started).reason == "interrupted"
    assert first.exit_code() == 0
    wait_for_end(owner)
    assert not Path(f"{journal}.sock").exists()
    assert_interrupted(resume(spawn(), started.with_token), started)


def test_an_owner_that_is_killed_is_replaced(spawn: Spawn, gate: Gate, journal: Path) -> None:
    first = spawn()
    started = began(first, gate)
    owner = owner_pid(journal)
    os.kill(owner, signal.SIGKILL)
    first.drain()
    first.exit_code()
    assert_interrupted(resume(spawn(), started.with_token), started)
    assert owner_pid(journal) != owner


# In the foreground


def test_a_foreground_process_finishes_its_call_for_nobody(spawn: Spawn, gate: Gate) -> None:
    first = spawn("--foreground")
    started = began(first, gate)
    first.hang_up()
    gate.release()
    assert first.exit_code() == 0
    assert_complete(resume(spawn("--foreground"), started.with_token), started)


def test_a_foreground_call_is_taken_up_by_a_relay_meanwhile(spawn: Spawn, gate: Gate) -> None:
    first = spawn("--foreground")
    started = began(first, gate)
    first.hang_up()
    second = spawn()
    gate.release()
    assert_complete(resume(second, started.with_token), started)
    second.half_close()
    assert first.exit_code() == 0


# WebSocket and stdio on one journal


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[ServerProcess]:
    """A `--ws` process, which owns its journal."""
    with ServerProcess(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("here", "there"), [("stdio", "ws-streams"), ("ws-mcp", "stdio"), ("ws-streams", "ws-mcp")]
)
def test_a_ticket_moves_between_transports(
    listening: ServerProcess, gate: Gate, here: str, there: str
) -> None:
    with listening.connect(here) as first:
        first.initialize(STREAMS)
        started = start(first, "count", n=5, gate=gate.path)
        gate.wait_for("sent")
    with listening.connect(there) as second:
        second.initialize(STREAMS)
        if here == "stdio":  # a user's stream: an anonymous caller's opens by its id alone
            refusal = second.ask("stream/resume", started.by_id)
            assert refusal.reason == "stream_not_found", "without the token it is not theirs"
        gate.release()
        assert_complete(resume(second, started.with_token), started)


def test_relays_are_let_go_when_a_websocket_owner_ends(listening: ServerProcess) -> None:
    with listening.connect("stdio") as peer:
        peer.initialize(STREAMS)
        assert listening.stop() == 0
        with pytest.raises(PeerGone):
            peer.receive_raw()


SLOW_APP = """
from streams import Server

open({here!r}, "wb", buffering=0).write(b".")
open({go!r}, "rb", buffering=0).read(1)
server = Server("slow", version="1")
"""


def test_an_owner_goes_on_whose_starter_was_killed(tmp_path: Path, journal: Path) -> None:
    """It also serves the other relays that wait for it."""
    app = tmp_path / "slow_server.py"
    pipes = {name: str(tmp_path / name) for name in ("here", "go")}
    for path in pipes.values():
        os.mkfifo(path)
    app.write_text(SLOW_APP.format(**pipes))
    here, go = (os.open(path, os.O_RDWR) for path in pipes.values())
    try:
        with Spawned(journal, app=f"{app}:server") as starter:
            assert os.read(here, 1) == b"."
            starter.process.kill()
            starter.process.wait()
        [pid] = owners(journal)
        os.write(go, b"..")  # also for the owner that the next relay may have to start
        with Spawned(journal, app=f"{app}:server") as relay:
            relay.initialize(PLAIN)
            assert owner_pid(journal) == pid
    finally:
        os.close(here)
        os.close(go)
