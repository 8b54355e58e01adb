"""Durations for people."""

import pytest

from streams.clock import lasting

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
