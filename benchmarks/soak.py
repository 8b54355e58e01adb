"""The busiest day imaginable, compressed, and whether the server stays as it is.

    python -m benchmarks.soak --minutes 30

A real server over all transports, with a journal on disk, meets clients with all kinds of requests,
right and wrong (`soak_day`). It keeps nothing for longer than 20 s (`soak_app`), so its use of
resources must be flat after the first quarter: memory, descriptors, threads, WAL, file, streams and
sessions, each within a bound that is printed. The exit code is 1 where one is not, where a message
was missing or out of place, or where the server has ended. Ctrl-C ends the day early.
"""

import argparse
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec
import trio
from rich.console import Console
from rich.table import Column, Table

from benchmarks.flat import MIB, Sample, Series, verdict
from benchmarks.servers import everywhere
from benchmarks.soak_day import HABITS, Day
from streams.cli.actions.call import cancel_on
from streams.logs import log_to_stderr

APP: Final = f"{Path(__file__).resolve().with_name('soak_app.py')}:server"
RESULTS: Final = Path(__file__).resolve().parent / "results"
SAMPLE_EVERY_S: Final = 1.0
TELL_EVERY: Final = 60  # samples
COLUMNS: Final = ("first tenth", "last tenth", "highest", "per hour", "allowed")


class Report(msgspec.Struct, frozen=True):
    """A whole run."""

    minutes: float  # up to the last sample
    seed: int
    done: dict[str, int]
    failures: list[str]
    series: list[Series]
    samples: list[Sample]

    @property
    def is_good(self) -> bool:
        """Whether every series is flat, and no action failed."""
        is_all_done = all(self.done.get(name) for name in HABITS)
        return is_all_done and not self.failures and all(one.is_flat for one in self.series)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print, write the samples down; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="throws the same dice again")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for soak.json")
    parser.add_argument("--app", default=APP, help="another server, with the same tools")
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.minutes < float("inf"):
        parser.error("--minutes must be above 0")
    log_to_stderr(logging.CRITICAL)
    seed = SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.out) as folder:
        try:
            report = trio.run(_soak, chosen.app, Path(folder), chosen.minutes, seed)
        except ValueError as error:
            parser.exit(1, f"too short: {error}\n")
    encoded = msgspec.json.encode(report)
    (chosen.out / "soak.json").write_bytes(encoded + b"\n")
    if chosen.json:
        print(encoded.decode())
    else:
        _print(report)
    return 0 if report.is_good else 1


async def _soak(app: str, folder: Path, minutes: float, seed: int) -> Report:
    """The whole day. Raises `ValueError` where it was too short to tell anything."""
    journal = folder / "soak.db"
    samples: list[Sample] = []
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with everywhere(app, journal) as served, trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + 60 * minutes
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            nursery.start_soon(_sample, served["ws"].pid, journal, samples)
            day = Day(served, seed)
            for name, habit in HABITS.items():
                for _ in range(habit.clients):
                    nursery.start_soon(day.go_on, name)
    series = verdict(samples)
    return Report(samples[-1].at_s / 60, seed, dict(day.done), day.failures, series, samples)


async def _sample(pid: int, journal: Path, samples: list[Sample]) -> None:
    """Look at the server every second. Raises `OSError` when it has ended."""
    began_at = trio.current_time()
    while True:
        at_s = trio.current_time() - began_at
        samples.append(await trio.to_thread.run_sync(Sample.taken, at_s, pid, journal))
        if len(samples) % TELL_EVERY == 0:
            print(msgspec.json.encode(samples[-1]).decode(), file=sys.stderr, flush=True)
        await trio.sleep_until(began_at + len(samples) * SAMPLE_EVERY_S)


def _print(report: Report) -> None:
    out = Console(highlight=False)
    table = Table("", *(Column(name, justify="right") for name in COLUMNS), "")
    for one in report.series:
        name, _, unit = one.name.partition("_")
        scale = MIB if unit else 1
        values = (one.first, one.last, one.highest, one.per_hour, one.allowed)
        shown = [f"{value / scale:,.1f}" for value in values]
        table.add_row(f"{name}, MiB" if unit else name, *shown, "flat" if one.is_flat else "GROWS")
    out.print(table)
    out.print(f"{report.minutes:.1f} min, --seed {report.seed}")
    out.print(", ".join(f"{name}: {report.done.get(name, 0):,}" for name in HABITS))
    for failure in report.failures:
        out.print(failure, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
