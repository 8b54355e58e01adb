"""Wall time, also that of a store, and durations for people."""

import pytest

from streams.clock import StoreClock, WallAhead, lasting, wall

DURATIONS = {
    -1.0: "0s",
    0.9: "0s",
    59.0: "59s",
    60.0: "1m",
    200.0: "3m 20s",
    3600.0: "1h",
    3630.0: "1h 30s",
    86_400 + 7_260.0: "1d 2h",
}


@pytest.mark.parametrize(("seconds", "told"), DURATIONS.items())
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, told: str) -> None:
    assert lasting(seconds) == told


def test_the_clock_of_a_store_is_told_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    trio_s = 0.0
    ahead = WallAhead(lambda: trio_s)
    at_start = ahead()
    clock, other = StoreClock(), StoreClock()
    monkeypatch.setattr("streams.clock.steady", lambda: 100.0)
    clock.tells(5000.0, asked_at=99.0)
    assert wall() == 5000.5, "the first answer counts, however long it took"
    clock.tells(6000.0, asked_at=99.0)
    assert wall() == 5000.5, "a later one that took long says little"
    clock.tells(6000.0, asked_at=100.0)
    assert (wall(), ahead()) == (6000.0, 6000.0)
    other.tells(7000.0, asked_at=100.0)
    assert wall() == 7000.0
    clock.close()
    clock.close()
    assert wall() == 7000.0
    other.close()
    assert wall() > 1e9
    monkeypatch.setattr("streams.clock.time.time", lambda: 1.0)
    assert ahead() == at_start, "this machine's clock may be set"
