"""Errors of the command: their words, and their form with --json."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams.cli.actions.call import CONNECT_S
from tests.rigs import HERE
from tests.rigs.command import Following, run
from tests.wire.process import CLI, ServerProcess
from tests.wire.raw import DEADLINE_S

APP = f"{HERE / 'command_server.py'}:server"
NEAR = "127.0.0.1:0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as server:
        yield server


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "token"
    made = ("token", "new", "ada", "--file", f"{path}s.jsonl", "--to", f"{path}")
    assert run(*made).returncode == 0
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[ServerProcess]:
    options = ("--auth-tokens", f"{token_file}s.jsonl")
    with ServerProcess(tmp_path_factory.mktemp("guarded"), app=APP, options=options) as server:
        yield server


def http_url(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.http_port}/mcp"


# The wrong address


@pytest.mark.parametrize(
    ("url_of", "why"),
    [
        (lambda s: f"ws://127.0.0.1:{s.http_port}", "Dial http://127.0.0.1:"),
        (lambda s: f"ws://127.0.0.1:{s.http_port}/mcp", "Dial http://127.0.0.1:"),
        (lambda s: f"http://127.0.0.1:{s.port}", "dial it with ws:// or wss://"),
        (lambda s: f"http://127.0.0.1:{s.port}/mcp", "dial it with ws:// or wss://"),
        (lambda s: f"https://127.0.0.1:{s.http_port}/mcp", "its URL is http://127.0.0.1:"),
        (lambda s: f"wss://127.0.0.1:{s.port}", "its URL is ws://127.0.0.1:"),
        (lambda s: f"http://127.0.0.1:{s.http_port}/other", "Unknown path: use /mcp"),
    ],
    ids=range(7),
)
def test_another_protocol_is_recognized_at_once(
    server: ServerProcess, url_of: Callable[[ServerProcess], str], why: str
) -> None:
    url = url_of(server)
    done = run("call", url, "count", "n:=1", "--timeout", f"{20 * CONNECT_S}")
    assert (done.returncode, done.stdout, len(done.shown)) == (3, "", 1)
    assert done.stderr.startswith("No connection: ")
    assert why in done.stderr
    assert url.split("/")[2] in done.stderr


def test_it_is_not_tried_again(tmp_path: Path) -> None:
    """Counts the attempts, since times tell nothing on a busy machine."""
    attempts = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    attempts.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = run("poll", f"ws://127.0.0.1:{listener.getsockname()[1]}", "x")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert done.returncode == 3
    assert len(attempts) == 1


@pytest.mark.parametrize("scheme", ["ws", "http"])
def test_a_host_that_cannot_be_found_is_named(scheme: str) -> None:
    done = run("call", f"{scheme}://nowhere.invalid:1/", "count")
    assert (done.returncode, done.stdout, len(done.shown)) == (3, "", 1)
    assert "the host nowhere.invalid cannot be found" in done.stderr
    assert "Errno" not in done.stderr


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "http://127.0.0.1:1/mcp"])
def test_a_refused_connection_names_its_address(url: str) -> None:
    done = run("call", url, "count")
    assert done.stderr == (
        f"No connection: {url}: all attempts to connect to 127.0.0.1:1 failed: Connection refused "
        "(no server listens there).\n"
    )


def test_a_password_in_a_url_is_not_shown() -> None:
    done = run("call", "http://ada:secret@127.0.0.1:1", "count")
    assert done.returncode == 2
    assert "secret" not in done.stderr
    assert "password" in done.stderr


def test_a_port_in_use_is_told_with_advice(server: ServerProcess) -> None:
    address = f"127.0.0.1:{server.port}"
    done = run("serve", APP, "--ws", address)
    assert done.returncode == 2
    assert f"{address}: cannot listen there: Address already in use: " in done.shown[-1]
    assert "127.0.0.1:0 takes a free one" in done.shown[-1]


# Tokens


@pytest.mark.parametrize("url_of", [lambda s: s.url, http_url], ids=["ws", "http"])
def test_a_missing_and_a_wrong_token_are_two_errors(
    guarded: ServerProcess, url_of: Callable[[ServerProcess], str], tmp_path: Path
) -> None:
    url = url_of(guarded)
    missing = run("tools", url)
    assert missing.returncode == 3
    assert missing.stderr == (
        f"No connection: {url} needs a bearer token, and none was sent: give one with "
        "MCP_STREAMS_TOKEN or --token-file.\n"
    )
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("mcps_wrong")
    for options, env, source in (
        (("--token-file", str(wrong)), {}, f"--token-file {wrong}"),
        ((), {"MCP_STREAMS_TOKEN": "mcps_wrong"}, "MCP_STREAMS_TOKEN"),
    ):
        done = run("tools", url, *options, env=env)
        assert done.returncode == 3
        assert f"{url} does not accept the bearer token of {source}: " in done.stderr
        assert "mcps_wrong" not in done.stderr


def test_the_way_back_has_the_token_file_and_calls_uses_it(
    guarded: ServerProcess, token_file: Path
) -> None:
    name = os.path.relpath(token_file)
    with Following("call", guarded.url, "forever", f"--token-file={name}", "--timeout=3") as call:
        assert call.end()[0] == 124
    _, by_name, _, by_ticket = call.said.splitlines()[-4:]
    assert by_name == f"  mcp-streams resume forever-1 --token-file {token_file}"
    assert by_ticket.startswith(f"  mcp-streams resume {guarded.url} ey")
    assert by_ticket.endswith(f" --token-file {token_file}")
    (row,) = json.loads(run("calls", "--json").stdout)
    assert row["state"] == "running"
    assert run("poll", "forever-1").stdout.endswith("  running\n")
    assert run("cancel", "forever-1").stderr == "Cancelled.\n"


def test_calls_sends_the_token_of_the_environment_to_its_own_servers(
    guarded: ServerProcess, token_file: Path
) -> None:
    env = {"MCP_STREAMS_TOKEN": token_file.read_text().strip()}
    assert run("call", guarded.url, "forever", "--timeout=3", env=env).returncode == 124
    (row,) = json.loads(run("calls", "--json", env=env).stdout)
    assert row["state"] == "running"
    (row,) = json.loads(run("calls", "--json").stdout)
    assert row["state"] == "unreachable"
    (row,) = json.loads(run("calls", "--json", f"--token-file={token_file}").stdout)
    assert row["state"] == "running"
    assert run("cancel", "forever-1", env=env).returncode == 0


def test_a_bearer_without_streams_is_not_called_anonymous(
    guarded: ServerProcess, server: ServerProcess, token_file: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "bob"
    run("token", "new", "bob", "--file", f"{token_file}s.jsonl", "--to", str(mine))
    done = run("poll", guarded.url, "--all", f"--token-file={mine}")
    assert (done.returncode, done.stderr) == (0, "No stream runs or waits to be delivered.\n")
    assert "is anonymous" in run("poll", server.url, "--all").stderr


# The form


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("call", "ws://127.0.0.1:1", "count"), 3),
        (("call", "http://nowhere.invalid/mcp", "count"), 3),
        (("call", "ftp://127.0.0.1", "count"), 2),
        (("call", "ws://127.0.0.1:1", "count", "n"), 2),
        (("call", "ws://127.0.0.1:1", "count", "--timeout=0"), 2),
        (("call", "ws://127.0.0.1:1", "count", "--nothing"), 2),
        (("call",), 2),
        (("nothing",), 2),
        (("tools", "stdio:/no/such/program"), 3),
        (("resume", "count-1"), 2),
        (("poll", "count-1"), 2),
        (("cancel", "count-1"), 2),
        (("calls", "--forget", "count-1"), 2),
        (("verify", "/no/such/file"), 2),
        (("serve", "nothing.py:server", "--ws", "127.0.0.1:0"), 2),
        (("token", "list", "--file", "/no/such/file"), 2),
    ],
)
def test_with_json_an_error_is_one_object_on_stderr(words: tuple[str, ...], code: int) -> None:
    done = run(*words, "--json")
    assert (done.returncode, done.stdout, len(done.shown)) == (code, "", 1), done.stderr
    assert json.loads(done.stderr)["error"]["message"]


def test_in_a_log_of_json_lines_the_last_one_is_json(tmp_path: Path) -> None:
    done = run("serve", APP, "--journal", str(tmp_path), "--log-format", "json", "--http", NEAR)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a directory" in json.loads(done.shown[-1])["error"]["message"]


def test_a_refused_call_is_told_with_its_code(server: ServerProcess) -> None:
    done = run("call", server.url, "nowhere", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    error = json.loads(done.stderr)["error"]
    assert error["code"] == -32602
    assert "nowhere" in error["message"]


def test_a_lost_stream_is_told_with_its_reason(server: ServerProcess) -> None:
    done = run("poll", server.url, "unknown", "--json")
    assert (done.returncode, done.stdout) == (4, "")
    assert json.loads(done.stderr)["error"]["reason"] == "stream_not_found"


# The working directory


@pytest.mark.parametrize(
    "words", [("serve", APP, "--journal", "j.db"), ("serve", APP), ("wrap", "--", "cat")]
)
def test_a_working_directory_that_was_removed_is_told(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    shell = ("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *CLI)
    done = run(*words, command=shell, cwd=place)
    assert done.returncode == 2
    assert done.shown[-1] == "The working directory was removed: change to another one."


# Standard output


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with ServerProcess(tmp_path_factory.mktemp("journal"), app=APP) as server:
        assert run("call", server.url, "count", "n:=3").returncode == 0
        server.stop()
    return server.journal


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "JOURNAL"),
        ("stats", "JOURNAL"),
        ("verify", "JOURNAL"),
        ("export", "JOURNAL"),
        ("token", "list"),
        ("calls", "--json"),
        ("--help",),
        ("--version",),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_one_line(
    journal: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = tuple(str(journal) if word == "JOURNAL" else word for word in words)
    if words[0] == "token":
        assert run("token", "new", "ada", cwd=tmp_path).returncode == 0
    for redirection, code in ((">/dev/full", 2), (">&-", 0)):
        done = run(
            *words, command=("sh", "-c", f'exec "$@" {redirection}', "sh", *CLI), cwd=tmp_path
        )
        assert done.returncode == code, done.stderr
        assert ("cannot be written: No space left on device." in done.stderr) == bool(code)


@pytest.mark.parametrize("coding", ["ascii:strict", "utf-8:strict"])
def test_a_name_that_a_locale_lacks_ends_nothing(journal: Path, coding: str) -> None:
    named = journal.with_name(os.fsdecode("é.db".encode("latin-1")))
    named.write_bytes(journal.read_bytes())
    for words in (("verify",), ("ls", "--json"), ("stats", "--json")):
        done = run(*words, str(named), env={"PYTHONIOENCODING": coding})
        assert (done.returncode, done.stderr) == (0, "")
        assert words[0] == "ls" or "\\udce9.db" in done.stdout
    done = run("ls", os.fsdecode(b"no\xff"), "--json")
    assert "no\\udcff" in json.loads(done.stderr)["error"]["message"]


# Ctrl-C at the start


@pytest.mark.parametrize("module", ["cyclopts", "msgspec", "trio", "rich", "streams.cli.calls"])
def test_ctrl_c_while_it_loads_ends_it_without_a_traceback(tmp_path: Path, module: str) -> None:
    """The signal comes while this module is imported, whatever the speed of the machine."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
    )
    done = subprocess.run(
        [*CLI, "call", "ws://127.0.0.1:1", "count"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        restore_signals=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_in_a_callback_of_a_weak_reference_ends_the_command() -> None:
    program = """if True:
        import signal, time, weakref
        from streams.cli import command, main

        class Module: ...

        def run():
            module = Module()
            lock = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
            del module
            time.sleep(60)

        command.run = run
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.2, 0.4, 0.8])
def test_ctrl_c_in_the_first_second_prints_no_traceback(after_s: float) -> None:
    program = "from streams.cli import main; print(flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "call", "ws://127.0.0.1:1", "count"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said
    assert said == ""
