"""The `mcp-streams` command."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import cyclopts
import msgspec
from cyclopts import Parameter

from streams.limits import Limits
from streams.options import CannotServe, Durability, Options

# Each command imports what it needs (PLC0415): a client waits for a relay to start.

app: Final = cyclopts.App(
    name="mcp-streams",
    help="Resumable streams for MCP: a call that outlives its connection.",
    version=lambda: version("mcp-streams"),
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

DONE, USAGE = 0, 2
BROKEN_PIPE: Final = 141  # as in `streams.commands`, which is not loaded for every command


@app.command
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    foreground: bool = False,
    ws: str | None = None,
    http: str | None = None,
    http_path: str = "/mcp",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    journal: Path | None = None,
    linger: float = 5.0,
    durability: Durability = "power",
    max_message_bytes: int | None = None,
    limit: tuple[str, ...] = (),
    insecure_anonymous: bool = False,
    allowed_host: tuple[str, ...] = (),
    allowed_origin: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Serve a server's tools over stdio, WebSocket and HTTP, or any of them.

    With --stdio and a journal, the process that a client spawns is only a relay to the journal's
    owner, which is started where there is none and goes on when the client has gone.

    Parameters
    ----------
    app
        file.py:server or package.module:server.
    stdio
        Serve one client over standard input and output. The default where neither --ws nor
        --http is given.
    foreground
        Do the work in this process, also with --stdio and a journal.
    ws
        Serve WebSocket clients at HOST:PORT; port 0 takes a free one and says which.
    http
        Serve HTTP clients (MCP's Streamable HTTP) at HOST:PORT; port 0 as with --ws.
    http_path
        The path of the one endpoint for --http.
    tls_cert
        A file with the certificate, and those that vouch for it, to serve --http with TLS.
    tls_key
        The file with its key, where that is not in the same file.
    journal
        The SQLite file that streams are kept in. Without it they live as long as the process.
    linger
        Seconds for which an owner that has nothing to do waits for the next client, 0.5 at least.
    durability
        "power" survives a power cut, "process" (faster) the end of the process only.
    max_message_bytes
        The longest message that is taken, 4 MiB by default.
    limit
        NAME=VALUE, one of the server's limits, such as streams_per_principal_max=20000.
    insecure_anonymous
        Let --ws and --http be reached from other machines though nobody is asked who they are.
    allowed_host
        A Host header to accept, besides those of this machine.
    allowed_origin
        An Origin of web pages that may connect, besides those of this machine.
    json
        Write the log as JSON lines.
    """
    if max_message_bytes is not None:
        limit = (*limit, f"message_bytes_max={max_message_bytes}")
    try:
        limits = _limits(limit)
    except ValueError as error:
        return _complain(f"--limit: {error}.")
    if not linger >= 0:
        return _complain("--linger: write seconds, 0 or more.")
    if not http_path.startswith("/"):
        return _complain("--http-path: begin it with a slash.")
    if tls_key is not None and tls_cert is None:
        return _complain("--tls-key: name the certificate too, with --tls-cert.")
    options = Options(
        app=app,
        journal=journal,
        stdio=stdio or (ws is None and http is None),
        foreground=foreground,
        ws=ws,
        http=http,
        http_path=http_path,
        tls_cert=tls_cert,
        tls_key=tls_key,
        linger_s=linger,
        durability=durability,
        insecure_anonymous=insecure_anonymous,
        allowed_hosts=allowed_host,
        allowed_origins=allowed_origin,
        limits=limits,
        json_log=json,
    )
    try:
        _run_server(options)
    except CannotServe as error:
        return _complain(str(error))
    return DONE


def _run_server(options: Options) -> None:
    if options.is_relay:
        from streams import relaying

        relaying.run(options)
        return
    from streams import console, serving

    console.log_to_stderr(as_json=options.json_log)
    serving.run(options)


def _limits(settings: tuple[str, ...]) -> dict[str, Any]:
    given = dict(setting.partition("=")[::2] for setting in settings)
    for name in given.keys() - set(Limits.__struct_fields__):
        raise ValueError(f"{name} is none, there are {', '.join(Limits.__struct_fields__)}")
    limits = msgspec.convert(given, Limits, strict=False)
    return {name: getattr(limits, name) for name in given}


@app.command
def call(url: str, tool: str, /, *arguments: str, json: bool = False) -> int:
    """Call a tool and follow the call to its end, over as many connections as that takes.

    Its messages go to standard error, its result to standard output. Ctrl-C detaches and prints
    the command that resumes; on a terminal, a second Ctrl-C cancels the call.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json.
    json
        Print the whole result, and each message, as JSON.
    """
    from streams import commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return _complain(str(error))
    return commands.run(
        lambda client: commands.call_tool(client, url, tool, given, as_json=json), url
    )


