"""The log: as the application has configured structlog, else warnings on standard error.

Never standard output, structlog's default: that may be a stdio transport, or a program's result.

Each line has the name of its logger: the package below `streams` that has written it, or
`transports`. `calls`, the log of calls (`streams.observe.calls`), writes so many lines that it
renders them itself and leaves them here, to be written together.
"""

import logging
import os
import re
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import UnsupportedOperation
from typing import Any, Final

import structlog

from streams.forks import in_child
from streams.turns import RateLimit

REDACTED: Final = "[redacted]"
STREAM_LETTERS: Final = 8  # of a streamId in a line; the list of the page shows the same ones

# Secrets by their form: our bearer tokens, JWTs, and any other 256 random bits of `streams.keys`,
# even if a part was cut off. Names are hardly as long, and hashes are written in hex.
# Secrets by the name before them: in headers, in JSON, in JSON within JSON, and in Python.
_SECRET: Final = re.compile(
    r"mcps_[A-Za-z0-9_-]+"
    r"|eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"
    r"|\b(?=[a-z0-9_-]*[A-Z])(?=[A-Z0-9_-]*[a-z])[A-Za-z0-9_-]{36,}"
)
_NAMED_SECRET: Final = re.compile(
    r"(?P<name>(?:authorization|mcp-session-id|resume_?token)[\\\"']*\s*[:=,]\s*b?[\\\"']*"
    r"(?:(?:bearer|basic)\s+)?|\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
# The user and the password in the URL of a store. It ends at the last @: a password may have any.
_STORE_SECRET: Final = re.compile(
    r"\b(?P<scheme>(?:redis|valkey|unix)[a-z+]*://)[^\s\"']*@", re.IGNORECASE
)

# A peer's words must not move a terminal's cursor, be invisible, or look like other words. So: C0
# without tab and newline, DEL, C1, marks that change the direction of text, separators of lines and
# paragraphs, surrogates.
CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
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
FILE_BYTES: Final = 64 * 1024  # in one write to a file; a pipe takes `PIPE_BUF` without waiting

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
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def settings(
    level: int, *, as_json: bool = False, levels: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The settings of structlog for standard error: in colour on a terminal, or as JSON lines.

    `levels` are those of loggers that have another than `level`.
    """
    renderers = _json_lines() if as_json else [_console_renderer()]
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
            redacted,
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
    """Standard error, whose reader may go: a terminal that was closed must not end a server.

    A line that cannot be written is lost: no place is left to tell it.
    """

    def __init__(self) -> None:
        # A deque, since threads write to the log as well.
        self._waiting: deque[Callable[[], bytes]] = deque()
        self._lost = 0
        in_child(self._waiting.clear)  # the parent writes them

    def write(self, text: str) -> None:
        self.write_waiting()
        with suppress(OSError, ValueError):  # a ValueError: it was closed
            sys.stderr.write(text)

    def add(self, render: Callable[[], bytes]) -> None:
        """Write a line with the next ones, when `write_waiting` or `write` is called next.

        It is rendered then: many lines in succession take half the time.
        """
        if len(self._waiting) < WAITING_LINES_MAX:
            self._waiting.append(render)
        else:
            self._lost += 1

    @property
    def is_waiting(self) -> bool:
        """Whether there are lines that `write_waiting` would write."""
        return bool(self._waiting)

    def write_waiting(self) -> None:
        """Write the lines that wait, as far as standard error takes them without waiting."""
        if not self._waiting:
            return
        with suppress(OSError, ValueError):
            try:
                fd = sys.stderr.fileno()
            except UnsupportedOperation:  # a program has replaced it
                sys.stderr.write(self._taken(sys.maxsize).decode())
                return
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            room = select.poll()
            room.register(fd, select.POLLOUT)
            while self._waiting and room.poll(0):
                os.write(fd, self._taken(FILE_BYTES if is_file else select.PIPE_BUF))
        if self._lost and not self._waiting:
            lost, self._lost = self._lost, 0
            log.warning("lines of the log were lost: standard error was not read", lines=lost)

    def _taken(self, size_max: int) -> bytes:
        """The first lines, up to this size, but one at least."""
        taken: list[bytes] = []
        size = 0
        with suppress(IndexError):  # another thread takes them, too
            while True:
                line = self._waiting.popleft()()
                if taken and size + len(line) > size_max:
                    self._waiting.appendleft(partial(bytes, line))
                    break
                taken.append(line)
                size += len(line)
        return b"".join(taken)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


STANDARD_ERROR: Final = _StandardError()
_FILE: Final[Any] = STANDARD_ERROR


def log_to_stderr(
    level: int = logging.INFO,
    *,
    as_json: bool = False,
    levels: Mapping[str, int] | None = None,
) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines.

    `levels` are those of loggers that have another than `level`.
    """
    structlog.configure(
        **settings(level, as_json=as_json, levels=levels),
        logger_factory=structlog.WriteLoggerFactory(_FILE),
    )


def redacted(_: object, __: str, line: str) -> str:
    """A rendered line of the log without secrets.

    An application that configures structlog by itself puts this processor behind its renderer.
    """
    line = _STORE_SECRET.sub(r"\g<scheme>", line)
    return _NAMED_SECRET.sub(rf"\g<name>{REDACTED}", _SECRET.sub(REDACTED, line))


def _escape_values(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escape control characters in all values, and newlines except in a traceback."""
    return {name: _escaped_value(name, value) for name, value in event.items()}


def _escaped_value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value  # shown by its `repr`, which escapes
    told = escaped(value)
    return told if name == "exception" else told.replace("\n", "\\n")


def _json_lines() -> list[Any]:
    return [structlog.processors.JSONRenderer()]


def _console_renderer() -> Any:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        exception_formatter=structlog.dev.plain_traceback,  # no values of variables
    )


class _Log:
    """Looks up the configuration at each message: the application may configure structlog late."""

    def __getattr__(self, level: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(), level)
        logger = structlog.WriteLogger(_FILE)
        return getattr(structlog.wrap_logger(logger, **settings(logging.WARNING)), level)


log: Final[Any] = _Log()
