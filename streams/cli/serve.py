"""`mcp-streams serve`."""

from streams.cli.base import SERVE, app, complain
from streams.cli.serving import (
    NO_AUTH,
    NOWHERE,
    PATIENT,
    UNSHARED,
    UNTOLD,
    USUALLY,
    Doors,
    Hosts,
    How,
    Replicas,
    Told,
    Where,
    run,
)
from streams.process.options import CannotServe


@app.command(group=SERVE)
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    where: Where = NOWHERE,
    journal: str | None = None,
    replicas: Replicas = UNSHARED,
    how: How = USUALLY,
    hosts: Hosts = PATIENT,
    auth: Doors = NO_AUTH,
    told: Told = UNTOLD,
) -> int:
    """Serve the tools of a Python file over stdio, WebSocket, HTTP, or all of them.

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
        Where streams are kept: a SQLite file, or the URL of a store that replicas share, such as
        redis://HOST:PORT/0. Without it they live as long as the process. Other users can see a
        command line: give a URL with a password as MCP_STREAMS_SERVE_JOURNAL.
    """
    try:
        given = where.options() | replicas.options(journal)
        given["stdio"] |= stdio
        patience = hosts.settings("timeout" if hosts.patience else "never")
        options = how.options(app=app, patience=patience, auth=auth, webhooks=told, **given)
        if options.store is not None and options.is_relay:
            from streams.process import state

            options = state.beside_store(options)
        return run(options)
    except (ValueError, CannotServe) as error:
        return complain(error)