@app.command
def pages(
    url: str, tool: str, /, *arguments: str, token: str | None = None, json: bool = False
) -> int:
    """Call a tool that gives pages, and print them all, as they come.

    Ctrl-C leaves the rest and prints the command that goes on behind the last page.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json; for a token, the same ones that it was given for.
    token
        Begin with the page that this token leads to.
    json
        Print each page whole, as JSON on a line of its own.
    """
    from streams import commands, turning

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return _complain(str(error))
    wanted = turning.Wanted(url, tool, arguments, given, token)
    return commands.run(lambda client: turning.turn_pages(client, wanted, as_json=json), url)


@app.command
def resume(where: str, what: str | None = None, /, *, json: bool = False) -> int:
    """Come back to a call, from wherever it was left and over any transport.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`.
    what
        After a URL: the call's name, or the ticket that was printed when the call was left.
    json
        Print the whole result, and each message, as JSON.
    """
    from streams import commands, noting
    from streams.callbook import CallbookUnusable

    if what is None and ":" in where:  # which no name has
        return _complain(
            "Say which call: mcp-streams resume URL TICKET, or mcp-streams resume NAME."
        )
    try:
        target = noting.find(where) if what is None else noting.find_at(where, what)
    except (ValueError, CallbookUnusable) as error:
        return _complain(str(error))
    return commands.run(
        lambda client: commands.resume(client, target.url, target.ticket, as_json=json),
        target.url,
        cwd=target.cwd,
    )


@app.command
def poll(
    where: str,
    what: str | None = None,
    /,
    *,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json: bool = False,
) -> int:
    """Ask how a stream stands, or with --all how all of yours do.

    Parameters
    ----------
    where
        The name of a call that was begun here, or a URL as for `call`.
    what
        After a URL: a call's name, a ticket, or a stream's id where the stream is yours.
    all_
        List all streams that run, or were not delivered.
    json
        Print a list of StreamStatus objects.
    """
    is_url = ":" in where  # which no name has
    if (what is None and is_url) != all_ or not (is_url or what is None):
        return _complain("Name one stream, or a URL and --all.")
    from streams import commands, noting
    from streams.callbook import CallbookUnusable

    url, cwd = where, None
    stream: Any = what
    try:
        if not is_url:
            target = noting.find(where)
            url, stream, cwd = target.url, target.ticket, target.cwd
        elif what is not None:
            stream = noting.ticket_or_id(what)
    except (ValueError, CallbookUnusable) as error:
        return _complain(str(error))
    return commands.run(
        lambda client: commands.poll(client, url, stream, as_json=json), url, cwd=cwd
    )


@app.command
def calls(
    *,
    forget: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    timeout: float = 5.0,
    json: bool = False,
) -> int:
    """List the calls that were begun here and not seen to their end, and where each stands.

    What is gone is shown once more, and no longer after that.

    Parameters
    ----------
    forget
        Names of calls to be listed no more; they go on all the same.
    timeout
        Seconds for which a server may take to answer.
    json
        Print a list of objects.
    """
    if not timeout > 0:
        return _complain("--timeout: write seconds, more than 0.")
    from streams import listing

    return listing.forget(forget) if forget else listing.run(timeout_s=timeout, as_json=json)


@app.command
def bench(
    url: str,
    tool: str | None = None,
    /,
    *arguments: str,
    rounds: int = 3,
    pings: int = 100,
    timeout: float = 60.0,
    json: bool = False,
) -> int:
    """Measure a server: connections and pings, and a tool's messages, live and resumed.

    A tool that is named is called twice in each round, so name one that may be. The second call is
    cut off behind its first message and resumed when it is done.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json.
    rounds
        How often everything is measured; once more ahead of that, which does not count.
    pings
        How many there are in a round, one after the other.
    timeout
        Seconds that a round may take.
    json
        Print all figures as JSON.
    """
    if rounds < 1 or pings < 1:
        return _complain("--rounds, --pings: write a number, 1 or more.")
    if not timeout > 0:
        return _complain("--timeout: write seconds, more than 0.")
    from streams import benching, commands

    try:
        given = commands.parse_arguments(arguments)
    except ValueError as error:
        return _complain(str(error))
    wanted = benching.Wanted(tool, given, rounds, pings, timeout)
    return commands.run_dialing(lambda dialer: benching.bench(dialer, wanted, as_json=json), url)


@app.command
def demo(*, folder: Path | None = None, json: bool = False) -> int:
    """Cut a call's connection, kill its server, and see that nothing is lost, on real input.

    Parameters
    ----------
    folder
        What to walk; by default the standard library of the Python that runs this.
    json
        Print the figures as JSON.
    """
    from streams import demo as demonstration

    return demonstration.run(folder, as_json=json)


def _complain(why: str) -> int:
    print(why, file=sys.stderr)
    return USAGE


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


if __name__ == "__main__":
    main()
