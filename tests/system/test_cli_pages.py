"""`mcp-streams pages` as a user runs it: child processes, and a server in another one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.command import Following, run, run_as_printed
from tests.wire.process import Gate, ServerProcess, gate_in


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.http_port}/mcp"


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


def test_all_pages_are_printed(url: str) -> None:
    done = run("pages", url, "pages", "n:=3")
    assert (done.returncode, done.stdout) == (0, "page 1\npage 2\npage 3\n")


def test_a_page_is_a_line_of_json(url: str) -> None:
    done = run("pages", url, "pages", "n:=3", "--json")
    pages = [json.loads(line) for line in done.stdout.splitlines()]
    assert [page["content"][0]["text"] for page in pages] == ["page 1", "page 2", "page 3"]
    assert ["nextResumeToken" in page for page in pages] == [True, True, False]


def test_a_call_says_that_there_is_more(url: str) -> None:
    done = run("call", url, "pages", "n:=2")
    assert (done.returncode, done.stdout) == (0, "page 1\n")
    assert "mcp-streams pages" in done.stderr
    assert "mcp-streams pages" not in run("call", url, "pages", "n:=1").stderr


def test_who_leaves_is_told_how_to_go_on(url: str, gate: Gate) -> None:
    words = ["pages", url, "pages", "n:=3", f"gate={gate.path}", "free:=1"]
    with Following(*words) as reading:
        assert reading.process.stdout is not None
        gate.wait_for("said 1")
        gate.wait_for("at 2")
        assert reading.process.stdout.readline() == "page 1\n"
        reading.interrupt()
        code, _ = reading.end()
    assert code == 130
    gate.release(2)
    done = run_as_printed(reading.said.splitlines()[-1].strip())
    assert (done.returncode, done.stdout) == (0, "page 2\npage 3\n")


def test_a_token_may_begin_with_a_dash(url: str, gate: Gate) -> None:
    done = run("pages", url, "pages", "n:=3", "--token=-no-such-token")
    assert done.returncode == 1, "it is refused by the server, and not as an option"


def test_who_leaves_before_the_first_page_has_nothing_to_go_on_with(url: str, gate: Gate) -> None:
    with Following("pages", url, "pages", "n:=3", f"gate={gate.path}", "--json") as reading:
        gate.wait_for("at 1")
        reading.interrupt()
        code, out = reading.end()
    assert (code, out) == (130, "")
    assert json.loads(reading.said.splitlines()[-1]) == {"left": {"pages": None, "token": None}}


def test_a_tool_that_fails_fails_the_command(url: str) -> None:
    done = run("pages", url, "failing_pages", "n:=2")
    assert done.returncode == 1
    assert done.stdout.startswith("page 1\n")


def test_a_token_of_another_call_is_refused(url: str) -> None:
    first = json.loads(run("call", url, "pages", "n:=2", "--json").stdout)
    token = first["nextResumeToken"]
    done = run("pages", url, "pages", "n:=3", "--token", token)
    assert (done.returncode, done.stdout) == (1, "")
    assert "resumeToken" in done.stderr


def test_bad_arguments_are_said_at_once() -> None:
    done = run("pages", "ws://127.0.0.1:1", "pages", "n")
    assert done.returncode == 2
    assert "key=text" in done.stderr
