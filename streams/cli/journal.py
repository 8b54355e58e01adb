"""The commands that look after a journal's file: whether it is sound, and what to save of it."""

from pathlib import Path

from streams.cli.base import app


@app.command
def verify(file: Path, /, *, json: bool = False) -> int:
    """Look for damage in a journal, which may be in use. Exit code 1 where there is any.

    Parameters
    ----------
    file
        The journal.
    json
        Print what was found as JSON.
    """
    from streams.cli.actions import journal

    return journal.verify(file, as_json=json)


@app.command
def export(file: Path, /, *, to: Path | None = None) -> int:
    """Save what is readable of a journal, which may be damaged or in use, as lines of JSON.

    Each stream is a header and then its messages that are not confirmed, as they were sent; a line
    {"missing": {"from": …, "to": …}} stands in the place of those that are lost. Exit code 1 where
    anything is.

    Parameters
    ----------
    file
        The journal.
    to
        A new folder for a file for each stream; by default all of it goes to standard output.
    """
    from streams.cli.actions import journal

    return journal.export(file, to)


@app.command
def backup(file: Path, to: Path, /, *, with_keys: bool = False) -> int:
    """Copy a journal, which may be in use, to a new file: all that was acknowledged is in it.

    Parameters
    ----------
    file
        The journal.
    to
        The new file.
    with_keys
        Copy the keys of its tokens as well, to TO.key: without them a copy opens nobody's stream.
    """
    from streams.cli.actions import journal

    return journal.backup(file, to, with_keys=with_keys)
