"""The commands that call tools, and that resume and poll calls."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from streams.cli.base import app, complain


@app.command
def call(
    url: str, tool: str, /, *arguments: str, token_file: Path | None = None, json: bool = False
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
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    json
        Print the whole result, and each message, as JSON.
    """
    from streams.cli.actions import call as commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return complain(str(error))
    return commands.run(
        lambda client: commands.call_tool(client, url, tool, given, as_json=json),
        url,
        token_file=token_file,
    )


@app.command
def pages(
    url: str,
    tool: str,
    /,
    *arguments: str,
    token: str | None = None,
    token_file: Path | None = None,
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
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    json
        Print each page whole, as JSON on a line of its own.
    """
    from streams.cli.actions import call as commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return complain(str(error))
    wanted = commands.PagesWanted(url, tool, arguments, given, token)
    return commands.run(
        lambda client: commands.pages(client, wanted, as_json=json), url, token_file=token_file
    )


@app.command
def resume(
    where: str,
    what: str | None = None,
    /,
    *,
    token_file: Path | None = None,
    json: bool = False,
) -> int:
    """Resume a call, from any machine and over any transport.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`.
    what
        After a URL: the call's name, or the ticket that was printed when the call was detached.
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    json
        Print the whole result, and each message, as JSON.
    """
    from streams.cli.actions import call as commands
    from streams.cli.actions import notes

    if what is None and ":" in where:  # no name has a colon
        return complain(
            "Say which call: mcp-streams resume URL TICKET, or mcp-streams resume NAME."
        )
    try:
        target = notes.find(where) if what is None else notes.find_at(where, what)
    except (ValueError, notes.CallbookUnusable) as error:
        return complain(str(error))
    return commands.run(
        lambda client: commands.resume(client, target.url, target.ticket, as_json=json),
        target.url,
        cwd=target.cwd,
        token_file=token_file,
    )


@app.command
def poll(
    where: str,
    what: str | None = None,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    token_file: Path | None = None,
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
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    json
        Print a list of StreamStatus objects.
    """
    is_url = ":" in where  # no name has a colon
    if (what is None and is_url) != all_ or not (is_url or what is None):
        return complain("Name one stream, or a URL and --all.")
    from streams.cli.actions import call as commands
    from streams.cli.actions import notes

    url, cwd = where, None
    stream: Any = what
    try:
        if not is_url:
            target = notes.find(where)
            url, stream, cwd = target.url, target.ticket, target.cwd
        elif what is not None:
            stream = notes.ticket_or_id(what)
    except (ValueError, notes.CallbookUnusable) as error:
        return complain(str(error))
    return commands.run(
        lambda client: commands.poll(client, url, stream, as_json=json),
        url,
        cwd=cwd,
        token_file=token_file,
    )


@app.command
def calls(
    *,
    forget: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    timeout: float = 5.0,
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
    json
        Print a list of objects.
    """
    if not timeout > 0:
        return complain("--timeout: write seconds, more than 0.")
    from streams.cli.actions import calls as listing

    return listing.forget(forget) if forget else listing.run(timeout_s=timeout, as_json=json)
