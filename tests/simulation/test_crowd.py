"""A crowd does not end a server. The seeds of `test_simulation` are about what its clients get."""

import pytest
import structlog

from tests.simulation.crowd import simulate_crowd
from tests.simulation.test_simulation import SEEDS


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_nothing_that_clients_do_ends_a_server(seed: int) -> None:
    with structlog.testing.capture_logs():
        simulate_crowd(seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_that_clients_do_ends_a_replica(seed: int) -> None:
    with structlog.testing.capture_logs():
        simulate_crowd(seed, is_shared=True)
