"""The actions of `verify`, `export` and `backup`.

Results go to standard output, everything else to standard error.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from streams.cli.actions.output import as_json_text, bar, harmless, say
from streams.cli.base import DONE, FAILED, complain
from streams.errors import JournalError, UnsafeFile
from streams.files import write_whole
from streams.journal.ownership import key_path
from streams.journal.sqlite.backup import Exported, Progress, back_up, export_streams
from streams.journal.sqlite.export import Lines, Sink, tables_at
from streams.journal.sqlite.file import check_new
from streams.journal.sqlite.verify import Report, inspect
from streams.keys import FILE_BYTES_MAX
from streams.permissions import read_secret

DAMAGES_SAID: Final = 20  # many damages say the same
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def verify(file: Path, *, as_json: bool) -> int:
    """Print whether a journal is sound; return the exit code."""
    try:
        report = inspect(file)
    except JournalError as error:
        return complain(error)
    return tell_report(str(file), report, as_json=as_json)


def tell_report(file: str, report: Report, *, as_json: bool) -> int:
    """Print a report about a journal; return the exit code."""
    if as_json:
        found = {"sound": not report.problems, **msgspec.to_builtins(report)}
        print(as_json_text(found))
    else:
        _show(file, report)
    return FAILED if report.problems else DONE


def _show(file: str, report: Report) -> None:
    for problem in report.problems:
        print(harmless(str(problem)))
    what = f"{counted(report.streams, 'stream')}, {counted(report.messages, 'message')}"
    if not report.is_read:
        what = f"schema {report.schema} is an older one: its streams were not looked at"
    if report.problems:
        say(f"{file} is damaged ({what}): restore a backup, or save what is readable with export.")
    else:
        print(f"{file} is sound: {what}.")


def export(file: Path, to: Path | None, tables: Path | None = None) -> int:
    """Save what is readable of a journal; return the exit code."""
    try:
        with (
            _interruptible(),
            exported_to(to, tables) as on_stream,
            shown_progress() as on_progress,
        ):
            saved = export_streams(file, on_stream, on_progress)
    except BrokenPipeError:
        raise  # `streams.cli.main` handles it
    except FileExistsError:
        return complain(is_there(to, tables))
    except (JournalError, OSError) as error:
        return complain(error)
    return tell_saved(saved)


def exported_to(
    folder: Path | None, tables: Path | None
) -> AbstractContextManager[Callable[[int], Sink]]:
    """A function that returns, for the number of a stream, where an export writes it."""
    return _lines_to(folder) if tables is None else tables_at(tables)


def is_there(folder: Path | None, tables: Path | None) -> str:
    """The complaint about an export whose place is taken."""
    if tables is not None:
        return f"{tables} exists already: name a new file."
    return f"{folder} is there already: name a new folder."


@contextmanager
def _lines_to(folder: Path | None) -> Iterator[Callable[[int], Sink]]:
    if folder is None:
        yield lambda number: Lines(sys.stdout.buffer.write)
        sys.stdout.flush()
        return
    folder.mkdir(mode=0o700)
    with ExitStack() as stack, _removed_if_empty(folder):

        def on_stream(number: int) -> Sink:
            stack.close()  # the file of the previous stream
            path = folder / f"{number}.ndjson"
            file = stack.enter_context(open(path, "xb", opener=_private))
            return Lines(file.write)

        yield on_stream


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new folder if the block fails and has put nothing into it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it has files, which are kept
            folder.rmdir()
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def tell_saved(saved: Exported) -> int:
    """Say what an export has saved; return the exit code."""
    for damage in list(saved.damages)[:DAMAGES_SAID]:
        say(damage)
    if len(saved.damages) > DAMAGES_SAID:
        say(f"… and {len(saved.damages) - DAMAGES_SAID:,} more like these")
    lost = f", {saved.missing:,} are missing" if saved.missing else ""
    say(f"{counted(saved.streams, 'stream')}, {counted(saved.messages, 'message')}{lost}.")
    return DONE if saved.is_whole else FAILED


def backup(file: Path, to: Path, *, with_keys: bool) -> int:
    """Copy a journal, with its keys if they are wanted; return the exit code."""
    keys = key_path(file)
    try:
        check_new(to)  # before a bar is shown
        with _interruptible(), shown_progress() as on_progress:
            back_up(file, to, on_progress)
        if with_keys:
            content = read_secret(keys, FILE_BYTES_MAX, follows_links=False)
            write_whole(key_path(to), content, os.link)
    except FileExistsError:
        return complain(f"{key_path(to)} is there already, so the keys were not copied.")
    except UnsafeFile as error:
        return complain(f"{error}.")
    except (JournalError, OSError) as error:
        return complain(error)
    say(f"{to} has all of {file}" + ("." if with_keys else f", and no keys: keep {keys} apart."))
    return DONE


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal interrupt the block as Ctrl-C does.

    A process that they end leaves a hidden file as long as the journal.
    """
    numbers = [each for each in _ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A progress bar, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with bar() as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def counted(count: int, what: str) -> str:
    """A number of things in words, such as 2 streams."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
