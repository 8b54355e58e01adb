"""The command, as a child process that talks to a server in another."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.rigs import HERE
from tests.rigs.command import Following, run, run_as_printed, stdio_url
from tests.wire.process import CLI, Gate, ServerProcess, gate_in
from tests.wire.raw import DEADLINE_S

APP = f"{HERE / 'command_server.py'}:server"
COUNTED = [f'info: {{"n":{n}}}' for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(params=["ws", "http"])
def scheme(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def url(server: ServerProcess, scheme: str) -> str:
    return url_of(server, scheme)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


def url_of(server: ServerProcess, scheme: str) -> str:
    return server.url if scheme == "ws" else f"http://127.0.0.1:{server.http_port}/mcp"


def count(url: str, gate: Gate) -> list[str]:
    return ["call", url, "count", "n:=3", f"gate={gate.path}"]


def owned_url(server: ServerProcess) -> str:
    """The same server and journal over stdio."""
    return stdio_url(APP, "--stdio", "--journal", str(server.journal))


# Output and errors


def test_messages_go_to_stderr_and_the_result_to_stdout(url: str) -> None:
    done = run("call", url, "count", "n:=3")
    assert (done.returncode, done.stdout, done.shown) == (0, "counted 3\n", COUNTED)


def test_progress_is_a_line_each_off_a_terminal(server: ServerProcess) -> None:
    done = run("call", server.url, "progress", "total:=2")
    assert (done.returncode, done.stdout) == (0, "arrived\n")
    assert done.shown == ["1/2 step 1", "2/2 step 2"]


def test_with_json_every_line_parses(server: ServerProcess) -> None:
    done = run("call", server.url, "show_off", "--json")
    assert json.loads(done.stdout)["content"][0] == {"type": "text", "text": "[bold] :100:"}
    shown = [json.loads(line) for line in done.shown]
    assert shown[0]["params"]["data"] == "[/red] :100: \x1b[2J"
    assert shown[-1] == {"method": "notifications/odd", "params": {"odd": ["no", "object"]}}


def test_a_server_cannot_steer_the_terminal_or_break_the_bar(server: ServerProcess) -> None:
    with Following("call", server.url, "show_off", on_terminal=True) as call:
        code, out = call.end()
    assert (code, out) == (0, "[bold] :100:\n[image image/png 5 bytes]\n")
    assert "info: [/red] :100: \N{REPLACEMENT CHARACTER}[2J" in call.said


def test_there_is_a_bar_on_a_terminal(server: ServerProcess, gate: Gate) -> None:
    with Following("call", server.url, "progress", "total:=4", on_terminal=True) as call:
        assert call.end() == (0, "arrived\n")
    assert "100%" in call.said
    assert "step 4" in call.said
    assert "4/4" not in call.said


def test_arguments_are_text_or_json(server: ServerProcess) -> None:
    done = run("call", server.url, "echo", 'value:={"a": [1, null]}', "other=b=c")
    assert json.loads(done.stdout) == {"value": {"a": [1, None]}, "other": "b=c"}
    whole = run("call", server.url, "echo", "value=1", "other:=null", "--json")
    assert whole.returncode == 1, "null is no text"
    assert json.loads(whole.stdout)["isError"] is True


@pytest.mark.parametrize("pair", ["n", "=1", ":=1", "n:=one"])
def test_a_bad_argument_is_told_before_anything_is_called(pair: str) -> None:
    done = run("call", "ws://127.0.0.1:1", "count", pair)
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)
    assert pair in done.stderr


# How it ends


@pytest.mark.parametrize(
    ("tool", "stdout", "stderr"),
    [
        ("fail", "the tool says no\n", ""),
        ("nowhere", "", "Unknown tool 'nowhere'"),
        ("ask", "This client does not answer elicitation/create. (code -32601)\n", "Go on?"),
    ],
)
def test_a_tool_that_fails_is_exit_code_1(url: str, tool: str, stdout: str, stderr: str) -> None:
    done = run("call", url, tool)
    assert (done.returncode, done.stdout) == (1, stdout)
    assert stderr in done.stderr


@pytest.mark.parametrize("days", ["0", "36501"])
def test_a_lifetime_that_is_refused_is_told_its_bounds(days: str, tmp_path: Path) -> None:
    done = run("token", "new", "ada", "--expires", days, "--file", str(tmp_path / "tokens"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--expires: write days, more than 0 and up to 36500.\n"


@pytest.mark.parametrize(
    "words",
    [
        ("--nothing",),
        ("nothing",),
        ("call",),
        ("call", "ws://127.0.0.1:1", "count", "--nothing"),
        ("call", "ftp://127.0.0.1", "count"),
        ("call", "ws://127.0.0.1:99999", "count"),
        ("call", "http://127.0.0.1:99999", "count"),
        ("call", "http://me@127.0.0.1:1", "count"),
        ("poll", "ws://127.0.0.1:1"),
        ("poll", "ws://127.0.0.1:1", "name", "--all"),
        ("poll", "name", "name"),
        ("poll", "name"),
        ("resume", "ws://127.0.0.1:1", "no-ticket"),
        ("resume", "ws://127.0.0.1:1"),
        ("resume", "name"),
        ("calls", "--timeout", "0"),
        ("calls", "--forget", "name"),
    ],
)
def test_misuse_is_exit_code_2(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


TOO_LONG = "/" + "a/" * 2100 + "journal.db"  # above the 4096 bytes of a path
NAME_TOO_LONG = "a" * 256


@pytest.mark.parametrize(
    "words",
    [
        ("serve", APP, "--ws", "127.0.0.1:0", "--journal={}"),
        ("serve", APP, "--stdio", "--journal={}"),
        ("serve", APP, "--stdio", "--foreground", "--journal={}"),
        ("verify", "{}"),
        ("export", "{}"),
        ("backup", "{}", "copy.db"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", ["/", "", ".", "..", TOO_LONG, NAME_TOO_LONG], ids=range(6))
def test_what_cannot_be_a_journal_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], place: str
) -> None:
    folder = Path("/") if place == "." else tmp_path
    done = run(*(word.replace("{}", place) for word in words), cwd=folder)
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1), done.stderr
    if len(place) < 3:
        assert f"{place or '.'} is a directory: name a file in it." in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing", "", ".", TOO_LONG, NAME_TOO_LONG], ids=range(5))
def test_a_token_file_that_cannot_be_read_is_exit_code_2(tmp_path: Path, place: str) -> None:
    for verb in ("call", "pages"):
        done = run(verb, "ws://127.0.0.1:1", "tool", f"--token-file={place}", cwd=tmp_path)
        assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1), done.stderr


@pytest.mark.parametrize(
    "nowhere",
    ["ws://127.0.0.1:1", "http://127.0.0.1:1/mcp", "stdio:/no/such/program", "stdio:false"],
)
def test_a_server_that_is_not_there_is_exit_code_3(nowhere: str) -> None:
    done = run("call", nowhere, "count", "n:=1")
    assert (done.returncode, done.stdout, len(done.shown)) == (3, "", 1)
    assert done.stderr.startswith("No connection: ")


def test_a_reader_who_has_had_enough_is_no_error_of_ours(server: ServerProcess) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(
        [*CLI, "call", server.url, "count", "n:=1"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b'info: {"n":1}\n')


def test_it_tells_its_version_and_its_usage() -> None:
    assert run("--version").stdout == f"{version('mcp-streams')}\n"
    shown = run("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("serve", "call", "resume", "poll", "calls"))
    assert "demo" in shown.stdout


# Detaching and resuming


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_ctrl_c_detaches_and_what_it_prints_leads_back(
    server: ServerProcess, url: str, gate: Gate, is_elsewhere: bool
) -> None:
    with Following(*count(url, gate)) as call:
        call.wait_for('"n":3')
        call.interrupt()
        way_back = call.way_back
        assert call.end() == (130, "")
    assert "Detached" in call.said
    gate.release()
    if is_elsewhere:  # the ticket works over any transport
        done = run("resume", owned_url(server), way_back.split()[-1])
    else:
        done = run_as_printed(way_back)
    assert (done.returncode, done.stdout) == (0, "counted 3\n")
    assert '"n"' not in done.stderr, "what was seen is not shown again"


def test_a_second_ctrl_c_cancels(url: str, gate: Gate) -> None:
    with Following(*count(url, gate), on_terminal=True) as call:
        call.wait_for('"n":3')
        call.interrupt()
        way_back = call.way_back
        call.wait_for("again cancels")
        call.interrupt()
        call.wait_for("Cancelled")
        assert call.end() == (130, "")
    gate.wait_for("cancelled")
    for again in (way_back, way_back.replace("resume", "poll")):
        done = run_as_printed(again)
        assert (done.returncode, done.stdout) == (4, "")
        assert "The call was cancelled" in done.stderr


def test_with_json_the_way_back_is_json(server: ServerProcess, gate: Gate) -> None:
    with Following(*count(server.url, gate), "--json") as call:
        call.wait_for('"n":3')
        call.interrupt()
        assert call.end() == (130, "")
    told = json.loads(call.said.splitlines()[-1])["detached"]
    assert told["resume"].endswith(told["ticket"])
    gate.release()
    assert run_as_printed(told["resume"]).stdout == "counted 3\n"


def test_ctrl_c_while_nobody_answers_prints_the_way_back_too(
    tmp_path: Path, gate: Gate, scheme: str
) -> None:
    with ServerProcess(tmp_path, app=APP) as server:
        with Following(*count(url_of(server, scheme), gate)) as call:
            call.wait_for('"n":3')
            server.kill()
            call.interrupt()
            way_back = call.way_back
            assert call.end() == (130, "")
        server.start()
        done = run_as_printed(way_back)
    assert (done.returncode, done.stdout) == (1, "")
    assert "server stopped before the call was done" in done.stderr


def test_ctrl_c_before_there_is_a_call_just_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    silent = f"stdio:sh -c 'echo started > {tmp_path}/started; cat > /dev/null'"
    with Following("call", silent, "count") as call:
        with open(tmp_path / "started") as started:
            assert started.read() == "started\n"
        call.interrupt()
        assert call.end() == (130, "")


PLAIN_SERVER = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
    else:
        print(message["method"], file=sys.stderr, flush=True)
"""


