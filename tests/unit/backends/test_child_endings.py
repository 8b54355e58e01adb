"""The ends of children: at the start, in a call, by a signal, and together with this process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from streams.backends import process
from streams.backends.secrets import Secrets
from streams.backends.supervision import DEATHS_MAX
from tests.rigs import ROOT
from tests.rigs.children import call, settings, state, text, wrapped
from tests.rigs.server import PLAIN, House, Json, Talker


async def refused(house: House) -> Json:
    """The error of `initialize`."""
    cable = house.cable()
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x"}}
    return await Talker(cable.near, cable).request("hello", "initialize", **hello)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter between the open and the read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def gone(*pids: int) -> None:
    """Wait until all these processes have ended."""
    with trio.fail_after(10):
        while any(map(is_alive, pids)):
            await trio.sleep(0.01)


# At the start


@pytest.mark.parametrize("code", [0, 3])
async def test_a_child_that_ends_at_once_fails_initialize(code: int) -> None:
    async with wrapped(does={"start": "exit", "code": code}) as (house, backend):
        began_at = trio.current_time()
        error = await refused(house)
        assert trio.current_time() - began_at < 10
        assert error["code"] == -32603
        assert error["data"] == {
            "reason": "start_failed",
            "exitCode": code,
            "stderrTail": "I cannot start: no database\n",
        }
        assert f"exit code {code}" in error["message"]
        assert "I cannot start: no database" in error["message"]
        assert backend.children == []


async def test_a_silent_child_fails_initialize_after_the_timeout() -> None:
    async with wrapped(does={"start": "silent"}, start_timeout_s=1.0) as (house, backend):
        error = await refused(house)
        assert "has not answered initialize within 1 s" in error["message"]
        assert "I am silent" in error["message"]
        assert error["data"]["reason"] == "start_failed"
        assert backend.children == []


async def test_a_child_that_prints_nothing_but_garbage_fails_initialize() -> None:
    async with wrapped(does={"start": "garbage"}) as (house, _):
        assert "no MCP server" in (await refused(house))["message"]


async def test_a_child_may_refuse_to_initialize_in_its_own_words() -> None:
    async with wrapped(does={"start": "refuses"}) as (house, backend):
        error = await refused(house)
        assert error == {"code": -32000, "message": "Not today", "data": {"a": 1}}
        await gone(*backend.children)


@pytest.mark.parametrize("isolate", ["session", "none", "call"])
@pytest.mark.parametrize("revision", [1, None])
async def test_a_revision_that_is_no_text_fails_initialize(revision: Any, isolate: str) -> None:
    does = {"hello": json.dumps({"protocolVersion": revision})}
    async with wrapped(does=does, isolate=isolate) as (house, backend):
        error = await refused(house)
        assert error["data"] == {"reason": "start_failed"}
        assert "unreadable answer to initialize" in error["message"]
        assert "$.protocolVersion" in error["message"]
        assert not backend.guests
        await gone(*backend.children)


@pytest.mark.parametrize("isolate", ["session", "none", "call"])
@pytest.mark.parametrize("capabilities", [[], None])
async def test_capabilities_that_are_no_object_count_as_none(
    capabilities: Any, isolate: str
) -> None:
    does = {"hello": json.dumps({"capabilities": capabilities})}
    async with wrapped(does=does, isolate=isolate) as (house, _):
        talker = await house.dial(PLAIN)
        assert text(await call(talker, "echo", a=1)) == '{"a": 1}'


@pytest.mark.parametrize("data", ["no licence", [1]])
async def test_the_error_of_a_child_may_have_any_data(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.backends.supervision.BACKOFF_MAX_S", 0.02)
    does = {"start": "refuses", "data": json.dumps(data)}
    async with wrapped(isolate="none", does=does) as (house, _):
        for _ in range(DEATHS_MAX):
            assert await refused(house) == {"code": -32000, "message": "Not today", "data": data}
        error = await refused(house)
        assert error["data"] == {"reason": "backend_down"}
        assert error["message"].startswith("Not today. It is not started again")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": ("/no/such/program",)}, "No such file or directory /no/such/program"),
        ({"command": ("/etc/passwd",)}, "Permission denied"),
        ({"command": (sys.executable,), "cwd": "/no/such/folder"}, "/no/such/folder"),
    ],
)
async def test_a_command_that_cannot_be_started_is_refused(given: Json, words: str) -> None:
    async with wrapped(**given) as (house, _):
        error = await refused(house)
        assert error["data"] == {"reason": "start_failed"}
        assert words in error["message"]


async def test_no_process_can_be_started_for_one_session_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)

        def fork(*_: Any) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        with monkeypatch.context() as patch:
            patch.setattr(process, "_popen", fork)
            error = await refused(house)
        assert "Resource temporarily unavailable" in error["message"]
        assert text(await call(talker, "echo")) == "{}"
        assert text(await call(await house.dial(PLAIN), "echo")) == "{}"


# In a call


@pytest.mark.parametrize(
    ("how", "details", "words"),
    [
        ({"code": 0}, {"exitCode": 0}, "exit code 0"),
        ({"code": 5}, {"exitCode": 5}, "exit code 5"),
        ({"signal": "SIGKILL"}, {"signal": "SIGKILL"}, "signal SIGKILL"),
        ({"signal": "SIGSEGV"}, {"signal": "SIGSEGV"}, "signal SIGSEGV"),
    ],
)
async def test_a_child_that_dies_ends_its_calls(how: Json, details: Json, words: str) -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "never")
        await talker.call(2, "leave", **how)
        errors: list[Json] = []
        while len(errors) < 2:
            errors += filter(None, [(await talker.read()).get("error")])
        for error in errors:
            assert error["code"] == -32603
            assert error["data"] == {
                "reason": "interrupted",
                **details,
                "stderrTail": "last words\n",
            }
            assert f"({words}: 'last words')" in error["message"]
        assert text(await call(talker, "echo", 3)) == "{}"


async def test_what_a_child_said_before_its_death_comes_first() -> None:
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "leave", first=500)
        await talker.answer(1)
        assert len(talker.seen) == 501


async def test_a_client_that_is_away_finds_the_interrupted_call() -> None:
    async with wrapped() as (house, _):
        first = await house.dial({"streams": {}})
        stream = await first.begin(1, "never")
        pid = (await state(first))["pid"]
        await first.channel.aclose()
        os.kill(pid, signal.SIGKILL)
        second = await house.dial({"streams": {}})
        told = await second.resume(2, stream)
        (error,) = (each["error"] for each in told if "error" in each)
        assert error["data"]["signal"] == "SIGKILL"


async def test_secrets_are_struck_out_of_the_last_words() -> None:
    secret = "s3cr3t-value"
    words = f"connecting with {secret} and hunter22 to db://me:pa55word@host"
    given = {
        "env": {"API_KEY": secret, "URL": "db://me:pa55word@host"},
        "command": (*settings().command, "--password", "hunter22"),
    }
    async with wrapped(**given) as (house, _):
        error = await call(await house.dial(PLAIN), "leave", words=words)
        told = error["message"] + error["data"]["stderrTail"]
        assert "connecting with [redacted] and [redacted]" in told
        assert not any(each in told for each in (secret, "hunter22", "pa55word"))


@pytest.mark.parametrize(
    "words",
    [
        "token=abcdefgh",
        "PASSWORD: abcdefgh",
        "{'api_key': 'abcdefgh'}",
        '{"client_secret":"abcdefgh"}',
        "postgres://me:abcdefgh@host/db",
        "Authorization: Bearer abcdefgh",
        "sk-proj-abcdefgh0123456789",
        "ghp_abcdefgh0123456789",
    ],
)
def test_secrets_are_known_by_their_forms(words: str) -> None:
    assert "abcdefgh" not in Secrets({}, ()).struck_out(f"Failed with {words}, sorry.")


@pytest.mark.parametrize(
    ("env", "command"),
    [
        ({"GITHUB_TOKEN": "abcdef"}, ()),
        ({"db_password": "abcdef"}, ()),
        ({"PGPASS": "x", "MY_PASS": "abcdef"}, ()),
        ({"PEM_KEY": "BEGIN\nabcdef\nEND"}, ()),
        ({}, ("--token", "abcdef")),
        ({}, ("--api-key=abcdef",)),
        ({}, ("AUTH_TOKEN=abcdef",)),
        ({"X": "https://u:abcdef@h/"}, ()),
        ({}, ("redis://:abcdef@h",)),
    ],
)
def test_secrets_are_known_by_their_names(env: dict[str, str], command: tuple[str, ...]) -> None:
    assert Secrets(env, command).struck_out("is abcdef.") == "is [redacted]."


@pytest.mark.parametrize("word", ["ab", "a.", "token", "token-", "token.", "token=", "redis://"])
def test_a_long_line_is_searched_in_a_moment(word: str) -> None:
    line = word * (300_000 // len(word))  # it was minutes, in which nothing else ran
    assert ("[redacted]" in Secrets({}, ()).struck_out(line)) == (word == "token=")


def test_usual_variables_are_no_secrets() -> None:
    usual = {"PWD": "/home/me", "OLDPWD": "/tmp/x", "PATH": "/usr/bin", "LANG": "en_US"}
    text = "in /home/me, /tmp/x and /usr/bin: en_US"
    assert Secrets(usual, ("run", "--verbose", "fast")).struck_out(text) == text


async def test_the_last_words_have_2_kib() -> None:
    async with wrapped() as (house, _):
        error = await call(await house.dial(PLAIN), "leave", words="a" * 5000 + "\n" + "b" * 100)
        assert len(error["data"]["stderrTail"]) == 2048
        assert error["data"]["stderrTail"].endswith("b" * 100 + "\n")
        assert len(error["message"]) < 500


@pytest.mark.parametrize("stderr", ["null", "inherit"])
async def test_standard_error_may_go_elsewhere(stderr: Any, capfd: Any) -> None:
    async with wrapped(stderr=stderr) as (house, _):
        error = await call(await house.dial(PLAIN), "leave", words="elsewhere")
        assert error["data"] == {"reason": "interrupted", "exitCode": 0}
    assert ("elsewhere" in capfd.readouterr().err) == (stderr == "inherit")


async def test_standard_error_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        async with wrapped() as (house, _):
            await call(await house.dial(PLAIN), "leave", words="hear me")
    assert "hear me" in [each.get("line") for each in logs]


async def test_garbage_is_logged_once_for_each_child() -> None:
    with structlog.testing.capture_logs() as logs:
        async with wrapped() as (house, _):
            talker = await house.dial(PLAIN)
            await call(talker, "garbage", n=20)
            await call(talker, "garbage", 2, n=20)
    found = [each for each in logs if "no JSON-RPC" in each["event"]]
    assert [each["line"] for each in found] == ["garbage 0"]


# Children that do not end


async def test_a_child_that_dies_takes_along_what_it_has_forked(tmp_path: Path) -> None:
    async with wrapped() as (house, _):
        file = tmp_path / "pid"
        error = await call(await house.dial(PLAIN), "fork", file=str(file))
        assert error["data"]["exitCode"] == 3
        await gone(int(file.read_text()))


@pytest.mark.parametrize("does", [{}, {"start": "stubborn"}])
async def test_nothing_is_left_of_a_session_that_has_ended(does: Json, tmp_path: Path) -> None:
    async with wrapped(does=does, stop_timeout_s=0.3) as (house, backend):
        talker = await house.dial(PLAIN)
        pid = (await state(talker))["pid"]
        assert backend.children == [pid]
        forked = int(text(await call(talker, "fork", 2, file=str(tmp_path / "pid"), dies=False)))
        await talker.channel.aclose()
        await gone(pid, forked)
        while backend.children:
            await trio.sleep(0.01)


async def test_a_client_may_leave_a_child_that_reads_nothing() -> None:
    async with wrapped(stop_timeout_s=0.3) as (house, backend):
        leaver, other = await house.dial(PLAIN), await house.dial(PLAIN, "bob")
        assert text(await call(leaver, "deaf", s=600)) == "done"
        for number in range(3):  # more than a pipe takes
            await leaver.call(10 + number, "echo", a="x" * (1 << 20))
        await trio.sleep(0.1)
        await leaver.channel.aclose()
        while len(backend.children) > 1:
            await trio.sleep(0.01)
        assert text(await call(other, "echo")) == "{}"


async def test_nothing_is_left_of_a_server_that_has_ended(tmp_path: Path) -> None:
    pids = []
    async with wrapped(stop_timeout_s=0.3, does={"start": "stubborn"}) as (house, _):
        for _ in range(3):
            talker = await house.dial(PLAIN)
            pids.append((await state(talker))["pid"])
        file = str(tmp_path / "pid")
        pids.append(int(text(await call(talker, "fork", 2, file=file, dies=False))))
    assert not any(map(is_alive, pids[:3]))
    await gone(*pids)


@pytest.mark.parametrize("fd", [0, 1])
async def test_a_child_that_closes_its_pipes_is_dead(fd: int) -> None:
    async with wrapped(restart="never") as (house, _):
        talker = await house.dial(PLAIN)
        await talker.call(1, "shut", fd=fd)
        if fd == 0:
            await trio.sleep(0.3)
            for number in range(2, 5):
                await talker.call(number, "echo")
        error = (await talker.answer(1))["error"]
        assert error["data"]["reason"] == "interrupted"
        assert "it has closed its pipes" in error["message"]


@pytest.mark.parametrize(
    ("why", "words"),
    [("", "it still lives 0.2 s after SIGKILL"), ("hm", "hm; it still lives 0.2 s after SIGKILL")],
)
async def test_a_child_that_survives_sigkill_is_said_to_live(
    why: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GONE_S", 0.2)
    monkeypatch.setattr(process.Process, "signal", lambda *_: None)  # as in a system call
    stubborn = settings(does={"start": "stubborn"})  # the end of its input must not end it first
    child = await process.start(stubborn)
    try:
        with structlog.testing.capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.run)
                await trio.testing.wait_all_tasks_blocked()
                if why:
                    child.kill(why)
                nursery.cancel_scope.cancel()
        assert is_alive(child.pid)
        assert child.has_ended.is_set()
        assert child.ending is not None
        assert child.ending.is_alive
        assert child.ending.is_failure
        assert child.ending.words == words
        assert child.ending.details == {}
        (told,) = (each for each in logs if each["event"] == "a child does not end")
        assert (told["log_level"], told["child"], told["how"]) == ("error", child.pid, words)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.read_rest()
        child._reap()
    await gone(child.pid)


def test_an_error_of_a_pipe_is_logged(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with structlog.testing.capture_logs() as logs:
            assert process._read_now(folder) == b""
    finally:
        os.close(folder)
    assert [each["log_level"] for each in logs] == ["warning"]
    assert "Is a directory" in logs[0]["why"]


def test_the_ends_of_pipes_are_not_logged() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with structlog.testing.capture_logs() as logs:
        assert process._read_now(reading) is None
        os.close(writing)
        assert process._read_now(reading) == b""
    os.close(reading)
    assert logs == []


async def test_no_descriptor_is_left() -> None:
    async with wrapped(stop_timeout_s=0.3) as (house, backend):
        await call(await house.dial(PLAIN), "leave")
        while backend.children:
            await trio.sleep(0.01)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(10):
            talker = await house.dial(PLAIN)
            if number % 2:
                await call(talker, "leave")
            else:
                await call(talker, "echo")
            await talker.channel.aclose()
        while backend.children:
            await trio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) == before


async def test_children_inherit_no_descriptors(tmp_path: Path) -> None:
    async with wrapped() as (house, _):
        with (tmp_path / "open").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            await house.dial(PLAIN)
            pid = (await state(await house.dial(PLAIN)))["pid"]
            links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
            assert [each for each in links if not each.startswith("pipe:")] == []


@pytest.mark.parametrize("command", ["settings().command", "(*SHELL, *settings().command)"])
def test_children_die_with_this_process(command: str, tmp_path: Path) -> None:
    """The second command is a shell that starts the server, as `npx` does."""
    program = tmp_path / "owner.py"
    program.write_text(
        "import trio\n"
        "from tests.rigs.children import settings, state, wrapped\n"
        "SHELL = ('sh', '-c', '\"$@\"; true', 'sh')\n"
        "async def main():\n"
        f"    given = {{'command': {command}, 'does': {{'start': 'stubborn'}}}}\n"
        "    async with wrapped(**given) as (house, _):\n"
        "        print((await state(await house.dial({})))['pid'], flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    time.sleep(0.5)
    assert is_alive(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until_s = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < until_s
        time.sleep(0.01)


async def test_a_child_lives_longer_than_the_threads_of_trio() -> None:
    """The kernel binds the death of a parent to its thread; trio's threads end after 10 s."""
    async with wrapped() as (house, _):
        talker = await house.dial(PLAIN)
        threads = {each.name for each in __import__("threading").enumerate()}
        assert "mcp-streams children" in threads
        await trio.sleep(11)
        assert text(await call(talker, "echo")) == "{}"
