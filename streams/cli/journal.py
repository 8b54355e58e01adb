"""The commands for a journal: `verify`, `export`, `backup` and `copy`."""

from pathlib import Path

from streams.cli.base import complain
from streams.cli.options import Seconds
from streams.journal.addresses import is_url, without_secrets
from streams.limits import LEASE_MAX_S, LEASE_MIN_S, LEASE_S


def verify(file: str, /, *, json: bool = False) -> int:
    """Look for damage in a journal, which may be in use.

    The exit code is 1 if there is any.

    Parameters
    ----------
    file
        The journal: a file, or the URL of a store.
    json
        Print the findings as JSON.
    """
    if is_url(file):
        from streams.cli.actions import store

        return store.verify(file, as_json=json)
    from streams.cli.actions import journal

    return journal.verify(Path(file), as_json=json)


def export(file: str, /, *, to: Path | None = None, sqlite: Path | None = None) -> int:
    """Save what is readable of a journal, which may be damaged or in use.

    Each stream is a header and then its unconfirmed messages, as they were sent: lines of JSON, or
    with --sqlite rows of the tables calls and messages. A line {"missing": {"from": …, "to": …}},
    or rows of the kind missing, replace messages that are lost. Exit code 1 if any are.

    Parameters
    ----------
    file
        The journal: a file, or the URL of a store.
    to
        A new folder, which gets a file for each stream; by default everything goes to standard
        output.
    sqlite
        A new SQLite file for other tools, such as sqlite-utils and Datasette.
    """
    if to is not None and sqlite is not None:
        return complain("--to and --sqlite are two exports: name one of them.")
    if is_url(file):
        from streams.cli.actions import store

        return store.export(file, to, sqlite)
    from streams.cli.actions import journal

    return journal.export(Path(file), to, sqlite)


def backup(file: str, to: str, /, *, with_keys: bool = False) -> int:
    """Copy a journal, which may be in use, to a new file, with all that it has acknowledged.

    Parameters
    ----------
    file
        The journal: a file. For a store see `copy`.
    to
        The new file.
    with_keys
        Copy the keys of its resume tokens as well, to TO.key: without them, no ticket works with
        the copy.
    """
    from streams.cli.actions import journal

    if is_url(file):
        return complain(
            f"{without_secrets(file)} has the backups of its own server: BGSAVE, or its "
            "append-only file. While no replica serves it, mcp-streams copy makes a file of it."
        )
    if is_url(to):
        return complain("A backup is a file. mcp-streams copy moves a journal to a store.")
    return journal.backup(Path(file), Path(to), with_keys=with_keys)


def copy(
    source: str,
    target: str,
    /,
    *,
    keys: bool = False,
    lease: Seconds = LEASE_S,
    json: bool = False,
) -> int:
    """Copy all of a journal into a new one: a file or a store, while no process serves either.

    Every record and every message is compared afterwards. A store with an incomplete copy is not
    served; copy again to complete it.

    Parameters
    ----------
    source
        The journal: a file, or the URL of a store. Other users can see a command line: give a URL
        with a password as MCP_STREAMS_COPY_SOURCE, and then the target alone as a word.
    target
        The new journal: a new file, or the URL of a store that has no journal there; with a
        password, as MCP_STREAMS_COPY_TARGET.
    keys
        Copy the keys of its resume tokens as well: without them, tickets work with the copy only
        if it is served with the same --key-file as the source.
    lease
        The lease of the replicas of a store: it is watched for so long to see that none lives.
    json
        Print what was copied as JSON.
    """
    from streams.cli.actions import copy as copying

    if not LEASE_MIN_S <= lease <= LEASE_MAX_S:
        return complain(f"--lease: write seconds, {LEASE_MIN_S:g} to {LEASE_MAX_S:g}.")
    return copying.run(source, target, with_keys=keys, lease_s=lease, as_json=json)
