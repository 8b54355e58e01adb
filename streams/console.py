"""Where the command's own words go: standard error, always, for standard output may be a wire."""

import logging
import sys

import structlog

from streams import logs


def log_to_stderr(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send this process's log to standard error, in colour on a terminal, or as JSON lines."""
    structlog.configure(
        **logs.settings(level, as_json=as_json),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
