"""`serve --journal redis://…`: over stdio with an owner, and by several processes at once.

The password of the store is in the URL, and must be nowhere else.
"""

import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from streams.engine.retry import START_S
from streams.journal.ownership import key_path
from streams.keys import Keyring
from tests.acceptance.launch import wait_for_end
from tests.rigs.command import Following, run
from tests.rigs.redis_servers import Server, running
from tests.wire.process import APP, CLI, Gate, ServerProcess, wait_until
from tests.wire.raw import PipePeer
from tests.wire.verbs import POSITIONS, Reader, Started, called, read_stream, start, up_to

SECRET = "hunter2"
KEYS = "{mcp-streams}:keys"
# Settings of a store that reads its data slowly, and answers meanwhile.
SLOW: Final = ("--key-load-delay", "200000", "--loading-process-events-interval-bytes", "1024")
SCHEMA = ("HGET", "{mcp-streams}:journal", "schema")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = ("--appendonly", "yes", "--requirepass", SECRET)
    with running("redis", tmp_path / "store", *settings) as server:
        yield server


@pytest.fixture
def store(server: Server) -> str:
    return f"redis://:{SECRET}@127.0.0.1:{server.port}/0"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the side files of owners."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mcp-streams"


def refused(*words: str, env: dict[str, str] | None = None) -> str:
    done = run(*words, env=env)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert SECRET not in done.stderr
    return done.shown[-1]


# Listening replicas


