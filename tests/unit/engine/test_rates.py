"""How often a principal may ask."""

import pytest
import trio
import trio.testing

from streams.engine.rates import BURST_S, KNOWN_MAX, Rates
from streams.errors import Refusal


async def taken(rates: Rates, principal: str = "ada") -> int:
    """How many requests may be made now."""
    await trio.lowlevel.checkpoint()
    for count in range(1000):
        try:
            rates.check(principal)
        except Refusal:
            return count
    return 1000


async def test_who_is_refused_is_told_when_to_come_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rates = Rates(0.25)
    assert await taken(rates) == 2
    with pytest.raises(Refusal) as refusing:
        rates.check("ada")
    assert refusing.value.data == {"reason": "too_many_requests", "retryAfter": 2}
    await trio.sleep(2)
    rates.check("ada")


async def test_a_budget_is_spent_at_once_and_fills_up_with_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rates = Rates(2.0)
    assert await taken(rates) == 2 * BURST_S
    assert await taken(rates) == 0
    assert await taken(rates, "eve") == 2 * BURST_S, "to each their own"
    await trio.sleep(3)
    assert await taken(rates) == 6
    await trio.sleep(1000)
    assert await taken(rates) == 2 * BURST_S


async def test_less_than_one_in_the_time_of_a_burst_is_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rates = Rates(1 / 60)
    assert await taken(rates) == 1
    await trio.sleep(60)
    assert await taken(rates) == 1


async def test_nothing_stands_for_no_limit() -> None:
    assert await taken(Rates(0)) == 1000


async def test_who_has_asked_for_nothing_for_long_is_forgotten(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rates = Rates(1.0)
    for number in range(KNOWN_MAX):
        rates.check(str(number))
    await trio.sleep(2)
    rates.check("one more")
    assert len(rates._full_at) == 1
