"""The life of a stream that gives pages: which is the answer to whom, and for how long."""

from typing import Any

import pytest

from streams.engine.lifecycle import Event, StreamState
from streams.errors import Ended
from streams.journal.records import Outcome
from streams.limits import Limits
from tests.rigs.lives import FENCE, commit, end, line, record, write


def a_state(limits: Limits | None = None, **more: Any) -> StreamState:
    return StreamState(record(**({"pages": ()} | more)), limits or Limits())


def with_pages(*seqs: int, limits: Limits | None = None, **more: Any) -> StreamState:
    """One whose pages are these, other messages in between, all of it durable."""
    state = a_state(limits, **more)
    for seq in range(1, max(seqs) + 1):
        assert state.add(line(seq), is_page=seq in seqs)
    commit(state)
    return state


# Numbers


def test_a_page_has_a_number_like_any_message() -> None:
    state = a_state()
    state.add(line("progress"))
    assert state.add(line("page"), is_page=True)
    state.add(line("more"))
    assert (state.last, state.pages) == (3, [2])
    append = state.take(FENCE)
    assert append is not None
    assert (append.run.count, append.pages, append.outcome) == (3, (2,), Outcome.LIVE)


def test_each_commit_tells_of_the_pages_that_are_new_in_it() -> None:
    state = with_pages(1, 3)
    state.add(line("x"))
    state.add(line("y"), is_page=True)
    append = state.take(FENCE)
    assert append is not None
    assert append.pages == (5,)


def test_there_is_no_more_room_for_a_page_than_for_anything() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    assert state.add(line(1))
    assert not state.add(line("page"), is_page=True)
    assert (state.last, state.pages) == (1, [])
    write(state)
    assert state.add(line("page"), is_page=True)


def test_after_the_end_there_is_no_page() -> None:
    state = a_state()
    end(state)
    with pytest.raises(Ended):
        state.add(line("late"), is_page=True)
    assert state.pages == []


# Whose answer a page is


def test_the_answer_is_the_first_response_behind_where_the_client_is() -> None:
    state = with_pages(2, 4)
    assert [state.answer_after(position) for position in range(6)] == [2, 2, 4, 4, None, None]
    end(state)
    assert [state.answer_after(position) for position in range(6)] == [2, 2, 4, 4, 5, 5]


def test_without_pages_the_answer_is_the_final_response() -> None:
    state = a_state(pages=None)
    state.add(line(1))
    assert state.answer_after(0) is None
    end(state)
    assert state.answer_after(0) == state.answer_after(1) == 2


def test_a_page_that_was_let_go_is_still_where_its_answer_ended() -> None:
    state = with_pages(2, 4)
    state.deliver(2)
    assert state.pages == [4]
    assert state.answer_after(0) == state.answer_after(1) == 2
    assert state.answer_after(2) == 4


def test_pages_below_the_mark_are_forgotten_and_the_others_kept_over_a_restart() -> None:
    state = with_pages(2, 4, 6)
    assert state.deliver(4)
    again = a_state(last=6, acked=4, pages=(6,))
    for each in (state, again):
        assert (each.pages, each.delivered, each.handed) == ([6], 4, 4)
        assert [each.answer_after(position) for position in (3, 4, 5, 6)] == [4, 6, 6, None]


# How it ends


@pytest.mark.parametrize(
    ("event", "is_error", "outcome"),
    [
        (Event.END, False, Outcome.COMPLETED),
        (Event.END, True, Outcome.COMPLETED),  # a result with isError is a result
        (Event.FAIL, True, Outcome.FAILED),
    ],
)
def test_only_an_error_for_a_response_is_a_failure(
    event: Event, is_error: bool, outcome: Outcome
) -> None:
    state = a_state()
    state.end(line("final"), event, is_error=is_error, at=2.0)
    assert state.is_ended
    append = state.take(FENCE)
    assert append is not None
    assert (append.outcome, append.ended_at) == (outcome, 2.0)
    assert append.last_error == (1 if is_error else 0)
    state.committed(1)
    flags = state.flags()
    assert (flags.is_live, flags.has_failed) == (False, outcome is Outcome.FAILED)
    assert flags.has_error is is_error


def test_a_failure_is_remembered_over_a_restart() -> None:
    state = a_state(outcome=Outcome.FAILED, last=3, last_error=3, ended_at=1.0)
    assert state.is_ended
    assert state.flags().has_failed


@pytest.mark.parametrize("event", [Event.ABANDON, Event.CANCEL])
def test_a_closed_stream_has_no_pages(event: Event) -> None:
    state = with_pages(2, 4)
    state.close(event, FENCE, at=1.0)
    assert state.pages == []
    with pytest.raises(Ended):
        state.add(line("late"), is_page=True)


# Time


def ended(limits: Limits | None = None, **more: Any) -> StreamState:
    """One whose last page, number 3, was sent over a connection that left at 10.0."""
    state = with_pages(2, limits=limits, **more)
    end(state)
    write(state)
    state.detach(10.0)
    return state


def test_the_last_page_can_be_had_again_for_two_minutes() -> None:
    state = ended(max_s=3600.0)
    assert state.deadline == 10.0 + 120.0


def test_asking_for_the_last_page_again_does_not_extend_its_time() -> None:
    state = ended(Limits(last_page_s=50.0), max_s=3600.0)
    for now in (20.0, 40.0, 59.0):
        state.attach(0, confirms=True)
        assert state.deadline is None
        state.detach(now)
        assert state.deadline == 60.0
        state.touch(now)
        assert state.deadline == 60.0


def test_the_last_page_is_not_kept_longer_than_anything_else_would_be() -> None:
    assert ended(max_s=30.0).deadline == 40.0


def test_a_last_page_that_was_made_while_nobody_was_there_waits_as_long_as_any() -> None:
    state = with_pages(2, max_s=3600.0)
    end(state)
    commit(state)
    state.detach(10.0)
    assert state.deadline == 3610.0


def test_after_a_restart_the_last_page_waits_as_long_as_any() -> None:
    state = a_state(last=3, acked=2, outcome=Outcome.COMPLETED, ended_at=1.0, max_s=3600.0)
    state.detach(10.0)
    assert state.deadline == 3610.0  # whether anybody was sent it is not known
