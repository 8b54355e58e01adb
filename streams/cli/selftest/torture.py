"""The action of `torture`: kills servers and breaks connections at random, and counts what is lost.

Each transport has one server, with a journal and users of its own. At random moments the server is
killed with SIGKILL, also while it starts, or ended with SIGTERM; its connections are cut, reset or
silenced. After that, every call that was begun is followed to its end.

A wrapped run has a command in place of the server file. Its processes are killed as well.
"""

import logging
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

import msgspec
import trio
from rich.console import Console
from rich.table import Column, Table

from streams import logs
from streams.cli.base import DONE, FAILED
from streams.cli.selftest.ledger import Figures
from streams.cli.selftest.rigs import ListeningRig, Rig, Serving, StdioRig
from streams.cli.selftest.storm import Front, Storm
from streams.limits import Durability

APP: Final = f"{Path(__file__).with_name('torture_server.py')}:server"
CHILD: Final = str(Path(__file__).with_name("torture_child.py"))
TRANSPORTS: Final = ("stdio", "websocket", "http")
# How often progress is printed, on a terminal and elsewhere.
SHOW_EVERY_S: Final = 0.25
TELL_EVERY_S: Final = 30.0

REPORT: Final = "report.json"

# A call without a ticket is never resumed, and counts towards this limit.
LIMITS: Final = ("--limit", "streams_per_principal_max=1000000")
# Few enough children that idle ones must make room. A call that is sent again begins anew, so it
# makes no progress while each of its servers dies sooner than it ends.
WRAPPING: Final = ("--children-max", "8", "--rerun", "hinted", "--limit", "restarts_max=1000000")


class Settings(msgspec.Struct, frozen=True):
    """The settings of a run. `app` is the server: tests pass a faulty one, to show that faults are
    found. With `child`, a script, that is wrapped in its place, and its processes are killed, too.
    """

    minutes: float
    seed: int
    durability: Durability = "power"
    app: str = APP
    transports: Sequence[str] = TRANSPORTS
    child: str = ""


class Report(msgspec.Struct, frozen=True):
    """The result of a run; `kept` is the folder of journals and logs, if they are kept."""

    settings: Settings
    is_good: bool
    kept: str | None
    figures: list[Figures]


def new_seed() -> int:
    """A random seed."""
    return SystemRandom().randrange(2**32)


def run(settings: Settings, *, keep: Path | None, as_json: bool) -> int:
    """Run; returns 0 if every message came, once. After a failure, journals and logs are kept.

    Raises `OSError` if `keep` exists or cannot be made.
    """
    logs.log_to_stderr(logging.CRITICAL)
    folder = made(keep)
    figures = trio.run(_torture, settings, folder.resolve(), as_json)
    is_good = all(one.is_good for one in figures)
    is_kept = keep is not None or not is_good
    report = Report(settings, is_good, str(folder) if is_kept else None, figures)
    hand_in(report, folder, is_kept=is_kept, as_json=as_json)
    if not as_json:
        _print(report)
    return DONE if is_good else FAILED


def made(keep: Path | None) -> Path:
    """The folder `keep`, which must be new, or a temporary one. Raises `OSError`."""
    folder = Path(tempfile.mkdtemp(prefix="mcp-streams-torture-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=keep is None)
    return folder


def hand_in(report: msgspec.Struct, folder: Path, *, is_kept: bool, as_json: bool) -> None:
    """Keep the report in the folder, or delete that. Print the report, if it is to be JSON."""
    encoded = msgspec.json.encode(report)
    if is_kept:
        (folder / REPORT).write_bytes(encoded)
    else:
        shutil.rmtree(folder)
    if as_json:
        print(encoded.decode())


async def _torture(settings: Settings, folder: Path, is_quiet: bool) -> list[Figures]:
    dice = Random(settings.seed)  # nosec B311 # random failures, not a secret
    async with trio.open_nursery() as nursery:
        fronts = [
            Front(
                name,
                _rig(name, settings, folder, nursery),
                _notes(name, folder),
                Random(dice.random()),  # nosec B311 # as above
            )
            for name in settings.transports
        ]
        storm = Storm(fronts, 60 * settings.minutes)
        await nursery.start(storm.handle_signals)
        first = (
            f"{settings.minutes:g} min, {', '.join(settings.transports)}, --seed {settings.seed}"
        )
        with shown(first, partial(_line, storm), is_quiet) as show:
            nursery.start_soon(show)
            try:
                await storm.run()
            finally:
                with trio.CancelScope(shield=True):
                    for front in fronts:
                        await front.end()
        nursery.cancel_scope.cancel()
    return [front.ledger.figures for front in fronts]


def _rig(name: str, settings: Settings, folder: Path, nursery: trio.Nursery) -> Rig:
    options: tuple[str, ...] = ("--durability", settings.durability, *LIMITS)
    journal = folder / f"{name}.db"
    serving = Serving(settings.app)
    if settings.child:
        # Without `site`, it starts in some milliseconds.
        serving = Serving(wrapped=[sys.executable, "-S", settings.child, str(_notes(name, folder))])
        options += WRAPPING
    if name == "stdio":
        return StdioRig(serving, journal, options)
    scheme = "ws" if name == "websocket" else name
    return ListeningRig(scheme, serving, journal, nursery, options)


def _notes(name: str, folder: Path) -> Path:
    return folder / f"{name}.notes"


@contextmanager
def shown(
    first: str, line: Callable[[], str], is_quiet: bool
) -> Iterator[Callable[[], Awaitable[None]]]:
    """A task that prints progress: on a terminal in one line, else in a new line now and then."""
    out = Console(stderr=True, quiet=is_quiet, highlight=False)
    if first:
        out.print(first)

    async def tell() -> None:
        while True:
            await trio.sleep(TELL_EVERY_S)
            out.print(line(), soft_wrap=True)

    if not out.is_terminal:
        yield tell
        return
    with out.status("starting") as status:

        async def show() -> None:
            while True:
                status.update(line())
                await trio.sleep(SHOW_EVERY_S)

        yield show


def _line(storm: Storm) -> str:
    figures = [front.ledger.figures for front in storm.fronts]
    kills = sum(one.kills + one.child_kills for one in figures)
    cuts = sum(one.cuts for one in figures)
    delivered = sum(one.delivered for one in figures)
    lost, twice = sum(one.lost for one in figures), sum(one.seen_twice for one in figures)
    when = "waiting for the last calls" if storm.is_over else f"{storm.left_s:.0f} s left"
    return (
        f"{when}: {kills} kills, {cuts} cuts, {delivered:,} messages delivered, "
        f"{lost} lost, {twice} twice"
    )


def _print(report: Report) -> None:
    out = Console(highlight=False)
    table = Table("", *(Column(one.transport, justify="right") for one in report.figures))
    for name in Figures.__struct_fields__[1:-1]:
        values = [getattr(one, name) for one in report.figures]
        shown = [f"{value:.2f}" if name.endswith("_s") else f"{value:,}" for value in values]
        table.add_row(name.replace("_", " ").removesuffix(" s"), *shown)
    out.print(table)
    for one in report.figures:
        for what in one.failures:
            out.print(f"{one.transport}: {what}", markup=False, soft_wrap=True)
    if report.kept is not None:
        out.print(f"Journals, logs and notes: {report.kept}", markup=False, soft_wrap=True)
