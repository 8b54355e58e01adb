"""A short form of the simulation; `make simulate` is the long one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.rigs import ROOT
from tests.simulation.plan import forgetful, lossless
from tests.simulation.universe import Report, simulate

SEEDS: Final = int(os.environ.get("SIMULATION_SEEDS", "15"))
KEPT: Final = [
    int(line.split()[0])
    for line in Path(__file__).with_name("seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


def told(report: Report, *, is_shared: bool = False) -> str:
    trace = "\n".join(report.trace[-100:])
    again = f"python -m tests.simulation --seed {report.seed} --trace" + " --replicas" * is_shared
    return f"{trace}\n\n{report.violations}\n{again}"


@pytest.mark.parametrize("seed", [*KEPT, *range(1_000, 1_000 + SEEDS)])
def test_nothing_happens_that_must_not(seed: int) -> None:
    report = simulate(seed)
    assert not report.violations, told(report)


@pytest.mark.parametrize("seed", [*lossless(0, SEEDS), *forgetful(0, SEEDS)])
def test_nothing_happens_that_must_not_to_replicas(seed: int) -> None:
    report = simulate(seed, is_shared=True)
    assert not report.violations, told(report, is_shared=True)


@pytest.mark.parametrize(("seed", "is_shared"), [(3, False), (2263, False), (3, True), (25, True)])
def test_a_seed_has_one_history(seed: int, is_shared: bool) -> None:
    """The history is the same in another process, with other hashes and addresses.

    In 2263 a server with several connections shuts down, and waits for one after the other.
    """
    report = simulate(seed, is_shared=is_shared)
    code = (
        "from tests.simulation.universe import simulate; "
        f"print(simulate({seed}, is_shared={is_shared}).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert int(ran.stdout) == report.digest == simulate(seed, is_shared=is_shared).digest
