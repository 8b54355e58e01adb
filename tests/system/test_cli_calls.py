"""The list of calls that the command keeps: each command is a child process, its server another."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.cli.actions.notes import Callbook
from tests.acceptance.launch import LINGER, owners, wait_for_end
from tests.rigs import HERE
from tests.rigs.command import Following, run, run_as_printed, stdio_url
from tests.wire.process import Gate, ServerProcess, gate_in, wait_until

APP = f"{HERE / 'command_server.py'}:server"
NOTHING = "No unfinished calls."


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


def http_url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.http_port}/mcp"


def count(url: str, gate: Gate) -> list[str]:
    return ["call", url, "count", "n:=3", f"gate={gate.path}"]


def leave(url: str, gate: Gate, *options: str, cwd: Path | None = None) -> str:
    """Begin a call and detach once it has sent all messages; the output."""
    with Following(*count(url, gate), *options, cwd=cwd) as call:
        call.wait_for('"n":3')
        call.interrupt()
        assert call.end() == (130, "")
    return call.said


def listed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run("calls", "--json").stdout)
    return rows


# Notes


@pytest.mark.parametrize("url_of", [lambda server: server.url, http_url], ids=["ws", "http"])
def test_what_was_left_is_listed_and_comes_back_by_its_name(
    server: ServerProcess, gate: Gate, url_of: Callable[[ServerProcess], str]
) -> None:
    farewell = leave(url_of(server), gate).splitlines()[3:]
    assert farewell[:3] == [
        "Detached; the call goes on. To come back:",
        "  mcp-streams resume count-1",
        "or, from anywhere:",
    ]
    assert farewell[3].startswith(f"  mcp-streams resume {url_of(server)} ey")
    head, line = run("calls").stdout.splitlines()
    assert head.split() == ["name", "tool", "age", "status"]
    assert line.split()[:2] == ["count-1", "count"]
    assert line.endswith("  running")
    gate.release()
    wait_until("the call is done", lambda: listed()[0]["state"] == "done")
    assert run("calls").stdout.splitlines()[1].endswith("  done, result waiting")
    done = run_as_printed(farewell[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "counted 3\n", "")
    nothing = run("calls")
    assert (nothing.returncode, nothing.stdout, nothing.shown) == (0, "", [NOTHING])


def test_a_call_is_noted_before_its_first_message_is_shown(
    server: ServerProcess, gate: Gate
) -> None:
    with Following(*count(server.url, gate)) as call:
        call.wait_for('"n":1')
        call.kill()
    (row,) = listed()
    assert (row["name"], row["state"]) == ("count-1", "running")
    assert row["arguments"] == {"n": 3, "gate": gate.path}
    gate.release()
    assert run("resume", "count-1").stdout == "counted 3\n"


def test_a_call_that_says_nothing_is_noted_too(server: ServerProcess, book: Callbook) -> None:
    with Following("call", server.url, "forever") as call:
        wait_until("the call is noted", book.entries)
        call.kill()
    assert [(row["name"], row["state"]) for row in listed()] == [("forever-1", "running")]


def test_calls_that_run_at_once_have_names_of_their_own(server: ServerProcess, gate: Gate) -> None:
    with Following(*count(server.url, gate)) as one, Following(*count(server.url, gate)) as two:
        for call in (one, two):
            call.wait_for('"n":3')
        assert [row["name"] for row in listed()] == ["count-1", "count-2"]
        gate.release(2)
        assert one.end() == two.end() == (0, "counted 3\n")
    assert listed() == []


@pytest.mark.parametrize(("tool", "code"), [("count", 0), ("fail", 1), ("nowhere", 1), ("ask", 1)])
def test_what_is_done_is_not_kept(
    server: ServerProcess, tool: str, code: int, book: Callbook
) -> None:
    done = run("call", server.url, tool, *(["n:=2"] if tool == "count" else []))
    assert done.returncode == code
    assert book.entries() == []


def test_a_call_that_was_cancelled_is_not_kept(server: ServerProcess, gate: Gate) -> None:
    with Following(*count(server.url, gate), on_terminal=True) as call:
        call.wait_for('"n":3')
        call.interrupt()
        call.wait_for("again cancels")
        call.interrupt()
        call.wait_for("Cancelled")
        assert call.end() == (130, "")
    assert listed() == []
    done = run_as_printed(call.short_way_back)
    assert (done.returncode, done.shown) == (
        2,
        ["No call is called count-1. The list of calls is empty."],
    )


def test_what_is_gone_is_shown_once(server: ServerProcess, gate: Gate) -> None:
    with Following("call", server.url, "brief", f"gate={gate.path}") as call:
        call.wait_for('"n":1')
        call.interrupt()
        assert call.end() == (130, "")
    gate.wait_for("cancelled")
    shown = run("calls")
    assert (shown.returncode, shown.stdout.splitlines()[1][-16:]) == (0, "gone (abandoned)")
    assert run("calls").shown == [NOTHING]


def test_what_turns_out_to_be_gone_is_not_kept(
    server: ServerProcess, gate: Gate, book: Callbook
) -> None:
    for verb in ("resume", "poll"):
        with Following("call", server.url, "brief", f"gate={gate.path}") as call:
            call.wait_for('"n":1')
            call.interrupt()
            assert call.end() == (130, "")
        gate.wait_for("cancelled")
        assert run(verb, "brief-1").returncode == 4
        assert book.entries() == []


def test_forgetting_leaves_the_call_alone(server: ServerProcess, gate: Gate) -> None:
    way_back = leave(server.url, gate).splitlines()[-1]
    leave(server.url, gate)
    unknown = run("calls", "--forget", "count-1", "count-3")
    assert (unknown.returncode, unknown.shown) == (
        2,
        ["No call is called count-3. There are: count-1, count-2."],
    )
    assert len(listed()) == 2
    assert run("calls", "--forget", "count-1", "count-2").returncode == 0
    assert listed() == []
    gate.release(2)
    assert run_as_printed(way_back.strip()).stdout == "counted 3\n"


# Names


def test_a_name_is_good_at_another_url(server: ServerProcess, gate: Gate) -> None:
    leave(server.url, gate)
    for words in (["count-1"], [http_url(server), "count-1"]):
        (status,) = json.loads(run("poll", *words, "--json").stdout)
        assert status["status"] == "live"
    gate.release()
    done = run("resume", http_url(server), "count-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "counted 3\n", "")
    assert listed() == []


def test_a_call_that_is_resumed_by_its_ticket_keeps_its_name(
    server: ServerProcess, gate: Gate, book: Callbook
) -> None:
    with Following("call", server.url, "count", "n:=2", f"gate={gate.path}") as call:
        call.wait_for('"n":1')
        call.kill()
    (noted,) = book.entries()
    assert noted.ticket.after is None
    with Following("resume", http_url(server), str(noted.ticket)) as call:
        call.wait_for('"n":2')
        call.interrupt()
        assert call.short_way_back == "mcp-streams resume count-1"
        assert call.end() == (130, "")
    assert book.entries()[0].ticket.after == 2, "the position that it was left at"
    gate.release()
    assert run_as_printed(call.way_back).returncode == 0
    assert book.entries() == []


def test_an_unknown_name_is_told_with_those_that_there_are(
    server: ServerProcess, gate: Gate
) -> None:
    leave(server.url, gate)
    for words in (["resume", "build-1"], ["resume", server.url, "build-1"], ["poll", "build-1"]):
        done = run(*words)
        assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)
        assert done.stderr.startswith("No call is called build-1")
        assert done.stderr.endswith("There are: count-1.\n")
    gate.release()


def test_half_a_ticket_is_not_shown(server: ServerProcess, gate: Gate) -> None:
    word = leave(server.url, gate).split()[-1]
    done = run("resume", server.url, word[:-9])
    assert (done.returncode, word[:-9] in done.stderr) == (2, False)
    assert "no ticket" in done.stderr
    gate.release()


def test_with_json_the_way_back_has_the_name(server: ServerProcess, gate: Gate) -> None:
    told = json.loads(leave(server.url, gate, "--json").splitlines()[-1])["detached"]
    assert told["name"] == "count-1"
    gate.release()
    assert run("resume", told["name"]).stdout == "counted 3\n"


def test_a_command_is_started_where_it_was(tmp_path: Path, gate: Gate) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    url = stdio_url(APP, "--stdio", "--journal", "journal.db", *LINGER)
    # The command belongs to this clone, and finds its package from any folder.
    url = url.replace("stdio:", f"stdio:env PYTHONPATH={shlex.quote(os.getcwd())} ")
    try:
        said = leave(url, gate, cwd=here)
        assert "or, from this folder:" in said
        done = run("calls", "--json", cwd=elsewhere)
        (row,) = json.loads(done.stdout)
        assert (row["state"], row["cwd"]) == ("running", str(here))
        gate.release()
        resumed = run("resume", "count-1", cwd=elsewhere)
        assert (resumed.returncode, resumed.stdout) == (0, "counted 3\n")
    finally:
        for pid in owners(here / "journal.db"):
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
    assert list(elsewhere.iterdir()) == []


# When something is not there


def test_who_cannot_be_reached_keeps_its_calls(tmp_path: Path, gate: Gate) -> None:
    with ServerProcess(tmp_path, app=APP) as server:
        leave(server.url, gate)
    done = run("calls")
    assert done.returncode == 3
    assert "  cannot be reached: " in done.stdout
    (row,) = listed()
    assert (row["name"], row["state"]) == ("count-1", "unreachable")


def test_a_file_that_cannot_be_written_fails_no_call(
    server: ServerProcess, gate: Gate, callbook_path: Path
) -> None:
    callbook_path.parent.parent.mkdir(exist_ok=True)
    callbook_path.parent.write_text("no folder")
    lines = leave(server.url, gate).splitlines()
    assert lines[0].startswith("This call is not saved in the list of calls: ")
    assert lines[0].endswith("(Not a directory): name another file with MCP_STREAMS_STATE.")
    assert lines[4] == "Detached; the call goes on. To come back:"
    assert len(lines) == 6
    gate.release()
    done = run_as_printed(lines[5].strip())
    assert (done.returncode, done.stdout, len(done.shown)) == (0, "counted 3\n", 1)


def test_a_damaged_file_fails_no_call_and_is_left_alone(
    server: ServerProcess, callbook_path: Path
) -> None:
    callbook_path.parent.mkdir(parents=True)
    callbook_path.write_text("{")
    done = run("call", server.url, "count", "n:=1")
    assert (done.returncode, done.stdout, len(done.shown)) == (0, "counted 1\n", 2)
    for words in (["calls"], ["resume", "count-1"], ["calls", "--forget", "count-1"]):
        refused = run(*words)
        assert (refused.returncode, refused.stdout, len(refused.shown)) == (2, "", 1)
        assert "is no list of calls" in refused.stderr
    assert callbook_path.read_text() == "{"
