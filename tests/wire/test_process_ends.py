"""The process ends at its deadline, whatever its tools do, and leaves the journal in good order."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from streams.process.deadline import DEADLINE_S
from tests.acceptance.launch import Spawned, owner_pid, wait_for_end
from tests.wire.httpverbs import text_of
from tests.wire.process import CLI, FAULTY_APP, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S as PATIENCE_S
from tests.wire.raw import PipePeer, method_is
from tests.wire.verbs import POSITIONS, Reader, start

# Each has sent one message and never ends, or leaves a child that never ends.
ENDLESS = ("shielded", "deaf", "spinning", "sleeping", "spinning_thread")
ENDED_AT_ONCE = ("endless_thread",)
SAID = "the process ends at its deadline"


@pytest.mark.parametrize("tool", [*ENDLESS, *ENDED_AT_ONCE])
def test_a_tool_that_never_ends_does_not_outlast_a_signal(tmp_path: Path, tool: str) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, tool)
            Reader(peer).until_seq(started.stream, 1)
            begun_at = time.monotonic()
            assert server.stop() == 0
            took_s = time.monotonic() - begun_at
        if tool in ("shielded", "deaf"):
            assert any(SAID in line and f"tools={tool}" in line for line in server.log)
            assert took_s < DEADLINE_S + PATIENCE_S / 2
        server.check_journal()
        server.start()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            reader = Reader(peer)
            reader.response(peer.request("stream/resume", {**started.with_token, "after": 0}))
            entries = reader.entries[started.stream]
        assert [*entries] == [1, 2]
        assert entries[2].reason == "interrupted"


def test_a_thread_that_a_tool_has_left_does_not_outlast_a_signal(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        assert left_by(server, "leaving_a_thread") == "left"
        assert server.stop() == 0


def test_no_end_waits_for_a_process_that_a_tool_has_left(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        child = int(left_by(server, "leaving_a_process"))
        try:
            server.send(signal.SIGTERM)
            wait_until("the server has ended", lambda: not server.is_alive())
        finally:
            os.kill(child, signal.SIGKILL)  # it has the pipe of the log, too
        assert server.wait() == 0


def left_by(server: ServerProcess, tool: str) -> str:
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        return text_of(peer.response(peer.call(tool)))


def test_a_call_that_is_run_again_goes_on_after_such_an_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "shielded_with_restart")
            Reader(peer).until_seq(started.stream, 1)
            assert server.stop(signal.SIGINT) == 0
        server.start()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            status = peer.ask("stream/poll", started.with_token)
            assert status.result["status"] == "live"
        assert server.stop() == 0


def test_an_owner_ends_at_its_deadline_and_the_next_one_knows_its_call(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, app=FAULTY_APP) as peer:
        peer.initialize(POSITIONS)
        started = start(peer, "shielded")
        Reader(peer).until_seq(started.stream, 1)
        owner = owner_pid(journal)
        os.kill(owner, signal.SIGTERM)
        wait_for_end(owner)
    with Spawned(journal, app=FAULTY_APP) as peer:
        peer.initialize(POSITIONS)
        reader = Reader(peer)
        reader.response(peer.request("stream/resume", {**started.with_token, "after": 1}))
        assert reader.entries[started.stream][2].reason == "interrupted"
        os.kill(owner_pid(journal), signal.SIGTERM)


def test_a_server_on_its_own_standard_streams_ends_at_its_deadline(tmp_path: Path) -> None:
    command = [*CLI, "serve", FAULTY_APP, "--stdio", "--foreground"]
    with PipePeer([*command, "--journal", str(tmp_path / "journal.db")]) as peer:
        peer.initialize(POSITIONS)
        peer.call("spinning")
        peer.expect(method_is("notifications/message"))
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(PATIENCE_S) == 0


@pytest.mark.needs_file("it removes the file")
def test_a_server_that_has_failed_ends_at_its_deadline_and_says_why(tmp_path: Path) -> None:
    """`docs/operate/operations.md`: one line on standard error and exit code 2."""
    with ServerProcess(tmp_path, app=FAULTY_APP) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "shielded")
            Reader(peer).until_seq(started.stream, 1)
            os.unlink(server.journal)
            key = {"mcp-streams/idempotencyKey": "stored before its tool starts"}
            add = {"name": "add", "arguments": {"a": 1, "b": 2}, "_meta": key}
            peer.request("tools/call", add)
            assert server.wait() == 2
        assert any("was removed" in line for line in server.log), server.log
        assert not any("Traceback" in line for line in server.log)


def test_standard_error_that_nobody_reads_does_not_keep_the_process() -> None:
    command = [*CLI, "serve", FAULTY_APP, "--ws", "127.0.0.1:0"]
    read_fd, write_fd = os.pipe()
    with subprocess.Popen(command, stderr=write_fd) as process:
        try:
            said = b""
            while b"listening" not in said:
                said += os.read(read_fd, 1 << 16)
            os.set_blocking(write_fd, False)
            for size in (1 << 12, 1):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(write_fd, b"x" * size)
            os.set_blocking(write_fd, True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            os.close(read_fd)
            os.close(write_fd)
