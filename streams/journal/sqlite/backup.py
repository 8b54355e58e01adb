"""Copies a journal that is in use, and exports the readable part of a damaged one."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.errors import JournalUnusable, Refusal, UnsafeFile
from streams.files import whole
from streams.journal.records import Record
from streams.journal.sqlite.export import Sink
from streams.journal.sqlite.file import check_new, translated
from streams.journal.sqlite.reader import Contents, is_current, is_sound, opened_to_read
from streams.keys import hashed
from streams.messages import Run, parse

PAGES_AT_ONCE: Final = 256  # copied between two reports of progress: 4 MiB with our page size

Progress = Callable[[int, int], None]  # given what is done, and the total


class Exported(msgspec.Struct):
    """The result of an export."""

    streams: int = 0
    messages: int = 0
    missing: int = 0  # messages known to be lost; not counted if the record is lost
    damages: dict[str, None] = msgspec.field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.damages)


def back_up(path: Path, to: Path, on_progress: Progress) -> None:
    """Copy a snapshot of a journal to a new file, without blocking the journal's owner.

    It contains all commits that were acknowledged before. Raises `JournalUnusable` if the file is
    not a journal, cannot be read, or cannot be copied; then no file is left.
    """
    check_new(to)
    try:
        with (
            whole(to, os.link) as file,  # never replaces an existing file
            opened_to_read(path) as (source, _),
            translated(file),
        ):
            _copy(source, file, on_progress)
    except FileExistsError:
        raise JournalUnusable(f"{to} exists already: name a new file.") from None
    except UnsafeFile as error:
        raise JournalUnusable(f"{error}.") from error
    except OSError as error:
        raise JournalUnusable(f"{to} cannot be written: {error}.") from error


def _copy(source: sqlite3.Connection, to: Path, on_progress: Progress) -> None:
    with closing(sqlite3.connect(to, isolation_level=None)) as copy:
        source.backup(
            copy,
            pages=PAGES_AT_ONCE,
            progress=lambda _, left, pages: on_progress(pages - left, pages),
        )
        # One file without a WAL, so that it can be copied on as it is.
        copy.execute("PRAGMA journal_mode = DELETE")


def export_streams(path: Path, on_stream: Callable[[int], Sink], on_progress: Progress) -> Exported:
    """Export what is readable, stream by stream.

    A stream has a header, then its messages that are not acked, as they were sent, and a note in
    place of lost ones. `on_stream` is given a stream's number and returns what takes these. Raises
    `JournalUnusable` if nothing can be read.
    """
    exported = Exported()
    with opened_to_read(path, may_be_damaged=True) as (connection, schema):
        if not is_current(schema):
            raise JournalUnusable(
                f"{path} was written by an older release (schema {schema}): export it with that "
                "release, or serve a copy of it once, which updates the copy."
            )
        contents = Contents(connection, lambda number, what: _note(exported, number, what))
        numbers = contents.numbers()
        for done, number in enumerate(numbers):
            on_progress(done, len(numbers))
            _export_stream(contents, number, on_stream(number), exported)
        on_progress(len(numbers), len(numbers))
    return exported


def _note(exported: Exported, number: int | None, what: str) -> None:
    exported.damages[what if number is None else f"stream {number}: {what}"] = None


def _export_stream(contents: Contents, number: int, sink: Sink, exported: Exported) -> None:
    record = contents.record(number)
    if record is None:
        _note(exported, number, "its record is missing")
    exported.streams += 1
    sink.header(header(number, record, contents.request(number)))
    after = 0 if record is None else record.trimmed
    last = None if record is None else record.last
    for first, until, lines in _pieces(contents.runs(number, after), after, last):
        if lines:
            sink.lines(first, until, lines)
            exported.messages += until - first + 1
        elif record is not None or first > 1:
            sink.missing(first, until)
            exported.missing += until - first + 1


def header(number: int, record: Record | None, request: bytes | None) -> dict[str, Any]:
    """The header of a stream. It has a hash of the id, which may be enough to resume the stream."""
    header: dict[str, Any] = {"stream": number, "request": _readable(request)}
    if record is not None:
        header |= {
            "sha256": hashed(record.stream),
            "principal": record.principal,
            "createdAt": record.created_at,
            "outcome": record.outcome.value,
            "confirmed": record.acked,
            "last": record.last,
        }
        if record.ended_at:
            header["endedAt"] = record.ended_at
    return header


def _readable(request: bytes | None) -> msgspec.Raw | None:
    try:
        parse(request or b"")
    except Refusal:
        return None
    return msgspec.Raw(request or b"")


def _pieces(runs: Iterator[Run], after: int, last: int | None) -> Iterator[tuple[int, int, bytes]]:
    """First seq, last seq and lines of each piece, without gaps; the lines are empty if lost."""
    position = after
    for run in runs:
        if run.last <= position:
            continue
        if run.seq > position + 1:
            yield position + 1, run.seq - 1, b""
        yield from _readable_lines(run, max(position, run.seq - 1))
        position = run.last
    if last is not None and position < last:
        yield position + 1, last, b""


def _readable_lines(run: Run, after: int) -> Iterator[tuple[int, int, bytes]]:
    if is_sound(run):
        run = run.after(after)
        yield run.seq, run.last, run.body
    elif len(run.lines) != run.count:
        yield after + 1, run.last, b""  # the lines cannot be numbered
    else:
        for seq, line in enumerate(run.lines, run.seq):
            if seq > after:
                yield seq, seq, line if is_sound(Run(seq, 1, line)) else b""
