"""The results on a terminal, in a file, and in a picture."""

import os
import platform
import sqlite3
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import reconnect
from benchmarks.chart import Bar, bar_chart, short
from benchmarks.measure import LIMIT_OF, Case, Figure, Results

NAMES = {
    "stdio": "stdio",
    "websocket": "WebSocket",
    "http": "HTTP lines",
    "sse": "HTTP SSE",
    "pipe": "pipe",
    "tcp": "TCP",
}
JOURNALS = {"file": "SQLite", "memory": "none"}


def this_machine() -> Mapping[str, str]:
    """What the figures depend on, in general terms."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
    }


def show(results: Results, console: Console) -> None:
    """Print the results as a table that fits into 80 columns."""
    title = f"Messages a second: medians of {results.plan.rounds} round(s)"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "over", "journal"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "range", "limit", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure, following in pairwise([*results.figures, None]):
        assert figure is not None
        is_last = following is None or _group(following.case) != _group(figure.case)
        table.add_row(*_cells(figure), end_section=is_last)
    console.print(table)
    for kind, rate in results.limits.items():
        console.print(f"limit: {NAMES[kind]} {rate / 1e9:.2f} GB/s", highlight=False)


def _group(case: Case) -> str:
    return f"{case.what} {case.size} B"


def _cells(figure: Figure) -> list[str]:
    case = figure.case
    return [
        _group(case),
        NAMES[case.transport],
        JOURNALS[case.journal],
        short(figure.median),
        f"{short(min(figure.rates))}-{short(max(figure.rates))}",
        f"{NAMES[LIMIT_OF[case.transport]]} {short(figure.limit)}",
        f"{figure.ratio:.3f}",
    ]


def write(results: Results, folder: Path) -> list[Path]:
    """Write `latest.json` and `latest.svg` into `folder`, which is made; returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "latest.json", folder / "latest.svg"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    picture.write_text(chart(results))
    return [data, picture]


def chart(results: Results) -> str:
    """The medians as an SVG picture."""
    groups: dict[str, list[Bar]] = {}
    for figure in results.figures:
        groups.setdefault(_group(figure.case), []).append(_bar(figure))
    for size in results.plan.counts:
        limits = [Bar(f"limit: {NAMES[k]}", r / size, "limit") for k, r in results.limits.items()]
        for name in (f"resume {size} B", f"live {size} B"):
            groups[name] += limits
    machine = results.machine
    return bar_chart(
        "Messages a second",
        f"Logarithmic scale. Medians of {results.plan.rounds} round(s); {machine['cpus']} CPUs, "
        f"{machine['system']}, {machine['python']}.",
        groups,
    )


def _bar(figure: Figure) -> Bar:
    case = figure.case
    if case.journal == "file":
        return Bar(f"{NAMES[case.transport]}, journal", figure.median, "ours")
    return Bar(f"{NAMES[case.transport]}, no journal", figure.median, "bare")


def show_reconnect(results: reconnect.Results, console: Console) -> None:
    """Print the resumes a second of each server, and how many times the other's ours are."""
    plan = results.plan
    title = f"{plan.clients} clients come back at once, {plan.count} messages each"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("resumes a second", "range", "messages a second"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results.figures:
        span = f"{short(min(one.rates))}-{short(max(one.rates))}"
        table.add_row(one.server, short(one.median), span, short(one.median * (plan.count + 1)))
    console.print(table)
    ratios = f"ratio: {results.ratio:.1f}, WebSocket {results.websocket_ratio:.1f}"
    console.print(ratios, highlight=False)


def write_reconnect(results: reconnect.Results, folder: Path) -> Path:
    """Write `reconnect.json` into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "reconnect.json"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    return data
