"""`mcp-streams tools`."""

import shlex

from streams.cli.base import USUALLY, How, complain


def tools(url: str, name: str | None = None, /, *, how: How = USUALLY, json: bool = False) -> int:
    """List a server's tools, or describe one of them, with an example of a call.

    Parameters
    ----------
    url
        ws://HOST:PORT, wss://HOST, http://HOST:PORT/PATH, https://…, or stdio:COMMAND.
    name
        The tool to describe.
    json
        Print the tools as the server lists them, as JSON.
    """
    if how.wrong:
        return complain(how.wrong)
    from streams.cli.actions import call as commands
    from streams.cli.actions import tools as listing

    reach = commands.Reach(url, None, how.token_file, how.timeout)
    call_line = f"mcp-streams call {shlex.quote(url)}{reach.options}"
    return commands.run(
        commands.bounded(
            lambda client: listing.list_tools(client, name, call_line=call_line, as_json=json)
        ),
        reach,
    )
