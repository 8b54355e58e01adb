"""`mcp-streams bench` as a user runs it: a child process, and a server in another one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs import HERE
from tests.rigs.command import run, stdio_url
from tests.wire.process import ServerProcess

APP = f"{HERE / 'command_server.py'}:server"
QUICKLY = ("--rounds", "2", "--pings", "5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(params=["ws", "http"])
def url(request: pytest.FixtureRequest, server: ServerProcess) -> str:
    return server.url if request.param == "ws" else f"http://127.0.0.1:{server.http_port}/mcp"


def report_of(*words: str) -> dict[str, Any]:
    done = run("bench", *words, *QUICKLY, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def figures_of(report: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    return {(each["name"], each["unit"]): each["figures"] for each in report["figures"]}


def test_every_server_is_connected_to_and_pinged(url: str) -> None:
    done = run("bench", url, *QUICKLY)
    assert done.returncode == 0
    title, _, *rows = done.stdout.splitlines()
    assert title.strip() == "command-tests, MCP 2025-11-25"
    assert [row.split()[0].strip(",") for row in rows] == ["connect", "initialize", "ping", "ping"]
    assert "Name a tool" in done.stderr
    assert "echo" in done.stderr


def test_a_tool_is_followed_and_then_cut_off_and_resumed(url: str) -> None:
    report = report_of(url, "count", "n:=20")
    figures = figures_of(report)
    assert report["notResumed"] is None
    assert figures["live", "messages"] == [20, 20]
    assert figures["resumed", "messages"] == [19, 19]
    assert all(rate > 0 for what in ("live", "resumed") for rate in figures[what, "messages/s"])


def test_every_figure_has_its_median_and_its_span(url: str) -> None:
    for each in report_of(url)["figures"]:
        assert len(each["figures"]) == 2
        assert each["lowest"] == min(each["figures"])
        assert each["lowest"] <= each["median"] <= each["highest"] == max(each["figures"])


def test_a_tool_that_is_not_there_is_named_beside_those_that_are(url: str) -> None:
    done = run("bench", url, "nothing", *QUICKLY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("There is no tool nothing. There are: ")
    assert "count" in done.stderr


def test_a_tool_that_fails_is_not_measured(url: str) -> None:
    done = run("bench", url, "fail", *QUICKLY)
    assert (done.returncode, done.stdout) == (1, "")
    assert "The tool failed" in done.stderr


def test_a_tool_that_says_nothing_has_no_rate_and_is_not_cut(url: str) -> None:
    report = report_of(url, "echo", "value=x")
    assert "no message" in report["notResumed"]
    figures = figures_of(report)
    assert figures["live", "messages"] == [0, 0]
    assert ("live", "messages/s") not in figures
    assert not [name for name, _ in figures if name == "resumed"]


def test_a_server_that_ends_with_its_connection_cannot_be_resumed() -> None:
    done = run("bench", stdio_url(APP), "count", "n:=3", *QUICKLY)
    assert done.returncode == 0
    assert "live" in done.stdout
    assert "resumed" not in done.stdout
    assert "Not resumed: " in done.stderr


def test_who_takes_too_long_is_given_up(url: str) -> None:
    done = run("bench", url, "forever", *QUICKLY, "--timeout", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--timeout" in done.stderr


@pytest.mark.parametrize(
    "words",
    [("--rounds", "0"), ("--pings", "0"), ("--timeout", "0"), ("count", "n")],
)
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...]) -> None:
    done = run("bench", "ws://127.0.0.1:1", *words)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_server_that_is_not_there_is_said_so(server: ServerProcess) -> None:
    done = run("bench", "ws://127.0.0.1:1", *QUICKLY)
    assert (done.returncode, done.stdout) == (3, "")
    assert "No connection" in done.stderr
