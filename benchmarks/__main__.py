"""The command: see the package's docstring."""

import argparse
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import trio
from rich.console import Console

from benchmarks import measure, reconnect, report
from streams.console import log_to_stderr

ResultsT = TypeVar("ResultsT")

RESULTS: Final = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("messages", "reconnect"), default="messages")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (5 or 3)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and SVG")
    chosen = parser.parse_args(arguments)
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error("--rounds must be 1 or more")
    log_to_stderr(logging.WARNING)
    measured = _reconnect if chosen.what == "reconnect" else _messages
    for path in measured(chosen.out, chosen.rounds, is_quick=chosen.quick):
        print(path)


def _messages(out: Path, rounds: int | None, *, is_quick: bool) -> list[Path]:
    plan = measure.QUICK if is_quick else measure.Plan()
    plan = msgspec.structs.replace(plan, rounds=rounds or plan.rounds)
    results = _run(measure.run, plan, out)
    report.show(results, Console())
    return report.write(results, out)


def _reconnect(out: Path, rounds: int | None, *, is_quick: bool) -> list[Path]:
    plan = reconnect.QUICK if is_quick else reconnect.Plan()
    plan = msgspec.structs.replace(plan, rounds=rounds or plan.rounds)
    results = _run(reconnect.run, plan, out)
    report.show_reconnect(results, Console())
    return [report.write_reconnect(results, out)]


def _run(run: Callable[..., Awaitable[ResultsT]], plan: msgspec.Struct, out: Path) -> ResultsT:
    # The journals stand beside the results, not in /tmp: on many machines that is no disk.
    out.mkdir(parents=True, exist_ok=True)
    machine = report.this_machine()
    with tempfile.TemporaryDirectory(dir=out) as folder, _progress() as on_step:
        return trio.run(lambda: run(plan, Path(folder), machine=machine, on_step=on_step))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield status.update


if __name__ == "__main__":
    main()
