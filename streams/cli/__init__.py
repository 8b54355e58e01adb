"""The `mcp-streams` command.

Each command imports its action when it is run (PLC0415), because a client waits for a relay to
start.
"""

import os
import sys

from streams.cli import bench, calls, journal, selftests, serve, token
from streams.cli.base import BROKEN_PIPE, USAGE, app
from streams.errors import explained

__all__ = ["app", "bench", "calls", "journal", "main", "selftests", "serve", "token"]


def main() -> None:
    """Run the command and exit with its code."""
    try:
        code = app()
        print(end="", flush=True)  # otherwise the interpreter flushes at exit, and fails there
    except BrokenPipeError:
        # The reader of standard output has closed it. The interpreter's flush at exit goes to
        # /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    except ImportError as error:
        if (why := explained(error, "This command of mcp-streams")) is error:
            raise
        print(f"{why}.", file=sys.stderr)
        code = USAGE
    sys.exit(code)
