"""The commands for the file of a journal: `verify`, `export` and `backup`."""

from pathlib import Path

from streams.cli.base import app


@app.command
def verify(file: Path, /, *, json: bool = False) -> int:
    """Look for damage in a journal, which may be in use. Exit code 1 if there is any.

    Parameters
    ----------
    file
        The journal.
    json
        Print the findings as JSON.
    """
    from streams.cli.actions import journal

    return journal.verify(file, as_json=json)


@app.command
def export(file: Path, /, *, to: Path | None = None) -> int:
    """Save what is readable of a journal, which may be damaged or in use, as lines of JSON.

    Each stream is a header and then its unconfirmed messages, as they were sent. A line
    {"missing": {"from": …, "to": …}} replaces messages that are lost. Exit code 1 if any are.

    Parameters
    ----------
    file
        The journal.
    to
        A new folder, which gets a file for each stream; by default everything goes to standard
        output.
    """
    from streams.cli.actions import journal

    return journal.export(file, to)


@app.command
def backup(file: Path, to: Path, /, *, with_keys: bool = False) -> int:
    """Copy a journal, which may be in use, to a new file, with all that it has acknowledged.

    Parameters
    ----------
    file
        The journal.
    to
        The new file.
    with_keys
        Copy the keys of its resume tokens as well, to TO.key: without them, no ticket works with
        the copy.
    """
    from streams.cli.actions import journal

    return journal.backup(file, to, with_keys=with_keys)
