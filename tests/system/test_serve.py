"""Processes that serve: what they refuse, how they end, what a relay does not load."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams.process.options import Options
from tests.acceptance.launch import Spawned, owner_pid, owners, wait_for_end
from tests.rigs.command import run
from tests.wire.process import APP, ServerProcess
from tests.wire.raw import DEADLINE_S
from tests.wire.verbs import STREAMS


def refused(*words: str) -> str:
    """Why `serve` does not even start: one line, on standard error."""
    done = run("serve", *words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.shown) == 1, done.stderr
    return done.stderr


# Refusals


@pytest.mark.parametrize(
    ("app", "why"),
    [
        ("/no/such/file.py:server", "/no/such/file.py: there is no such file"),
        ("no_colon.py", "file.py:server or package.module:server"),
        ("no.such.package:server", "ModuleNotFoundError: No module named 'no'"),
        ("json:loads", "no Server named 'loads'"),
    ],
)
def test_an_app_that_is_none_is_refused(app: str, why: str) -> None:
    assert why in refused(app)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("\nraise KeyError('licence')", "KeyError: 'licence' ({app}, line 2)"),
        ("import json\n\njson.loads('[')", "JSONDecodeError"),
        ("def (", "SyntaxError: invalid syntax ({name}, line 1)"),
        ("import no_such_thing", "No module named 'no_such_thing' ({app}, line 1)"),
    ],
)
def test_an_app_that_raises_is_told_where(tmp_path: Path, source: str, why: str) -> None:
    app = tmp_path / "broken_server.py"
    app.write_text(source)
    assert why.format(app=app, name=app.name) in refused(f"{app}:server")


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--ws", "8765", "write HOST:PORT"),
        ("--ws", "127.0.0.1:65536", "a port of up to 65535"),
        ("--ws", "0.0.0.0:0", "--insecure-anonymous"),
        ("--limit", "streams=1", "unknown streams; known are unsent_entries_max"),
        ("--limit", "streams_max=many", "streams_max"),
        ("--limit", "streams_max=0", "above 0"),
        ("--max-message-bytes", "-1", "above 0"),
        ("--linger", "-1", "0 or more"),
        ("--journal", "/no/such/folder/journal.db", "/no/such/folder"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(option: str, value: str, why: str) -> None:
    assert why in refused(APP, f"{option}={value}")


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "notes.txt"
    journal.write_text("Not a database, and not to be made one.\n" * 100)
    assert str(journal) in refused(APP, "--foreground", f"--journal={journal}")
    assert str(journal) in refused(APP, f"--journal={journal}"), "the relay passes it on"
    assert journal.read_text().startswith("Not a database")


def test_a_port_in_use_is_refused_before_the_journal_is_touched(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("serve", APP, f"--ws={address}", f"--journal={journal}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{address}: cannot listen there" in done.shown[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_journal_has_one_owner(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        why = refused(APP, "--ws=127.0.0.1:0", f"--journal={server.journal}")
        assert f"already owned by another process (pid {server.pid})" in why


# Ends


def test_end_of_input_ends_a_foreground_process() -> None:
    done = run("serve", APP, "--stdio", "--json")
    assert (done.returncode, done.stdout) == (0, "")
    assert [json.loads(line)["level"] for line in done.shown] == ["info"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    with ServerProcess(tmp_path) as server:
        assert server.stop(number) == 0
    assert any("shutting down" in line for line in server.log)
    assert not any("Traceback" in line for line in server.log)


def test_an_owner_rests_for_the_next_client_and_then_ends(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, "--linger", "1") as peer:
        peer.initialize(STREAMS)
        owner = owner_pid(journal)
        assert owners(journal) == [owner]
        leaving_at = time.monotonic()
        assert peer.end_as_sdks_do(grace_s=DEADLINE_S) == 0
    wait_for_end(owner)
    assert time.monotonic() - leaving_at >= 1
    assert not Path(f"{journal}.sock").exists()


# The relay


def test_a_relay_loads_nothing_that_takes_time(tmp_path: Path) -> None:
    code = "import sys, streams.cli, streams.process.relay; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "transports.relay.handover" in loaded
    assert not {"trio", "structlog", "sqlite3", "jsonschema_rs"} & set(loaded)


def test_ctrl_c_ends_a_relay_without_a_word_and_an_owner_that_may_not_linger(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, "--linger", "0") as peer:
        peer.initialize(STREAMS)
        owner = owner_pid(journal)
        os.kill(peer.process.pid, signal.SIGINT)
        assert peer.exit_code() == 130
    wait_for_end(owner)


def test_an_owner_is_given_everything_that_its_relay_was_told(tmp_path: Path) -> None:
    told = Options(
        app=APP,
        journal=tmp_path / "journal.db",
        stdio=True,
        linger_s=7,
        durability="process",
        limits={"streams_max": 3},
        json_log=True,
    )
    owner = Options.parse(told.for_owner())
    assert (told.is_relay, owner.is_relay, owner.stdio) == (True, False, False)
    assert owner.hello() == told.hello()
    for name in ("journal", "linger_s", "durability", "limits", "json_log"):
        assert getattr(owner, name) == getattr(told, name)
