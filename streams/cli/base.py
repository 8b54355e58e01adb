"""The app that the commands belong to, their exit codes, and how they print errors."""

from importlib.metadata import version
from typing import Final

import cyclopts
from cyclopts import Parameter

app: Final = cyclopts.App(
    name="mcp-streams",
    help="Resumable streams for MCP: a call that outlives its connection.",
    version=lambda: version("mcp-streams"),
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

# Exit codes.
DONE: Final = 0
FAILED: Final = 1  # the tool has failed, the journal is damaged, or a self-test has found a fault
USAGE: Final = 2  # the command is wrong, or one of its files cannot be used
CANNOT_CONNECT: Final = 3
GONE: Final = 4  # the stream cannot be resumed
DETACHED: Final = 130  # after Ctrl-C, as shells report SIGINT
BROKEN_PIPE: Final = 141  # as shells report SIGPIPE


def complain(why: object, code: int = USAGE) -> int:
    """Print an error to standard error, and return the exit code."""
    from streams.cli.actions.output import say

    say(str(why))
    return code
