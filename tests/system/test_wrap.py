"""`mcp-streams wrap`: real processes, over stdio, HTTP and WebSocket."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import trio
from mcp import StdioServerParameters
from mcp.client.client import Client as SdkClient
from mcp.client.stdio import stdio_client

from streams import Client
from streams.errors import CallFailed, CannotConnect
from streams.process import state
from tests.acceptance.launch import owner_pid, wait_for_end
from tests.rigs import HERE
from tests.rigs.command import run
from tests.system.test_systemd import service, url_of
from tests.wire.process import CLI
from tests.wire.raw import DEADLINE_S
from transports import dial, stdio

SERVER = (sys.executable, str(HERE / "stdio_server.py"))
ABOUT = {"name": "host", "version": "1"}
SOON = ("--linger=0.5", "--stop-timeout=1")  # so that what a test has started soon ends


@pytest.fixture(autouse=True)
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the journals that the command makes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mcp-streams"


def journals(states: Path) -> list[Path]:
    return sorted(states.glob("*.db"))


def patient(dialer: Any) -> Client:
    """A client that gives the child of a busy machine time to load."""
    return Client(dialer, connect_timeout_s=DEADLINE_S)


def wrapping(*options: str, command: tuple[str, ...] = SERVER) -> list[str]:
    given = {option.partition("=")[0] for option in options}
    soon = [option for option in SOON if option.partition("=")[0] not in given]
    return [*CLI, "wrap", *soon, *options, "--", *command]


def client(*options: str, command: tuple[str, ...] = SERVER, **how: Any) -> Client:
    """A client that starts `wrap` as a host does."""
    return patient(partial(stdio.connect, wrapping(*options, command=command), **how))


async def text(client: Client, tool: str, /, **arguments: Any) -> str:
    async with client.call(tool, arguments) as call:
        result = await call.result()
    return str(result["content"][0]["text"])


async def pid(client: Client) -> int:
    """The child that answers this client."""
    return int((await text(client, "process")).split("\n")[0])


async def begun(file: Path) -> list[int]:
    """The processes in which `wait` was called for this file: at least one."""
    calls = Path(f"{file}.calls")
    while not calls.exists() or not calls.read_text().endswith("\n"):
        await trio.sleep(0.01)
    return [int(line) for line in calls.read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until this holds, in a test without trio."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def greet(relay: "subprocess.Popen[str]") -> None:
    """Initialize, as a host does, and read the answer."""
    assert relay.stdin is not None
    assert relay.stdout is not None
    hello = {"protocolVersion": "2025-11-25", "clientInfo": ABOUT, "capabilities": {}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    relay.stdin.write(json.dumps(request) + "\n")
    relay.stdin.flush()
    assert "result" in json.loads(relay.stdout.readline())


class Wrapped:
    """`wrap --http --ws` in the foreground."""

    def __init__(self, *options: str, command: tuple[str, ...] = SERVER) -> None:
        self.log = ""
        where = ("--http=127.0.0.1:0", "--ws=127.0.0.1:0")
        self.process = subprocess.Popen(
            wrapping(*where, *options, command=command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = self.hear(r"http://\S+")
        self.ws = re.findall(r"ws://\S+", self.log)[0]

    def hear(self, what: str) -> str:
        assert self.process.stderr is not None
        while not (found := re.search(what, self.log)):
            line = self.process.stderr.readline()
            assert line, self.log
            self.log += line
        return found[0]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self.log += self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode


@contextmanager
def wrapped(*options: str, command: tuple[str, ...] = SERVER) -> Iterator[Wrapped]:
    started = Wrapped(*options, command=command)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


# One call over each transport


def test_an_official_client_starts_it_as_any_stdio_server(states: Path) -> None:
    async def main() -> tuple[list[str], Any]:
        command, *words = wrapping()
        how = StdioServerParameters(command=command, args=words, env=dict(os.environ))
        async with SdkClient(stdio_client(how)) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            result = await client.call_tool("add", {"a": 1, "b": 2})
            return tools, result.structured_content

    tools, result = trio.run(main)
    assert tools == ["add", "process", "descriptors", "variable", "count", "wait"]
    assert result == {"result": 3}
    [journal] = journals(states)
    assert journal.name.startswith("stdio_server-")
    assert stat.S_IMODE(states.stat().st_mode) == 0o700
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600


async def test_it_serves_http_and_websocket() -> None:
    with wrapped() as server:
        for url in (server.http, server.ws):
            async with patient(dial(url)) as client:
                assert client.server_info == {"name": "small", "version": "1.5"}
                assert client.instructions == "Add numbers."
                assert await text(client, "add", a=20, b=22) == "42"
        assert server.end(signal.SIGTERM) == 0


# Children


async def test_each_host_has_a_child_of_its_own_under_one_owner(states: Path) -> None:
    async with client() as one, client() as two:
        assert await pid(one) != await pid(two)
        [journal] = journals(states)
        owner = owner_pid(journal)
    wait_for_end(owner)


async def test_without_isolation_two_hosts_share_a_child(states: Path) -> None:
    async with client("--isolate=none") as one, client("--isolate=none") as two:
        assert await pid(one) == await pid(two)
    async with client() as third:
        await pid(third)
    assert len(journals(states)) == 2, "another isolation is another owner"


async def test_a_child_has_nothing_open_but_its_standard_streams() -> None:
    async with client() as one:
        assert await text(one, "descriptors") == ""


async def test_all_words_behind_the_dashes_are_the_commands(tmp_path: Path) -> None:
    words = (
        "x" * 20_000,
        "--http",
        "3",
        "--json",
        "--help",
        "--config",
        "x",
        "--",
        "--version",
        "-h",
    )
    async with client(command=(*SERVER, *words)) as one:
        assert (await text(one, "process")).split("\n")[2:] == list(words)


# The environment and the folder


async def test_the_environment_of_the_host_reaches_the_child(tmp_path: Path) -> None:
    env = {**os.environ, "API_KEY": "of-host", "OTHER": "of-host"}
    (tmp_path / "there").mkdir()
    async with client(
        "--env=OTHER=of-option=1", f"--cwd={tmp_path / 'there'}", env=env, cwd=tmp_path
    ) as one:
        assert await text(one, "variable", name="API_KEY") == "of-host"
        assert await text(one, "variable", name="OTHER") == "of-option=1"
        assert (await text(one, "process")).split("\n")[1] == str(tmp_path / "there")


async def test_no_host_gets_the_secrets_of_another_one(states: Path) -> None:
    first, second = ({**os.environ, "API_KEY": secret} for secret in ("first", "second"))
    async with client(env=first) as one, client(env=second) as two:
        assert await text(one, "variable", name="API_KEY") == "first"
        assert await text(two, "variable", name="API_KEY") == "second"
    assert len(journals(states)) == 2


async def test_the_terminal_of_a_host_does_not_count(states: Path) -> None:
    first, second = ({**os.environ, "TERM_SESSION_ID": each, "PWD": each} for each in "ab")
    async with client(env=first) as one, client(env=second) as two:
        await pid(one)
        await pid(two)
    assert len(journals(states)) == 1


async def test_another_environment_on_one_journal_is_refused(tmp_path: Path) -> None:
    journal = f"--journal={tmp_path / 'own.db'}"
    async with client(journal) as one:
        await pid(one)
        done = run("wrap", journal, "--", *SERVER, env={"API_KEY": "second"})
    assert done.returncode == 2
    assert "was started in another environment: use another --journal" in done.stderr
    assert "second" not in done.stderr


async def test_another_command_on_one_journal_is_refused(tmp_path: Path) -> None:
    journal = f"--journal={tmp_path / 'own.db'}"
    async with client(journal) as one:
        await pid(one)
        done = run("wrap", journal, "--", *SERVER, "more")
        other = run("wrap", journal, f"--cwd={tmp_path}", "--", *SERVER)
    assert (done.returncode, other.returncode) == (2, 2)
    assert "stdio_server.py more`" in done.stderr
    assert str(tmp_path) in other.stderr


async def test_no_process_shows_a_variable_on_its_command_line(states: Path) -> None:
    env = {**os.environ, "MCP_STREAMS_WRAP_ENV": "API_KEY=very-secret"}
    async with client(env=env) as one:
        assert await text(one, "variable", name="API_KEY") == "very-secret"
        [journal] = journals(states)
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            if str(os.getpid()) != process.parent.name:
                assert b"very-secret" not in process.read_bytes(), process
        assert owner_pid(journal)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("npx -y @modelcontextprotocol/server-everything@1.0 stdio", "server-everything"),
        ("uvx mcp-server-git --repository .", "mcp-server-git"),
        ("uvx --python 3.12 mcp-server-git==1.0", "mcp-server-git"),
        ("uvx --from some-package==2 some-command", "some-package"),
        ("uv run --directory /srv server.py", "server"),
        ("/usr/bin/python3.12 -m package.server", "package.server"),
        ("node build/index.js", "index"),
        ("docker run -i --rm -e KEY mcp/github", "github"),
        ("/opt/some-server --npx", "some-server"),
        ("python", "python"),
        ("../", ".."),
    ],
)
def test_a_journal_has_the_name_of_what_runs(command: str, name: str) -> None:
    assert state.name_of_command(command.split()) == name
    path = state.journal_of(Path("/state"), name, "0123456789abcdef0123")
    assert path.parent == Path("/state")
    assert re.fullmatch(r"[\w.-]+-0123456789abcdef\.db", path.name)


async def test_a_name_is_another_journal(states: Path) -> None:
    for name in ("one", "two/../x"):
        async with client(f"--name={name}") as one:
            await pid(one)
    assert [path.name.rpartition("-")[0] for path in journals(states)] == ["one", "two-..-x"]


# Ends, of all kinds


async def test_a_call_outlives_its_host_and_another_one_gets_its_result(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with trio.fail_after(DEADLINE_S):
        async with client("--linger=20") as one, one.call("wait", {"file": str(file)}) as call:
            [child] = await begun(file)
            while (ticket := call.ticket) is None:
                await trio.sleep(0.01)
        file.touch()
        async with client("--linger=0.5") as two, two.resume(ticket) as call:
            result = await call.result()
    assert result["content"][0]["text"] == "waited"
    assert await begun(file) == [child], "it has run once"


async def test_a_killed_relay_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "go"
    relays: list[int] = []

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        """A relay, whose process the test knows."""
        async with stdio.connect(wrapping("--linger=20")) as channel:
            number = int(channel.principal.removeprefix("child(").removesuffix(")"))
            relays.append(number)
            yield channel

    with trio.fail_after(DEADLINE_S):
        async with patient(start) as one, one.call("wait", {"file": str(file)}) as call:
            [child] = await begun(file)
            while call.ticket is None:
                await trio.sleep(0.01)
            os.kill(relays[0], signal.SIGKILL)
            while len(relays) < 2:  # the client has started another one
                await trio.sleep(0.01)
            file.touch()
            result = await call.result()
    assert result["content"][0]["text"] == "waited"
    assert await begun(file) == [child], "it has run once"


async def test_a_killed_child_ends_its_call_and_the_next_call_has_another_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "go"
    with trio.fail_after(DEADLINE_S):
        async with client() as one:
            async with one.call("wait", {"file": str(file)}) as call:
                [child] = await begun(file)
                os.kill(child, signal.SIGKILL)
                with pytest.raises(CallFailed) as failed:
                    await call.result()
            assert failed.value.data["reason"] == "interrupted"
            assert failed.value.data["signal"] == "SIGKILL"
            assert await pid(one) != child


async def test_a_killed_owner_takes_its_children_with_it_and_the_next_one_tells_of_the_call(
    tmp_path: Path, states: Path
) -> None:
    file = tmp_path / "go"
    with trio.fail_after(DEADLINE_S):
        async with client() as one:
            async with one.call("wait", {"file": str(file)}) as call:
                [child] = await begun(file)
                while not call.ticket:
                    await trio.sleep(0.01)
                [journal] = journals(states)
                owner = owner_pid(journal)
                os.kill(owner, signal.SIGKILL)
                wait_for_end(child)
                with pytest.raises(CallFailed) as failed:  # the client has started another relay
                    await call.result()
                assert failed.value.data["reason"] == "interrupted"
            assert await text(one, "add", a=1, b=1) == "2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_all_children(tmp_path: Path, number: signal.Signals) -> None:
    with trio.fail_after(DEADLINE_S), wrapped() as server:
        async with patient(dial(server.ws)) as one, patient(dial(server.http)) as two:
            children = [await pid(one), await pid(two)]
            assert all(map(is_running, children))
            assert await trio.to_thread.run_sync(server.end, number) == 0
            assert not any(map(is_running, children))
    assert "Traceback" not in server.log


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {grandchild.pid}\\n")
for line in sys.stdin:
    if '"initialize"' in line:
        print('{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-06-18","capabilities":{},'
            '"serverInfo":{"name":"stubborn","version":"1"}}}'.replace('"id":0', '"id":' +
            line.partition('"id":')[2].partition(",")[0].rstrip("}\\n ")), flush=True)
time.sleep(600)
"""


