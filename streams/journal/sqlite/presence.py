"""That the files of a journal are still the ones that were opened.

A file that is removed, or that another one takes the place of, goes on to take what is written,
and nobody will ever find it there.
"""

import os
from pathlib import Path
from typing import Final

from streams.clock import wall
from streams.errors import JournalUnusable
from streams.journal.ownership import lock_path

# A folder that was changed just now may be changed again within the same tick of its time.
_TICK_NS: Final = 50_000_000


class Presence:
    """Looks at the file, its WAL and its lock, when something was made or removed beside them."""

    def __init__(self, path: Path) -> None:
        """To be called once a connection has written in WAL mode, which makes the WAL."""
        wal = path.with_name(f"{path.name}-wal")
        self._folder = os.fspath(path.parent)
        self._opened = {os.fspath(each): _identity(each) for each in (path, wal, lock_path(path))}
        self._changed_ns = -1  # when the folder was, and nothing of ours

    def check(self) -> None:
        """Raise `JournalUnusable` where one of them is gone, or another one."""
        changed_ns = _changed_ns(self._folder)
        if changed_ns == self._changed_ns:
            return
        for path, opened in self._opened.items():
            if _identity(path) != opened:
                raise JournalUnusable(
                    f"{path} was removed or replaced while this server used it: put back what "
                    "belongs there or restore a backup, see that no other server has it, then "
                    "start again."
                )
        if wall() * 1e9 - changed_ns > _TICK_NS:
            self._changed_ns = changed_ns


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0  # never seen: what was in it is looked for


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
