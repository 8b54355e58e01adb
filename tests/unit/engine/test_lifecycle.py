"""The life of one stream, without input, output or a clock."""

from typing import Any

import pytest

from streams.engine.lifecycle import TRANSITIONS, Event, StreamState
from streams.errors import Ended
from streams.journal.contract import STORED_BYTES_MAX
from streams.journal.records import Append, Outcome
from streams.limits import Limits
from streams.messages import Run
from tests.rigs.lives import FENCE, commit, end, line, record, write


def a_state(limits: Limits | None = None, **more: Any) -> StreamState:
    return StreamState(record(**more), limits or Limits())


# Transitions


def drive(state: StreamState, event: Event) -> None:
    match event:
        case Event.APPEND:
            state.add(line("x"))
        case Event.END | Event.FAIL:
            state.end(line("final"), event, is_error=True, at=1.0)
        case Event.ABANDON | Event.CANCEL:
            state.close(event, FENCE, at=1.0)


WAYS_TO = {
    Outcome.LIVE: [],
    Outcome.COMPLETED: [Event.END],
    Outcome.FAILED: [Event.FAIL],
    Outcome.ABANDONED: [Event.ABANDON],
    Outcome.CANCELLED: [Event.CANCEL],
}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("outcome", Outcome)
def test_what_the_table_allows_happens_and_nothing_else(outcome: Outcome, event: Event) -> None:
    state = a_state()
    for step in WAYS_TO[outcome]:
        drive(state, step)
    before = (state.outcome, state.last, state.batch_bytes)
    assert state.outcome is outcome
    if event in TRANSITIONS[outcome]:
        drive(state, event)
        assert state.outcome is TRANSITIONS[outcome][event]
    else:
        with pytest.raises(Ended, match=outcome.value):
            drive(state, event)
        assert (state.outcome, state.last, state.batch_bytes) == before


def test_an_error_ends_a_stream_as_a_result_does() -> None:
    assert TRANSITIONS[Outcome.FAILED] == TRANSITIONS[Outcome.COMPLETED]


def test_nothing_leads_out_of_a_tombstone() -> None:
    assert TRANSITIONS[Outcome.ABANDONED] == TRANSITIONS[Outcome.CANCELLED] == {}


def test_a_closed_stream_keeps_nothing() -> None:
    state = a_state()
    state.add(line("durable"))
    commit(state)
    state.add_request("q", line("?"))
    closed = state.close(Event.CANCEL, FENCE, at=7.0)
    assert (closed.outcome, closed.at) == (Outcome.CANCELLED, 7.0)
    assert state.take(FENCE) is None
    assert not state.questions
    assert state.last == state.durable == state.handed == state.delivered == 1


def test_a_commit_that_ends_after_the_stream_was_closed_changes_nothing() -> None:
    state = a_state()
    state.add(line("on its way"))
    append = state.take(FENCE)
    assert append is not None
    state.close(Event.ABANDON, FENCE, at=1.0)
    state.committed(append.run.last)
    assert state.last == state.durable == state.handed == state.delivered == 0


# Numbers


def test_messages_are_numbered_from_one_without_gaps() -> None:
    state = a_state()
    for n in range(1, 4):
        assert state.add(line(n))
        assert state.last == n
    append = state.take(FENCE)
    assert append == Append("a-stream", FENCE, Run(1, 3, line(1) + line(2) + line(3)), 0, 0)
    assert state.add(line(4))
    assert commit(state) == Run(4, 1, line(4))


def test_a_long_batch_comes_in_parts_as_they_are_stored() -> None:
    state = a_state()
    size = len(line("x" * 100_000))
    for _ in range(5):
        state.add(line("x" * 100_000))
    state.add(line("x" * 2 * STORED_BYTES_MAX))
    state.add(line("last"))
    runs = []
    while (append := state.take(FENCE)) is not None:
        assert append.outcome is Outcome.LIVE
        runs.append(append.run)
        state.committed(append.run.last)
    assert [(run.seq, run.count) for run in runs] == [(1, 2), (3, 2), (5, 1), (6, 1), (7, 1)]
    assert [len(run.body) for run in runs[:2]] == [2 * size] * 2
    assert (state.batch_bytes, state.durable) == (0, 7)


@pytest.mark.parametrize("how", ["request", "page", "end"])
def test_a_long_batch_with_more_than_plain_messages_is_one_change(how: str) -> None:
    """Its marks are those of the whole batch."""
    state = a_state(pages=() if how == "page" else None)
    state.add(line("x" * STORED_BYTES_MAX))
    match how:
        case "request":
            state.add_request("q", line("?"))
        case "page":
            state.add(line("page"), is_page=True)
        case "end":
            state.end(line("final"), is_error=False, at=1.0)
    append = state.take(FENCE)
    assert append is not None
    assert (append.run.seq, append.run.last) == (1, 2)
    assert state.take(FENCE) is None


