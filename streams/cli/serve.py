"""`mcp-streams serve`."""

from pathlib import Path

from msgspec.structs import replace

from streams.cli.base import app, complain
from streams.cli.serving import NO_AUTH, PATIENT, USUALLY, Doors, Hosts, How, run


@app.command
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    journal: Path | None = None,
    hosts: Hosts = PATIENT,
    how: How = USUALLY,
    auth: Doors = NO_AUTH,
) -> int:
    """Serve a server's tools over stdio, WebSocket and HTTP, or any of them.

    With --stdio and a journal, the process that a client spawns is only a relay to the journal's
    owner: a process that is started if none runs, and that survives the client.

    Parameters
    ----------
    app
        file.py:server or package.module:server.
    stdio
        Serve one client over standard input and output. The default if neither --ws nor --http is
        given.
    journal
        The SQLite file that keeps the streams. Without it they live as long as the process.
    """
    try:
        patience = hosts.settings("timeout" if hosts.patience else "never")
        options = how.options(auth, app=app, journal=journal, patience=patience)
    except ValueError as error:
        return complain(error)
    return run(replace(options, stdio=stdio or options.stdio))
