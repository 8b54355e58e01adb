"""The command: see the package's docstring."""

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio
from rich.console import Console

from benchmarks import measure, report
from streams.console import log_to_stderr

RESULTS: Final = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, help="how often everything is measured (5)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and SVG")
    chosen = parser.parse_args(arguments)
    plan = measure.QUICK if chosen.quick else measure.Plan()
    if chosen.rounds is not None:
        if chosen.rounds < 1:
            parser.error("--rounds must be 1 or more")
        plan = msgspec.structs.replace(plan, rounds=chosen.rounds)
    log_to_stderr(logging.WARNING)
    results = _measured(plan, chosen.out)
    report.show(results, Console())
    for path in report.write(results, chosen.out):
        print(path)


def _measured(plan: measure.Plan, out: Path) -> measure.Results:
    # The journals stand beside the results, not in /tmp: on many machines that is no disk.
    out.mkdir(parents=True, exist_ok=True)
    machine = report.this_machine()
    with tempfile.TemporaryDirectory(dir=out) as folder, _progress() as on_step:
        return trio.run(lambda: measure.run(plan, Path(folder), machine=machine, on_step=on_step))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield status.update


if __name__ == "__main__":
    main()
