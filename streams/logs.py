"""The log: as the application has configured structlog, else warnings on standard error.

Never standard output, structlog's default: that may be a stdio transport, or a program's result.

Each line has the name of its logger: the package below `streams` that has written it, or
`transports`. `calls`, the log of calls (`streams.observe.calls`), writes so many lines that it
renders them itself and leaves them here, to be written together.

Structlog is imported where it is used (PLC0415): with rich and asyncio, which it loads, it takes as
long to load as most of the client, which seldom has a line to write.
"""

import atexit
import logging
import math
import os
import re
import select
import stat
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import UnsupportedOperation
from typing import Any, Final, TextIO

from streams.clock import steady
from streams.forks import in_child
from streams.turns import RateLimit

REDACTED: Final = "[redacted]"
STREAM_LETTERS: Final = 8  # of a streamId in a line; the list of the page shows the same ones

# Secrets by their form: our bearer tokens, JWTs, and any other 256 random bits of `streams.keys`,
# even if a part was cut off. Names are hardly as long, and hashes are written in hex. The search
# for these begins once in a run of their letters: a long run would take seconds.
# Secrets by the name before them: in headers, in JSON, in JSON within JSON, and in Python.
_SECRET: Final = re.compile(
    r"mcps_[A-Za-z0-9_-]+"
    r"|eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"
    r"|(?<![A-Za-z0-9_-])(?=[a-z0-9_-]*[A-Z])(?=[A-Z0-9_-]*[a-z])[A-Za-z0-9_-]{36,}"
)
_NAMED_SECRET: Final = re.compile(
    r"(?P<name>(?:authorization|mcp-session-id|resume_?token)[\\\"']*\s*[:=,]\s*b?[\\\"']*"
    r"(?:(?:bearer|basic)\s+)?|\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
# The user and the password in the URL of a store. It ends at the last @: a password may have any.
# One attempt for each word, as for `secrets._NAMED`; no scheme is longer.
_STORE_SECRET: Final = re.compile(
    r"(?<![^\s\"'])(?P<scheme>(?>[^\s\"']*?\b(?:redis|valkey|unix)[a-z+]{0,20}://))[^\s\"']*@",
    re.IGNORECASE,
)

# A peer's words must not move a terminal's cursor, be invisible, or look like other words. So: C0
# without tab and newline, DEL, C1, marks that change the direction of text, separators of lines and
# paragraphs, surrogates, characters without a width, tags. The joiners of emoji stay.
CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069"
    r"\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)

# How many warnings about one peer are written at once, and per second in the long run. Without a
# limit, a peer that sends nonsense would fill the disk.
WARNINGS_MAX: Final = 20
WARNINGS_PER_S: Final = 1.0

# How many characters of a peer's own words a warning has.
SAID_MAX: Final = 200

# How many lines wait to be written together. If standard error is a pipe that nobody reads, the
# lines above that are lost: they must not hold up the server.
WAITING_LINES_MAX: Final = 5_000
WAITING_BYTES_MAX: Final = 1024 * 1024  # of them, without the lines of calls, which are short
FILE_BYTES: Final = 64 * 1024  # in one write to a file; a pipe takes `PIPE_BUF` without waiting

RETRY_S: Final = 0.02  # until lines that wait are tried again
# How long the end of the process waits for a standard error that takes no more.
FINAL_S: Final = 1.0

# A tool chooses the text of its exception. An exception that is longer loses its middle.
EXCEPTION_BYTES_MAX: Final = 16 * 1024
_INDENT: Final = "    "
_CUT: Final = f"\n{_INDENT}... a part is left out ... "  # the rest follows in the same line
# So much around the parts that are kept is searched for secrets that begin or end in them.
_AROUND: Final = 4 * 1024

# Lines that these write belong to their caller.
_HELPERS: Final = ("structlog", "streams.logs", "streams.faults")


class Warnings:
    """Writes warnings about one peer, up to a limit."""

    def __init__(self) -> None:
        self._limit: RateLimit | None = None  # made later: trio's clock may not run yet
        self._times = 0  # warnings since the last one that was written

    def warn(self, event: str, **details: object) -> None:
        """Write a warning, or count it: the next one that is written has the count, `times`."""
        if self._limit is None:
            self._limit = RateLimit(WARNINGS_MAX, WARNINGS_PER_S)
        self._times += 1
        if self._limit.spend():
            if self._times > 1:
                details["times"] = self._times
            log.warning(event, **{name: _short(value) for name, value in details.items()})
            self._times = 0


def _short(value: object) -> object:
    return value[:SAID_MAX] if isinstance(value, str) else value


def escaped(text: str) -> str:
    """A text with `\\uXXXX` in place of each of its `CONTROLS`; in JSON, that means the same."""
    return CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def settings(
    level: int, *, as_json: bool = False, levels: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The settings of structlog for standard error: in colour on a terminal, or as JSON lines.

    `levels` are those of loggers that have another than `level`.
    """
    import structlog

    renderers = _json_lines() if as_json else _text_lines()
    levels = levels or {}
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _Naming(level, levels),
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _escape_values,
            *renderers,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(
            min(level, *levels.values()) if levels else level
        ),
    }


class _Naming:
    """Names the logger of a line, and drops the line if it is below the level of that logger."""

    def __init__(self, level: int, levels: Mapping[str, int]) -> None:
        self._level = level
        self._levels = levels

    def __call__(self, _: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
        name = event.setdefault("logger", _room_of_caller())
        level = logging.getLevelNamesMapping()[event["level"].upper()]
        if level < self._levels.get(name, self._level):
            import structlog

            raise structlog.DropEvent
        return event


def _room_of_caller() -> str:
    frame = sys._getframe(1)
    while (module := frame.f_globals.get("__name__", "")).startswith(_HELPERS):
        assert frame.f_back is not None  # the log is called by a module of ours
        frame = frame.f_back
    return room_of(module)


def room_of(module: str) -> str:
    """The name of the logger that the lines of a module have."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "streams" and rest else first


class _StandardError:
    """Standard error, whose reader may go, or not read: neither must end or stop a server.

    All lines are written in their order, and none is waited for. Those that standard error does not
    take at once wait for a thread, up to a limit; beyond it they are lost and counted. If standard
    error is closed, no place is left to tell it.
    """

    def __init__(self) -> None:
        # A deque, since threads write to the log as well. With each line its bytes, if known.
        self._waiting: deque[tuple[Callable[[], bytes], int]] = deque()
        in_child(self._clear)  # the parent writes them
        self._clear()

    def _clear(self) -> None:
        self._waiting.clear()
        self._bytes = 0  # of the lines that wait
        self._rest = b""  # of lines that were taken, not yet written
        self._lost = 0
        self._is_written = threading.Lock()  # never waited for: a signal handler may write as well
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Write a line after those that wait, as far as that needs no waiting."""
        line = text.encode(errors="backslashreplace")
        self.add(partial(bytes, line), len(line))
        self.write_waiting()

    def add(self, render: Callable[[], bytes], size: int = 0) -> None:
        """Write a line with the next ones, when `write_waiting` or `write` is called next.

        It is rendered then: many lines in succession take half the time. `size` is its bytes.
        """
        is_too_much = self._waiting and self._bytes + size > WAITING_BYTES_MAX
        if len(self._waiting) >= WAITING_LINES_MAX or is_too_much:
            self._lost += 1
            return
        self._waiting.append((render, size))
        self._bytes += size

    @property
    def is_waiting(self) -> bool:
        """Whether there are lines that `write_waiting` would write."""
        return bool(self._waiting or self._rest)

    def write_waiting(self) -> None:
        """Write the lines that wait, as far as standard error takes them without waiting."""
        # A line that comes while another thread writes is seen there after the release.
        while self.is_waiting and self._is_written.acquire(blocking=False):
            try:
                is_done = self._write_some()
            finally:
                self._is_written.release()
            if not is_done:
                self._write_later()
                return
        if self._lost and not self.is_waiting:
            lost, self._lost = self._lost, 0
            log.warning("lines of the log were lost: standard error was not read", lines=lost)

    def _write_some(self) -> bool:
        """Whether all is written, or lost since standard error is closed."""
        try:
            try:
                fd = -1 if sys.stderr is None else sys.stderr.fileno()
            except UnsupportedOperation:  # a program has replaced it
                fd = -1
            if fd < 0 or not hasattr(select, "poll"):  # as on Windows
                self._write_to_object()
                return True
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            size = FILE_BYTES if is_file else select.PIPE_BUF
            room = select.poll()
            room.register(fd, select.POLLOUT)
            while self.is_waiting and room.poll(0):
                self._rest = self._rest or self._taken(size)
                self._rest = self._rest[os.write(fd, self._rest[:size]) :]
        except BlockingIOError:  # another process has made it so, and filled it
            return False
        except (OSError, ValueError):  # a ValueError: it was closed
            self._waiting.clear()
            self._rest, self._bytes = b"", 0
        return not self.is_waiting

    def _write_to_object(self) -> None:
        told = self._rest + self._taken(sys.maxsize)
        self._rest = b""
        if sys.stderr is not None:  # it is None if it was closed before the start
            sys.stderr.write(told.decode())
            sys.stderr.flush()

    def _taken(self, size_max: int) -> bytes:
        """The first lines, up to this size, but one at least."""
        taken: list[bytes] = []
        size = 0
        while self._waiting:
            render, counted = self._waiting.popleft()
            line = render()
            if taken and size + len(line) > size_max:
                self._waiting.appendleft((partial(bytes, line), counted))
                break
            taken.append(line)
            size += len(line)
            self._bytes -= counted
        if not self._waiting:
            self._bytes = 0  # threads may have counted at the same time
        return b"".join(taken)

    def _write_later(self) -> None:
        """Let a thread write what is left, once standard error takes it."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._write_all, name="mcp-streams log", daemon=True)
            with suppress(RuntimeError):  # no thread at the end of the interpreter, or too many
                thread.start()
                self._thread = thread

    def _write_all(self) -> None:
        self.finish(math.inf)
        self._thread = None
        self.write_waiting()  # of a line that came before the last statement

    def finish(self, within_s: float) -> None:
        """Write the lines that wait, and wait for that up to so many seconds."""
        until = steady() + within_s
        while self.is_waiting and steady() < until:
            threading.Event().wait(RETRY_S)  # never set: a pause
            self.write_waiting()


STANDARD_ERROR: Final = _StandardError()
atexit.register(STANDARD_ERROR.finish, FINAL_S)


class _LineLogger:
    """Structlog's logger for `STANDARD_ERROR`. It has no lock: a signal handler may log."""

    def msg(self, line: str) -> None:
        """Write a line."""
        STANDARD_ERROR.write(line + "\n")

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


_LINES: Final = _LineLogger()


class _Libraries(logging.Handler):
    """Writes what libraries log by `logging`, such as exporters, as lines of this log.

    It is the handler of last resort: a program that sets up `logging` has its own.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        level = min(record.levelno // 10 * 10, logging.CRITICAL)
        write = {logging.CRITICAL: log.critical, logging.ERROR: log.error}.get(level, log.warning)
        try:
            told = record.getMessage()
        except Exception as error:  # `logging` promises that no line of the log fails a program
            why = type(error).__name__
            told = (
                f"a line of the log cannot be formatted: {why} ({record.pathname}:{record.lineno})"
            )
        write(told, logger=record.name, exc_info=record.exc_info)


_LIBRARIES: Final = _Libraries(logging.WARNING)


def log_to_stderr(
    level: int = logging.INFO,
    *,
    as_json: bool = False,
    levels: Mapping[str, int] | None = None,
) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines.

    `levels` are those of loggers that have another than `level`.
    """
    import structlog

    structlog.configure(
        **settings(level, as_json=as_json, levels=levels),
        logger_factory=lambda *_: _LINES,
    )
    take_libraries()
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning of Python, such as a coroutine without `await`, as a line of this log."""
    told = {"logger": "warnings", "at": f"{filename}:{lineno}"}
    log.warning(f"{category.__name__}: {message}", **told)


def take_libraries() -> None:
    """Write what libraries log by `logging` as lines of this log."""
    logging.lastResort = _LIBRARIES


def redacted(_: object, __: str, line: str) -> str:
    """A rendered line of the log without secrets.

    An application that configures structlog by itself puts this processor behind its renderer.
    """
    if "@" in line:  # few lines have one
        line = _STORE_SECRET.sub(r"\g<scheme>", line)
    return _NAMED_SECRET.sub(rf"\g<name>{REDACTED}", _SECRET.sub(REDACTED, line))


def _escape_values(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escape control characters in all values, and newlines except in a traceback."""
    return {name: _escaped_value(name, value) for name, value in event.items()}


def _escaped_value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value  # shown by its `repr`, which escapes
    if name == "exception" and len(value) > 2 * EXCEPTION_BYTES_MAX:
        # `_shortened` keeps less than this. To escape all of 4 MiB would block the process.
        value = value[:EXCEPTION_BYTES_MAX] + value[-EXCEPTION_BYTES_MAX:]
    told = escaped(value)
    return told if name == "exception" else told.replace("\n", "\\n")


def _shortened(exception: str) -> str:
    """The text of an exception without secrets, and without its middle if it is long."""
    half = (EXCEPTION_BYTES_MAX - len(_CUT)) // 2
    if len(exception.encode()) <= EXCEPTION_BYTES_MAX:
        return redacted(None, "", exception)
    first = redacted(None, "", exception[: half + _AROUND]).encode()[:half]
    last = redacted(None, "", exception[-half - _AROUND :]).encode()[-half:]
    return first.decode(errors="ignore") + _CUT + last.decode(errors="ignore")


def _json_lines() -> list[Any]:
    import structlog

    return [_redact_values, structlog.processors.JSONRenderer()]


def _redact_values(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Redact all values. In a line of JSON, `redacted` would take letters of its escapes."""
    if isinstance(exception := event.get("exception"), str):
        event["exception"] = _shortened(exception)
    told: dict[str, Any] = _redacted_value("", event)
    return told


def _redacted_value(name: str, value: Any) -> Any:
    """A value for JSON without secrets; `name` is that of a member, or the value before it."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
        return {_redacted_value("", key): _redacted_value(key, members[key]) for key in members}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        before = ["", *(each if isinstance(each, str) else repr(each) for each in value)]
        return [_redacted_value(*each) for each in zip(before, value, strict=False)]
    text = value if isinstance(value, str) else repr(value)
    head = f"{name}="
    told = redacted(None, "", head + text)
    return told[len(head) :] if told.startswith(head) else redacted(None, "", text)


def _text_lines() -> list[Any]:
    import structlog

    colors = sys.stderr is not None and sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors,
        exception_formatter=structlog.dev.plain_traceback,  # no values of variables
    )
    return [_indent_exception, renderer, redacted]


def _indent_exception(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Indent an exception, so that none of its lines can look like a line of the log."""
    if isinstance(exception := event.get("exception"), str):
        event["exception"] = _shortened(_INDENT + exception.replace("\n", f"\n{_INDENT}"))
    return event


_UNSHOWN: Final = ("debug", "info")  # unless the application has configured structlog


def _write_nothing(event: str, **details: object) -> None:
    """Log a line of a level that is not shown."""


class _Log:
    """Looks up the configuration at each message: the application may configure structlog late."""

    def __getattr__(self, level: str) -> Any:
        if level in _UNSHOWN and "structlog" not in sys.modules:  # so nobody has configured it
            return _write_nothing
        import structlog

        if structlog.is_configured():
            return getattr(structlog.get_logger(), level)
        return getattr(structlog.wrap_logger(_LINES, **settings(logging.WARNING)), level)


log: Final[Any] = _Log()
