"""The log: as the application has configured structlog, else warnings on standard error.

Standard output, which structlog would take, may be a wire, or what a program has to say.
"""

import logging
import re
import sys
from typing import Any, Final

import structlog

from streams.turns import RateLimit

REDACTED: Final = "[redacted]"

# Secrets by their looks: bearer tokens, ours and JWTs, and whatever else of ours has 256 random
# bits (`streams.keys`), of which a part may have been cut off; names are hardly as long, and hashes
# are not written so. And what comes after a name that says what it is, in headers, in JSON, in JSON
# within JSON, and in Python.
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


# A peer's words may not move the cursor of a terminal, be invisible, or look like other words:
# C0 but for tab and newline, DEL, C1, what turns the direction of text, separators of lines and
# paragraphs, surrogates.
CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


# How many warnings about one peer are written at once, and per second in the long run: a peer
# sends lines faster than anybody reads them, and a log has no end.
WARNINGS_MAX: Final = 20
WARNINGS_PER_S: Final = 1.0

# Letters of a peer's own words in a warning.
SAID_MAX: Final = 200


class Warnings:
    """Warnings about one peer, of which a bounded number is written."""

    def __init__(self) -> None:
        self._budget: RateLimit | None = (
            None  # it needs a clock, and this may be made before it runs
        )
        self._times = 0  # those since the last that was written, and that one

    def warn(self, event: str, **details: object) -> None:
        """Write a warning, or count it: the next that is written says `times`."""
        if self._budget is None:
            self._budget = RateLimit(WARNINGS_MAX, WARNINGS_PER_S)
        self._times += 1
        if self._budget.spend():
            if self._times > 1:
                details["times"] = self._times
            log.warning(event, **{name: _short(value) for name, value in details.items()})
            self._times = 0


def _short(value: object) -> object:
    return value[:SAID_MAX] if isinstance(value, str) else value


def escaped(text: str) -> str:
    """A text whose `CONTROLS` stand as `\\uXXXX`, which JSON reads as what they were."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def settings(level: int, *, as_json: bool = False) -> dict[str, Any]:
    """What makes structlog write to standard error, in colour on a terminal, or as JSON lines."""
    renderers = _json_lines() if as_json else [_for_people()]
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _one_line_each,
            *renderers,
            redacted,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(level),
    }


def log_to_stderr(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines."""
    structlog.configure(
        **settings(level, as_json=as_json),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def redacted(_: object, __: str, line: str) -> str:
    """A line of the log, rendered, without what must not be known to who reads logs.

    An application that configures structlog by itself puts this behind its renderer.
    """
    return _NAMED_SECRET.sub(rf"\g<name>{REDACTED}", _SECRET.sub(REDACTED, line))


def _one_line_each(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """The event with values that end no line and control no terminal; a traceback has lines."""
    return {name: _told(name, value) for name, value in event.items()}


def _told(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value  # is shown as `repr` has it
    told = escaped(value)
    return told if name == "exception" else told.replace("\n", "\\n")


def _json_lines() -> list[Any]:
    return [structlog.processors.JSONRenderer()]


def _for_people() -> Any:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        exception_formatter=structlog.dev.plain_traceback,  # no values of variables
    )


class _Log:
    """Looks for the configuration at each message: the application may come to it late."""

    def __getattr__(self, level: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(), level)
        logger = structlog.WriteLogger(sys.stderr)
        return getattr(structlog.wrap_logger(logger, **settings(logging.WARNING)), level)


log: Final[Any] = _Log()
