"""How commands print: results to standard output, everything else to standard error."""

import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from streams import messages
from streams.logs import CONTROLS, escaped
from streams.messages import Message

# How much is printed of an error, which may be a server's text.
ERROR_CHARS_MAX: Final = 2_000

# The request of a server that asks the user something.
QUESTION: Final = "elicitation/create"

# The largest number that a progress bar takes: rich computes times from it.
BAR_MAX: Final = 1e15


def harmless(text: str) -> str:
    """A server's text, without characters that control a terminal."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """An error in one line, whatever line breaks it has."""
    line = " ".join(text.split())
    return line if len(line) <= ERROR_CHARS_MAX else f"{line[:ERROR_CHARS_MAX]}…"


def say(line: str) -> None:
    """Print a line that is no result."""
    print(harmless(line), file=sys.stderr, flush=True)


def bar() -> Progress:
    """A progress bar on standard error, removed at its end."""
    what = TextColumn("{task.description}", markup=False)
    return Progress(
        what,
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False, markup=False, emoji=False),
        transient=True,
    )


class _Progress(msgspec.Struct):
    progress: int | float
    total: int | float | None = None
    message: str = ""


class Display:
    """Prints a call's messages to standard error: a progress bar on a terminal, else lines."""

    def __init__(self, *, as_json: bool, asks: bool = False) -> None:
        """With `asks`, questions for the user are left to `streams.cli.actions.questions`."""
        self._as_json = as_json
        self._asks = asks
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._is_paused = False
        if sys.stderr.isatty() and not as_json:
            self._bar = bar()

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, message: Message) -> None:
        """Print one message of the call."""
        if self._asks and message.method == QUESTION:
            return
        try:
            params = messages.decode(message.params, Any)
        except ValueError as error:
            say(one_line(f"{message.method}: its params cannot be read: {error}"))
            return
        if self._as_json:
            shown = {"method": message.method, "params": params}
            print(as_json_text(shown), file=sys.stderr, flush=True)
        elif message.method == "notifications/progress" and (progress := _progress(params)):
            self._show_progress(progress)
        elif message.method == "notifications/message" and isinstance(params, dict):
            self._say(f"{params.get('level')}: {_text(params.get('data'))}")
        else:
            self._say(f"{message.method}: {_text(params)}")

    def pause(self) -> None:
        """Remove the bar, since the user is asked something."""
        self._is_paused = True
        if self._bar is not None:
            self._bar.stop()

    def go_on(self) -> None:
        """Show the bar again."""
        self._is_paused = False
        if self._bar is not None:
            self._bar.start()

    def _say(self, line: str) -> None:
        if self._bar is None or self._is_paused:
            say(line)
        else:
            self._bar.console.print(harmless(line), soft_wrap=True)

    def _show_progress(self, now: _Progress) -> None:
        if self._is_paused:
            return
        if self._bar is None:
            of_all = "" if now.total is None else f"/{now.total}"
            self._say(f"{now.progress}{of_all} {now.message}".rstrip())
            return
        if not (0 <= now.progress <= BAR_MAX and 0 < (now.total or 1) <= BAR_MAX):
            return  # a bar cannot show it
        if self._task is None:
            self._task = self._bar.add_task("", total=now.total)
        what = harmless(one_line(now.message))[-40:]
        self._bar.update(self._task, completed=now.progress, total=now.total, description=what)


def _progress(params: Any) -> _Progress | None:
    try:
        return msgspec.convert(params, _Progress)
    except msgspec.ValidationError:
        return None  # another server's progress, of another shape


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: Collection[str]
) -> None:
    """Print a table: for a person on a terminal, else for programs that read lines."""
    if sys.stdout.isatty():
        print_to_terminal(columns, rows, wrapped)
    else:
        print_aligned(columns, rows)


def print_to_terminal(
    columns: Sequence[str], rows: Sequence[Sequence[str]], wrapped: Collection[str]
) -> None:
    """Print a table whose columns `wrapped` are as narrow as the window needs."""
    shown = Table(box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column, no_wrap=column not in wrapped, overflow="fold")
    for cells in rows:
        shown.add_row(*map(Text, cells))
    Console(highlight=False).print(shown)


def print_aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a line for each row, however long."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())


def as_json_text(value: Any) -> str:
    """A value as JSON on one line, without characters that control a terminal."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a word of the command line that is not UTF-8
        encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(value)))
    return escaped(encoded.decode())


def _encodable(value: Any) -> Any:
    """The same value, with escapes in place of bytes that are not UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list) else value


def _text(data: Any) -> str:
    return data if isinstance(data, str) else as_json_text(data)


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a tool's result: its content, or all of it as JSON.

    Content that does not have MCP's shape is printed as JSON too.
    """
    blocks = result.get("content") if isinstance(result, dict) else None
    if as_json or not blocks or not isinstance(blocks, list):
        print(as_json_text(result))
        return
    for block in blocks:
        shown = _block(block)
        print(harmless(shown) if sys.stdout.isatty() else shown)


def _block(block: Any) -> str:
    """A content block as text; of other content, its type and size."""
    if not isinstance(block, dict):
        return as_json_text(block)
    resource = block.get("resource")
    inner = resource if isinstance(resource, dict) else block
    if isinstance(text := inner.get("text"), str):
        return text
    told = (block.get("type"), inner.get("uri"), inner.get("mimeType"))
    words = [word for word in told if isinstance(word, str) and word]
    data = inner.get("data") or inner.get("blob")
    if data and isinstance(data, str):
        words.append(f"{len(data) * 3 // 4 - data[-2:].count('=')} bytes")
    return f"[{' '.join(words)}]" if words else as_json_text(block)
