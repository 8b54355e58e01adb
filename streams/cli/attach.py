"""`mcp-streams attach`."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from cyclopts import Parameter

from streams.cli import wrap
from streams.cli.base import complain
from streams.cli.options import (
    FLAT,
    KEEP,
    PATIENCE,
    KeepOptions,
    PatienceOptions,
    Seconds,
    file_of,
    parts,
    run,
)
from streams.process.options import TOKEN_VARIABLE, CannotServe, Command, Options, Remote

DAY_S: Final = 86_400.0

_URL: Final = re.compile(r"(https?|wss?)://[^/\s]+\S*")


def attach(
    url: str,
    /,
    *,
    token_file: Path | None = None,
    header: tuple[str, ...] = (),
    give_up: Seconds = DAY_S,
    rerun: tuple[str, ...] = (),
    offline_start: Annotated[bool, Parameter(negative="--no-offline-start")] = True,
    journal: str | None = None,
    name: str | None = None,
    hosts: Annotated[PatienceOptions, FLAT] = PATIENCE,
    keep: Annotated[KeepOptions, FLAT] = KEEP,
) -> int:
    """Let a host that knows only stdio use a remote server, and come back after each outage.

    A host starts it as it starts any stdio server. The connection belongs to an owner: a process
    that is started if none runs, that survives the host, and that connects again after an outage.

    Parameters
    ----------
    url
        http://HOST:PORT/PATH, https://…, ws://HOST:PORT, wss://HOST, or stdio:COMMAND, which is the
        same as "mcp-streams wrap -- COMMAND".
    token_file
        A file with the bearer token to send; without it, MCP_STREAMS_TOKEN is sent. It is read
        again for each new connection.
    header
        NAME:VALUE, sent with each request. Other users can see a command line: give secrets in a
        --token-file.
    give_up
        How long an outage may last before the calls that wait for its end fail: seconds, or such as
        30s, 5m or 24h.
    rerun
        Tools whose interrupted calls are sent again where the server has forgotten them, as globs,
        or "hinted" for those that say that they are read-only or idempotent. By default none.
    offline_start
        Start without the server too, with what it said last, since hosts drop a server that is not
        there at their start.
    journal
        The SQLite file that keeps the streams. By default a file of this URL and these credentials,
        in $XDG_STATE_HOME/mcp-streams or ~/.local/state/mcp-streams.
    name
        The name of that file; by default that of the host.
    """
    try:
        patience = hosts.settings("timeout")
        reruns = parts(rerun, "--rerun")
        if url.startswith("stdio:"):
            command = _command(url, reruns, has_credentials=bool(token_file or header))
            options = keep.options(app=command, journal=file_of(journal), patience=patience)
            return run(wrap.placed(options, name))
        _check(url, give_up)
        remote = Remote(
            url=url,
            token_file=None if token_file is None else token_file.absolute(),
            headers=_headers(header),
            give_up_s=give_up,
            rerun=reruns,
            offline_start=offline_start,
        )
        options = keep.options(app=remote, journal=file_of(journal), patience=patience)
        return run(_placed(options, remote, name))
    except (ValueError, CannotServe) as error:
        return complain(error)


def _check(url: str, give_up_s: float) -> None:
    if not _URL.fullmatch(url):
        raise ValueError(
            f"{url}: write http://HOST:PORT/PATH, https://…, ws://HOST:PORT, wss://HOST or "
            "stdio:COMMAND."
        )
    if not give_up_s > 0:
        raise ValueError("--give-up: write a time above 0, such as 24h.")


def _command(url: str, reruns: tuple[str, ...], *, has_credentials: bool) -> Command:
    if has_credentials:
        raise ValueError("--token-file and --header are for URLs, not for stdio:COMMAND.")
    words = shlex.split(url.removeprefix("stdio:"))
    if not words:
        raise ValueError("stdio: no command to start: write stdio:COMMAND.")
    return wrap.Child(rerun=reruns).command(words)


def _placed(options: Options, remote: Remote, name: str | None) -> Options:
    """The options with the digest of the credentials, and with a journal where none was named."""
    from streams.process import state

    token = None if remote.token_file else os.environ.get(TOKEN_VARIABLE)
    credentials = (str(remote.token_file or ""), token, remote.headers)
    host = urlsplit(remote.url).hostname or "server"
    return state.placed(options, name or host, remote.url, credentials)


def _headers(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Raises `ValueError`, which shows no value: it may be a secret."""
    found = []
    for each in given:
        name, separator, value = each.partition(":")
        if not separator or not name.strip():
            raise ValueError("--header: write NAME:VALUE.")
        found.append((name.strip(), value.strip()))
    return tuple(found)
