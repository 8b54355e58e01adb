"""Keys of a journal that another program has written to.

Bytes of one stream, session or post that cannot be read count as absent: the log names their key,
and all others go on. A key that all streams share makes the replicas wait until it is repaired.
"""

import math
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import trio

from streams.logs import log

# The same warning is written once, and again only after it was not caused for this time: a replica
# that waits for a repair tries several times a second.
QUIET_S: Final = 60.0
REMEMBERED_MAX: Final = 1000  # warnings
# The errors of `codec`'s functions for bytes that it has not made.
UNREADABLE: Final = (ValueError, LookupError, TypeError, msgspec.MsgspecError)
WHAT_TO_DO: Final = "see what has written to it, and delete what it wrote"

_T = TypeVar("_T")


class Complaints:
    """Warnings about the store, each written once."""

    def __init__(self) -> None:
        self._caused_at: dict[tuple[str, str], float] = {}

    def warn(self, event: str, what: str, **details: str) -> None:
        """Write a warning, unless the same one about `what` was caused shortly before."""
        mark, now = (event, what), trio.current_time()
        last_at = self._caused_at.pop(mark, -math.inf)
        self._caused_at[mark] = now
        if len(self._caused_at) > REMEMBERED_MAX:
            del self._caused_at[next(iter(self._caused_at))]
        if now - last_at > QUIET_S:
            log.warning(event, **details)

    def ignored(self, key: str | bytes, why: object, part: str = "") -> None:
        """A key, or a part of what it holds, cannot be read, and counts as absent."""
        shown = text_of(key)
        event = "what another program has written to the store is ignored"
        told = {"part": part} if part else {}
        self.warn(event, shown, key=shown, **told, why=str(why), advice=WHAT_TO_DO)

    def decoded(
        self, key: str | bytes, decode: Callable[..., _T], *stored: object, part: str = ""
    ) -> _T | None:
        """Decode the bytes of a key. Returns None, with a warning, if they are damaged.

        `part` names the entry or field of a key that has several.
        """
        try:
            return decode(*stored)
        except UNREADABLE as error:
            self.ignored(key, error, part)
            return None


def text_of(key: str | bytes) -> str:
    """A key for the log: names of streams have any bytes."""
    return key if isinstance(key, str) else key.decode(errors="replace")
