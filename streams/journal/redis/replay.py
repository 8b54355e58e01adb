"""The last committed changes, to be applied again when the store has lost them.

A store goes back when it restarts from an older copy, or when a replica of it that is behind takes
over. Each commit of ours has a number, and the store keeps that of the last one. So a lower number
than we know of tells exactly which commits are lost.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from streams.journal.records import Change, bytes_in
from streams.limits import MIB

KEPT_S: Final = 5.0  # a store that syncs each second loses two at most; a failover, the lag
KEPT_BYTES: Final = 32 * MIB
_CHANGE_BYTES: Final = 200


class _Commit(msgspec.Struct, frozen=True):
    number: int
    at: float
    size: int
    changes: Sequence[Change]


class Recent:
    """The last committed changes."""

    def __init__(self) -> None:
        self._commits: deque[_Commit] = deque()
        self._size = 0
        self._dropped = 0  # the number of the newest commit that is not kept any more

    def add(self, number: int, now: float, changes: Sequence[Change]) -> None:
        """Keep a commit. `now` is trio's time."""
        size = sum(_CHANGE_BYTES + bytes_in(each) for each in changes)
        self._commits.append(_Commit(number, now, size, changes))
        self._size += size
        self.drop_old(now)

    def drop_old(self, now: float) -> None:
        """Drop what is kept for long enough, or is too much.

        At `now` the store had all of it. As long as it does not answer, nothing gets older: what it
        has when it is back may be older by what it lacked when it was last heard of.
        """
        while self._commits and (self._commits[0].at < now - KEPT_S or self._size > KEPT_BYTES):
            dropped = self._commits.popleft()
            self._size -= dropped.size
            self._dropped = dropped.number

    def since(self, number: int) -> tuple[list[Change], bool]:
        """The changes after the commit `number`, and whether these are all."""
        found = [commit for commit in self._commits if commit.number > number]
        changes = [change for commit in found for change in commit.changes]
        return changes, self._dropped <= number

    def renumber(self, since: int, number: int, now: float) -> None:
        """The changes after the commit `since` are stored again, as the commit `number`."""
        changes, _ = self.since(since)
        while self._commits and self._commits[-1].number > since:
            self._size -= self._commits.pop().size
        if changes:
            self.add(number, now, changes)
