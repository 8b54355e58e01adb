"""The `mcp-streams` command.

Each command imports what it needs when it is run (PLC0415): a client waits for a relay to start.
"""

import os
import sys

from streams.cli import bench, calls, journal, selftests, serve, token
from streams.cli.base import BROKEN_PIPE, app

__all__ = ["app", "bench", "calls", "journal", "main", "selftests", "serve", "token"]


def main() -> None:
    """Run the command and exit with its code."""
    try:
        code = app()
        print(end="", flush=True)  # or else it is the interpreter that fails to, at its end
    except BrokenPipeError:
        # Whoever reads our output has had enough; what is left of it has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)
