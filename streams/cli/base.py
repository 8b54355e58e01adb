"""What the commands share: the app that they belong to, and how they complain."""

import sys
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

DONE, USAGE = 0, 2


def complain(why: str) -> int:
    """Say what is wrong with how the command was given; its exit code."""
    print(why, file=sys.stderr)
    return USAGE
