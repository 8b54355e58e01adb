"""The results on a terminal, as Markdown, and as pictures."""

import os
import platform
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.chart import Bar, bar_chart, short
from benchmarks.goals import NOT_MEASURED, Verdict, verdicts
from benchmarks.harness import Measured, Results, Row

YES, NO = "yes", "**no**"
_ALIGN: Final = "|---|--:|--:|--:|--:|---|"


def this_machine() -> Mapping[str, str]:
    """The machine's properties that the figures depend on, in general terms."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
    }


def machine_words(results: Results) -> str:
    """The machine in a line."""
    machine = results.machine
    return (
        f"{machine['cpus']} CPUs, {machine['system']}, {machine['python']}, "
        f"SQLite {machine['sqlite']}"
    )


# On a terminal


def show(results: Results, console: Console) -> None:
    """Print a table for each suite, and one of the goals."""
    for measured in results.suites:
        console.print(_table(measured))
    found = [verdict for verdict in verdicts(results) if verdict.word != NOT_MEASURED]
    console.print(_goals_table(found))


def _table(measured: Measured) -> Table:
    title = f"{measured.title} (medians of {_rounds(measured)})"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if measured.columns:
        table.add_column(measured.name, overflow="fold")
        for heading in _headings(measured):
            table.add_column(heading, justify="right", no_wrap=True)
        for cells in _lines(measured):
            table.add_row(*cells)
        return table
    table.add_column(measured.name, overflow="fold")
    for heading in ("size", "median", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ratio", overflow="fold")
    for row in _by_size(measured):
        spread = "" if row.failed else "-".join(short(figure) for figure in row.span)
        table.add_row(row.name, _size(row.size), _median(row), spread, _ratio(row))
    return table


def _headings(measured: Measured) -> list[str]:
    """The columns, each with the unit of its rows."""
    units = {row.name.rpartition(": ")[2]: row.unit for row in measured.rows}
    named = [(column, units.get(column, column)) for column in measured.columns]
    return [column if unit == column else f"{column}, {unit}" for column, unit in named]


def _lines(measured: Measured) -> list[list[str]]:
    """The rows of a suite with columns: the name of each line, and its cells."""
    lines: dict[str, dict[str, str]] = {}
    for row in measured.rows:
        name, _, column = row.name.rpartition(": ")
        lines.setdefault(name, {})[column] = row.failed or short(row.median)
    return [
        [name, *(cells.get(column, "") for column in measured.columns)]
        for name, cells in lines.items()
    ]


def _goals_table(found: Sequence[Verdict]) -> Table:
    table = Table(title="Goals", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in ("size", "goal", "reached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met")
    for verdict in found:
        table.add_row(*_goal_cells(verdict))
    return table


def _by_size(measured: Measured) -> list[Row]:
    return sorted(measured.rows, key=lambda row: row.size)


def _size(size: int) -> str:
    return f"{size:,} B" if size else ""


def _median(row: Row) -> str:
    if row.failed:
        return row.failed
    unit = "" if row.unit == "messages/s" else f" {row.unit}"
    return f"{short(row.median)}{unit}"


def _ratio(row: Row) -> str:
    return f"{row.ratio:.3g} × {row.of}" if row.ratio else ""


def _goal_cells(verdict: Verdict) -> list[str]:
    goal = verdict.goal
    bound = f"{'≤' if goal.is_ceiling else '≥'} {goal.bound:g}{_unit(verdict)}"
    reached = verdict.word or f"{short(verdict.reached)}{_unit(verdict)}"
    is_met = "" if verdict.word else YES if verdict.is_met else NO
    return [goal.what, _size(goal.size), bound, reached, is_met]


def _unit(verdict: Verdict) -> str:
    return f" {verdict.unit}" if verdict.unit else ""


# As Markdown


def markdown(results: Results, pictures: Mapping[str, str]) -> str:
    """All tables; `pictures` has the file of a suite's chart."""
    parts = [f"Measured on: {machine_words(results)}.", _versions(results)]
    if results.plan.is_quick:
        parts.insert(0, "**This was a quick run: far too short to say anything of speed.**")
    parts += ["## Goals", goals_markdown(results)]
    for measured in results.suites:
        parts.append(f"## {measured.title}")
        parts.append(_suite_markdown(measured))
        if measured.name in pictures:
            parts.append(f"![{measured.title}, as bars]({pictures[measured.name]})")
    return "\n\n".join(filter(None, parts))


def goals_markdown(results: Results) -> str:
    """The goals, and how far each was reached."""
    lines = ["| | size | goal | reached | met |", "|---|--:|--:|--:|---|"]
    lines += [f"| {' | '.join(_goal_cells(verdict))} |" for verdict in verdicts(results)]
    return "\n".join(lines)


def _suite_markdown(measured: Measured) -> str:
    table = _columns_markdown(measured) if measured.columns else _rows_markdown(measured)
    why = {f"{row.name}: {row.detail}" for row in measured.rows if row.failed == "missing"}
    lines = [f"Medians of {_rounds(measured)}.", "", *table]
    return "\n".join([*lines, *[f"\n{line}" for line in sorted(why)]])


def _rows_markdown(measured: Measured) -> list[str]:
    lines = ["| | size | median | lowest | highest | ratio |", _ALIGN]
    for row in _by_size(measured):
        lowest, highest = ("", "") if row.failed else map(short, row.span)
        cells = [row.name, _size(row.size), _median(row), lowest, highest, _ratio(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _columns_markdown(measured: Measured) -> list[str]:
    lines = [f"| | {' | '.join(_headings(measured))} |", f"|---|{'--:|' * len(measured.columns)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in _lines(measured))]


def _rounds(measured: Measured) -> str:
    return "1 round" if measured.rounds == 1 else f"{measured.rounds} rounds"


def _versions(results: Results) -> str:
    found = {row.version for measured in results.suites for row in measured.rows if row.version}
    return f"Peers: {'; '.join(sorted(found))}." if found else ""


# As pictures


def charts(results: Results) -> Mapping[str, str]:
    """An SVG for each suite whose rows are all of one unit, or that has columns."""
    shown = {measured.name: _charted(measured) for measured in results.suites}
    return {
        name: _chart(measured, machine_words(results))
        for name, measured in shown.items()
        if len({row.unit for row in measured.rows if not row.failed}) == 1
    }


def _charted(measured: Measured) -> Measured:
    """Only the first column, where there are columns."""
    if not measured.columns:
        return measured
    end = f": {measured.columns[0]}"
    rows = [
        msgspec.structs.replace(row, name=row.name.removesuffix(end))
        for row in measured.rows
        if row.name.endswith(end)
    ]
    return msgspec.structs.replace(measured, rows=rows)


def headline(results: Results) -> str:
    """An SVG of the suite `resume`, with the smallest messages alone."""
    (whole,) = (measured for measured in results.suites if measured.name == "resume")
    smallest = min(row.size for row in whole.rows)
    rows = [row for row in whole.rows if row.size == smallest]
    measured = msgspec.structs.replace(whole, rows=rows)
    return _chart(measured, machine_words(results))


def _chart(measured: Measured, machine: str) -> str:
    groups: dict[str, list[Bar]] = {}
    for row in _by_size(measured):
        bar = Bar(row.name, row.median, row.role, row.failed)
        groups.setdefault(_size(row.size), []).append(bar)
    subtitle = f"Logarithmic scale. Medians of {_rounds(measured)}; {machine}."
    return bar_chart(measured.title, subtitle, groups)
