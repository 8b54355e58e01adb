"""The command: see the package's docstring."""

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import trio
from rich.console import Console

from benchmarks import harness, publish, report
from benchmarks.harness import QUICK, Plan, Results
from benchmarks.suites import SUITES
from streams.logs import log_to_stderr

RESULTS: Final = Path(__file__).resolve().parent / "results"
LATEST: Final = "latest.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--suite",
        action="append",
        choices=SUITES,
        help="by default all; the latest results of the others stay",
    )
    parser.add_argument("--peers", action="store_true", help="measure the peers, too")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--size", type=int, help="messages of this size alone, in bytes")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and SVG")
    parser.add_argument("--publish", action="store_true", help="publish the latest results")
    chosen = parser.parse_args(arguments)
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if chosen.publish:
        for path in publish.publish(chosen.out / LATEST):
            print(path)
        return
    plan = QUICK if chosen.quick else Plan()
    plan = msgspec.structs.replace(
        plan, rounds=chosen.rounds or plan.rounds, has_peers=chosen.peers
    )
    try:
        plan = plan.only(chosen.size) if chosen.size else plan
    except ValueError as error:
        parser.error(f"--size: {error}")
    log_to_stderr(logging.WARNING)
    results = _measure(chosen.suite or list(SUITES), plan, chosen.out)
    report.show(results, Console())
    for path in _write(_beside_latest(results, chosen.out / LATEST), chosen.out):
        print(path)


def _measure(names: Sequence[str], plan: Plan, out: Path) -> Results:
    # The journals stand beside the results, not in /tmp: on many machines that is no disk.
    out.mkdir(parents=True, exist_ok=True)
    suites = [SUITES[name] for name in names]
    with tempfile.TemporaryDirectory(dir=out) as folder, _progress() as on_step:
        place, machine = Path(folder), report.this_machine()
        return trio.run(harness.run, suites, plan, place, machine, on_step)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says each step: on a terminal in one line, else one line for each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: console.print(step, highlight=False)
        return
    with console.status("starting") as status:
        yield status.update


def _beside_latest(results: Results, latest: Path) -> Results:
    with suppress(FileNotFoundError, msgspec.DecodeError):  # none yet, or another release's
        results = results.beside(publish.load(latest))
    order = list(SUITES)
    suites = sorted(results.suites, key=lambda measured: order.index(measured.name))
    return msgspec.structs.replace(results, suites=suites)


def _write(results: Results, out: Path) -> list[Path]:
    data = out / LATEST
    data.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    written = [data]
    for name, picture in report.charts(results).items():
        path = out / f"{name}.svg"
        path.write_text(picture)
        written.append(path)
    return written


if __name__ == "__main__":
    main()
