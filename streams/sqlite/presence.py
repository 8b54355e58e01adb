"""That the files of a journal are still the ones that were opened.

A file that is removed, or that another one takes the place of, goes on to take what is written,
and nobody will ever find it there.
"""

import os
from pathlib import Path

from streams.errors import JournalUnusable
from streams.ownership import lock_path


class Presence:
    """Looks at the file, its WAL and its lock: 5 µs for all three."""

    def __init__(self, path: Path) -> None:
        """To be called once a connection has written in WAL mode, which makes the WAL."""
        wal = path.with_name(f"{path.name}-wal")
        self._opened = {os.fspath(each): _identity(each) for each in (path, wal, lock_path(path))}

    def check(self) -> None:
        """Raise `JournalUnusable` where one of them is gone, or another one."""
        for path, opened in self._opened.items():
            if _identity(path) != opened:
                raise JournalUnusable(
                    f"{path} was removed or replaced while this server used it: put back what "
                    "belongs there or restore a backup, see that no other server has it, then "
                    "start again."
                )


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
