"""All commands, their settings, and their errors of usage.

A command's module is loaded when the command is run, and it imports its action then (PLC0415),
because a client waits for a relay to start.
"""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

import cyclopts

from streams.cli import base, settings
from streams.cli.base import (
    BROKEN_PIPE,
    CALL,
    JOURNALS,
    OPERATE,
    SERVE,
    TRY,
    USAGE,
    app,
    complain,
)

__all__ = ["app", "run"]

Shell = Literal["bash", "zsh", "fish"]

# The errors of a disk that standard output is written to.
_DISK_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

_USAGES = {
    "call": {"usage": "Usage: mcp-streams call [OPTIONS] URL TOOL [KEY=VALUE...]"},
    "pages": {"usage": "Usage: mcp-streams pages [OPTIONS] URL TOOL [KEY=VALUE...]"},
    "bench": {"usage": "Usage: mcp-streams bench [OPTIONS] URL [TOOL] [KEY=VALUE...]"},
}
for group, module, names in (
    (SERVE, "serve", ("serve",)),
    (SERVE, "wrap", ("wrap",)),
    (SERVE, "attach", ("attach",)),
    (CALL, "tools", ("tools",)),
    (CALL, "calls", ("call", "pages", "resume", "cancel", "poll", "calls")),
    (OPERATE, "operators", ("ls", "show", "tail", "stats", "drain")),
    (OPERATE, "token", ("token",)),
    (OPERATE, "webhook", ("webhook",)),
    (JOURNALS, "journal", ("verify", "export", "backup", "copy")),
    (TRY, "selftests", ("demo", "torture")),
    (TRY, "bench", ("bench",)),
):
    for name in names:
        app.command(f"streams.cli.{module}:{name}", group=group, **_USAGES.get(name, {}))


@app.command(name="--install-completion")
def install_completion(*, shell: Shell | None = None, output: Path | None = None) -> int:
    """Install the completion of commands and options for your shell.

    Parameters
    ----------
    shell
        By default the one that this command is run from.
    output
        The file to write; by default the one where the shell looks.
    """
    try:
        path = app.install_completion(shell=shell, output=output)  # nosec B604 # the name of a shell; nothing is run
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return complain(f"The completion cannot be installed: {error}. Name a shell with --shell.")
    print(f"The completion is in {path}: open a new shell to use it.")
    return base.DONE


def run() -> int:
    """Run the command of `sys.argv`; returns its exit code."""
    words = sys.argv[1:]
    base.Errors.are_json = "--json" in _ours(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some locales lack characters
    try:
        words, file = settings.without_config(words)
        # Help and version must be there even if the file is damaged.
        asks = not {"--help", "-h", "--version"}.isdisjoint(_ours(words))
        app.config = settings.BUILT_IN if asks else settings.sources(app, file)
        if not words or words[0] in app.help_flags:
            app.resolved_commands()  # loads them all: the help has the first line of each
        code: int | None = app(words, print_error=False, exit_on_error=False)
        print(end="", flush=True)  # otherwise the interpreter flushes at exit, and fails there
    except cyclopts.CycloptsError as error:
        return _misused(error)
    except settings.CannotConfigure as error:
        return complain(error)
    except BrokenPipeError:  # the reader of standard output has closed it
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENOENT and not _is_anywhere():
            return complain("The working directory was removed: change to another one.")
        if error.filename is not None or error.errno not in _DISK_ERRORS:
            raise
        _drop_output()
        return complain(f"Standard output cannot be written: {error.strerror}.")
    return code or 0


def _is_anywhere() -> bool:
    """Whether the working directory is still there."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _drop_output() -> None:
    """Let what is left of the output go to /dev/null, also when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ours(words: list[str]) -> list[str]:
    """The words before "--": those behind it may belong to another command."""
    return words[: words.index("--")] if "--" in words else words


def _misused(error: cyclopts.CycloptsError) -> int:
    if sys.argv[1:2] == ["wrap"] and "--" not in sys.argv:
        from streams.cli.wrap import BEHIND

        return complain(f"wrap: {error} To wrap a command, {BEHIND}")
    if base.Errors.are_json:
        return complain(error)
    (error.console or app.error_console).print(cyclopts.CycloptsPanel(error))
    return USAGE
