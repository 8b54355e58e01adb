"""What the engine needs from storage: the interface `Journal`, which every storage implements.

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

# Runs are stored in pieces of this size: one of them, and the header ahead of it, make one write of
# 256 KiB, so what is stored goes out without being copied together.
STORED_BYTES_MAX: Final = 252 * 1024


class Shortage(msgspec.Struct, frozen=True):
    """There is little room left: what is begun may be ended, and nothing new begun."""

    why: str
    is_severe: bool  # ended at once, and not with a few words more
    limit: int | None = None  # the setting that it comes of, in bytes; None where the disk is full
    used: int | None = None  # bytes of that, where it is the setting for the whole journal

    def __str__(self) -> str:
        return self.why


class Totals(msgspec.Struct, frozen=True):
    """How much there is in a journal."""

    evicted: int  # streams
    last_number: int  # of all records; 0 where there is none


class Lookups(Protocol):
    """What a journal is asked. `limit` bounds how many are returned.

    All may raise `Unavailable` (repeat it) or `JournalUnusable` (fatal).
    """

    async def totals(self) -> Totals:
        """How much there is."""

    async def find(self, stream: str) -> Record | None:
        """The record of a stream, at rest or not."""

    async def principal_of(self, stream: str) -> str | None:
        """Whose a stream is, at rest or not.

        This, and `named`, should take as long for what there is as for what there is not: the
        next one after it can be read instead.
        """

    async def named(self, name: bytes) -> str | None:
        """The id of the stream at rest that was given this name."""

    async def grants(self, stream: str) -> Sequence[Grant]:
        """What sessions were granted of a stream, in the order in which it was last saved."""

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        """A principal's streams at rest that are still wanted, by their numbers: those above
        `after`. `only_read` leaves out those that are not `is_read`.
        """

    async def count(self, principal: str) -> int:
        """How many a principal has that are at rest and still wanted."""

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        """The streams at rest by their `due_at`, earliest first. `only_leftover` leaves out those
        that are still wanted.
        """


class Journal(Lookups, Protocol):
    """Storage for streams and sessions.

    All may raise `Unavailable` (repeat it) or `JournalUnusable` (fatal).
    """

    @property
    def shortage(self) -> Shortage | None:
        """What there is not enough of; None while there is."""

    @property
    def anonymous_shortage(self) -> Shortage | None:
        """The same for the streams of all anonymous callers together; None while they are within
        their share.
        """

    async def claim(self) -> Sequence[Record]:
        """Take over every stream: each record is given a new fence, older leases are void.

        Returned are those that are not at rest, by their numbers.
        """

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """Apply the changes in order and make them durable, all in one step.

        A change that its stream's record does not allow changes nothing and is answered with its
        error (`Gone`, `Fenced`, `Ended`, `Conflict`); the others are applied. A change of a session
        is answered with None, always.
        """

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """Every session, and every grant of a stream that is not at rest, each in the order in
        which they were last saved.
        """

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """The durable lines that follow `after`, as runs that follow each other; none where there
        are none.

        At most `bytes_max` bytes, or one line that is longer; less than would fit where that saves
        cutting a stored run. Short runs are joined, to `STORED_BYTES_MAX` at most. `after` must not
        lie below what the record has `trimmed`.
        """

    async def aclose(self) -> None:
        """Finish what was begun and let go of the storage."""
