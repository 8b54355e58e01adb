"""The app that the commands belong to, the options that several have, exit codes and errors."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

import cyclopts
from cyclopts import Group, Parameter

from streams.process.version import VERSION


def _default_shown(default: object) -> str | None:
    """A default as `--help` shows it: not where it says only that an option is off or not given."""
    if default is None or default is False or default in ((), ""):
        return None
    return f"{default:g}" if isinstance(default, float) else str(default)


app: Final = cyclopts.App(
    name="mcp-streams",
    help="Resumable streams for MCP: a call that outlives its connection.",
    help_epilogue=(
        "Each option can also be a variable, such as MCP_STREAMS_SERVE_WS for serve --ws, or a "
        "line of TOML in --config FILE, in a table such as [serve]; by default the file is "
        "~/.config/mcp-streams/config.toml. The command line comes first, then variables."
    ),
    version=VERSION,
    version_format="plaintext",  # Markdown takes time to load
    # Each option has a variable, which the epilogue describes once.
    default_parameter=Parameter(negative=(), show_env_var=False, show_default=_default_shown),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # `streams.cli.main` handles it
)

# The commands in the order of `mcp-streams --help`.
SERVE: Final = Group.create_ordered("Serve")
CALL: Final = Group.create_ordered("Call tools")
OPERATE: Final = Group.create_ordered("Operate a server")
JOURNALS: Final = Group.create_ordered("Journals")
TRY: Final = Group.create_ordered("Try and measure")

# Exit codes.
DONE: Final = 0
FAILED: Final = 1  # the tool has failed, the journal is damaged, or a self-test has found a fault
USAGE: Final = 2  # the command is wrong, or one of its files cannot be used
CANNOT_CONNECT: Final = 3
GONE: Final = 4  # the stream cannot be resumed
TIMED_OUT: Final = 124  # as timeout(1) reports it
DETACHED: Final = 130  # after Ctrl-C, as shells report SIGINT
BROKEN_PIPE: Final = 141  # as shells report SIGPIPE


@dataclass(frozen=True, kw_only=True)
class Dialing:
    """The options of the commands that connect to one server.

    Parameters
    ----------
    timeout
        Seconds after which the command gives up; a call that runs is then detached, and goes on. By
        default there is no such limit.
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    """

    timeout: float | None = None
    token_file: Path | None = None

    @property
    def wrong(self) -> str | None:
        """The sentence that says what is wrong with these options; None if nothing is."""
        if self.timeout is not None and not self.timeout > 0:
            return "--timeout: write seconds, more than 0."
        return None


Word = Annotated[str, Parameter(name="KEY=VALUE")]
"""An argument of a tool."""

How = Annotated[Dialing, Parameter(name="*")]
USUALLY: Final = Dialing()


class Errors:
    """How errors are printed."""

    are_json: ClassVar[bool] = False


def complain(why: object, exit_code: int = USAGE, /, **details: object) -> int:
    """Print an error to standard error, and return the exit code.

    With --json it is an object, {"error": {"message": …}}, which has the `details` too.
    """
    from streams.cli.actions.output import as_json_text, say

    if Errors.are_json:
        told = {name: value for name, value in details.items() if value is not None}
        say(as_json_text({"error": {"message": str(why), **told}}))
    else:
        say(str(why))
    return exit_code


def alike(name: str, known: Iterable[str], part: float = 0.6) -> str:
    """The known name that is most like this one, and by this part of it at least, or ""."""
    import difflib

    names = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=part)
    return names[close[0]] if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    names = list({each.casefold(): each for each in known}.values())
    if close := alike(name, names):
        return f"; did you mean {close}?"
    return f"; known are {', '.join(names)}." if names else "."