def test_several_processes_serve_one_journal(tmp_path: Path, store: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with ServerProcess(one, store=store) as first, ServerProcess(other, store=store) as second:
        for each in (first, second):
            with each.connect("ws-streams") as peer:
                peer.initialize(POSITIONS)
                assert called(peer, "add", a=1, b=2).result["content"][0]["text"] == "3"
        assert first.stop() == 0
        assert second.is_alive()
    assert not list(tmp_path.rglob("*.lock")), "no process owns a journal that all share"


def test_the_log_says_what_a_crash_may_cost_and_no_password(tmp_path: Path, store: str) -> None:
    with ServerProcess(tmp_path, store=store) as server:
        server.hear("the journal is in a store")
        [line] = [line for line in server.log if "the journal is in a store" in line]
        assert "a crash of its machine loses nothing" in line
        assert server.stop() == 0
    assert SECRET not in "".join(server.log)


def test_calls_and_keys_outlive_the_process(tmp_path: Path, store: str) -> None:
    with ServerProcess(tmp_path, store=store, options=("--lease", "0.3")) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            reader = Reader(peer)
            started = start(peer, "count", n=9)
            reader.until_seq(started.stream, 10)
        server.restart()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            after, _ = read_stream(peer, started.with_token, after=0)
            assert after.seqs(started.stream) == up_to(10)


# A later version of the form of records and of the library of functions: it has a new field in
# each record, another text of the library, and a schema that begins once all replicas know it.
LATER: Final = """
import msgspec
from streams.journal.redis import codec, library

class Progress(codec.Progress, frozen=True, array_like=True, gc=False):
    later: str = "by an older version"

codec.SCHEMA, codec.Progress = 2, Progress
codec._progress = msgspec.msgpack.Decoder(Progress).decode
library.CODE = library.CODE.replace(library.NAME.encode(), library.NAME.encode() + b"_later")
library.NAME += "_later"
"""


def test_replicas_are_upgraded_one_after_the_other(
    tmp_path: Path, server: Server, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls go on, from older replicas to later ones, and back while both serve."""
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text(LATER)
    gate = Gate(tmp_path / "gate")
    options = ("--lease", "0.5")
    one, two, three = (ServerProcess(tmp_path, store=store, options=options) for _ in range(3))
    with ExitStack() as stack:
        stack.enter_context(one)
        stack.enter_context(two)
        with one.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            ended = start(peer, "count", n=9)
            Reader(peer).until_seq(ended.stream, 10)
        with monkeypatch.context() as later:
            later.setenv("PYTHONPATH", str(tmp_path / "later"))
            stack.enter_context(three)
        with three.connect("ws-streams") as peer, two.connect("ws-streams") as old:
            for each in (peer, old):
                each.initialize(POSITIONS)
            after, _ = read_stream(peer, ended.with_token, after=0)
            assert after.seqs(ended.stream) == up_to(10)
            begun = start(peer, "count", n=3, gate=gate.path)
            gate.release(10)
            after, _ = read_stream(old, begun.with_token, after=0)
            assert after.seqs(begun.stream) == up_to(4)
        assert (one.stop(), two.stop()) == (0, 0)
        wait_until(
            "the schema of the later version",
            lambda: b"2" in server.ask(*SCHEMA, login=("AUTH", SECRET)).split(),
        )
        assert "upgrade mcp-streams here" in refused(*LISTENING, f"--journal={store}")
        with three.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            after, _ = read_stream(peer, begun.with_token, after=0)
            assert after.seqs(begun.stream) == up_to(4)
        assert three.stop() == 0
    gate.close()


# Over stdio


def relay(store: str, *options: str) -> PipePeer:
    return PipePeer([*CLI, "serve", APP, "--stdio", "--journal", store, *options])


def owner_in(state: Path) -> int:
    [lock] = state.glob("*.lock")
    return int(lock.read_text())


def test_the_owner_of_relays_is_in_the_folder_of_state(state: Path, store: str) -> None:
    with relay(store, "--linger=0.5") as peer:
        peer.initialize(POSITIONS)
        assert called(peer, "add", a=1, b=2).result["content"][0]["text"] == "3"
        pid = owner_in(state)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"streams.process.owner" in command
        assert SECRET.encode() not in command
    wait_for_end(pid)
    [log] = state.glob("127.0.0.1-*.log")
    assert "the journal is in a store" in log.read_text()
    for file in filter(Path.is_file, state.iterdir()):
        assert SECRET not in file.name + file.read_text(errors="replace")


def test_relays_of_one_store_share_an_owner_and_calls_outlive_them(
    state: Path, store: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    with relay(store) as one, relay(store) as other:
        for peer in (one, other):
            peer.initialize(POSITIONS)
        pid = owner_in(state)
        started = start(one, "count", n=3, gate=gate.path)
        one.cut()
        gate.release(10)
        after, _ = read_stream(other, started.with_token, after=0)
        assert after.seqs(started.stream) == up_to(4)
        assert owner_in(state) == pid
    os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)
    gate.close()


def test_an_owner_that_cannot_start_says_why_without_the_password(state: Path, store: str) -> None:
    wrong = store.replace(SECRET, f"{SECRET}-wrong")
    why = refused("serve", APP, f"--journal={wrong}")
    assert "The journal's owner did not start" in why
    assert "wrong" not in why


# Refusals


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("wrap", "--journal=redis://:hunter2@h/0", "--", "true"), "their journal is a file"),
        (("wrap", "--journal", "valkeys://h", "--", "true"), "their journal is a file"),
        (("attach", "http://h/mcp", "--journal=redis://:hunter2@h/0"), "their journal is a file"),
        (("attach", "stdio:true", "--journal=redis://h/0"), "their journal is a file"),
        (("serve", APP, "--journal=http://:hunter2@h/0"), "is no store: name a file, or a URL"),
        (("serve", APP, "--journal=redis:///0"), "there is no host"),
        (("serve", APP, "--journal=127.0.0.1:6379"), "write redis://HOST:PORT/0 for a store"),
        (("wrap", "--journal=redis:/h", "--", "true"), "write redis://HOST:PORT/0 for a store"),
        (("serve", APP, "--lease=2"), "--lease is for a journal that replicas share"),
        (("serve", APP, "--journal=a.db", "--lease=2"), "--lease is for a journal that replicas"),
        (("serve", APP, "--replicas-acked=1"), "--replicas-acked is for a journal that replicas"),
        (("serve", APP, "--journal=redis://h", "--lease=0"), "--lease: write seconds, 0.1 to"),
        (("serve", APP, "--journal=redis://h", "--lease=2d"), "--lease: write seconds, 0.1 to"),
        (("serve", APP, "--journal=redis://h", "--replicas-acked=-1"), "write a number, 0 to"),
        (("serve", APP, "--keep-completed=-1"), "--keep-completed: write seconds, above 0"),
        (("backup", "redis://:hunter2@h/0", "to.db"), "has the backups of its own server"),
        (("backup", "a.db", "redis://:hunter2@h/0"), "mcp-streams copy"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], why: str) -> None:
    assert why in refused(*words)


LISTENING = ("serve", APP, "--http=127.0.0.1:0")


def test_a_wrong_password_is_not_told(store: str) -> None:
    wrong = store.replace(SECRET, f"{SECRET}-wrong")
    assert "wrong" not in refused(*LISTENING, f"--journal={wrong}").replace("wrong password", "")
    assert "wrong" not in refused("copy", wrong, "copy.db").replace("wrong password", "")


def test_a_store_that_wants_a_password_says_so(store: str) -> None:
    bare = store.replace(f":{SECRET}@", "")
    assert "wants a password" in refused(*LISTENING, f"--journal={bare}")


def test_a_store_that_is_not_there_is_named_without_the_password() -> None:
    url = f"redis://:{SECRET}@127.0.0.1:1/0"
    assert "redis://127.0.0.1:1/0" in refused(*LISTENING, f"--journal={url}")


WAITS: Final = "waiting for the store of the journal"


def test_a_server_waits_for_a_store_that_starts_later(server: Server, store: str) -> None:
    server.kill()
    with Following(*LISTENING, f"--journal={store}") as serving:
        serving.wait_for(WAITS)
        server.start()
        serving.wait_for("listening")
        assert SECRET not in serving.said
        serving.process.terminate()
        assert serving.end() == (0, "")


def test_a_server_waits_for_a_store_that_reads_its_data(server: Server, store: str) -> None:
    """The store takes connections, and reads slowly until the test has seen enough."""
    login = ("AUTH", SECRET)
    server.ask("CONFIG", "SET", "rdbcompression", "no", login=login)
    fill = "for n = 1, 1000 do redis.call('SET', 'key' .. n, string.rep('x', 2000)) end"
    server.ask("EVAL", fill, "0", login=login)
    server.ask("SAVE", login=login)
    server.kill()
    (server.folder / "appendonlydir").rename(server.folder / "before")
    slow = Server("redis", server.folder, *SLOW, "--requirepass", SECRET)
    try:
        slow.start()
        with Following(*LISTENING, f"--journal=redis://:{SECRET}@127.0.0.1:{slow.port}") as serving:
            serving.wait_for(f"{WAITS}.*is loading")
            slow.ask("CONFIG", "SET", "key-load-delay", "0", login=login)
            serving.wait_for("listening")
    finally:
        slow.kill()


def test_a_server_that_waits_for_its_store_ends_as_soon_as_it_is_told(store: str) -> None:
    url = f"redis://:{SECRET}@127.0.0.1:1/0"
    with Following(*LISTENING, f"--journal={url}") as serving:
        serving.wait_for(WAITS)
        serving.process.terminate()
        serving.end(within_s=START_S / 2)
        assert "has waited" not in serving.said


@pytest.mark.parametrize("missing", ["coredis", "anyio"])
def test_a_store_without_its_extra_names_that(tmp_path: Path, state: Path, missing: str) -> None:
    (tmp_path / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    for words in (LISTENING, ("serve", APP)):
        why = refused(*words, f"--journal=redis://:{SECRET}@127.0.0.1:1/0", env=env)
        assert "pip install 'mcp-streams[redis]'" in why


@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_prefix_without_a_journal_is_not_sound(store: str, command: str) -> None:
    why = refused(command, f"{store}?prefix=typo")
    assert "has no journal under the prefix typo" in why


# Keys


def test_a_file_of_keys_is_shared_and_its_first_key_makes_tokens(
    tmp_path: Path, store: str
) -> None:
    keys = tmp_path / "keys"
    write(keys, b"a")
    options = ("--lease=2", f"--key-file={keys}")
    with ServerProcess(tmp_path, store=store, options=options) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "count", n=3)
            assert started.token == Keyring([b"a" * 32]).token(started.stream)
            Reader(peer).until_seq(started.stream, 4)
        server.kill()
        write(keys, b"b", b"a")
        server.start()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            after, _ = read_stream(peer, started.with_token, after=0)
            assert after.seqs(started.stream) == up_to(4)


@pytest.mark.parametrize("place", ["file", "store", "beside"])
def test_new_keys_are_read_at_a_sighup(tmp_path: Path, server: Server, place: str) -> None:
    """A new key on top makes the tokens from then on, and those of before stay good."""
    keys = tmp_path / "keys"
    store = "" if place == "beside" else f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
    options = (f"--key-file={keys}",) if place == "file" else ()
    if place == "file":
        write(keys, b"a")
    gate = Gate(tmp_path / "gate")
    with ServerProcess(tmp_path, store=store, options=options) as served:
        with served.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            before = start(peer, "count", n=3, gate=gate.path)
            if place == "store":
                was = server.ask("GET", KEYS, login=("AUTH", SECRET)).split()[1]
                both = (line(b"b") + was).decode()
                server.ask("SET", KEYS, both, login=("AUTH", SECRET))
            elif place == "beside":
                write(key_path(served.journal), b"b", more=key_path(served.journal).read_bytes())
            else:
                write(keys, b"b", b"a")
            os.kill(served.pid, signal.SIGHUP)
            served.hear("the keys were read again")
            new = Keyring([b"b" * 32])
            after = start(peer, "count", n=3, gate=gate.path)
            assert not new.is_token_of(before.stream, before.token)
            assert new.is_token_of(after.stream, after.token)
            gate.release(20)
        with served.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            renewed = Started(before.id, before.stream, new.token(before.stream))
            for started in (before, after, renewed):
                read, _ = read_stream(peer, started.with_token, after=0)
                assert read.seqs(started.stream) == up_to(4)
    gate.close()


def test_keys_that_cannot_be_read_change_nothing(tmp_path: Path, store: str) -> None:
    keys = tmp_path / "keys"
    write(keys, b"a")
    options = (f"--key-file={keys}",)
    with ServerProcess(tmp_path, store=store, options=options) as served:
        for spoil in (lambda: keys.write_bytes(b"no key\n"), keys.unlink):
            spoil()
            heard = len([each for each in served.log if "the keys in use stay" in each])
            os.kill(served.pid, signal.SIGHUP)
            wait_until(
                "told",
                lambda: len([e for e in served.log if "the keys in use stay" in e]) > heard,  # noqa: B023
            )
        with served.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "count", n=1)
            assert started.token == Keyring([b"a" * 32]).token(started.stream)


def test_a_replica_with_other_keys_or_another_lease_does_not_start(
    tmp_path: Path, store: str
) -> None:
    keys = tmp_path / "keys"
    write(keys, b"a")
    serve = ("serve", APP, "--journal", store, "--http", "127.0.0.1:0")
    with ServerProcess(tmp_path, store=store) as first:
        told = refused(*serve, f"--key-file={keys}")
        name = next(
            line.split("replica=")[1].split()[0] for line in first.log if "replica=" in line
        )
        assert f"Replica {name} of this journal has other keys" in told
        assert str(keys) in told
        told = refused(*serve, "--lease=3")
        assert f"Replica {name} of this journal has a lease of 2 s, and this one of 3 s" in told
        assert not any("another replica" in line for line in first.log)


def test_a_replica_that_differs_from_others_is_told_of(tmp_path: Path, store: str) -> None:
    key_file, same = tmp_path / "keys", tmp_path / "same"
    write(key_file, b"a")
    write(same, b"a")
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with (
        ServerProcess(one, store=store, options=(f"--key-file={same}",)) as first,
        ServerProcess(other, store=store, options=(f"--key-file={key_file}",)) as second,
    ):
        [told] = [line for line in first.log if "the journal is in a store" in line]
        assert not any("has other keys" in line for line in first.log + second.log)
        write(key_file, b"b", b"a")
        second.send(signal.SIGHUP)
        second.hear("another replica has other keys: tokens fail")
        [wrong] = [line for line in second.log if "has other keys" in line]
        assert f"ours_from={key_file}" in wrong
        assert told.split("replica=")[1].split()[0] == wrong.split("replica=")[1].split()[0]
        [again] = [line for line in second.log if "the keys were read again" in line]
        first_key = hashlib.sha256(b"b" * 32).hexdigest()[:8]
        assert f"first={first_key} keys=2" in again


def test_a_file_of_keys_that_is_missing_is_not_made(tmp_path: Path, store: str) -> None:
    missing = tmp_path / "keys"
    for journal in (store, str(tmp_path / "journal.db")):
        why = refused(*LISTENING, f"--journal={journal}", f"--key-file={missing}")
        assert f"{missing}: there is no such file of keys: make it once" in why
    assert not missing.exists()


def test_a_file_of_keys_may_be_a_link_of_ours(tmp_path: Path, store: str) -> None:
    """Kubernetes mounts secrets so."""
    write(tmp_path / "real", b"a")
    (tmp_path / "keys").symlink_to(tmp_path / "real")
    options = (f"--key-file={tmp_path / 'keys'}",)
    with ServerProcess(tmp_path, store=store, options=options) as served:
        assert served.stop() == 0


def line(key: bytes) -> bytes:
    return base64.urlsafe_b64encode(key * 32) + b"\n"


def write(path: Path, *keys: bytes, more: bytes = b"") -> None:
    path.touch(0o600)
    path.write_bytes(b"".join(map(line, keys)) + more)


# Messages that a store has lost

LOSING: Final = """
import pathlib
import streams.journal.redis.replay
import trio
from streams import Call, Server

streams.journal.redis.replay.KEPT_S = 0.0  # the replica cannot put anything back
server = Server("builds", resume_min_s=0)

@server.tool
async def build(call: Call, folder: str) -> str:
    while not pathlib.Path(folder, "begin").exists():
        await trio.sleep(0.01)
    for row in range(8):
        await call.log("info", f"row {row}")
        await call.flush()
    pathlib.Path(folder, "half").touch()
    while not pathlib.Path(folder, "go").exists():
        await trio.sleep(0.01)
    await call.log("info", "the last row")
    return "built"
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_goes_on_behind_messages_that_the_store_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    monkeypatch.setenv("MCP_STREAMS_STATE", str(tmp_path / "calls.json"))
    (tmp_path / "app.py").write_text(LOSING)
    app = f"{tmp_path / 'app.py'}:server"
    with (
        running("redis", tmp_path / "store") as losing,
        ServerProcess(tmp_path, app=app, store=losing.url) as server,
    ):
        begun = run("call", server.url, "build", f"folder={tmp_path}", "--detach")
        assert begun.returncode == 0, begun
        (tmp_path / "begin").touch()
        wait_until("the call has eight rows", (tmp_path / "half").exists)
        losing.ask("FLUSHALL")
        server.hear("the store has gone back")
        (tmp_path / "go").touch()
        done = run("resume", "build-1", *(("--json",) if as_json else ()))
    assert (done.returncode, "built" in done.stdout) == (0, True), done
    if as_json:
        [gap] = [json.loads(line)["gap"] for line in done.shown if '"gap"' in line]
        assert 1 <= gap["from"] <= gap["to"]
    else:
        pattern = r"(\d+) messages are gone: .* The call goes on with message (\d+)\."
        [(lost, at)] = re.findall(pattern, done.stderr)
        assert 1 < int(lost) < int(at)
        assert "row 7" not in done.stderr
    assert "the last row" in done.stderr
    assert run("calls").stderr == "No unfinished calls.\n"
