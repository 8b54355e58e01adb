"""The commands that call tools, and that resume, cancel and poll calls."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from streams.cli.base import GONE, USUALLY, Dialing, How, Word, complain
from streams.cli.operator_options import Where

if TYPE_CHECKING:
    from streams.cli.actions.call import Reach


def call(
    url: str,
    tool: str,
    /,
    *arguments: Word,
    how: How = USUALLY,
    detach: bool = False,
    json: bool = False,
) -> int:
    """Call a tool and follow the call to its end, over as many connections as that takes.

    Its messages go to standard error, its result to standard output. Ctrl-C detaches and prints
    the command that resumes the call; on a terminal, a second Ctrl-C cancels the call.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json.
    detach
        Leave the call as soon as it can be resumed, and print how. A call that ends before is
        printed as usual.
    json
        Print the whole result, and each message, as JSON.
    """
    if how.wrong:
        return complain(how.wrong)
    from streams.cli.actions import call as commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return complain(str(error))
    return commands.call_tool(_reach(url, how), tool, given, as_json=json, detaches=detach)


def pages(
    url: str,
    tool: str,
    /,
    *arguments: Word,
    token: str | None = None,
    how: How = USUALLY,
    json: bool = False,
) -> int:
    """Call a tool that returns pages, and print all of them as they come.

    Ctrl-C stops, and prints the command that reads on behind the last page.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json; with --token, the same ones as for the first page.
    token
        A page token: begin with the page that it leads to.
    json
        Print each page whole, as JSON on a line of its own.
    """
    if how.wrong:
        return complain(how.wrong)
    from streams.cli.actions import call as commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return complain(str(error))
    wanted = commands.PagesWanted(tool, arguments, given, token)
    return commands.pages(_reach(url, how), wanted, as_json=json)


def resume(
    where: str,
    what: str | None = None,
    /,
    *,
    how: How = USUALLY,
    json: bool = False,
) -> int:
    """Resume a call, from any machine and over any transport.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`.
    what
        After a URL: the call's name, or the ticket that was printed when the call was detached.
    json
        Print the whole result, and each message, as JSON.
    """
    return _with_call("resume", where, what, how, json)


def cancel(
    where: str,
    what: str | None = None,
    /,
    *,
    admin: str | None = None,
    journal: str | None = None,
    how: How = USUALLY,
    json: bool = False,
) -> int:
    """Cancel a call, wherever it was begun.

    A call that is finished stays as it is (exit code 4).

    With --admin or --journal an operator of the server cancels it, and its client is told so.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`; for an operator the
        beginning of the call's id, as `ls` shows it.
    what
        After a URL: the call's name, or its ticket.
    admin
        The address of the server's --admin, as for `ls`; --token-file is then the operator's.
    journal
        The journal whose server is asked, as for `ls`.
    json
        Print what became of it, as JSON.
    """
    if admin is None and journal is None:
        return _with_call("cancel", where, what, how, json)
    from streams.cli.actions import operators

    at = Where(admin=admin, journal=journal, token_file=how.token_file)
    if wrong := at.two_places():
        return complain(wrong)
    if what is not None:
        return complain("An operator names the call alone: mcp-streams cancel STREAM --admin URL.")
    return operators.cancel(at, where, as_json=json)


def _with_call(verb: str, where: str, what: str | None, how: Dialing, json: bool) -> int:
    """Resume or cancel one call."""
    if how.wrong:
        return complain(how.wrong)
    from streams.cli.actions import call as commands
    from streams.cli.actions import notes

    if what is None and ":" in where:  # no name has a colon
        return complain(
            f"Say which call: mcp-streams {verb} URL TICKET, or mcp-streams {verb} NAME."
        )
    try:
        target = notes.find(where) if what is None else notes.find_at(where, what)
    except notes.Finished as error:
        return complain(error, GONE)
    except (ValueError, notes.CallbookUnusable) as error:
        is_unknown = verb == "cancel" and what is None
        ask = " To cancel a server's call as its operator, add --journal FILE or --admin URL."
        return complain(f"{error}{ask if is_unknown else ''}")
    reach = _reach(target.url, how, target.token_file, target.cwd)
    if verb == "cancel":
        return commands.cancel(reach, target.ticket, as_json=json)
    return commands.resume(reach, target.ticket, as_json=json)


def _reach(
    url: str, how: Dialing, noted_token: str | None = None, cwd: str | None = None
) -> "Reach":
    from streams.cli.actions.call import Reach

    noted = None if noted_token is None else Path(noted_token)
    return Reach(url, cwd, how.token_file or noted, how.timeout)


def poll(
    where: str,
    what: str | None = None,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    how: How = USUALLY,
    json: bool = False,
) -> int:
    """Print the status of a stream, or with --all of all your streams.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`.
    what
        After a URL: a call's name, a ticket, or a stream's id, which is enough if the stream is
        yours or an anonymous caller's.
    all_
        List all streams that run, or were not delivered.
    json
        Print a list of StreamStatus objects, each with its state as in `calls`.
    """
    if how.wrong:
        return complain(how.wrong)
    is_url = ":" in where  # no name has a colon
    if (what is None and is_url) != all_ or not (is_url or what is None):
        return complain("Name one stream, or a URL and --all.")
    from streams.cli.actions import call as commands
    from streams.cli.actions import notes

    stream: Any = what
    reach = _reach(where, how)
    try:
        if not is_url:
            target = notes.find(where)
            stream, reach = target.ticket, _reach(target.url, how, target.token_file, target.cwd)
        elif what is not None:
            stream = notes.ticket_or_id(what)
    except notes.Finished as error:
        return complain(error, GONE)
    except (ValueError, notes.CallbookUnusable) as error:
        return complain(str(error))
    return commands.poll(reach, stream, as_json=json)


def calls(
    *,
    forget: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    timeout: float = 5.0,
    token_file: Path | None = None,
    json: bool = False,
) -> int:
    """List the unfinished calls that were begun here, with the status of each.

    A call that cannot be resumed any more is listed one last time.

    Parameters
    ----------
    forget
        Names of calls to remove from the list; their work goes on.
    timeout
        Seconds that a server may take to answer.
    token_file
        A file with the bearer token for calls that were begun without one. Others are asked about
        with the token that they were begun with: its file, or MCP_STREAMS_TOKEN.
    json
        Print a list of objects.
    """
    if not timeout > 0:
        return complain("--timeout: write seconds, more than 0.")
    from streams.cli.actions import calls as listing

    if forget:
        return listing.forget(forget)
    return listing.run(timeout_s=timeout, as_json=json, token_file=token_file)
