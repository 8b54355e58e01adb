"""The log: as the application has configured structlog, else warnings on standard error.

Never standard output, structlog's default: that may be a stdio transport, or a program's result.
"""

import logging
import re
import sys
from contextlib import suppress
from typing import Any, Final

import structlog

from streams.turns import RateLimit

REDACTED: Final = "[redacted]"

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


def settings(level: int, *, as_json: bool = False) -> dict[str, Any]:
    """The settings of structlog for standard error: in colour on a terminal, or as JSON lines."""
    renderers = _json_lines() if as_json else [_console_renderer()]
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _escape_values,
            *renderers,
            redacted,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(level),
    }


class _StandardError:
    """Standard error, whose reader may go: a terminal that was closed must not end a server.

    A line that cannot be written is lost: no place is left to tell it.
    """

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a ValueError: it was closed
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


_STANDARD_ERROR: Final[Any] = _StandardError()


def log_to_stderr(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines."""
    structlog.configure(
        **settings(level, as_json=as_json),
        logger_factory=structlog.WriteLoggerFactory(_STANDARD_ERROR),
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
        logger = structlog.WriteLogger(_STANDARD_ERROR)
        return getattr(structlog.wrap_logger(logger, **settings(logging.WARNING)), level)


log: Final[Any] = _Log()
