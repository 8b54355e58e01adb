"""The books of a torture run: promised messages are compared with those that came."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streams import messages
from streams.cli.selftest.ledger import FAILURES_MAX, Figures, Ledger, Story
from streams.cli.selftest.torture_server import entry_of, note, note_run, noted
from streams.messages import Message

NAME = "http-1-1"


def message(data: Mapping[str, object]) -> Message:
    params = {"level": "info", "data": data}
    return messages.look(messages.notification("notifications/message", params))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger("http", tmp_path)


async def figures_of(
    ledger: Ledger,
    numbers: list[int],
    *,
    acknowledged: int = 0,
    count: int = 9,
    result: dict[str, Any] | None = None,
    is_interrupted: bool = False,
) -> Figures:
    """The figures of a call of `count` messages, of which these come, in this order."""
    story = Story(NAME, count)
    ledger.begin(story)
    if acknowledged:
        with (ledger.notes / NAME).open("a") as file:
            note(file, acknowledged)
    for number in numbers:
        story.look(message(entry_of(NAME, number)))
    if result is not None:
        story.finish({"structuredContent": result})
    story.is_over |= is_interrupted
    ledger.settle(story)
    return ledger.figures


async def test_a_call_of_which_all_came_is_good(ledger: Ledger) -> None:
    figures = await figures_of(ledger, list(range(1, 10)), acknowledged=8, result={"messages": 9})
    assert (figures.acknowledged, figures.delivered, figures.lost) == (8, 9, 0)
    assert (figures.calls, figures.finished, figures.interrupted) == (1, 1, 0)
    assert figures.is_good
    assert not list(ledger.notes.iterdir()), "nothing is left of what went well"


async def test_what_was_acknowledged_and_did_not_come_is_lost(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 2, 3], acknowledged=5, is_interrupted=True)
    assert (figures.acknowledged, figures.delivered, figures.lost) == (5, 3, 2)
    assert figures.interrupted == 1
    assert not figures.is_good
    assert "missing: [4, 5]" in figures.failures[0]
    assert noted(ledger.notes / NAME) == 5, "the notes of what went wrong are kept"


async def test_what_was_not_acknowledged_need_not_come(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 2, 3, 4], acknowledged=3, is_interrupted=True)
    assert (figures.lost, figures.is_good) == (0, True)


async def test_what_stands_ahead_of_something_delivered_is_lost(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 4], is_interrupted=True)
    assert (figures.lost, figures.is_good) == (2, False)


async def test_all_messages_stand_ahead_of_the_result(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 2], result={"messages": 9})
    assert (figures.lost, figures.is_good) == (7, False)


async def test_another_result_is_damage(ledger: Ledger) -> None:
    figures = await figures_of(ledger, list(range(1, 10)), result={"messages": 8})
    assert (figures.damaged, figures.is_good) == (1, False)


async def test_what_comes_again_is_seen_twice(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 2, 1, 3, 3], is_interrupted=True)
    assert (figures.delivered, figures.seen_twice, figures.misordered) == (3, 2, 0)
    assert not figures.is_good


async def test_what_comes_late_is_misordered(ledger: Ledger) -> None:
    figures = await figures_of(ledger, [1, 3, 2, 4], is_interrupted=True)
    assert (figures.lost, figures.seen_twice, figures.misordered) == (0, 0, 1)
    assert not figures.is_good


@pytest.mark.parametrize(
    "spoilt",
    [
        {"number": 2},
        {"number": "1"},
        {"call": "http-1-2"},
        {"proof": ""},
        {"proof": None},
        entry_of(NAME, 10),
        entry_of(NAME, 0),
    ],
)
def test_what_is_not_as_it_was_sent_is_damaged(spoilt: dict[str, object]) -> None:
    story = Story(NAME, 9)
    story.look(message({**entry_of(NAME, 1), **spoilt}))
    assert (story.damaged, story.seen) == (1, set())


def test_a_call_without_a_ticket_counts_for_nothing_else(ledger: Ledger) -> None:
    story = Story(NAME, 9)
    for let_go in (ledger.drop, ledger.refuse):
        ledger.begin(story)
        let_go(story)
    assert ledger.figures == Figures("http", calls=2, unannounced=1, refused=1)
    assert not ledger.open


async def test_a_call_that_is_not_seen_to_its_end_spoils_the_verdict(ledger: Ledger) -> None:
    await figures_of(ledger, [1], is_interrupted=True)
    assert ledger.figures.is_good
    ledger.begin(Story(NAME, 9))
    ledger.settle_all()
    assert (ledger.figures.unfinished, ledger.figures.is_good) == (1, False)


@pytest.mark.parametrize(("tool", "runs"), [("short", 1), ("reading", 3), ("work", 1)])
def test_short_calls_leave_nothing_to_note(ledger: Ledger, tool: str, runs: int) -> None:
    story = Story(NAME, 0, tool)
    ledger.begin(story)
    for _ in range(runs):
        note_run(ledger.notes, NAME)
    story.finish({"structuredContent": {"messages": 0}})
    ledger.settle(story)
    ledger.settle_all()
    figures = ledger.figures
    assert (figures.calls, figures.short, figures.finished) == (1, int(tool != "work"), 1)
    assert (figures.run_twice, figures.failures) == (0, [])


@pytest.mark.parametrize("tool", ["short", "work"])
def test_a_tool_that_ran_twice_is_found_even_if_its_call_was_lost(
    ledger: Ledger, tool: str
) -> None:
    story = Story(NAME, 0, tool)
    ledger.begin(story)
    for _ in range(2):
        note_run(ledger.notes, NAME)
    ledger.drop(story)
    ledger.settle_all()
    assert ledger.figures.run_twice == 1
    assert ledger.figures.failures == [f"{NAME}: its tool was run 2 times"]


def test_a_result_without_a_run_is_found(ledger: Ledger) -> None:
    story = Story(NAME, 0, "short")
    ledger.begin(story)
    story.finish({"structuredContent": {"messages": 0}})
    ledger.settle_all()
    assert ledger.figures.failures == [f"{NAME}: its tool was run 0 times"]


def test_a_run_in_which_nothing_came_is_not_good() -> None:
    assert not Figures("http").is_good
    assert Figures("http", delivered=1).is_good
    assert Figures("http", finished=1).is_good


def test_any_fault_spoils_the_verdict() -> None:
    for fault in ("lost", "seen_twice", "misordered", "damaged", "run_twice", "unfinished"):
        assert not Figures("http", delivered=1, **{fault: 1}).is_good
    assert not Figures("http", delivered=1, failures=["no server"]).is_good


def test_not_every_failure_is_kept(ledger: Ledger) -> None:
    for number in range(2 * FAILURES_MAX):
        ledger.fail(str(number))
    assert ledger.figures.failures == [str(number) for number in range(FAILURES_MAX)]


def test_recovery_is_told_by_its_median_and_its_worst(ledger: Ledger) -> None:
    for took_s in (3.0, 1.0, 2.0):
        ledger.recovered(took_s)
    assert (ledger.figures.recovery_median_s, ledger.figures.recovery_worst_s) == (2.0, 3.0)


async def test_a_note_that_is_half_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert noted(path) == 0
    with path.open("a") as file:
        note(file, 7)
        note(file, 12)
    with path.open("a") as file:
        file.write("31")
    assert noted(path) == 12
