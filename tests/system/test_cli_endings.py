"""How calls end for a person: cancelled, late, finished before, or asking a question."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.cli.actions.notes import Callbook
from tests.rigs import HERE
from tests.rigs.command import Following, run, run_as_printed
from tests.wire.process import Gate, ServerProcess, gate_in, wait_until

APP = f"{HERE / 'command_server.py'}:server"
FINISHED = (
    "The call is finished, and its result was received before: there is nothing left to resume."
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


@pytest.fixture
def book(callbook_path: Path) -> Callbook:
    return Callbook(callbook_path)


@pytest.fixture(params=["ws", "http"])
def url(server: ServerProcess, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "ws" else f"http://127.0.0.1:{server.http_port}/mcp"


def leave(url: str, gate: Gate, *options: str) -> str:
    """Begin a call and detach once it has sent all messages; the command to come back."""
    with Following("call", url, "count", "n:=3", f"gate={gate.path}", *options) as call:
        call.wait_for('"n":3')
        call.interrupt()
        way_back = call.way_back
        assert call.end() == (130, "")
    return way_back


# cancel


def test_a_call_is_cancelled_by_its_name(url: str, gate: Gate, book: Callbook) -> None:
    way_back = leave(url, gate)
    done = run("cancel", "count-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "Cancelled.\n")
    gate.wait_for("cancelled")
    assert book.entries() == []
    again = run_as_printed(way_back.replace("resume", "cancel"))
    assert (again.returncode, again.stdout) == (4, "")
    assert "The call was cancelled" in again.stderr


def test_a_call_is_cancelled_by_its_ticket(url: str, gate: Gate) -> None:
    way_back = leave(url, gate)
    done = run_as_printed(f"{way_back.replace('resume', 'cancel')} --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["state"] == "cancelled"
    gate.wait_for("cancelled")


def test_a_call_that_is_done_is_not_cancelled(url: str, gate: Gate, book: Callbook) -> None:
    leave(url, gate)
    gate.release()
    wait_until("the call is done", lambda: "done" in run("calls").stdout)
    done = run("cancel", "count-1")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "The call is finished (done, result waiting): there is nothing to cancel.\n"
    )
    assert len(book.entries()) == 1
    assert run("resume", "count-1").stdout == "counted 3\n"


@pytest.mark.parametrize("words", [["name"], ["ws://127.0.0.1:1"], ["ws://127.0.0.1:1", "x"], []])
def test_cancel_wants_a_call(words: list[str]) -> None:
    done = run("cancel", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


# A call that is finished


def test_a_finished_call_says_so(url: str, gate: Gate, book: Callbook) -> None:
    way_back = leave(url, gate)
    gate.release()
    assert run_as_printed(way_back).stdout == "counted 3\n"
    again = run_as_printed(way_back)
    assert (again.returncode, again.stdout, again.shown) == (4, "", [FINISHED])
    as_json = run_as_printed(f"{way_back} --json")
    assert json.loads(as_json.stderr) == {"error": {"message": FINISHED, "reason": "delivered"}}
    cancelled = run_as_printed(way_back.replace("resume", "cancel"))
    assert cancelled.returncode == 4
    assert "(its result was received)" in cancelled.stderr
    polled = run_as_printed(way_back.replace("resume", "poll"))
    assert polled.stdout.endswith("  gone (delivered)\n")
    assert book.entries() == []
    for verb in ("resume", "poll", "cancel"):
        named = run(verb, "count-1")
        assert (named.returncode, named.stdout, len(named.shown)) == (4, "", 1)
        assert named.stderr.startswith("count-1 is finished, and its result was printed")


def test_a_name_is_used_again_after_its_call_is_finished(server: ServerProcess, gate: Gate) -> None:
    for _ in range(2):
        leave(server.url, gate)
        gate.release()
        assert run("resume", "count-1").stdout == "counted 3\n"


def test_poll_and_calls_have_one_vocabulary(url: str, gate: Gate) -> None:
    way_back = leave(url, gate)
    for state, words in (("running", "running"), ("done", "done, result waiting")):
        if state == "done":
            gate.release()
            wait_until("the call is done", lambda: "done" in run("calls").stdout)
        assert run("calls").stdout.splitlines()[1].endswith(f"  {words}")
        assert run("poll", "count-1").stdout.endswith(f"  {words}\n")
        (row,) = json.loads(run("calls", "--json").stdout)
        (polled,) = json.loads(run_as_printed(way_back.replace("resume", "poll --json")).stdout)
        assert row["state"] == polled["state"] == state
    assert run("resume", "count-1").returncode == 0


def test_no_sentence_is_printed_beside_json() -> None:
    done = run("calls", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# --timeout


def test_a_call_that_takes_too_long_is_detached(url: str, gate: Gate) -> None:
    words = ("call", url, "count", "n:=3", f"gate={gate.path}", "--timeout", "3")
    done = run(*words)
    assert (done.returncode, done.stdout) == (124, "")
    lines = done.shown[-5:]
    assert lines[0] == "No result within 3 s."
    assert lines[1] == "Detached; the call goes on. To come back:"
    gate.release()
    assert run_as_printed(lines[2].strip()).stdout == "counted 3\n"


def test_with_json_a_late_call_prints_json_alone(server: ServerProcess, gate: Gate) -> None:
    words = ("call", server.url, "count", "n:=3", f"gate={gate.path}", "--timeout=3", "--json")
    done = run(*words)
    assert done.returncode == 124
    shown = [json.loads(line) for line in done.shown]
    assert "detached" in shown[-1]
    gate.release()


@pytest.mark.parametrize("verb", ["call", "resume", "poll", "cancel", "tools"])
@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_timeout_is_more_than_nothing(verb: str, timeout: str) -> None:
    done = run(verb, "ws://127.0.0.1:1", "x", f"--timeout={timeout}")
    assert (done.returncode, done.stderr) == (2, "--timeout: write seconds, more than 0.\n")


def test_a_server_that_is_silent_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("call", "stdio:sleep 100", "count", "--timeout=0.5")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no answer within 0.5 s" in done.stderr
    assert time.monotonic() - began < 60


# Another server at the same port


def test_a_call_is_not_forgotten_when_another_server_has_its_port(
    tmp_path: Path, gate: Gate, book: Callbook
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    with ServerProcess(mine, app=APP) as server:
        leave(server.url, gate)
        ports = server.port, server.http_port
    stranger = ServerProcess(other, app=APP)
    stranger.port, stranger.http_port = ports
    with stranger:
        for _ in range(2):
            line = run("calls").stdout.splitlines()[1]
            assert "  not known: Another server listens at this URL now" in line
        for verb in ("poll", "resume", "cancel"):
            done = run(verb, "count-1")
            assert done.returncode == 4
            assert "Another server listens at this URL now" in done.stderr
    assert [entry.name for entry in book.entries()] == ["count-1"]
    back = ServerProcess(mine, app=APP)
    back.port, back.http_port = ports
    with back:
        assert "server stopped before the call was done" in run("resume", "count-1").stderr
    assert book.entries() == []


# Questions


def test_a_question_is_answered_at_the_terminal(url: str) -> None:
    with Following("call", url, "ask", on_terminal=True) as call:
        call.wait_for("The server asks: Go on\\?")
        call.wait_for(r"go \[y/n\]: ")
        call.type("maybe\n")
        call.wait_for("maybe: write y or n")
        call.type("y\n")
        assert call.end() == (0, "answered\n")


def test_a_resumed_call_asks_again(url: str) -> None:
    with Following("call", url, "ask", on_terminal=True) as call:
        call.wait_for(r"go \[y/n\]: ")
        call.interrupt()
        call.wait_for("again cancels")
        assert call.end() == (130, "")
    assert run("poll", "ask-1").stdout.endswith("  running, has a question for you\n")
    with Following("resume", "ask-1", on_terminal=True) as resumed:
        resumed.wait_for("The server asks: Go on\\?")
        resumed.wait_for(r"go \[y/n\]: ")
        resumed.type("n\n")
        assert resumed.end() == (0, "answered\n")


def test_ctrl_d_declines_a_question(server: ServerProcess) -> None:
    with Following("call", server.url, "ask", on_terminal=True) as call:
        call.wait_for(r"go \[y/n\]: ")
        call.type("\x04")
        assert call.end() == (0, "answered\n")


def test_without_a_terminal_no_question_can_be_answered(server: ServerProcess) -> None:
    done = run("call", server.url, "ask")
    assert done.returncode == 1
    assert "does not answer elicitation/create" in done.stdout
