"""Turns: how much busy connections do between two turns of another one."""

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from streams.turns import (
    ACTIVE_S,
    BUSY_AT_ONCE,
    FREE_PER_S,
    FREE_UNITS,
    PAUSE_S_MAX,
    PAUSE_TIMES,
    PIECE_S,
    REST_UNITS,
    TURN_UNITS,
    LargeWork,
    RateLimit,
    Turns,
    pause_after,
)


@pytest.mark.parametrize("connections", [1, 10, 100])
async def test_of_busy_connections_two_have_turns_between_two_turns_of_another(
    connections: int, mock_clock: MockClock
) -> None:
    done = [0] * connections
    async with trio.open_nursery() as nursery:

        async def be_busy(index: int) -> None:
            turns = Turns()
            while True:
                done[index] += 1
                if turns.spend():
                    await turns.wait()

        for index in range(connections):
            nursery.start_soon(be_busy, index)
        while sum(done) < connections * (FREE_UNITS + 2 * TURN_UNITS):
            await trio.lowlevel.checkpoint()  # what each may do freely is used up
        before = list(done)
        for _ in range(10 * connections):
            so_far = sum(done)
            await trio.lowlevel.checkpoint()
            assert sum(done) - so_far <= 2 * BUSY_AT_ONCE * TURN_UNITS
        gained = [now - then for now, then in zip(done, before, strict=True)]
        assert max(gained) - min(gained) <= 2 * TURN_UNITS
        assert min(gained) > 0
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_not_busy_waits_for_no_busy_one(
    mock_clock: MockClock,
) -> None:
    order: list[str] = []
    turns = Turns()
    mock_clock.jump(TURN_UNITS / FREE_PER_S)  # before the others begin, which earn nothing by it
    async with trio.open_nursery() as nursery:

        async def be_busy() -> None:
            turns = Turns()
            while len(order) < 1000:
                order.append("busy")
                turns.spend(TURN_UNITS)
                await turns.wait()

        for _ in range(10):
            nursery.start_soon(be_busy)
        while len(order) < 500:
            await trio.lowlevel.checkpoint()
        assert turns.spend(TURN_UNITS)
        before = len(order)
        await turns.wait()
        assert len(order) - before <= 2 * BUSY_AT_ONCE


async def test_a_connection_that_rests_does_not_join_the_queue(mock_clock: MockClock) -> None:
    turns = Turns()
    for _ in range(10 * int(FREE_UNITS)):
        for _ in range(REST_UNITS):
            assert not turns.spend()
        turns.rest()


async def test_a_connection_with_more_than_a_short_request_at_a_time_does_not_rest(
    mock_clock: MockClock,
) -> None:
    turns = Turns()
    for _ in range(TURN_UNITS // (REST_UNITS + 1)):
        is_over = turns.spend(REST_UNITS + 1)
        turns.rest()
    assert is_over


async def test_new_connections_wait_for_each_other(mock_clock: MockClock) -> None:
    """A client that reconnects all the time gets no more by that."""
    order: list[int] = []
    async with trio.open_nursery() as nursery:

        async def connect_again_and_again() -> None:
            while True:
                turns = Turns()
                turns.spend(TURN_UNITS)
                await turns.wait()
                order.append(len(order))

        for _ in range(10):
            nursery.start_soon(connect_again_and_again)
        for _ in range(100):
            before = len(order)
            await trio.lowlevel.checkpoint()
            assert len(order) - before <= 2 * BUSY_AT_ONCE
        assert len(order) > 10
        nursery.cancel_scope.cancel()


async def test_what_is_free_comes_back_with_time(mock_clock: MockClock) -> None:
    budget = RateLimit(3, 1.0)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    mock_clock.jump(1.5)
    assert [budget.spend(), budget.spend()] == [True, False]
    mock_clock.jump(100)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    assert FREE_PER_S > 0


async def test_what_a_unit_has_earned_counts(mock_clock: MockClock) -> None:
    budget = RateLimit(1, 0.0)
    assert all(budget.spend(1.0) for _ in range(10))
    assert not budget.spend(0.5)
    assert budget.spend(0.5)


async def test_between_two_pieces_of_large_work_is_a_pause_while_others_are_active(
    mock_clock: MockClock,
) -> None:
    large = LargeWork(trio.current_time)
    ended: list[float] = []
    took = 8 * PIECE_S

    def work() -> None:
        mock_clock.jump(took)
        ended.append(trio.current_time())

    large.note("somebody else", trio.current_time())
    async with trio.open_nursery() as nursery:
        for principal in ("a", "b"):
            nursery.start_soon(large.do, principal, work)
        await trio.testing.wait_all_tasks_blocked()
        assert len(ended) == 1  # at once
        mock_clock.jump(pause_after(took) - 0.9)
        large.note("somebody else", trio.current_time())
        await trio.testing.wait_all_tasks_blocked()
        assert len(ended) == 1
        mock_clock.jump(1.0)
    assert ended[1] - ended[0] == pytest.approx(pause_after(took) + 0.1 + took)


@pytest.mark.parametrize(
    ("pieces", "pauses"),
    [(0.5, 0.5), (1, 1), (2, 4), (8, 64), (10_000, PAUSE_S_MAX / PIECE_S / PAUSE_TIMES)],
)
def test_the_longer_a_piece_of_large_work_the_smaller_its_share(
    pieces: float, pauses: float
) -> None:
    assert pause_after(pieces * PIECE_S) == pytest.approx(pauses * PIECE_S * PAUSE_TIMES)


async def test_no_pause_is_longer_than_its_limit(mock_clock: MockClock) -> None:
    large = LargeWork(trio.current_time)
    await large.do("a", lambda: mock_clock.jump(60))
    large.note("somebody else", trio.current_time())
    mock_clock.jump(PAUSE_S_MAX)
    large.note("somebody else", trio.current_time())
    with trio.fail_after(0.5):
        await large.do("a", lambda: None)


@pytest.mark.parametrize("since", [0.0, ACTIVE_S])
async def test_large_work_of_one_principal_alone_has_no_pauses(
    since: float, mock_clock: MockClock
) -> None:
    large = LargeWork(trio.current_time)
    if since:
        large.note("somebody else", trio.current_time())
        mock_clock.jump(since)
    began = trio.current_time()
    for _ in range(5):
        large.note("a", trio.current_time())  # its small messages are no other's
        await large.do("a", lambda: mock_clock.jump(0.1))
    assert trio.current_time() - began == pytest.approx(0.5)


async def test_a_failure_of_large_work_is_the_callers_and_is_paid_for(
    mock_clock: MockClock,
) -> None:
    large = LargeWork(trio.current_time)

    def fail() -> None:
        mock_clock.jump(PIECE_S)
        raise ValueError("no JSON")

    large.note("somebody else", trio.current_time())
    with pytest.raises(ValueError, match="no JSON"):
        await large.do("a", fail)
    began = trio.current_time()
    mock_clock.autojump_threshold = 0
    await large.do("a", lambda: None)
    assert trio.current_time() - began == pytest.approx(PIECE_S * PAUSE_TIMES)
