"""Reads are repeated while the journal cannot be read, and a start waits for its store."""

from collections.abc import Awaitable, Callable

import pytest
import structlog
import trio
from trio.testing import MockClock

from streams.engine.retry import RETRY_LAST_S, START_S, at_start, patiently
from streams.errors import JournalUnusable, StoreAway, Unavailable


def away(until_s: float) -> Callable[[], Awaitable[str]]:
    async def ask() -> str:
        await trio.lowlevel.checkpoint()
        if trio.current_time() < until_s:
            raise StoreAway("redis://host does not answer")
        return "read"

    return ask


async def test_a_journal_is_asked_until_it_answers_and_the_log_says_it_once(
    autojump_clock: MockClock,
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await patiently(away(1_000.0)) == "read"
    assert trio.current_time() <= 1_000.0 + RETRY_LAST_S
    assert len(logs) == 1


async def test_patience_has_an_end_where_it_is_given_one(autojump_clock: MockClock) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await patiently(away(1_000.0), for_s=10.0)
    assert 10.0 <= trio.current_time() <= 10.0 + RETRY_LAST_S


async def test_a_start_waits_for_its_store_and_says_so(autojump_clock: MockClock) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await at_start(away(START_S - 1.0)) == "read"
    [line] = logs
    assert line["event"] == "waiting for the store of the journal"
    assert line["why"] == "redis://host does not answer"


async def test_a_start_without_its_store_ends_and_says_what_to_do(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(
        JournalUnusable, match=f"not answer; the server has waited for {START_S:g} s: start"
    ):
        await at_start(away(1_000.0))
    assert trio.current_time() <= START_S + RETRY_LAST_S