def test_nothing_new_is_nothing_to_take() -> None:
    assert a_state().take(FENCE) is None


def test_the_final_response_says_when_the_stream_ended_and_whether_badly() -> None:
    state = a_state()
    state.add_request("q", line("?"))
    state.end(line("final"), is_error=True, at=12.5)
    append = state.take(FENCE)
    assert append is not None
    assert (append.last_request, append.last_error, append.ended_at) == (1, 2, 12.5)
    assert append.outcome is Outcome.COMPLETED


def test_numbers_go_on_after_a_restart() -> None:
    state = a_state(last=7, acked=4)
    assert (state.last, state.durable, state.handed, state.delivered) == (7, 7, 4, 4)
    state.add(line("next"))
    assert commit(state).seq == 8


# Room


def test_without_room_a_message_is_refused_and_nothing_changes() -> None:
    state = a_state(Limits(unsent_entries_max=2))
    assert state.add(line(1))
    assert state.add(line(2))
    assert not state.add(line(3))
    assert not state.add_request("q", line("?"))
    assert state.last == 2
    assert not state.questions
    write(state)
    assert state.add(line(3))


def test_bytes_that_were_never_written_count() -> None:
    state = a_state(Limits(unsent_bytes_max=20))
    assert state.add(b"x" * 19 + b"\n")
    assert not state.add(line(1))
    write(state)
    assert state.add(line(1))


def test_what_a_former_process_had_numbered_makes_no_room_when_it_is_written() -> None:
    state = a_state(Limits(unsent_bytes_max=20), last=3)
    assert not state.hand(Run(1, 2, b"x" * 50))
    assert state.add(b"y" * 19 + b"\n")
    assert not state.add(line(5))
    assert not state.hand(Run(3, 1, b"x" * 25))
    assert not state.add(line(5))
    write(state)
    assert state.add(line(5))


def test_what_was_written_once_is_not_unsent_again() -> None:
    state = a_state(Limits(unsent_entries_max=2))
    state.add(line(1))
    run = write(state)
    state.detach(0.0)
    state.attach(0, confirms=False)
    assert not state.hand(run)  # the replay of it
    assert state.add(line(2))
    assert state.add(line(3))
    assert not state.add(line(4))


def test_a_request_to_the_client_can_be_forced() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    state.add(line(1))
    assert state.add_request("q", line("?"), is_forced=True)
    assert state.questions["q"].seq == 2


def test_there_is_always_room_for_the_final_response() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    state.add(line(1))
    end(state)
    assert state.last == 2


def test_without_room_only_the_latest_progress_of_each_token_is_kept() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    assert state.add_progress("a", line("a1"))
    for n in range(2, 9):
        assert not state.add_progress("a", line(f"a{n}"))
        assert not state.add_progress("b", line(f"b{n}"))
    assert state.last == 1  # what may be dropped has no number
    write(state)
    assert state.release_held()
    assert commit(state) == Run(2, 2, line("a8") + line("b8"))


def test_held_progress_is_numbered_before_the_next_other_message() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    state.add(line(1))
    state.add_progress("p", line("progress"))
    write(state)
    assert state.add(line("other"))
    assert commit(state) == Run(2, 2, line("progress") + line("other"))


def test_held_progress_is_numbered_before_the_final_response() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    state.add(line(1))
    state.add_progress("p", line("progress"))
    end(state)
    assert commit(state) == Run(1, 3, line(1) + line("progress") + line("final"))


def test_without_room_held_progress_stays_held() -> None:
    state = a_state(Limits(unsent_entries_max=1))
    state.add(line(1))
    state.add_progress("p", line("progress"))
    assert not state.release_held()
    assert not state.add(line(2))
    assert state.last == 1


# Marks


def test_the_size_of_lines_that_were_handed_elsewhere_is_estimated() -> None:
    state = a_state()
    for text in ("first", "second", "third", "fourth"):
        state.add(line(text))
    commit(state)
    state.hand_elsewhere(1)
    assert state.bytes_handed == state.bytes_numbered // 4
    state.hand_elsewhere(4)
    assert (state.handed, state.bytes_handed) == (4, state.bytes_numbered)


def test_nothing_is_delivered_before_it_is_durable() -> None:
    state = a_state()
    state.add(line(1))
    state.add(line(2))
    assert not state.deliver(2)
    commit(state)
    assert state.deliver(2)
    assert not state.deliver(1)  # no news
    assert state.delivered == state.handed == 2


def test_what_came_from_the_journal_is_durable() -> None:
    state = a_state()
    state.add(line(1))
    append = state.take(FENCE)
    assert append is not None
    state.hand(append.run)  # a reader was faster than the report of the commit
    assert state.durable == state.handed == 1


KIB = 1024


