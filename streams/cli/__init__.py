"""The `mcp-streams` command.

Each command imports what it needs when it is run (PLC0415): a client waits for a relay to start.
"""

import os
import sys
from typing import Final

from streams.cli import calls, keeping, serve, token, torture, trying
from streams.cli.base import app

__all__ = ["app", "calls", "keeping", "main", "serve", "token", "torture", "trying"]

BROKEN_PIPE: Final = 141  # as in `streams.cli.actions.call`, which is not loaded for every command


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
