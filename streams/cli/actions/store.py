"""The actions of `verify` and `export` for the journal in a store, which replicas may serve.

A stream may change while it is read: its owner trims what the client has confirmed. So where lines
are missing, its record is looked at again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from streams.cli.actions.journal import (
    exported_to,
    is_there,
    shown_progress,
    tell_report,
    tell_saved,
)
from streams.cli.base import complain
from streams.errors import JournalError, JournalUnusable, first_of
from streams.journal.addresses import without_secrets
from streams.journal.copying import Progress, Walk, Whole, kept, read_kept
from streams.journal.records import Record
from streams.journal.sqlite.backup import Exported, header
from streams.journal.sqlite.export import Sink
from streams.journal.sqlite.reader import is_sound
from streams.journal.sqlite.verify import PROBLEMS_MAX, Problem, Report, problems_of
from streams.keys import hashed
from streams.limits import Limits
from streams.server.storage import Place, open_store

OnStream = Callable[[int], Sink]
OnPiece = Callable[[int, int, bytes | None], object]


def verify(url: str, *, as_json: bool) -> int:
    """Print whether the journal in a store is sound; return the exit code."""
    failure: BaseException | None = None
    try:
        with shown_progress() as on_progress:
            report = trio.run(_inspect, url, on_progress)
    except* (JournalError, OSError) as errors:
        failure = first_of(errors)
    if failure is not None:
        return complain(failure)
    return tell_report(without_secrets(url), report, as_json=as_json)


async def _inspect(url: str, on_progress: Progress) -> Report:
    problems: list[Problem] = []
    streams = messages = 0
    async with open_store(Place(journal=url), Limits(), only_existing=True) as store:
        walk = Walk(store, on_progress)
        while found := await walk.next():
            record, _ = found
            wrong = [*problems_of(record)]

            def look(first: int, until: int, body: bytes | None) -> None:
                nonlocal messages
                if body is None:
                    wrong.append(f"messages {first} to {until} are missing or damaged")  # noqa: B023
                else:
                    messages += until - first + 1

            await _read_stream(store, record, look)
            streams += 1
            named = hashed(record.stream)
            problems += [Problem(what, record.number, named) for what in wrong]
    return Report(1, True, streams, messages, tuple(problems[:PROBLEMS_MAX]))


async def _read_stream(journal: Whole, record: Record, on_piece: OnPiece) -> None:
    """Give on all lines of a stream, in pieces: the first and last seq, and the lines.

    None stands for lines that are missing or damaged. Lines that were confirmed meanwhile are left
    out.
    """
    for start, last in kept(record):
        after = start
        while after < last:
            try:
                runs = await read_kept(journal, record.stream, after, last)
            except JournalUnusable:
                now = await journal.find(record.stream)
                if now is not None and now.trimmed <= after:
                    on_piece(after + 1, last, None)
                    break
                after = last if now is None else now.trimmed
                continue
            for run in runs:
                on_piece(run.seq, run.last, run.body if is_sound(run) else None)
                after = run.last


def export(url: str, to: Path | None, tables: Path | None = None) -> int:
    """Save what is readable of the journal in a store; return the exit code."""
    failure: BaseException | None = None
    saved = Exported()
    try:
        with exported_to(to, tables) as on_stream, shown_progress() as on_progress:
            trio.run(_export, url, on_stream, on_progress, saved)
    except* BrokenPipeError:
        raise BrokenPipeError from None  # `streams.cli.main` handles it
    except* FileExistsError:
        failure = FileExistsError(is_there(to, tables))
    except* (JournalError, OSError) as errors:
        failure = first_of(errors)
    return tell_saved(saved) if failure is None else complain(failure)


async def _export(url: str, on_stream: OnStream, on_progress: Progress, saved: Exported) -> None:
    async with open_store(Place(journal=url), Limits(), only_existing=True) as store:
        walk = Walk(store, on_progress)
        while found := await walk.next():
            record, _ = found
            sink = on_stream(record.number)
            sink.header(header(record.number, record, record.origin))
            saved.streams += 1
            await _read_stream(store, record, partial(_save, saved, sink))


def _save(saved: Exported, sink: Sink, first: int, last: int, body: bytes | None) -> None:
    if body is None:
        sink.missing(first, last)
        saved.missing += last - first + 1
    else:
        sink.lines(first, last, body)
        saved.messages += last - first + 1
