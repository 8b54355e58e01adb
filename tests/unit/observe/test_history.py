"""The recent past of calls and of the server: bounded, and true at its samples."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from streams.engine.events import (
    CallAnswered,
    CallAsked,
    CallDetached,
    CallEnded,
    CallInterrupted,
    CallReleased,
    CallRestarted,
    CallResumed,
)
from streams.journal.records import Outcome
from streams.observe.history import (
    CALLS_MAX,
    EVERY_S,
    MOMENTS_MAX,
    RATES_MAX,
    SAMPLES_MAX,
    History,
    Past,
    Rate,
    of_interval,
)
from streams.observe.tallies import COMMIT_S, Histogram


class Totals:
    def __init__(self) -> None:
        self.batches = Histogram((1.0, 10.0))
        self.commits = Histogram(COMMIT_S)


def marks(last: int = 0, delivered: int = 0) -> Any:
    return SimpleNamespace(
        last=last, durable=last, handed=last, delivered=delivered, is_ended=False
    )


def stream(name: str, last: int = 0, created_at: float = 0.0) -> Any:
    return SimpleNamespace(
        id=name, state=marks(last), record=SimpleNamespace(created_at=created_at)
    )


def test_a_sample_is_kept_if_marks_have_changed() -> None:
    past = Past()
    for at, last in ((1, 0), (2, 0), (3, 0), (4, 5), (5, 5)):
        past.sample(at, marks(last))
    assert [(each.at, each.numbered) for each in past.samples] == [(1, 0), (3, 0), (4, 5)]


def test_a_long_past_gets_coarser_and_keeps_its_ends() -> None:
    past = Past()
    for at in range(10 * SAMPLES_MAX):
        past.sample(at, marks(at))
        samples = list(past.samples)
        assert len(samples) <= SAMPLES_MAX
        assert samples[0].at == 0
        assert samples[-1].at >= at - 1
    assert [each.at for each in samples] == sorted(each.at for each in samples)


EVENTS = [
    (CallDetached, ("gone",), "cut", ""),
    (CallDetached, ("silent",), "silent", ""),
    (CallDetached, ("left",), "left", ""),
    (CallDetached, ("superseded",), "detached", "superseded"),
    (CallResumed, ("websocket", 3, 4), "resumed", "over websocket, with 4 missed"),
    (CallAsked, ("q", "elicitation/create", True), "asked", "elicitation/create"),
    (CallAnswered, ("q",), "answered", ""),
    (CallInterrupted, (), "interrupted", ""),
    (CallReleased, (), "released", ""),
    (CallRestarted, (), "restarted", ""),
]


@pytest.mark.parametrize(("event", "about", "what", "details"), EVENTS)
def test_each_event_is_a_moment(event: Any, about: Any, what: str, details: str) -> None:
    history = History(Totals())
    history.hear(event(stream("a", last=7), *about))
    past = history.past("a")
    assert past is not None
    [moment] = past.moments
    assert (moment.what, moment.seq, moment.details) == (what, 7, details)


def test_a_call_that_only_ends_leaves_nothing() -> None:
    history = History(Totals())
    history.hear(CallEnded(stream("a"), Outcome.COMPLETED, ""))
    assert history.past("a") is None
    history.hear(CallDetached(stream("a"), "gone"))
    history.hear(CallEnded(stream("a"), Outcome.FAILED, "interrupted"))
    past = history.past("a")
    assert past is not None
    assert [each.what for each in past.moments] == ["cut", "failed"]


def test_calls_and_moments_are_bounded() -> None:
    history = History(Totals())
    for number in range(CALLS_MAX + 10):
        history.hear(CallDetached(stream(str(number)), "gone"))
    assert history.past("9") is None, "the one that changed longest ago goes"
    assert history.past("10") is not None
    history.sample([stream("late", last=1)])
    assert history.past("late") is None, "a sample alone displaces no other call"
    for _ in range(MOMENTS_MAX + 10):
        history.hear(CallDetached(stream("10"), "gone"))
    past = history.past("10")
    assert past is not None
    assert len(past.moments) == MOMENTS_MAX


def test_a_call_of_this_process_begins_at_nothing() -> None:
    history = History(Totals())
    history.sample([stream("new", 5, history.began_at + 1), stream("old", 5, 0.0)])
    new, old = history.past("new"), history.past("old")
    assert new is not None
    assert old is not None
    assert [each.numbered for each in new.samples] == [0, 5]
    assert [each.numbered for each in old.samples] == [5], "what was before is not known"


async def test_rates_are_those_of_each_interval(autojump_clock: Any, nursery: Any) -> None:
    totals = Totals()
    history = History(totals)
    nursery.start_soon(history.run, list)

    await trio.sleep(EVERY_S * 1.5)
    totals.batches.observe(30)
    totals.commits.observe(0.02)
    totals.commits.observe(0.04)
    await trio.sleep(EVERY_S)
    await trio.sleep(EVERY_S)
    assert [each.messages_per_s for each in history.rates] == pytest.approx([0, 30, 0])
    assert [each.commit_s for each in history.rates] == pytest.approx([0, 0.03, 0])
    await trio.sleep(2 * RATES_MAX * EVERY_S)
    assert len(history.rates) == RATES_MAX


def test_an_interval_of_rates_keeps_the_slowest_commit() -> None:
    rates = [Rate(float(n), float(n), n / 1000) for n in range(10)]
    steps = of_interval(rates, 5)
    assert [each.messages_per_s for each in steps] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert [each.commit_s for each in steps] == pytest.approx([0.001, 0.003, 0.005, 0.007, 0.009])
    assert of_interval([], 5) == []
