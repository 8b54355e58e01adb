"""The log of a server process, as its options want it: standard error, and the log of calls."""

import logging

from streams import logs
from streams.engine.events import Events
from streams.observe.calls import LOGGER, CallLog
from streams.process.options import Options, levels_of


def log_as(options: Options) -> None:
    """Send the log of this process to standard error."""
    usual, levels = _levels(options)
    logs.log_to_stderr(usual, as_json=options.json_log, levels=levels)


def call_log(options: Options, events: Events) -> CallLog:
    """The log of the calls that `events` tells of. The caller runs it."""
    usual, levels = _levels(options)
    log = CallLog(levels.get(LOGGER, usual), as_json=options.json_log)
    log.listen_to(events)
    return log


def _levels(options: Options) -> tuple[int, dict[str, int]]:
    numbers = logging.getLevelNamesMapping()
    levels = {name: numbers[level.upper()] for name, level in levels_of(options.log_level).items()}
    return levels.pop("", logging.INFO), levels
