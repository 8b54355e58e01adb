"""Measurement in rounds: each round measures all of a suite, one row after the other.

Other work of the machine then affects all rows alike. Only rows of one suite are compared.
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

# The bound for one measurement: no machine takes as long, so it has hung.
PATIENCE_S: Final = 900.0

ResultT = TypeVar("ResultT")
Role = Literal["ours", "bare", "limit", "peer"]


class Plan(msgspec.Struct, frozen=True):
    """The amounts to measure. `counts` has the number of messages for each size in bytes.

    With `rounds` 0 each suite has its own number of rounds, after one to warm up.
    """

    rounds: int = 0
    counts: Mapping[int, int] = msgspec.field(default_factory=lambda: {200: 200_000, 4096: 20_000})
    limit_bytes: int = 512 * 1024 * 1024
    streams: int = 100  # at once, if more than one
    paced: int = 2_000  # messages whose latency is measured in a round
    clients: int = 1_000  # that resume at once
    has_peers: bool = False
    is_quick: bool = False

    def only(self, size: int) -> "Plan":
        """The same plan for one size. Raises `ValueError` where it is not in the plan."""
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
    """A measurement that gives several rows: it runs once a round."""

    def __init__(self, run: Callable[[], Awaitable[ResultT]]) -> None:
        self._run = run
        self._result: ResultT | None = None
        self._read: set[Callable[[ResultT], float]] = set()

    def figure(self, read: Callable[[ResultT], float]) -> Callable[[], Awaitable[float]]:
        """The measurement of one row: `read` takes its figure from the batch's result."""

        async def measure() -> float:
            if self._result is None or read in self._read:
                self._result = None  # so that only one result is in memory
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
    """A row to measure: `measure` does it once and returns a figure in `unit`.

    `size` is that of its messages, 0 where it does not apply; `of` names the row, of the same size,
    that it is compared with. `missing` is the reason why it cannot be measured here.
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
    """The `measure` of a missing subject."""
    raise AssertionError("a missing subject is not measured")


class Row(msgspec.Struct, frozen=True):
    """A subject's figures, one a round, and their median.

    `ratio` is that of the medians; 0 without a row to compare with. `failed` is a word that
    replaces all figures.
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
    """Subjects that are compared; `open` prepares them, in a folder of their own.

    With `columns`, a row's name ends with one of them, after a colon: rows of the same beginning
    are one line of the table. The chart shows the first column.
    """

    name: str
    title: str
    open: Callable[[Plan, Path], AbstractAsyncContextManager[Sequence[Subject]]]
    rounds: int = 5
    warms_up: bool = True
    columns: Sequence[str] = ()


class Measured(msgspec.Struct, frozen=True):
    """The rows of a suite."""

    name: str
    title: str
    rounds: int
    rows: Sequence[Row]
    columns: Sequence[str] = ()


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
        """Add those suites of an earlier run that were not measured this time.

        The earlier run must have the same plan, rounds apart, and the same machine: rows are
        compared within a suite only.
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

    Raises `Lost` as soon as a message of ours is missing; a peer's row reports it instead.
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
    return Measured(suite.name, suite.title, rounds, _rows(tries), suite.columns)


def _which(number: int, rounds: int) -> str:
    return f"round {number} of {rounds}" if number else "warming up"


class _Tries:
    """A subject, and its figures so far."""

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
        gc.collect()  # garbage of the previous subject must not count here
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
