"""The log: as the application has configured structlog, else warnings on standard error.

Standard output, which structlog would take, may be a wire, or what a program has to say.
"""

import logging
import sys
from typing import Any, Final

import structlog


def settings(level: int, *, as_json: bool = False) -> dict[str, Any]:
    """What makes structlog write to standard error, in colour on a terminal, or as JSON lines."""
    renderers = _json_lines() if as_json else [_for_people()]
    return {
        "processors": [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *renderers,
        ],
        "wrapper_class": structlog.make_filtering_bound_logger(level),
    }


def _json_lines() -> list[Any]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


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
