"""Where the command's own words go: standard error, always, for standard output may be a wire."""

import logging
import sys
from typing import Any

import structlog


def log_to_stderr(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *(_json_lines() if as_json else [_for_people()]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def _json_lines() -> list[Any]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _for_people() -> Any:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        exception_formatter=structlog.dev.plain_traceback,  # no values of variables
    )
