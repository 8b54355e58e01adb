"""`mcp-streams copy`: journals are moved whole, and nothing serves one that is incomplete."""

import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.journal.ownership import key_path
from streams.journal.sqlite.verify import inspect
from tests.rigs import ROOT
from tests.rigs.command import run
from tests.rigs.redis_servers import KINDS, cluster, running
from tests.wire.process import APP, CLI, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S
from tests.wire.verbs import POSITIONS, Reader, read_stream, refused, start, up_to

MESSAGES = 40
PAD = 4000
SECRET = "hunter2"


class Written:
    """A journal with ended calls and one that runs, as a killed server has left it."""

    def __init__(self, folder: Path) -> None:
        with ServerProcess(folder) as server:
            self.journal = server.journal
            with server.connect("ws-streams") as peer:
                peer.initialize(POSITIONS)
                reader = Reader(peer)
                self.ended = [start(peer, "count", n=MESSAGES, pad=PAD) for _ in range(8)]
                self.running = start(peer, "killed", n=100_000, flush_every=1, gate="")
                for started in self.ended:
                    reader.until_seq(started.stream, MESSAGES + 1)
                reader.until_seq(self.running.stream, 100)
            server.kill()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written"))


@pytest.fixture
def source(written: Written, tmp_path: Path) -> Path:
    """A copy of these files, which a test may change."""
    folder = tmp_path / "source"
    shutil.copytree(
        written.journal.parent, folder, ignore=shutil.ignore_patterns("*.sock", "*.ops")
    )
    return folder / written.journal.name


def check_served(journal: str | Path, written: Written, folder: Path) -> None:
    """A server of this journal has the calls, for clients with their tokens."""
    folder.mkdir()
    server = ServerProcess(folder, store=str(journal))
    with server, server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        for started in written.ended:
            after, _ = read_stream(peer, started.with_token, after=0)
            assert after.seqs(started.stream) == up_to(MESSAGES + 1)
        after, _ = read_stream(peer, written.running.with_token, after=0)
        entries = after.entries[written.running.stream]
        assert list(entries) == up_to(max(entries))
        assert max(entries) > 100
        refused(entries[max(entries)], "interrupted", -32603)
        assert server.stop() == 0


