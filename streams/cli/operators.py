"""The commands of operators: `ls`, `show`, `tail`, `stats`, `drain`; `cancel` is with `call`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from streams.cli.base import OPERATE, app, complain
from streams.cli.options import Seconds

if TYPE_CHECKING:
    from streams.cli.actions.operators import How
    from streams.cli.actions.sources import Where

WATCH_MIN_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Looking:
    """Where operators look.

    Parameters
    ----------
    admin
        The address of a server's --admin: http://HOST:PORT, https://HOST or unix:PATH.
    journal
        A journal: a file, the URL of a store, or the beginning of a name in the user's folder of
        state. The owner of a file is asked; without one the journal itself is read.
    token_file
        A file with the operator's token; without it, MCP_STREAMS_ADMIN_TOKEN is sent, or the token
        that a server of this user has kept for the address.
    """

    admin: str | None = None
    journal: str | None = None
    token_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Showing:
    """How a command shows what changes.

    Parameters
    ----------
    watch
        Show it again and again, until Ctrl-C.
    every
        Seconds between two looks of --watch.
    json
        Print JSON: one value, or with --watch one on each line.
    """

    watch: bool = False
    every: Seconds = 1.0
    json: bool = False


At = Annotated[Looking, Parameter(name="*")]
Shown = Annotated[Showing, Parameter(name="*")]
# A place that was written as a word, where it is an option.
Unplaced = Annotated[str | None, Parameter(show=False)]
HERE: Final = Looking()
ONCE: Final = Showing()


@app.command(group=OPERATE)
def ls(
    where: str | None = None,
    /,
    *,
    state: tuple[str, ...] = (),
    text: str = "",
    limit: int = 50,
    at: At = HERE,
    shown: Shown = ONCE,
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

    wrong = _wrong(shown) or _one_place(where, at)
    if wrong := wrong or ("--limit: write 1 to 1000." if not 0 < limit <= 1000 else ""):
        return complain(wrong)
    asked = operators.Asked(states=state, text=text, limit=limit)
    return operators.ls(_where(where, at), asked, _how(shown))


@app.command(group=OPERATE)
def show(stream: str, place: Unplaced = None, /, *, at: At = HERE, shown: Shown = ONCE) -> int:
    """Show one call: its state, its client, and what its client has missed.

    Parameters
    ----------
    stream
        The beginning of the call's id, as `ls` and the log show it.
    """
    from streams.cli.actions import operators

    if wrong := _wrong(shown) or _misplaced("show", stream, place) or _one_place(None, at):
        return complain(wrong)
    return operators.show(_where(None, at), stream, _how(shown))


@app.command(group=OPERATE)
def tail(
    stream: str | None = None,
    place: Unplaced = None,
    /,
    *,
    lines: int = 10,
    every: Seconds = 0.5,
    at: At = HERE,
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

    wrong = _wrong(Showing(every=every)) or _misplaced("tail", stream or "", place)
    wrong = wrong or _one_place(None, at)
    if wrong := wrong or ("--lines: write 0 or more." if lines < 0 else ""):
        return complain(wrong)
    how = operators.How(watch=True, every_s=every, json=json)
    return operators.tail(_where(None, at), stream, lines, how)


@app.command(group=OPERATE)
def stats(where: str | None = None, /, *, at: At = HERE, shown: Shown = ONCE) -> int:
    """Count the calls, clients and messages of a server or a journal.

    Parameters
    ----------
    where
        As for `ls`.
    """
    from streams.cli.actions import operators

    if wrong := _wrong(shown) or _one_place(where, at):
        return complain(wrong)
    return operators.stats(_where(where, at), _how(shown))


@app.command(group=OPERATE)
def drain(
    where: str | None = None,
    /,
    *,
    grace: Seconds | None = None,
    no_wait: bool = False,
    at: At = HERE,
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
    if wrong := wrong or _one_place(where, at):
        return complain(wrong)
    return operators.drain(_where(where, at), grace, waits=not no_wait, as_json=json)


def _wrong(shown: Showing) -> str:
    return "" if shown.every >= WATCH_MIN_S else f"--every: write seconds, {WATCH_MIN_S:g} or more."


def _one_place(where: str | None, at: Looking) -> str:
    """Refuse two places: `drain` must not end another server than the one that is meant."""
    named = [where, at.admin and f"--admin {at.admin}", at.journal and f"--journal {at.journal}"]
    given = [each for each in named if each]
    return f"{' and '.join(given)}: name one place." if len(given) > 1 else ""


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


def _how(shown: Showing) -> "How":
    from streams.cli.actions.operators import How

    return How(watch=shown.watch, every_s=shown.every, json=shown.json)


def _where(where: str | None, at: Looking) -> "Where":
    from streams.cli.actions.sources import Where

    return Where(admin=at.admin, journal=where or at.journal, token_file=at.token_file)
