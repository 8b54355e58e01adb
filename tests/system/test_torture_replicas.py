"""`mcp-streams torture --replicas`: nothing is lost, and planted faults are found."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streams.cli.selftest.replicas import processes
from streams.cli.selftest.replicas.faults import FAULTS
from streams.cli.selftest.rigs import NoServer
from streams.cli.selftest.torture import REPORT
from tests.rigs import HERE
from tests.rigs.command import Following, run
from tests.rigs.needing import lacking
from tests.system.test_torture import processes_at

PATIENCE_S = 240.0
FAULTY = f"{HERE / 'faulty_torture_server.py'}:server"
WRONG = ("lost", "twice", "misordered", "damaged", "run_twice", "gaps")


def torture(
    settings: str, *, first: str = "", keep: str = "Path(sys.argv[1])", as_json: bool = False
) -> tuple[str, ...]:
    """`mcp-streams torture --replicas`, with short calls and with what the command cannot set."""
    return (
        sys.executable,
        "-c",
        "import sys; from pathlib import Path; from streams.cli.selftest import replicas; "
        f"{first}settings = replicas.Settings({settings}, call_s=(2.0, 6.0)); "
        f"sys.exit(replicas.run(settings, keep={keep}, as_json={as_json}))",
    )


ALL_FAULTS = torture("3, 1.0, 7, times=1, streams=12")
ELSEWHERE = torture("2, 1.0, 1, ['kill'], 1, 4, app=sys.argv[2]", as_json=True)
IN_A_PATH = torture(
    "2, 1.0, 1, ['rolling'], 1, 4",
    first="from streams.cli.selftest.replicas import processes; processes.PATH = sys.argv[1]; ",
    keep="None",
)


@pytest.fixture(autouse=True)
def store() -> None:
    try:
        processes.store_program()
    except NoServer as error:
        lacking(str(error))


def rows_of(kept: Path) -> dict[str, Any]:
    report = json.loads((kept / REPORT).read_bytes())
    return {row["fault"]: row for row in report["rows"]}


@pytest.mark.timeout(300)  # some faults last for seconds
def test_nothing_is_lost_by_any_fault(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run(str(kept), command=ALL_FAULTS, within_s=PATIENCE_S)
    assert done.returncode == 0, done
    rows = rows_of(kept)
    assert rows.keys() == FAULTS.keys()
    for fault, row in rows.items():
        assert row["faults"] == 1, fault
        assert row["delivered"] > 0, fault
        assert fault in done.stdout
        if fault == "failover-behind":  # clients are told of what the copy lacks
            assert {row[name] for name in WRONG if name != "gaps"} == {0}, row
            assert row["longest_outage_s"] > 0
        else:
            assert {row[name] for name in WRONG} == {0}, row
            assert row["longest_silence_s"] >= row["beyond_outage_s"] > 0, fault
    assert not processes_at(kept)


def test_a_faulty_server_is_found_out(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run(str(kept), FAULTY, command=ELSEWHERE, within_s=PATIENCE_S)
    assert done.returncode == 1, done
    report = json.loads(done.stdout)
    assert not report["is_good"]
    [row] = report["rows"]
    assert any("missing: [1" in what for what in report["failures"])
    assert row["lost"] + row["twice"] + row["damaged"] + row["misordered"] > 0
    assert not processes_at(kept)


def test_ctrl_c_ends_the_faults_and_the_calls_come_to_their_ends(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = ("torture", "--replicas", "2", "--faults", "kill", "--minutes", "10")
    more = ("--streams", "6", "--keep", str(kept))
    with Following(*words, *more, on_terminal=True) as torturing:
        torturing.wait_for(r"SIGKILL of a replica: [1-9]\d* faults")
        torturing.interrupt()
        torturing.wait_for("waiting for the last calls")
        code, out = torturing.end(within_s=PATIENCE_S)
    assert code == 0, out
    row = rows_of(kept)["kill"]
    assert row["faults"] >= 1
    assert {row[name] for name in WRONG} == {0}
    assert not processes_at(kept)


def test_without_haproxy_clients_choose_replicas_and_it_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    path, _ = processes.store_program()
    (folder / "valkey-server").symlink_to(path)
    done = run(str(folder), command=IN_A_PATH, within_s=PATIENCE_S)
    assert done.returncode == 0, done
    assert "There is no haproxy: the clients choose replicas themselves" in done.stderr
    assert "no balancer" in done.stdout


def test_what_cannot_be_is_misuse(tmp_path: Path) -> None:
    for words in (
        ["--replicas", "0"],
        ["--replicas", "3", "--times", "0"],
        ["--replicas", "3", "--streams", "0"],
        ["--replicas", "3", "--faults", "kill,flood"],
        ["--replicas", "3", "--faults", ""],
        ["--replicas", "3", "--wrap"],
        ["--replicas", "3", "--durability", "process"],
        ["--replicas", "3", "--keep", str(tmp_path)],
        ["--faults", "kill"],
        ["--times", "3"],
        ["--streams", "3"],
    ):
        done = run("torture", *words)
        assert (done.returncode, done.stdout, len(done.shown)) == (2, "", 1), done