def test_a_copy_with_its_keys_is_served_in_place_of_the_journal(
    source: Path, written: Written, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    done = run("copy", str(source), str(copy), "--keys", "--json")
    assert (done.returncode, done.shown) == (0, []), done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy.db", "copy.db.key", "source"]
    told = json.loads(done.stdout)
    assert (told["streams"], told["keys"]) == (9, True)
    assert told["messages"] == inspect(source).messages == inspect(copy).messages
    assert inspect(copy).problems == ()
    assert key_path(copy).read_bytes() == key_path(source).read_bytes()
    assert key_path(copy).stat().st_mode & 0o777 == 0o600
    check_served(copy, written, tmp_path / "served")


@pytest.mark.parametrize("variables", ["SOURCE", "TARGET", "SOURCE TARGET"])
def test_either_journal_may_be_named_by_a_variable(
    source: Path, tmp_path: Path, variables: str
) -> None:
    """A URL with a password is no word of a command line; the other one may be."""
    named = {"SOURCE": str(source), "TARGET": str(tmp_path / "copy.db")}
    env = {f"MCP_STREAMS_COPY_{each}": named.pop(each) for each in variables.split()}
    done = run("copy", *named.values(), "--json", env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["source"], told["target"]) == (str(source), str(tmp_path / "copy.db"))


def test_a_word_for_a_journal_comes_before_its_variable(source: Path, tmp_path: Path) -> None:
    env = {"MCP_STREAMS_COPY_SOURCE": "no.db", "MCP_STREAMS_COPY_TARGET": str(tmp_path / "to.db")}
    done = run("copy", str(source), env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to.db").exists()


def test_the_keys_are_copied_only_if_they_are_wanted(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    done = run("copy", str(source), str(copy))
    assert done.returncode == 0
    assert "9 streams" in done.stdout
    assert "only if both are served with the same --key-file" in done.stderr
    assert not key_path(copy).exists()


def test_keys_that_are_missing_are_not_copied(source: Path, tmp_path: Path) -> None:
    key_path(source).unlink()
    done = run("copy", str(source), str(tmp_path / "copy.db"), "--keys")
    assert done.returncode == 2
    assert "has no keys to copy" in done.stderr
    assert not (tmp_path / "copy.db").exists()
    assert not key_path(source).exists(), "and none are made"


def test_a_journal_in_use_is_not_copied(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        done = run("copy", str(server.journal), str(tmp_path / "copy.db"))
    assert done.returncode == 2
    assert f"already owned by another process (pid {server_pid(done.stderr)})" in done.stderr
    assert not (tmp_path / "copy.db").exists()


def server_pid(said: str) -> str:
    return said.partition("(pid ")[2].partition(")")[0]


@pytest.mark.parametrize("there", ["copy.db", "copy.db.key"])
def test_nothing_that_is_there_is_replaced(source: Path, tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    done = run("copy", str(source), str(tmp_path / "copy.db"), "--keys")
    assert done.returncode == 2
    assert f"{there} exists already" in done.stderr
    assert (tmp_path / there).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2, "and no other file is left"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such.db", "there is no such file"),
        ("notes.txt", "not a SQLite file"),
        ("empty.db", "not a journal"),
    ],
)
def test_a_source_that_is_no_journal_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "notes.txt").write_text("Not a database.\n" * 100)
    (tmp_path / "empty.db").touch()
    done = run("copy", str(tmp_path / name), str(tmp_path / "copy.db"))
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "copy.db").exists()


def test_a_damaged_journal_is_not_copied(source: Path, tmp_path: Path) -> None:
    with ServerProcess(source.parent) as server:  # what is in the log goes to the tables
        server.stop()
    with sqlite3.connect(source) as connection:
        connection.execute("UPDATE runs SET body = x'7b7d0a7b7d0a' WHERE rowid = 1")
    connection.close()
    done = run("copy", str(source), str(tmp_path / "copy.db"))
    assert done.returncode == 2
    assert "are damaged" in done.stderr
    assert list(tmp_path.iterdir()) == [source.parent]


@pytest.mark.parametrize(
    ("scheme", "why"),
    [("http://store/0", "is no store"), ("redis:///0", "there is no host")],
)
def test_a_url_that_is_none_of_a_store_is_refused(
    source: Path, tmp_path: Path, scheme: str, why: str
) -> None:
    for words in ((str(source), scheme), (scheme, str(tmp_path / "copy.db"))):
        done = run("copy", *words)
        assert done.returncode == 2
        assert why in done.stderr


# Stores


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a store, with its password."""
    folder = tmp_path_factory.mktemp("store")
    settings = ("--appendonly", "yes", "--requirepass", SECRET)
    with running(request.param, folder, *settings) as server:
        yield f"redis://:{SECRET}@127.0.0.1:{server.port}/0"


def copied(*words: str) -> dict[str, Any]:
    done = run("copy", *words, "--lease=0.2", "--json")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def refused_copy(*words: str) -> str:
    done = run("copy", *words, "--lease=0.2")
    assert (done.returncode, done.stdout) == (2, "")
    assert SECRET not in done.stderr
    return done.stderr


def test_a_journal_moves_to_a_store_and_back(
    source: Path, written: Written, tmp_path: Path, store: str
) -> None:
    there = copied(str(source), store, "--keys")
    copy = tmp_path / "back.db"
    back = copied(store, str(copy), "--keys")
    counts = ("streams", "messages", "bytes", "sessions", "grants")
    assert [there[each] for each in counts] == [back[each] for each in counts]
    assert inspect(copy).problems == ()
    assert key_path(copy).read_bytes() == key_path(source).read_bytes()
    check_served(copy, written, tmp_path / "served")


def test_a_copy_in_a_store_is_served(
    source: Path, written: Written, tmp_path: Path, store: str
) -> None:
    copied(str(source), store, "--keys")
    check_served(store, written, tmp_path / "served")


def test_stores_are_copied_to_each_other(source: Path, tmp_path: Path, store: str) -> None:
    first = copied(str(source), f"{store}?prefix=a", "--keys")
    second = copied(f"{store}?prefix=a", f"{store}?prefix=b", "--keys")
    assert first["messages"] == second["messages"] > 0
    copied(f"{store}?prefix=b", str(tmp_path / "c.db"))
    assert inspect(tmp_path / "c.db").messages == first["messages"]


def test_a_store_that_has_a_journal_is_no_target(source: Path, store: str) -> None:
    copied(str(source), store)
    why = refused_copy(str(source), store)
    assert "has a journal there already" in why
    assert "incomplete" not in why, "the journal that is there may be served"
    copied(str(source), f"{store}?prefix=other")


def test_a_store_with_live_replicas_is_neither_copied_nor_written(
    source: Path, tmp_path: Path, store: str
) -> None:
    with ServerProcess(tmp_path, store=store, options=("--lease=0.2",)):
        assert "in use by 1 replica: stop all" in refused_copy(store, str(tmp_path / "copy.db"))
        assert "in use by 1 replica: stop all" in refused_copy(str(source), store)
    assert not (tmp_path / "copy.db").exists()


def test_an_incomplete_copy_is_served_by_nothing_until_it_is_complete(
    source: Path, written: Written, tmp_path: Path, store: str
) -> None:
    """The store has no room for all of it."""
    copied(store, str(tmp_path / "nothing.db"))  # the store has the library of functions then
    used = int(asked(store, "INFO", "memory").partition("used_memory:")[2].split()[0])
    asked(store, "CONFIG", "SET", "maxmemory", str(used + 400_000))
    why = refused_copy(str(source), store, "--keys")
    assert "maxmemory" in why
    assert "The copy is incomplete, and no process serves it: copy again" in why
    asked(store, "CONFIG", "SET", "maxmemory", "0")
    served = run("serve", APP, "--http=127.0.0.1:0", f"--journal={store}")
    assert served.returncode == 2
    assert "is an unfinished copy: run mcp-streams copy" in served.shown[-1]
    assert "is an unfinished copy" in refused_copy(store, str(tmp_path / "copy.db"))
    copied(str(source), store, "--keys")
    check_served(store, written, tmp_path / "served")


def test_what_an_incomplete_copy_has_left_is_deleted_first(
    source: Path, tmp_path: Path, store: str
) -> None:
    asked(store, "SET", "{mcp-streams-of-others}:journal", "theirs")
    first = copied(str(source), store, "--keys")
    asked(store, "SET", "{mcp-streams}:copying", "1")  # as if it had been killed
    assert copied(str(source), store) == first | {"keys": False}
    assert "theirs" in asked(store, "GET", "{mcp-streams-of-others}:journal")
    assert "no keys to copy" in refused_copy(store, str(tmp_path / "copy.db"), "--keys")


def test_the_documented_command_deletes_every_key_of_a_journal(source: Path, store: str) -> None:
    copied(str(source), store, "--keys")
    asked(store, "SET", "{mcp-streams}:m:\n \"'\\*", "a name of any bytes")
    asked(store, "SET", "{mcp-streams-of-others}:journal", "theirs")
    page = (ROOT / "docs/operate/replicas.md").read_text()
    [(script, first, pattern)] = re.findall(r'redis-cli EVAL "([^"]+)" 1 \'(.+)\' \'(.+)\'', page)
    asked(store, "EVAL", script, "1", first, pattern)
    assert asked(store, "DBSIZE") == ":1\r\n"
    copied(str(source), store, "--keys")


def asked(store: str, *words: str) -> str:
    """The answer of the server to a command."""
    port = int(store.partition("@127.0.0.1:")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        answer = ""
        for command in (("AUTH", SECRET), words):
            parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{parts}".encode())
            answer = connection.recv(1 << 16).decode(errors="replace")
    assert not answer.startswith("-"), answer
    return answer


def test_verify_and_export_read_a_store(source: Path, tmp_path: Path, store: str) -> None:
    told = copied(str(source), store)
    done = run("verify", store, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == told["messages"]
    assert "is sound: 9 streams" in run("verify", store).stdout
    folders = [tmp_path / "of-file", tmp_path / "of-store"]
    for journal, folder in zip((str(source), store), folders, strict=True):
        assert run("export", journal, "--to", str(folder)).returncode == 0
    of_file, of_store = ({each.name: each for each in folder.iterdir()} for folder in folders)
    assert of_file.keys() == of_store.keys()
    for name, path in of_file.items():
        assert path.read_bytes() == of_store[name].read_bytes()


def test_verify_and_export_find_what_a_store_has_lost(
    source: Path, tmp_path: Path, store: str
) -> None:
    copied(str(source), store)
    streams = re.findall(r"{mcp-streams}:l:[\w-]+", asked(store, "KEYS", "{mcp-streams}:l:*"))
    assert streams
    asked(store, "DEL", streams[0])
    done = run("verify", store)
    assert done.returncode == 1
    assert "are missing or damaged" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    done = run("export", store)
    assert done.returncode == 1
    assert '{"missing":{"from":1,' in done.stdout


def test_an_interrupted_copy_leaves_no_file(source: Path, tmp_path: Path, store: str) -> None:
    """It is interrupted at any time: it has made the whole file by then, or none."""
    copied(str(source), store, "--keys")
    copy = tmp_path / "copy.db"
    copying = subprocess.Popen(
        [*CLI, "copy", store, str(copy), "--keys", "--lease=0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until("begun", lambda: len(list(tmp_path.iterdir())) > 1 or copying.poll() is not None)
    copying.send_signal(signal.SIGINT)
    _, said = copying.communicate(timeout=DEADLINE_S)
    left = sorted(each.name for each in tmp_path.iterdir())
    if copying.returncode == 0:
        assert left == ["copy.db", "copy.db.key", "source"]
    else:
        assert copying.returncode == 130
        assert f"{copy} was not made" in said
        assert left == ["source"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_a_copy_leaves_no_file(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The copy is slowed down: it is ended while its file is made."""
    slow = (
        "import trio; from streams.cli.actions import copy; "
        "copy.copy_journal = lambda *given: trio.sleep_forever(); "
        "from streams.cli import main; main()"
    )
    words = ["copy", str(source), str(tmp_path / "copy.db"), "--json"]
    copying = subprocess.Popen(
        [sys.executable, "-c", slow, *words], stderr=subprocess.PIPE, text=True
    )
    wait_until("begun", lambda: list(tmp_path.glob(".copy.db.*-wal")))
    copying.send_signal(number)
    _, said = copying.communicate(timeout=DEADLINE_S)
    assert copying.returncode == 130
    assert "copy.db was not made" in json.loads(said)["error"]["message"]
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_journal_moves_through_a_cluster(source: Path, tmp_path: Path) -> None:
    with cluster("redis", tmp_path / "cluster") as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        there = copied(str(source), url, "--keys")
        copied(url, f"{url}?prefix=other", "--keys")
        back = copied(f"{url}?prefix=other", str(tmp_path / "back.db"), "--keys")
    assert there["messages"] == back["messages"] > 0
    assert key_path(tmp_path / "back.db").read_bytes() == key_path(source).read_bytes()
