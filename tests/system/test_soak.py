"""Soaking a server works, sees to it that all messages are right, and tells what is not flat."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.flat import BOUNDS, MIB, WARM_UP, Sample, Series, verdict
from benchmarks.soak import Report
from benchmarks.soak_day import HABITS
from benchmarks.watched import Cost
from benchmarks.watched import Report as Watched
from tests.rigs import HERE, ROOT
from tests.rigs.command import run
from tests.wire.process import wait_until
from tests.wire.raw import DEADLINE_S

SECONDS = 200
FAULTY = f"{HERE / 'faulty_fill.py'}:lossy"


def day(**series: list[float]) -> list[Sample]:
    """A sample each second, of which these series are not flat."""
    steady = {name: [100.0] * SECONDS for name in BOUNDS}
    steady |= {name: [64.0 * MIB] * SECONDS for name in BOUNDS if name.endswith("_bytes")}
    values = steady | series
    return [
        Sample(float(at), **{name: int(values[name][at]) for name in BOUNDS})
        for at in range(SECONDS)
    ]


def not_flat(samples: list[Sample]) -> set[str]:
    return {one.name for one in verdict(samples) if not one.is_flat}


def test_a_steady_day_is_flat() -> None:
    assert not_flat(day()) == set()


@pytest.mark.parametrize("name", BOUNDS)
def test_whatever_grows_is_found_out(name: str) -> None:
    bound = BOUNDS[name]
    start = 64.0 * MIB if name.endswith("_bytes") else 100.0
    whole = 2 * (bound.share * start + bound.slack)  # in the whole run
    grows = [start + whole * at / SECONDS for at in range(SECONDS)]
    assert not_flat(day(**{name: grows})) == {name}
    assert not_flat(day(**{name: grows[::-1]})) == set(), "to shrink is no fault"


def test_a_file_may_be_as_large_as_what_was_in_use_at_once() -> None:
    used = [64.0 * MIB] * SECONDS
    used[SECONDS // 2] = 128.0 * MIB
    grown = [64.0 * MIB] * (SECONDS // 2) + [128.0 * MIB] * (SECONDS // 2)
    assert not_flat(day(file_bytes=grown)) == {"file_bytes"}
    assert not_flat(day(file_bytes=grown, used_bytes=used)) == set()


def test_a_wal_may_grow_until_it_starts_over() -> None:
    grows = [8 * MIB + 31 * MIB * at / SECONDS for at in range(SECONDS)]
    assert not_flat(day(wal_bytes=grows)) == set()
    assert not_flat(day(wal_bytes=[2 * size for size in grows])) == {"wal_bytes"}


def test_the_warm_up_and_a_single_peak_do_not_count() -> None:
    early = int(WARM_UP * SECONDS)
    warming = [MIB * float(at) for at in range(early)] + [float(early * MIB)] * (SECONDS - early)
    assert not_flat(day(resident_bytes=warming)) == set()
    peak = [64.0 * MIB] * SECONDS
    peak[-3] = 640.0 * MIB
    assert not_flat(day(resident_bytes=peak)) == set()


def test_the_slope_is_told_for_an_hour() -> None:
    grows = [64.0 * MIB + MIB * at for at in range(SECONDS)]
    [one] = [one for one in verdict(day(resident_bytes=grows)) if one.name == "resident_bytes"]
    assert one.per_hour == pytest.approx(3600 * MIB)
    assert one.first < one.last <= one.highest


def test_too_few_samples_tell_nothing() -> None:
    with pytest.raises(ValueError, match="tell nothing"):
        verdict(day()[:3])
    with pytest.raises(ValueError, match="tell nothing"):
        verdict([])


def report(**changes: object) -> Report:
    done = dict.fromkeys(HABITS, 1)
    values = {"done": done, "failures": [], "series": verdict(day()), **changes}
    return Report(minutes=1.0, seed=1, samples=[], **values)  # type: ignore[arg-type]


def test_a_day_is_good_if_all_was_done_and_right_and_flat() -> None:
    grown = Series("threads", first=1, last=9, highest=9, per_hour=0, allowed=7)
    assert report().is_good
    assert not report(series=[grown]).is_good
    assert not report(failures=["calls: Lost('message 3 was expected: 4')"]).is_good
    assert not report(done={**dict.fromkeys(HABITS, 1), "pages": 0}).is_good


def test_everything_is_done_and_every_message_is_right(tmp_path: Path) -> None:
    done = run(
        *("--minutes", "0.1", "--seed", "3", "--json", "--out", str(tmp_path)),
        command=(sys.executable, "-m", "benchmarks.soak"),
        within_s=100.0,
    )
    assert done.returncode in (0, 1), done  # so short a day need not be flat
    told = json.loads(done.stdout)
    assert (told["failures"], told["seed"]) == ([], 3)
    assert sum(told["done"].values()) >= 10
    assert [one["name"] for one in told["series"]] == list(BOUNDS)
    assert json.loads((tmp_path / "soak.json").read_text()) == told
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"], "no journal is left"


def test_what_it_costs_to_watch_a_server_is_measured() -> None:
    done = run(
        *("--minutes", "0.1", "--seed", "3", "--json"),
        command=(sys.executable, "-m", "benchmarks.watched"),
        within_s=100.0,
    )
    assert done.returncode in (0, 1), done  # so short a day tells little of the cost
    told = json.loads(done.stdout)
    assert told["failures"] == []
    assert min(told[name]["actions"] for name in ("plain", "watched")) > 0


def test_watching_may_cost_little() -> None:
    plain = Cost(actions=100, cpu_s=1.0, resident_bytes=64 * MIB)
    assert Watched(1, 3, plain, Cost(100, 1.04, 73 * MIB), []).is_good
    assert not Watched(1, 3, plain, Cost(100, 1.06, 73 * MIB), []).is_good
    assert not Watched(1, 3, plain, Cost(100, 1.04, 75 * MIB), []).is_good
    assert not Watched(1, 3, plain, Cost(100, 1.04, 73 * MIB), ["calls: Lost()"]).is_good


def test_ctrl_c_ends_a_day_that_was_too_short_to_tell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as soaking:
        wait_until("the server starts", lambda: list(tmp_path.glob("*/soak.db")))
        soaking.send_signal(signal.SIGINT)
        _, said = soaking.communicate(timeout=DEADLINE_S)
    assert (soaking.returncode, said.count("\n")) == (1, 1), said
    assert said.startswith("too short: "), said
    assert list(tmp_path.iterdir()) == [], "no journal is left"


def test_a_server_that_loses_a_message_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "HABITS", {"calls": HABITS["calls"]})
    words = ["--minutes", "0.07", "--app", FAULTY, "--out", str(tmp_path)]
    assert soak.main(words) == 1
    assert "calls: Lost('" in capsys.readouterr().out
