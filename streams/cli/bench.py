"""`mcp-streams bench`."""

from pathlib import Path

from streams.cli.base import Word, complain


def bench(
    url: str,
    tool: str | None = None,
    /,
    *arguments: Word,
    rounds: int = 3,
    pings: int = 100,
    timeout: float = 60.0,
    token_file: Path | None = None,
    json: bool = False,
) -> int:
    """Measure a server: connections and pings, and a tool's messages, live and resumed.

    A tool that is named is called twice in each round, so name a harmless one. The second call is
    cut off behind its first message and resumed when its work is done.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    tool
        The tool's name.
    arguments
        key=text or key:=json.
    rounds
        How often everything is measured, after one round that does not count.
    pings
        The number of pings in a round, one after the other.
    timeout
        Seconds that a round may take.
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. (Other users
        can see a command line, so it takes no bearer token.)
    json
        Print all figures as JSON.
    """
    if rounds < 1 or pings < 1:
        return complain("--rounds, --pings: write a number, 1 or more.")
    if not timeout > 0:
        return complain("--timeout: write seconds, more than 0.")
    from streams.cli.actions import bench as benching
    from streams.cli.actions import call

    try:
        given = call.parse_arguments(arguments)
    except ValueError as error:
        return complain(str(error))
    wanted = benching.Wanted(tool, given, rounds, pings, timeout)
    return call.run_dialing(
        lambda dialer: benching.bench(dialer, wanted, as_json=json),
        call.Reach(url, token_file=token_file),
    )
