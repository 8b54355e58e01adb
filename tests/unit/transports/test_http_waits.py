"""The waits for requests: each ends in its time, and those that are idle or oldest end first."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from transports.http.requests import Phase
from transports.http.waits import PATIENCE_S, Wait, Waits


@asynccontextmanager
async def watched() -> AsyncIterator[Waits]:
    waits = Waits()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits.run)
        yield waits
        nursery.cancel_scope.cancel()


async def lasted(wait: Wait) -> float:
    """How long from now until the wait is given up."""
    began = trio.current_time()
    with wait.scope:
        await trio.sleep_forever()
    return trio.current_time() - began


@pytest.mark.parametrize("phase", list(Phase))
async def test_each_wait_ends_in_its_time(phase: Phase, autojump_clock: MockClock) -> None:
    async with watched() as waits:
        await trio.sleep(3.0)
        for each in Phase:
            waits.begin(Wait(), each)
        waits.begin(wait := Wait(), phase)
        assert await lasted(wait) == pytest.approx(PATIENCE_S[phase])


async def test_each_part_of_a_request_has_a_time_of_its_own(autojump_clock: MockClock) -> None:
    async with watched() as waits:
        waits.begin(wait := Wait(), Phase.NOTHING)
        await trio.sleep(74.0)
        waits.begin(wait, Phase.HEAD)
        await trio.sleep(9.0)
        waits.begin(wait, Phase.BODY)
        assert await lasted(wait) == pytest.approx(30.0)


async def test_a_wait_that_has_ended_is_not_given_up(autojump_clock: MockClock) -> None:
    async with watched() as waits:
        waits.begin(wait := Wait(), Phase.HEAD)
        waits.end(wait)
        await trio.sleep(100.0)
        assert not wait.is_over


async def test_only_idle_waits_end_with_the_departure() -> None:
    waits = Waits()
    idle, heard, begun = Wait(), Wait(), Wait()
    for each in (idle, heard, begun):
        waits.begin(each, Phase.NOTHING)
    waits.heard(heard)
    waits.begin(begun, Phase.HEAD)
    waits.end_idle()
    assert [each.is_over for each in (idle, heard, begun)] == [True, False, False]


async def test_the_wait_that_began_first_makes_room_first() -> None:
    waits = Waits()
    first, second = Wait(), Wait()
    waits.begin(first, Phase.NOTHING)
    waits.begin(second, Phase.HEAD)
    waits.begin(first, Phase.BODY)  # the same wait
    assert waits.end_longest()
    assert (first.is_over, second.is_over) == (True, False)
    assert waits.end_longest()
    assert not waits.end_longest()
