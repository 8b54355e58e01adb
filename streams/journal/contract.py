"""The interface `Journal`, which every storage implements.

A journal keeps records and lines of streams (`streams.journal.records`), and sessions over HTTP
(`streams.journal.sessions`). All writing is one method, `commit`: many changes in one durable step.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from streams.errors import JournalError
from streams.journal.records import Change, Record
from streams.journal.sessions import Grant, SessionRecord
from streams.messages import Run

# Runs are stored in pieces of this size. A piece with its header makes one write of 256 KiB, so
# that stored lines are sent without a further copy.
STORED_BYTES_MAX: Final = 252 * 1024


class Shortage(msgspec.Struct, frozen=True):
    """Little room is left: calls may end, and no new call may begin."""

    why: str
    is_severe: bool  # calls that run end at once, and may not send more first
    limit: int | None = None  # the setting that is reached, in bytes; None if the disk is full
    used: int | None = None  # bytes in use, if the limit is that of the whole journal

    def __str__(self) -> str:
        return self.why


class Totals(msgspec.Struct, frozen=True):
    """Counts of a journal's contents."""

    evicted: int  # streams
    last_number: int  # the highest number of a record; 0 if there are no records


class Lookups(Protocol):
    """How evicted streams are found, which are not in memory.

    A stream is *evicted* from its first `Evict` until it is forgotten, even while the engine has
    loaded it. There may be millions of them, so no method returns them all: `limit` bounds how many
    are returned.

    All methods may raise `Unavailable` (try again) or `JournalUnusable` (fatal).
    """

    async def totals(self) -> Totals:
        """Count what the journal holds."""

    async def find(self, stream: str) -> Record | None:
        """The record of a stream, evicted or not."""

    async def principal_of(self, stream: str) -> str | None:
        """The principal that a stream belongs to, evicted or not.

        `principal_of` and `named` should take the same time for unknown ids, so that timing leaks
        nothing: a backend can read the next row instead.
        """

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        """The id of the evicted stream that was given this name.

        With `is_secret` only its owner can ask for it, so an unknown one may be answered sooner.
        """

    async def grants(self, stream: str) -> Sequence[Grant]:
        """The grants of a stream, in the order in which they were last saved."""

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        """A principal's evicted streams that are still wanted, in the order of their numbers.

        Only those with numbers above `after`, and with `only_read` those that are `is_read`.
        """

    async def count(self, principal: str) -> int:
        """How many evicted streams of a principal are still wanted."""

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        """The evicted streams by their `due_at`, earliest first.

        `only_unwanted` leaves out those that are still wanted.
        """


class Journal(Lookups, Protocol):
    """Storage for streams and sessions.

    A commit whose outcome is unknown may be repeated. Sessions have no lease: they belong to the
    process that owns the journal.

    All methods may raise `Unavailable` (try again) or `JournalUnusable` (fatal).
    """

    @property
    def shortage(self) -> Shortage | None:
        """The lack of room in the journal; None while there is enough."""

    @property
    def anonymous_shortage(self) -> Shortage | None:
        """Whether the streams of all anonymous callers together near their limit; None if not."""

    async def claim(self) -> Sequence[Record]:
        """Take over every stream: each record gets a new fence, which voids older leases.

        Returns the records that are not evicted, in the order of their numbers.
        """

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """Apply the changes in order, and make them durable in one step.

        Returns one answer for each change: None, or the error (`Gone`, `Fenced`, `Ended`,
        `Conflict`) if the stream's record does not allow it. A refused change changes nothing; the
        others are applied. The answer to a change of a session is always None.
        """

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """Every session, and every grant of a stream that is not evicted.

        Both are in the order in which they were last saved.
        """

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """The durable lines after `after`, as runs without gaps; empty if no lines follow.

        Returns at most `bytes_max` bytes, or one line that is longer. It may be less than would
        fit, to avoid cutting a stored run. Short runs are joined, up to `STORED_BYTES_MAX`. `after`
        must not lie below the record's `trimmed`.
        """

    async def aclose(self) -> None:
        """Finish what was begun, and close the storage."""