async def test_a_child_that_ignores_everything_is_killed_with_its_own_children(
    tmp_path: Path,
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = (sys.executable, str(tmp_path / "stubborn.py"), str(tmp_path / "pids"))
    with trio.fail_after(DEADLINE_S), wrapped("--stop-timeout=3", command=command) as server:
        async with patient(dial(server.ws)) as one:
            assert one.server_info["name"] == "stubborn"
            pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
            assert await trio.to_thread.run_sync(server.end, signal.SIGTERM) == 0
            assert not any(map(is_running, pids))


async def test_a_command_that_is_down_for_good_ends_the_process() -> None:
    with trio.fail_after(DEADLINE_S), wrapped("--isolate=none", "--restart=never") as server:
        async with patient(dial(server.ws)) as one:
            os.kill(await pid(one), signal.SIGKILL)
            assert await trio.to_thread.run_sync(server.wait) == 2
    assert "it is not started again" in server.log
    assert "Traceback" not in server.log


def test_the_relays_of_a_command_that_is_down_for_good_fail_too() -> None:
    words = wrapping("--isolate=none", "--restart=never")
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        about = {"name": "host", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "clientInfo": about, "capabilities": {}}
        call = {"name": "process", "arguments": {}}
        for number, method, params in ((1, "initialize", hello), (2, "tools/call", call)):
            request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            relay.stdin.write(json.dumps(request) + "\n")
            relay.stdin.flush()
            answer = json.loads(relay.stdout.readline())
        child = int(answer["result"]["content"][0]["text"].split("\n")[0])
        os.kill(child, signal.SIGKILL)
        relay.wait(DEADLINE_S)
        said = relay.communicate()[1]
    assert (relay.returncode, "it is not started again" in said) == (2, True), said


@pytest.mark.parametrize(
    ("number", "code", "why"), [(signal.SIGKILL, 2, "was killed"), (signal.SIGTERM, 0, "")]
)
def test_a_relay_fails_when_its_owner_is_killed_and_not_when_it_is_shut_down(
    states: Path, number: signal.Signals, code: int, why: str
) -> None:
    with subprocess.Popen(wrapping(), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as relay:
        greet(relay)
        [journal] = journals(states)
        os.kill(owner_pid(journal), number)
        relay.wait(DEADLINE_S)
        said = relay.communicate()[1]
    assert (relay.returncode, why in said, bool(said)) == (code, True, bool(why)), said


def test_a_relay_whose_client_has_ended_is_content(states: Path) -> None:
    with subprocess.Popen(wrapping(), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as relay:
        greet(relay)
        said = relay.communicate(timeout=DEADLINE_S)[1]
    assert (relay.returncode, said) == (0, "")


def test_a_relay_that_is_killed_while_its_child_starts_leaves_no_child(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    slow = (
        "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(300)"
    )
    command = (sys.executable, "-c", slow, str(file))
    patient_start = wrapping("--start-timeout=300", command=command)
    with subprocess.Popen(patient_start, stdin=PIPE, stdout=PIPE, text=True) as relay:
        assert relay.stdin is not None
        hello = {"protocolVersion": "2025-11-25", "clientInfo": ABOUT, "capabilities": {}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        relay.stdin.write(json.dumps(request) + "\n")
        relay.stdin.flush()
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
        relay.kill()
        relay.wait()
        # As in Node, the host has the read end of the pipe open as long as the owner has the other.
        wait_until(lambda: not is_running(int(file.read_text())))


# The owner is one process


def test_relays_that_start_at_once_share_an_owner(states: Path) -> None:
    async def main() -> list[int]:
        children = []

        async def one() -> None:
            async with client("--linger=2") as host:
                children.append(await pid(host))

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
        return children

    assert len(set(trio.run(main))) == 4
    assert len(journals(states)) == 1


def test_a_relay_tells_which_options_of_its_own_do_not_count() -> None:
    """They would be ignored without a word: the owner has those of its first relay."""

    def relaying(*options: str) -> "subprocess.Popen[str]":
        words = wrapping("--isolate=none", *options)
        return subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)

    with relaying() as first:
        greet(first)
        with relaying("--restart=never", "--patience=50") as second:
            said = second.communicate(timeout=DEADLINE_S)[1]
        with relaying() as third:
            greet(third)
            assert third.communicate(timeout=DEADLINE_S)[1] == ""
        assert first.communicate(timeout=DEADLINE_S)[1] == ""
    assert said.startswith("mcp-streams: The owner of this journal runs with other options")
    assert "--patience none (here: 50), --restart on-failure (here: never)" in said
    assert said.count("\n") == 1


# --check


def test_check_prints_what_it_found(states: Path) -> None:
    done = run("wrap", "--check", "--", *SERVER)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("small 1.5, MCP 2025-")
    assert second == "tools: 6 (add, process, descriptors, variable, count, wait)"
    assert not journals(states)


def test_check_prints_json() -> None:
    done = run("wrap", "--check", "--json", "--", *SERVER)
    found = json.loads(done.stdout)
    assert (found["name"], found["version"], found["tools"]) == ("small", "1.5", 6)
    assert found["protocol"].startswith("2025-")
    assert found["toolNames"][0] == "add"
    assert done.stderr == ""


BARE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        result = {RESULT}
    elif asked["method"] == "tools/list":
        LIST
        result = {"tools": []}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
TOOLS = '"capabilities": {"tools": {}}'


@pytest.mark.parametrize(
    ("about", "named"),
    [
        ("{}", "a server without a name, MCP "),
        ('{"name": "demo"}', "demo, MCP "),
        ('{"name": "demo", "version": "2"}', "demo 2, MCP "),
    ],
)
def test_check_leaves_out_what_a_server_does_not_say(about: str, named: str) -> None:
    code = BARE.replace("RESULT", f'{TOOLS}, "serverInfo": {about}').replace("LIST", "pass")
    done = run("wrap", "--check", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(named)


def test_check_says_which_list_did_not_come() -> None:
    code = BARE.replace("RESULT", TOOLS).replace("LIST", "continue")
    words = ("wrap", "--check", "--start-timeout=15", "--stop-timeout=0.2")
    done = run(*words, "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert "not tools/list within 15 s" in done.stderr


REFUSES = """
input()
print('{"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "no licence", "data": "x"}}')
input()
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no licence\\nask the owner')", "no licence\nask the owner"),
        ("import time; time.sleep(60)", "within"),
        ("import sys; sys.stdin.readline(); print('hello')", ""),
        ("print('Usage: wrong')", ""),
        (REFUSES, "no licence"),
    ],
)
def test_check_fails_with_the_last_words_of_the_command(code: str, why: str) -> None:
    timeout_s = 2 if "sleep" in code else 60  # only one of them has nothing to say
    words = ("wrap", "--check", f"--start-timeout={timeout_s}", "--stop-timeout=0.2")
    done = run(*words, "--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr
    as_json = run(*words, "--json", "--", sys.executable, "-c", code)
    assert as_json.returncode == 1
    assert "message" in json.loads(as_json.shown[-1])["error"]


# Usage and settings


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "mcp-streams wrap [OPTIONS] -- npx -y some-server"),
        (["--"], "no command: write the command behind --"),
        (["npx", "-y", "x"], "To wrap a command, write the command behind --"),
        (["python3"], "write the command behind --"),
        (["--", "no-such-program"], "PATH has no program no-such-program"),
        (["--", "./no/such"], "is no program"),
        (["--", ""], "no program"),
        (["--cwd=/no/such", "--", "true"], "--cwd: there is no folder /no/such"),
        ([f"--cwd=/{'x' * 300}", "--", "true"], "--cwd: there is no folder /xxx"),
        (["--env=KEY", "--", "true"], "--env: write NAME=VALUE"),
        (["--isolate=all", "--", "true"], "session"),
        (["--children-max=0", "--", "true"], "--children-max: write a number above 0"),
        (["--start-timeout=0", "--", "true"], "--start-timeout: write seconds, more than 0"),
        (["--stop-timeout=soon", "--", "true"], "soon is no time: write seconds"),
        (["--watchdog=99999d", "--", "true"], "99999d is too long: write 1000000000 seconds at"),
        (["--patience=0", "--", "true"], "--patience: write seconds, more than 0"),
        (["--patience=1d", "--", "true"], "--patience: write seconds, more than 0 and less than a"),
        (["--once=", "--", "true"], "--once: a name is empty"),
        (["--rerun=a,,b", "--", "true"], "--rerun: a name is empty"),
        (["--limit=x=1", "--", "true"], "--limit: unknown x"),
        (["--limit=resident_max=-1", "--", "true"], "resident_max must be 0 or more, not -1"),
        (["--http=8080", "--", "true"], "write HOST:PORT"),
        (["--http=0.0.0.0:0", "--", "true"], "--insecure-anonymous"),
        (["--journal=/no/such/j.db", "--", "true"], "/no/such"),
    ],
)
def test_wrong_usage_says_what_to_do(words: list[str], why: str) -> None:
    done = run("wrap", *words)
    assert (done.returncode, done.stdout) == (2, "")
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert why in shown


def test_where_no_journal_can_be_made_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = run("wrap", "--", *SERVER, env={"XDG_STATE_HOME": str(tmp_path / "taken")})
    assert done.returncode == 2
    assert "name one with --journal" in done.stderr


async def test_settings_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[wrap]\nenv = ["ONE=of-file"]\njournal = "{tmp_path / "own.db"}"\nlinger = "500ms"\n'
    )
    env = {
        **os.environ,
        "MCP_STREAMS_CONFIG": str(settings),
        "MCP_STREAMS_WRAP_CWD": str(tmp_path),
    }
    async with client(env=env) as one:
        assert await text(one, "variable", name="ONE") == "of-file"
        assert (await text(one, "process")).split("\n")[1] == str(tmp_path)
    assert (tmp_path / "own.db").exists()
    settings.write_text("[wrap]\nisolated = 1\n")
    done = run("wrap", "--config", str(settings), "--", *SERVER)
    assert "wrap.isolated is no setting of mcp-streams wrap; did you mean isolate?" in done.stderr


async def test_a_bearer_token_is_asked_for(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    token = run("token", "new", "ada", "--file", str(tokens)).stdout.strip()
    assert token, "no token"
    with wrapped(f"--auth-tokens={tokens}") as server:
        with pytest.raises(CannotConnect):
            async with patient(dial(server.http)):
                pass
        async with patient(dial(server.http, token=token)) as one:
            assert await text(one, "add", a=1, b=2) == "3"


def test_systemds_socket_is_served_and_no_child_has_it(tmp_path: Path) -> None:
    async def main(url: str) -> Mapping[str, Any]:
        async with patient(dial(url)) as one:
            return {
                "variables": [
                    await text(one, "variable", name=name)
                    for name in ("LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET")
                ],
                "open": await text(one, "descriptors"),
            }

    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = ("wrap", "--http=127.0.0.1:0", *SOON, "--", *SERVER)
        with service(tmp_path, [listening], *words) as started:
            assert started.notice() == "READY=1"
            found = trio.run(main, url_of(listening))
            started.end()
            assert started.notice() == "STOPPING=1"
    assert found["variables"] == ["", "", ""]
    assert found["open"] == ""


def test_a_relay_of_a_command_loads_nothing_that_takes_time() -> None:
    code = (
        "import sys, streams.cli.command, streams.cli.wrap, streams.process.relay; "
        "import streams.process.state; "
        "print('\\n'.join(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"trio", "structlog", "sqlite3", "jsonschema_rs", "mcp"} & set(loaded)
