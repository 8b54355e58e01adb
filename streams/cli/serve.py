"""`mcp-streams serve`."""

from typing import Annotated

from streams.cli.base import complain
from streams.cli.options import (
    FLAT,
    KEEP,
    LISTEN,
    NO_AUTH,
    PATIENCE,
    SHARE,
    WEBHOOKS,
    KeepOptions,
    ListenOptions,
    PatienceOptions,
    ShareOptions,
    run,
)
from streams.process.options import Auth, CannotServe, Webhooks


def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    listen: Annotated[ListenOptions, FLAT] = LISTEN,
    journal: str | None = None,
    share: Annotated[ShareOptions, FLAT] = SHARE,
    keep: Annotated[KeepOptions, FLAT] = KEEP,
    hosts: Annotated[PatienceOptions, FLAT] = PATIENCE,
    auth: Annotated[Auth, FLAT] = NO_AUTH,
    webhooks: Annotated[Webhooks, FLAT] = WEBHOOKS,
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
        given = listen.options() | share.options(journal)
        given["stdio"] |= stdio
        patience = hosts.settings("timeout" if hosts.patience else "never")
        options = keep.options(app=app, patience=patience, auth=auth, webhooks=webhooks, **given)
        if options.store is not None and options.is_relay:
            from streams.process import state

            options = state.beside_store(options)
        return run(options)
    except (ValueError, CannotServe) as error:
        return complain(error)
