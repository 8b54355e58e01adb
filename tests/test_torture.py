"""Torture, as its user runs it: nothing is lost, and the verdict is earned."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.command import Done, Following, run

FAULTY = f"{Path(__file__).parent / 'faulty_torture_server.py'}:server"

# The torture itself, with another server.
ELSEWHERE = (
    sys.executable,
    "-c",
    "import sys; from pathlib import Path; from streams import torture; "
    "settings = torture.Settings(0.02, 1, app=sys.argv[2]); "
    "sys.exit(torture.run(settings, keep=Path(sys.argv[1]), as_json=True))",
)


def figures(done: Done) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    assert [one["transport"] for one in found] == ["stdio", "websocket", "http"]
    return found


def processes_at(folder: Path) -> list[int]:
    """Processes that have to do with a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(folder) in command:
            found.append(int(process.name))
    return found


def test_nothing_is_lost_and_nothing_comes_twice(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run("torture", "--minutes", "0.1", "--seed", "7", "--keep", str(kept), "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    report = json.loads(done.stdout)
    assert report["settings"]["seed"] == 7
    assert report["is_good"] is True
    for one in figures(done):
        assert one["delivered"] >= one["acknowledged"] > 0
        assert one["finished"] + one["interrupted"] + one["unannounced"] == one["calls"]
        assert one["recovery_worst_s"] >= one["recovery_median_s"]
        wrong = ("lost", "seen_twice", "misordered", "damaged", "unfinished")
        assert {one[name] for name in wrong} == {0}
        assert (kept / f"{one['transport']}.db").exists()
    assert sum(one["kills"] for one in figures(done)) >= 1
    assert max(one["recovery_worst_s"] for one in figures(done)) > 0
    assert not processes_at(kept)


def test_a_faulty_server_is_found_out(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run(str(kept), FAULTY, command=ELSEWHERE)
    assert done.returncode == 1
    for one in figures(done):
        # Each call that comes to its end has one of each, and one is a part of a call at least.
        for fault in ("lost", "seen_twice", "misordered", "damaged"):
            assert one[fault] >= 1, fault
        assert "missing: [3, 7" in "".join(one["failures"])
    assert not processes_at(kept)


def test_ctrl_c_ends_it_with_the_figures_so_far() -> None:
    with Following("torture", "--minutes", "10", on_terminal=True) as torturing:
        torturing.wait_for(r"\d+ s left: [1-9]\d* kills")
        torturing.interrupt()
        torturing.wait_for("waiting for the last calls")
        code, out = torturing.end()
    assert code == 0, out
    assert "seen twice" in out


def test_what_cannot_be_is_misuse(tmp_path: Path) -> None:
    for words in (["--minutes", "0"], ["--minutes", "nan"], ["--keep", str(tmp_path)]):
        done = run("torture", *words)
        assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1), done