def test_ctrl_c_cancels_a_call_that_was_never_announced(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_SERVER)
    with Following("call", f"stdio:{sys.executable} {tmp_path}/plain.py", "count") as call:
        call.wait_for("tools/call")
        call.interrupt()
        call.wait_for("cannot be resumed: it is cancelled")
        assert call.end() == (130, "")
    assert "notifications/cancelled" in call.said


def test_a_call_is_followed_over_the_death_of_its_server(
    tmp_path: Path, gate: Gate, scheme: str
) -> None:
    with (
        ServerProcess(tmp_path, app=APP) as server,
        Following(*count(url_of(server, scheme), gate)) as call,
    ):
        call.wait_for('"n":3')
        server.restart()
        assert call.end() == (1, "")
    lines = call.said.splitlines()
    assert lines[:3] == COUNTED
    assert "server stopped before the call was done" in lines[3]
    assert len(lines) == 4


# poll


def test_poll_takes_a_ticket_or_an_id(server: ServerProcess, url: str, gate: Gate) -> None:
    with Following(*count(owned_url(server), gate)) as call:
        call.wait_for('"n":3')
        call.interrupt()
        ticket = call.way_back.split()[-1]
        assert call.end() == (130, "")
    polled = json.loads(run("poll", url, ticket, "--json").stdout)
    (status,) = polled
    assert status["status"] == "live"
    name = status["streamId"]
    mine = run("poll", owned_url(server), name)
    assert (mine.returncode, mine.stdout.split()[:2]) == (0, [name, "running"])
    listed = run("poll", owned_url(server), "--all", "--json")
    assert name in [each["streamId"] for each in json.loads(listed.stdout)]
    theirs = run("poll", url, name)
    assert (theirs.returncode, theirs.stdout) == (4, "")
    assert "No such stream for you" in theirs.stderr
    gate.release()


def test_poll_all_asks_for_a_ticket_where_nobody_knows_who_asks(url: str) -> None:
    done = run("poll", url, "--all")
    assert (done.returncode, done.stdout, len(done.shown)) == (0, "", 1)
    assert "anonymous" in done.stderr


def test_poll_all_says_that_there_is_nothing() -> None:
    done = run("poll", stdio_url(APP), "--all", "--json")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "No stream runs" in done.stderr


def test_the_command_is_installed_under_its_name() -> None:
    done = run("--version", command=(str(Path(sys.executable).with_name("mcp-streams")),))
    assert done.returncode == 0
