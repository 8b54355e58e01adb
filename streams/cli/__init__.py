"""The `mcp-streams` command.

This module loads nothing: from its first line on, Ctrl-C ends the command without a traceback.
"""

import os
import signal
import sys
from typing import Any, Final

__all__ = ["app", "main"]

_USAGE: Final = 2  # as in `base`, which is not loaded yet
_DETACHED: Final = 130
_SOON_S: Final = 0.01


def main() -> None:
    """Run the command and exit with its code."""
    if sys.stdout is None:  # closed: a file would take the number 1
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the end
    if sys.stderr is None:  # closed: `print` would take standard output, and a file the number 2
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the end
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not as nohup has it
    if is_usual:
        signal.signal(signal.SIGINT, _end)
        sys.unraisablehook = _interrupt_again
    try:
        from streams.cli.command import run

        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
    except KeyboardInterrupt:
        code = _DETACHED
    except ImportError as error:
        from streams.errors import explained

        if (why := explained(error, "This command of mcp-streams")) is error:
            raise
        print(f"{why}.", file=sys.stderr)
        code = _USAGE
    if is_usual:
        signal.signal(signal.SIGINT, _end)  # while the interpreter ends
    import threading

    if threading.active_count() > 1:
        from streams.process.deadline import leave

        leave(code)
    sys.exit(code)


def _end(*_: object) -> None:
    """End at once: nothing has begun, or all is done."""
    os._exit(_DETACHED)


def _interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Python drops a Ctrl-C that comes in a callback of a weak reference, as imports have them."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    import threading

    # From another thread: here it would be dropped as well.
    main_thread = threading.main_thread().ident
    threading.Timer(_SOON_S, signal.pthread_kill, (main_thread, signal.SIGINT)).start()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streams.cli.command import app

    return app
