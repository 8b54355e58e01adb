"""The demo: it finds planted faults, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.cli.selftest.demo import Figures
from tests.rigs import HERE
from tests.rigs.command import Done, run
from tests.rigs.redis_servers import running
from tests.wire.process import wait_until
from tests.wire.raw import DEADLINE_S

FAULTY = f"{HERE / 'faulty_demo_server.py'}:server"
SLOW = f"{HERE / 'faulty_demo_server.py'}:slow_server"
FILES = 12

# `mcp-streams demo`, with another server.
ELSEWHERE = (
    sys.executable,
    "-c",
    "import sys; from pathlib import Path; from streams.cli.selftest import demo; "
    "sys.exit(demo.run(Path(sys.argv[1]), as_json=True, app=sys.argv[2]))",
)


def folder_of_files(place: Path, first: str = "all is well") -> Path:
    folder = place / "files"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:02}").write_text(first if number == 0 else str(number))
    return folder


def figures(done: Done) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)
    calls = [(one["transport"], one["restart"]) for one in found]
    assert calls == [("stdio", True), ("websocket", True), ("http", True), ("http", False)]
    return found


def servers_of(app: str) -> list[int]:
    """The processes that serve `app`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(app) in command:
            found.append(int(process.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_the_demo_ends_its_servers(
    tmp_path: Path, number: signal.Signals
) -> None:
    places = {"TMPDIR": str(tmp_path)}
    words = [*ELSEWHERE, str(folder_of_files(tmp_path)), SLOW]
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | places, text=True
    ) as demo:
        wait_until("servers", lambda: len(servers_of(SLOW)) > 3)  # the demo itself is one
        demo.send_signal(number)
        _, said = demo.communicate(timeout=DEADLINE_S)
    assert (demo.returncode, said.splitlines()[-1]) == (130, "Interrupted.")
    wait_until("their end", lambda: not servers_of(SLOW))
    assert [each.name for each in tmp_path.iterdir()] == ["files"]


def test_a_folder_without_files_that_can_be_named_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff")).write_text("no message can name it")
    done = run("demo", "--folder", str(tmp_path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no files to read" in json.loads(done.stderr)["error"]["message"]


@pytest.mark.parametrize(
    ("seen", "is_good"),
    [
        ({}, True),
        ({"lost": 1}, False),
        ({"seen_twice": 1}, False),
        ({"end": "different"}, False),
        ({"end": "failed"}, False),
        ({"end": "interrupted"}, False),
        ({"end": "interrupted", "restart": False}, True),
        ({"end": "failed", "restart": False}, False),
    ],
)
def test_any_fault_spoils_the_verdict(seen: dict[str, Any], is_good: bool) -> None:
    good = {"restart": True, "lost": 0, "seen_twice": 0, "end": "equal"}
    one = Figures(transport="stdio", sent=9, delivered=9, cuts=2, kills=1, **{**good, **seen})
    assert one.is_good is is_good


def test_nothing_is_lost_and_nothing_seen_twice(tmp_path: Path) -> None:
    done = run("demo", "--folder", str(folder_of_files(tmp_path)), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    *restarted, once = figures(done)
    for one in restarted:
        assert (one["sent"], one["delivered"], one["end"]) == (2 * FILES, 2 * FILES, "equal")
    for one in (*restarted, once):
        assert (one["lost"], one["seen_twice"]) == (0, 0)
        assert (one["cuts"], one["kills"]) == (2, 1)


def test_a_kill_ends_only_the_call_that_cannot_be_restarted(tmp_path: Path) -> None:
    done = run(str(folder_of_files(tmp_path)), SLOW, command=ELSEWHERE)
    assert (done.returncode, done.stderr) == (0, "")
    found = figures(done)
    assert [one["end"] for one in found] == ["equal", "equal", "equal", "interrupted"]
    assert {(one["lost"], one["seen_twice"], one["sent"]) for one in found} == {(0, 0, 2 * FILES)}


def test_over_a_store_nothing_is_lost_and_no_key_is_left(tmp_path: Path) -> None:
    with running("redis", tmp_path / "store") as store:
        words = ("--folder", str(folder_of_files(tmp_path)), "--json")
        done = run("demo", *words, "--journal", f"{store.url}/0?prefix=reports")
        assert (done.returncode, done.stderr) == (0, "")
        assert store.ask("DBSIZE") == b":0\r\n"
    *restarted, once = figures(done)
    for one in restarted:
        assert (one["sent"], one["delivered"], one["end"]) == (2 * FILES, 2 * FILES, "equal")
    for one in (*restarted, once):
        assert (one["lost"], one["seen_twice"], one["kills"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("journal", "why"),
    [("redis://127.0.0.1:1", "no connection to 127.0.0.1:1"), ("calls.db", "calls.db is a file")],
)
def test_another_place_than_a_store_is_misuse(journal: str, why: str, tmp_path: Path) -> None:
    done = run("demo", "--folder", str(folder_of_files(tmp_path)), "--journal", journal)
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)
    assert why in done.stderr


def test_a_server_that_does_not_start_is_told_in_plain_words(tmp_path: Path) -> None:
    done = run(str(folder_of_files(tmp_path)), f"{HERE / 'nothing.py'}:server", command=ELSEWHERE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing.py" in done.stderr


def test_one_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "only").write_text("one")
    done = run("demo", "--folder", str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.count("server killed") == 4


@pytest.mark.parametrize(
    ("fault", "lost", "twice", "end"),
    [("muddles", 2, 2, "different"), ("fails", 2 * FILES, 0, "different")],
)
def test_a_faulty_server_is_found_out(
    tmp_path: Path, fault: str, lost: int, twice: int, end: str
) -> None:
    done = run(str(folder_of_files(tmp_path, fault)), FAULTY, command=ELSEWHERE)
    assert done.returncode == 1
    for one in figures(done):
        assert (one["lost"], one["seen_twice"], one["end"]) == (lost, twice, end)
    assert not servers_of(FAULTY)


def test_a_folder_without_files_is_misuse(tmp_path: Path) -> None:
    done = run("demo", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1)
