"""`mcp-streams serve`."""

from pathlib import Path

from streams.cli.base import app, complain
from streams.cli.serving import (
    NO_AUTH,
    NOWHERE,
    PATIENT,
    USUALLY,
    Doors,
    Hosts,
    How,
    Where,
    run,
)


@app.command
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    where: Where = NOWHERE,
    journal: Path | None = None,
    how: How = USUALLY,
    hosts: Hosts = PATIENT,
    auth: Doors = NO_AUTH,
) -> int:
    """Serve a server's tools over stdio, WebSocket and HTTP, or any of them.

    With --stdio and a journal, the process that a client spawns is only a relay to the journal's
    owner: a process that is started if none runs, and that survives the client.

    Parameters
    ----------
    app
        file.py:server or package.module:server. An object of the official SDK is served unchanged.
    stdio
        Serve one client over standard input and output. The default if neither --ws nor --http is
        given.
    journal
        The SQLite file that keeps the streams. Without it they live as long as the process.
    """
    try:
        options = where.options()
        options["stdio"] |= stdio
        patience = hosts.settings("timeout" if hosts.patience else "never")
        return run(how.options(app=app, journal=journal, patience=patience, auth=auth, **options))
    except ValueError as error:
        return complain(error)
