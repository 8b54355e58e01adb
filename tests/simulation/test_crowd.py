"""A crowd does not end a server. The seeds of `test_simulation` are about what its clients get."""

import pytest

from tests.simulation.crowd import simulate_crowd
from tests.simulation.test_simulation import SEEDS


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_nothing_that_clients_do_ends_a_server(seed: int) -> None:
    report = simulate_crowd(seed)
    assert not report.violations, "\n".join(report.trace)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_that_clients_do_ends_a_replica(seed: int) -> None:
    report = simulate_crowd(seed, is_shared=True)
    assert not report.violations, "\n".join(report.trace)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_seed_has_one_history(is_shared: bool) -> None:
    first, second = (simulate_crowd(3, is_shared=is_shared).digest for _ in range(2))
    assert first == second != 0
