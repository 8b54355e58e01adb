"""Measuring in rounds: everything of a suite once in each of them, one after the other, so that
what else the machine does meets all rows alike. Only rows of one suite are compared.
"""

import gc
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count
from pathlib import Path
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
import trio

from benchmarks.numbered import Lost

# No measurement takes as long, wherever it runs: whatever does has hung.
PATIENCE_S: Final = 900.0

ResultT = TypeVar("ResultT")
Role = Literal["ours", "bare", "limit", "peer"]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured. `counts` has the number of messages for each size in bytes.

    `rounds` is 0 where each suite does as many as it thinks right, behind one to warm up.
    """

    rounds: int = 0
    counts: Mapping[int, int] = msgspec.field(default_factory=lambda: {200: 200_000, 4096: 20_000})
    limit_bytes: int = 512 * 1024 * 1024
    streams: int = 100  # at once, where it is more than one
    paced: int = 2_000  # messages whose latency is measured in a round
    clients: int = 1_000  # that come back at once
    has_peers: bool = False
    is_quick: bool = False

    def only(self, size: int) -> "Plan":
        """The same for one size. Raises `ValueError` where it is not in the plan."""
        if size not in self.counts:
            raise ValueError(f"there are sizes {', '.join(map(str, self.counts))}")
        return msgspec.structs.replace(self, counts={size: self.counts[size]})


QUICK: Final = Plan(
    rounds=1,
    counts={200: 2_000, 4096: 200},
    limit_bytes=8 * 1024 * 1024,
    streams=10,
    paced=100,
    clients=20,
    is_quick=True,
)


class Batch(Generic[ResultT]):
    """What is measured in one go and gives several rows: it is run once a round."""

    def __init__(self, run: Callable[[], Awaitable[ResultT]]) -> None:
        self._run = run
        self._result: ResultT | None = None
        self._read: set[Callable[[ResultT], float]] = set()

    def figure(self, read: Callable[[ResultT], float]) -> Callable[[], Awaitable[float]]:
        """What measures one row: `read` finds it in what came of the run."""

        async def measure() -> float:
            if self._result is None or read in self._read:
                self._result = None  # not two of them in memory
                self._result = await self._run()
                self._read.clear()
            self._read.add(read)
            return read(self._result)

        return measure


def in_thread(run: Callable[[Path], ResultT], folder: Path) -> Batch[ResultT]:
    """A batch that runs in a thread, each time with a new folder in `folder`."""
    numbers = count(1)

    async def run_once() -> ResultT:
        place = folder / str(next(numbers))
        place.mkdir()
        return await trio.to_thread.run_sync(run, place)

    return Batch(run_once)


class Subject(msgspec.Struct, frozen=True):
    """One row to be: `measure` does it once and returns a figure in `unit`.

    `size` is that of its messages, 0 where that says nothing; `of` names the row, of the same
    size, that it is held against. `missing` is why it cannot be measured here.
    """

    name: str
    size: int
    measure: Callable[[], Awaitable[float]]
    role: Role = "ours"
    unit: str = "messages/s"
    of: str = ""
    version: str = ""
    missing: str = ""


async def unmeasured() -> float:
    """Stands where a subject is missing."""
    raise AssertionError("what is missing is not measured")


class Row(msgspec.Struct, frozen=True):
    """What came of a subject: the figure of every round, and their median.

    `ratio` is that of the medians; 0 where there is nothing to be held against. `failed` is a word
    that stands instead of all figures.
    """

    name: str
    size: int
    role: Role
    unit: str
    figures: Sequence[float]
    median: float
    of: str = ""
    ratio: float = 0.0
    version: str = ""
    failed: str = ""
    detail: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """The lowest figure and the highest."""
        return min(self.figures), max(self.figures)


class Suite(NamedTuple):
    """Subjects that are compared; `open` makes them ready, in a folder of their own."""

    name: str
    title: str
    open: Callable[[Plan, Path], AbstractAsyncContextManager[Sequence[Subject]]]
    rounds: int = 5
    warms_up: bool = True


class Measured(msgspec.Struct, frozen=True):
    """What came of a suite."""

    name: str
    title: str
    rounds: int
    rows: Sequence[Row]


class Results(msgspec.Struct, frozen=True):
    """A whole run."""

    plan: Plan
    machine: Mapping[str, str]
    suites: Sequence[Measured]

    def row(self, suite: str, name: str, size: int) -> Row | None:
        """One row, or None where it was not measured."""
        rows = [row for measured in self.suites if measured.name == suite for row in measured.rows]
        return next((row for row in rows if (row.name, row.size) == (name, size)), None)

    def beside(self, earlier: "Results") -> "Results":
        """With those suites of an earlier run that were not measured again, where that was of the
        same plan, rounds apart, on the same machine: rows are compared within a suite.
        """
        plans = [msgspec.structs.replace(each.plan, rounds=0) for each in (earlier, self)]
        if plans[0] != plans[1] or earlier.machine != self.machine:
            return self
        again = {measured.name for measured in self.suites}
        kept = [measured for measured in earlier.suites if measured.name not in again]
        return msgspec.structs.replace(self, suites=[*kept, *self.suites])


OnStep = Callable[[str], None]


async def run(
    suites: Sequence[Suite],
    plan: Plan,
    folder: Path,
    machine: Mapping[str, str],
    on_step: OnStep = lambda _: None,
) -> Results:
    """Measure all suites, one after the other.

    Raises `Lost` as soon as a message of ours is missing; of a peer's, its row says so.
    """
    measured = []
    for suite in suites:
        place = folder / suite.name
        place.mkdir()
        measured.append(await _measured(suite, plan, place, on_step))
    return Results(plan, machine, measured)


async def _measured(suite: Suite, plan: Plan, folder: Path, on_step: OnStep) -> Measured:
    rounds = plan.rounds or suite.rounds
    warm_up = int(suite.warms_up and not plan.is_quick)
    on_step(f"{suite.name}: getting ready")
    async with suite.open(plan, folder) as subjects:
        tries = [_Tries(subject) for subject in subjects]
        for number in range(1 - warm_up, rounds + 1):
            for one in tries:
                if not one.failed:
                    on_step(f"{suite.name}, {_which(number, rounds)}: {one.label}")
                    await one.once(is_kept=number > 0)
    return Measured(suite.name, suite.title, rounds, _rows(tries))


def _which(number: int, rounds: int) -> str:
    return f"round {number} of {rounds}" if number else "warming up"


class _Tries:
    """A subject, and what came of it up to now."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.figures: list[float] = []
        self.failed = "missing" if subject.missing else ""
        self.detail = subject.missing

    @property
    def label(self) -> str:
        size = f", {self.subject.size} B" if self.subject.size else ""
        return f"{self.subject.name}{size}"

    async def once(self, *, is_kept: bool) -> None:
        gc.collect()  # what the last one left behind is not this one's
        try:
            with trio.fail_after(PATIENCE_S):
                figure = await self.subject.measure()
        except (Lost, TimeoutError, trio.TooSlowError) as error:
            if self.subject.role != "peer":
                raise
            self.failed = "loses or reorders" if isinstance(error, Lost) else "does not end"
            self.detail = str(error)
        else:
            self.figures += [figure] * is_kept


def _rows(tries: Sequence[_Tries]) -> list[Row]:
    medians = {
        (one.subject.name, one.subject.size): statistics.median(one.figures)
        for one in tries
        if not one.failed
    }
    return [_row(one, medians) for one in tries]


def _row(one: _Tries, medians: Mapping[tuple[str, int], float]) -> Row:
    subject = one.subject
    median = medians.get((subject.name, subject.size), 0.0)
    against = medians.get((subject.of, subject.size), 0.0)
    return Row(
        name=subject.name,
        size=subject.size,
        role=subject.role,
        unit=subject.unit,
        figures=[] if one.failed else one.figures,
        median=median,
        of=subject.of,
        ratio=median / against if against else 0.0,
        version=subject.version,
        failed=one.failed,
        detail=one.detail,
    )