@pytest.mark.parametrize("size", [10 * KIB, 64 * KIB, 100 * KIB])
def test_a_plain_client_is_taken_to_have_the_oldest_beyond_the_limit(size: int) -> None:
    state = a_state(Limits(undelivered_bytes_max=640 * KIB))
    state.attach(0, confirms=False)
    for _ in range(100):
        assert state.add(b"x" * (size - 1) + b"\n")
        write(state)
    undelivered_bytes = (state.handed - state.delivered) * size
    assert 640 * KIB - 2 * 64 * KIB - size <= undelivered_bytes <= 640 * KIB + size


def test_the_undelivered_stay_limited_when_messages_grow() -> None:
    state = a_state(Limits(undelivered_bytes_max=640 * KIB))
    state.attach(0, confirms=False)
    for size in [64 * KIB] * 20 + [256 * KIB] * 20:
        state.add(b"x" * (size - 1) + b"\n")
        write(state)
    assert (state.handed - state.delivered) * 256 * KIB <= 640 * KIB + 256 * KIB


def test_lost_lines_take_no_room() -> None:
    """The client knows that the store has lost them, and resumes behind them."""
    state = a_state(Limits(unsent_bytes_max=300))
    while state.add(b"x" * 99 + b"\n"):
        commit(state)
    assert (state.last, state.has_room) == (3, False)
    state.deliver(2)
    assert state.has_room
    state.deliver(3)
    assert state.kept_bytes == 0


def test_what_was_only_just_written_is_not_taken_for_delivered() -> None:
    state = a_state(Limits(undelivered_bytes_max=10))
    state.attach(0, confirms=False)
    state.add(b"x" * 99 + b"\n")
    write(state)
    assert state.delivered == 0


def test_a_confirming_client_holds_up_its_handler_at_the_limit() -> None:
    state = a_state(Limits(undelivered_bytes_max=100))
    state.attach(0, confirms=True)
    for _ in range(10):
        assert state.add(b"x" * 9 + b"\n")
        write(state)
    assert not state.add(line(1))
    assert state.delivered == 0
    assert state.deliver(10)
    assert state.add(line(1))


# Polls


def test_flags_of_a_new_stream() -> None:
    flags = a_state().flags()
    assert flags.is_live
    assert not flags.pending_messages
    assert not flags.has_request
    assert not flags.has_error


def test_pending_is_what_is_durable_and_not_delivered() -> None:
    state = a_state()
    state.add(line(1))
    assert not state.flags().pending_messages
    write(state)
    assert state.flags().pending_messages
    assert not state.flags(1).pending_messages
    state.deliver(1)
    assert not state.flags().pending_messages
    assert state.flags(0).pending_messages


def test_a_request_counts_until_it_is_answered() -> None:
    state = a_state()
    state.add_request("q", line("?"))
    write(state)
    state.deliver(1)
    assert state.flags().has_request
    assert state.flags(1).has_request
    del state.questions["q"]
    assert not state.flags().has_request
    assert state.flags(0).has_request


def test_an_error_result_counts_until_it_is_delivered() -> None:
    state = a_state()
    end(state, is_error=True)
    assert not state.flags().has_error
    commit(state)
    assert state.flags().has_error
    assert not state.flags(1).has_error
    state.deliver(1)
    assert not state.flags().has_error


def test_completed_is_said_when_no_crash_can_take_it_back() -> None:
    state = a_state()
    end(state)
    assert state.flags().is_live
    commit(state)
    assert not state.flags().is_live


def test_ended_is_not_drained() -> None:
    state = a_state()
    end(state)
    assert state.is_ended
    assert not state.is_drained
    assert not state.is_finished(0)
    write(state)
    assert state.is_finished(1)
    assert not state.is_drained
    state.deliver(1)
    assert state.is_drained


# Time


def test_an_attached_stream_has_no_deadline() -> None:
    state = a_state(max_s=100.0)
    assert state.deadline is None
    state.detach(10.0)
    assert state.deadline == 110.0
    state.touch(50.0)
    assert state.deadline == 150.0
    state.attach(0, confirms=False)
    state.touch(60.0)
    assert state.deadline is None


def test_min_is_counted_from_the_disconnect() -> None:
    state = a_state(min_s=5.0)
    assert state.early_s(0.0) == 0.0
    state.detach(10.0)
    assert state.early_s(12.0) == 3.0
    assert state.early_s(15.0) == 0.0


def test_a_drained_stream_keeps_its_status_for_a_day_at_most() -> None:
    state = a_state(Limits(drained_s=60.0), max_s=100.0)
    end(state)
    write(state)
    state.detach(0.0)
    assert state.deadline == 100.0
    state.deliver(1)
    assert state.deadline == 60.0


def test_a_tombstone_has_a_time_of_its_own() -> None:
    state = a_state(Limits(tombstone_s=9.0), max_s=100.0)
    state.detach(0.0)
    state.close(Event.ABANDON, FENCE, at=0.0)
    assert state.deadline == 9.0
