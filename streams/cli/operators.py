"""The commands of operators: `ls`, `show`, `tail`, `stats`, `drain`; `cancel` is with `call`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from streams.cli.base import complain
from streams.cli.operator_options import DEFAULT_OUTPUT, DEFAULT_WHERE, Output, Where
from streams.cli.options import Seconds

# A place that was written as a word, where it is an option.
Unplaced = Annotated[str | None, Parameter(show=False)]


def ls(
    where: str | None = None,
    /,
    *,
    state: tuple[str, ...] = (),
    text: str = "",
    limit: int = 50,
    at: Where = DEFAULT_WHERE,
    output: Output = DEFAULT_OUTPUT,
) -> int:
    """List the calls of a server or of a journal, the newest first.

    `mcp-streams calls` is for clients: it lists the calls that were begun here, on any server.

    Parameters
    ----------
    where
        The address of a server's --admin, or a journal; by default the only server of this user
        that `wrap` or `attach` has started.
    state
        Only calls in this state: running, asking, stopped, completed, failed, abandoned, cancelled.
    text
        Only calls whose id, tool or principal has this text.
    limit
        List at most so many calls.
    """
    from streams.cli.actions import operators

    wrong = output.wrong or at.two_places(where)
    if wrong := wrong or ("--limit: write 1 to 1000." if not 0 < limit <= 1000 else ""):
        return complain(wrong)
    asked = operators.Asked(states=state, text=text, limit=limit)
    return operators.ls(_at(where, at), asked, output)


def show(
    stream: str,
    place: Unplaced = None,
    /,
    *,
    at: Where = DEFAULT_WHERE,
    output: Output = DEFAULT_OUTPUT,
) -> int:
    """Show one call: its state, its client, and what its client has missed.

    Parameters
    ----------
    stream
        The beginning of the call's id, as `ls` and the log show it.
    """
    from streams.cli.actions import operators

    if wrong := output.wrong or _misplaced("show", stream, place) or at.two_places():
        return complain(wrong)
    return operators.show(at, stream, output)


def tail(
    stream: str | None = None,
    place: Unplaced = None,
    /,
    *,
    lines: int = 10,
    every: Seconds = 0.5,
    at: Where = DEFAULT_WHERE,
    json: bool = False,
) -> int:
    """Print the messages of a call until it ends, or each change of any call.

    Parameters
    ----------
    stream
        The beginning of the call's id; without it, a line for each change of a call.
    lines
        Print so many earlier messages first.
    every
        Seconds between two looks.
    json
        Print each message, or each change, as JSON on a line of its own.
    """
    from streams.cli.actions import operators

    output = Output(watch=True, every=every, json=json)
    wrong = output.wrong or _misplaced("tail", stream or "", place)
    wrong = wrong or at.two_places()
    if wrong := wrong or ("--lines: write 0 or more." if lines < 0 else ""):
        return complain(wrong)
    return operators.tail(at, stream, lines, output)


def stats(
    where: str | None = None, /, *, at: Where = DEFAULT_WHERE, output: Output = DEFAULT_OUTPUT
) -> int:
    """Count the calls, clients and messages of a server or a journal.

    Parameters
    ----------
    where
        As for `ls`.
    """
    from streams.cli.actions import operators

    if wrong := output.wrong or at.two_places(where):
        return complain(wrong)
    return operators.stats(_at(where, at), output)


def drain(
    where: str | None = None,
    /,
    *,
    grace: Seconds | None = None,
    no_wait: bool = False,
    at: Where = DEFAULT_WHERE,
    json: bool = False,
) -> int:
    """End a server in good order: it takes no new calls, and running ones get time to end.

    Clients come back to the next process; so does every call that can be restarted.

    Parameters
    ----------
    where
        As for `ls`.
    grace
        Seconds for running calls to end; by default those of the server's own --grace.
    no_wait
        Return at once, and not when the server has ended.
    json
        Print the server's answer as JSON.
    """
    from streams.cli.actions import operators

    wrong = "--grace: write seconds, 0 or more." if grace is not None and not grace >= 0 else ""
    if wrong := wrong or at.two_places(where):
        return complain(wrong)
    return operators.drain(_at(where, at), grace, waits=not no_wait, as_json=json)


def _misplaced(command: str, stream: str, place: str | None) -> str:
    """Say what to write for a place that stands where a call's id does, or behind it."""
    if place is not None:
        return f"{command} {stream} {place}: write {command} {stream} {_option(place)}."
    if not set(stream) & set("./:"):  # an id has none of these
        return ""
    kind = "an address" if _option(stream).startswith("--admin") else "a journal"
    kind = "a file" if Path(stream).is_file() else kind
    return f"{command} {stream}: that is {kind}: write {_option(stream)}."


def _option(place: str) -> str:
    is_admin = place.startswith(("http://", "https://", "unix:"))
    return f"--{'admin' if is_admin else 'journal'} {place}"


def _at(where: str | None, at: Where) -> Where:
    return at if where is None else replace(at, journal=where)
