"""How streams are found that only the journal knows: those at rest, which are in no memory.

A stream is *at rest* from its first `streams.journal.contract.Rest` on, and for as long as there is
anything of it, whoever has it in memory again meanwhile. A million of them take a million rows, and
nothing else, so nobody asks for all of them at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from streams.journal.contract import Record
    from streams.journal.sessions import Grant


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

    async def find(self, stream: str) -> "Record | None":
        """The record of a stream, at rest or not."""

    async def principal_of(self, stream: str) -> str | None:
        """Whose a stream is, at rest or not.

        This, and `named`, should take as long for what there is as for what there is not: the
        next one after it can be read instead.
        """

    async def named(self, name: bytes) -> str | None:
        """The id of the stream at rest that was given this name."""

    async def grants(self, stream: str) -> "Sequence[Grant]":
        """What sessions were granted of a stream, in the order in which it was last saved."""

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> "Sequence[Record]":
        """A principal's streams at rest that are still wanted, by their numbers: those above
        `after`. `only_read` leaves out those that are not `is_read`.
        """

    async def count(self, principal: str) -> int:
        """How many a principal has that are at rest and still wanted."""

    async def due(self, *, limit: int, only_unwanted: bool = False) -> "Sequence[Record]":
        """The streams at rest by their `due_at`, earliest first. `only_leftover` leaves out those
        that are still wanted.
        """
