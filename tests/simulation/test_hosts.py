"""Each call of a host gets one answer. The seeds of `test_simulation` are about other clients."""

import pytest

from tests.simulation.hosts import simulate_hosts
from tests.simulation.test_simulation import SEEDS

# Seeds that once showed calls that ran twice, had no answer or a wrong one: a key, an eviction, a
# turn, a progress token, a listing, a store that was away, an end that was not known yet, a tool
# without room, a call that was made anew, a shutdown, a replica that was late.
KEPT = (101, 102, 145, 3, 4, 1202, 1174, 4040, 5226, 6125, 7076)


@pytest.mark.parametrize("seed", [*KEPT, *range(10_000, 10_000 + SEEDS)])
def test_each_call_gets_one_answer(seed: int) -> None:
    report = simulate_hosts(seed)
    assert not report.violations, "\n".join([*report.trace[-100:], *report.violations])


def test_a_seed_has_one_history() -> None:
    first, second = (simulate_hosts(11).digest for _ in range(2))
    assert first == second != 0
