"""`mcp-streams torture` as a user runs it: nothing is lost, and planted faults are found."""

import json
import os
import sys
from pathlib import Path

from streams.cli.selftest import torture
from tests.rigs import HERE
from tests.rigs.command import Following, run

PATIENCE_S = 100.0  # the last calls have a minute of their own
FAULTY = f"{HERE / 'faulty_torture_server.py'}:server"
FAULTY_CHILD = HERE / "faulty_torture_child.py"
WRONG = ("lost", "seen_twice", "misordered", "damaged", "run_twice", "unfinished")

# `mcp-streams torture`, with another server.
ELSEWHERE = (
    sys.executable,
    "-c",
    "import sys; from pathlib import Path; from streams.cli.selftest import torture; "
    "served = {sys.argv[3]: sys.argv[2]}; "
    "settings = torture.Settings(0.02, 1, transports=('websocket',), **served); "
    "sys.exit(torture.run(settings, keep=Path(sys.argv[1]), as_json=True))",
)


def processes_at(folder: Path) -> list[int]:
    """The processes whose command line names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(folder) in command:
            found.append(int(process.name))
    return found


def test_nothing_is_lost_until_ctrl_c_ends_it_with_the_figures_so_far(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("torture", "--minutes", "10", "--seed", "7", "--keep", str(kept))
    with Following(*words, on_terminal=True) as torturing:
        torturing.wait_for(r"\d+ s left: (?:[5-9]|\d\d+) kills")
        torturing.interrupt()
        torturing.wait_for("waiting for the last calls")
        code, out = torturing.end(within_s=PATIENCE_S)
    assert code == 0, out
    assert "seen twice" in out
    report = json.loads((kept / torture.REPORT).read_bytes())
    assert (report["settings"]["seed"], report["is_good"]) == (7, True)
    assert [one["transport"] for one in report["figures"]] == ["stdio", "websocket", "http"]
    assert sum(one["acknowledged"] for one in report["figures"]) > 0
    for one in report["figures"]:
        assert one["delivered"] >= one["acknowledged"]
        assert one["calls"] > one["short"] > 0
        ends = ("finished", "interrupted", "unannounced", "refused")
        assert sum(one[name] for name in ends) == one["calls"]
        assert one["recovery_worst_s"] >= one["recovery_median_s"]
        assert {one[name] for name in WRONG} == {0}
        assert (kept / f"{one['transport']}.db").exists()
    assert sum(one["kills"] for one in report["figures"]) >= 1
    assert not processes_at(kept)


def test_a_faulty_server_is_found_out(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run(str(kept), FAULTY, "app", command=ELSEWHERE, within_s=PATIENCE_S)
    assert done.returncode == 1
    [one] = json.loads(done.stdout)["figures"]
    # Each call that comes to its end has one of each, and the last ones do.
    for fault in ("lost", "seen_twice", "misordered", "damaged", "run_twice"):
        assert one[fault] >= 1, fault
    assert "missing: [1, 3" in "".join(one["failures"])
    assert not processes_at(kept)


def test_wrapped_calls_end_once_though_children_owners_and_networks_fail(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("torture", "--wrap", "--minutes", "10", "--seed", "7", "--keep", str(kept))
    with Following(*words, on_terminal=True) as torturing:
        torturing.wait_for(r"\d+ s left: [1-9]\d\d* kills")
        torturing.interrupt()
        torturing.wait_for("waiting for the last calls")
        code, out = torturing.end(within_s=PATIENCE_S)
    assert code == 0, out
    report = json.loads((kept / torture.REPORT).read_bytes())
    for one in report["figures"]:
        ends = ("finished", "interrupted", "unannounced", "refused")
        assert sum(one[name] for name in ends) == one["calls"] > 0
        assert {one[name] for name in WRONG} == {0}
        assert one["last_words"] <= one["interrupted"]
    assert not processes_at(kept)


def test_a_faulty_child_is_found_out(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = (str(kept), str(FAULTY_CHILD), "child")
    done = run(*words, command=ELSEWHERE, within_s=PATIENCE_S)
    assert done.returncode == 1
    [one] = json.loads(done.stdout)["figures"]
    for fault in ("lost", "seen_twice", "damaged"):
        assert one[fault] >= 1, fault
    assert not processes_at(kept)


def test_what_cannot_be_is_misuse(tmp_path: Path) -> None:
    for words in (["--minutes", "0"], ["--minutes", "nan"], ["--keep", str(tmp_path)]):
        done = run("torture", *words)
        assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1), done
