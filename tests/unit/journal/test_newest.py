"""The newest runs of a journal, in memory."""

import pytest

from streams.journal import newest as module
from streams.journal.newest import NewestRuns
from streams.messages import Run


def run(seq: int, count: int = 1, size: int = 10) -> Run:
    return Run(seq, count, (b"x" * (size // count - 1) + b"\n") * count)


def kept_of(newest: NewestRuns, stream: str, after: int = 0) -> list[int]:
    return [run.last for run in newest.after(stream, after)]


def test_the_oldest_runs_of_all_streams_leave_memory_first() -> None:
    newest = NewestRuns(40)
    newest.add("a", [run(1), run(2)])
    newest.add("b", [run(1)])
    newest.add("a", [run(3)])
    newest.add("b", [run(2)])
    assert kept_of(newest, "a", after=1) == [2, 3]
    newest.add("b", [run(3)])
    assert kept_of(newest, "a", after=2) == [3]
    assert kept_of(newest, "b") == [1, 2, 3]


def test_a_reader_that_needs_older_lines_gets_none_from_memory() -> None:
    newest = NewestRuns(20)
    newest.add("a", [run(1), run(2), run(3)])
    assert kept_of(newest, "a", after=0) == []
    assert kept_of(newest, "a", after=1) == [2, 3]
    assert kept_of(newest, "a", after=3) == []
    assert kept_of(newest, "b") == []


def test_what_is_not_kept_yet_follows_the_kept_runs() -> None:
    newest = NewestRuns(20)
    newest.add("a", [run(1), run(2)])
    beyond = [run(2), run(3)]  # one of them is kept meanwhile
    assert [each.last for each in newest.after("a", 0, beyond)] == [1, 2, 3]
    assert newest.after("a", 2, beyond) == ()


def test_what_is_dropped_makes_room_once() -> None:
    newest = NewestRuns(40)
    newest.add("a", [run(1), run(2, 2), run(4)])
    newest.drop("a", 2)  # ends within the second run
    assert kept_of(newest, "a", after=2) == [3, 4]
    newest.drop("a", 2)
    newest.add("b", [run(1), run(2)])
    assert (kept_of(newest, "a", after=2), kept_of(newest, "b")) == ([3, 4], [1, 2])
    newest.drop("a", 4)
    newest.drop("a", 4)
    newest.add("b", [run(3), run(4)])
    assert (kept_of(newest, "a"), kept_of(newest, "b")) == ([], [1, 2, 3, 4])
    newest.add("b", [run(5)])
    assert (kept_of(newest, "b"), kept_of(newest, "b", after=1)) == ([], [2, 3, 4, 5])


def test_short_runs_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 3)
    newest = NewestRuns(1000)
    for stream in "abcd":
        newest.add(stream, [run(1)])
    assert [kept_of(newest, stream) for stream in "abcd"] == [[], [1], [1], [1]]


def test_a_stream_without_kept_lines_takes_no_memory() -> None:
    newest = NewestRuns(1000)
    newest.add("a", [])
    newest.add("b", [run(1)])
    newest.drop("b", 1)
    assert not newest._runs


def test_with_no_room_nothing_stays_in_memory() -> None:
    newest = NewestRuns(0)
    newest.add("a", [run(1)])
    assert kept_of(newest, "a") == []
