"""The interface `Journal`, which every storage implements.

A journal keeps records and lines of streams (`streams.journal.records`), sessions over HTTP
(`streams.journal.sessions`), and webhooks that wait (`streams.journal.webhooks`). All writing is
one method, `commit`: many changes in one durable step.

Some storages are shared by several processes, the *replicas* of one server. A stream is owned by
one replica, which alone appends to it; the others follow it. A storage with one process at a time
has no replicas (`streams.journal.alone`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from streams.errors import JournalError
from streams.journal.records import Change, Record
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.webhooks import Webhook
from streams.messages import Run

# Runs are stored in pieces of this size. A piece with its header makes one write of 256 KiB, so
# that stored lines are sent without a further copy.
STORED_BYTES_MAX: Final = 252 * 1024


Wanted = Callable[[str], bool]  # whether a replica wants to own the stream of this id


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


class Post(msgspec.Struct, frozen=True):
    """A message from one replica to another."""

    sender: str  # a replica
    stream: str  # what it is about; "" for a message about no stream
    body: bytes


class News(msgspec.Struct, frozen=True):
    """The events in a shared journal since the last call of `Journal.news`.

    It may name a stream that has not changed.
    """

    changed: frozenset[str] = frozenset()  # streams that this replica follows
    posts: Sequence[Post] = ()  # to this replica, those of one sender in the order of sending
    is_all: bool = False  # news were lost: anything that is followed or cached may have changed
    released: frozenset[str] = frozenset()  # replicas that have given up their streams: `claim` ""


class Lookups(Protocol):
    """How streams are found that are not in memory.

    In a journal with one owner these are the evicted ones. A stream is *evicted* from its first
    `Evict` until it is forgotten, even while the engine has loaded it. In a shared journal they are
    all that this replica does not own. There may be millions of them, so no method returns them
    all: `limit` bounds how many are returned.

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
        """The id of the stream that was given this name last, by `Evict` or by `Create`.

        With `is_secret` only its owner can ask for it, so an unknown one may be answered sooner.
        """

    async def grants(self, stream: str) -> Sequence[Grant]:
        """The grants of a stream, in the order in which they were last saved."""

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        """A principal's streams that are still wanted, in the order of their numbers.

        Only those with numbers above `after`, and with `only_read` those that are `is_read`. In a
        shared journal these are the streams of all replicas: one that this replica has just claimed
        may not be in its memory yet.
        """

    async def count(self, principal: str) -> int:
        """How many of a principal's streams are still wanted."""

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        """The streams with the highest numbers, evicted or not, the highest first.

        Only those with numbers below `before`, if that is given. In a shared journal these are
        the streams of all replicas.
        """

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        """The ids of streams, evicted or not, that begin with these letters: at most `limit`."""

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

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many bytes its parts take, such as its file and the file's WAL, by their names.

        Empty where that is unknown. It is quick, and asks neither a disk's content nor a store.
        """

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        """Take over streams of `owner`: each record gets a new fence, which voids older leases.

        `""` stands for streams without an owner: in a journal with one owner, for all. Returns the
        records that are not evicted, in the order of their numbers. In a shared journal these are
        some of the owner's streams, and only such that are `wanted`, if that is given: call it
        again until it returns none. Of two replicas that claim a stream, one gets it. Those that
        run come first; others may be left evicted, because streams that have ended need no owner.
        Posts to `owner` about these streams, which it has not received, are among the `news` of
        this replica from then on.

        If it raises `Unavailable`, streams may have been claimed all the same: `owned` has them.
        So it is with `take`.
        """

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        """Apply the changes in order, and make them durable in one step.

        Returns one answer for each change: None, or the error (`Gone`, `Fenced`, `Ended`,
        `Conflict`) if the stream's record does not allow it; in a shared journal another replica
        may own the stream by now. A refused change changes nothing; the others are applied. The
        answer to a change of a session or a webhook is always None.
        """

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """Every session, and every grant of a stream that is not evicted.

        Both are in the order in which they were last saved.
        """

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """The durable lines after `after`, as runs without gaps; empty if no lines follow.

        Returns at most `bytes_max` bytes, or one line that is longer. It may be less than would
        fit, to avoid cutting a stored run. Short runs are joined, up to `STORED_BYTES_MAX`. `after`
        must not lie below the record's `trimmed`. If the next lines are lost (`Record.lost`), the
        first run begins behind these. Raises `Missing` if lines are missing for any other reason.
        """

    def expect(self, stream: str, after: int, *, bytes_max: int) -> None:
        """A `read` of these lines will come soon: a shared journal asks its store for them."""

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        """The webhooks that wait, those that are due first."""

    async def count_webhooks(self) -> int:
        """How many webhooks wait."""

    async def take_webhooks(self, now: float, until: float, *, limit: int) -> Sequence[Webhook]:
        """The first webhooks that are due at `now`, in wall time.

        In a shared journal they are due again at `until`, so that another replica sends those of
        one that dies, and none is sent by two at once.
        """

    async def aclose(self) -> None:
        """Finish what was begun, and close the storage."""

    # Of a shared journal. `streams.journal.alone` has the answers of one that is not.

    @property
    def replica(self) -> str:
        """The name of this process among the replicas; "" in a journal that is not shared."""

    @property
    def lease_s(self) -> float:
        """How long, in seconds, an owner may be silent before others `claim` its streams."""

    async def renew(self) -> Mapping[str, int] | None:
        """Show that this replica lives. Call it several times in each `lease_s`.

        Returns a count for each replica, which grows each time that one renews; -1 for one that is
        known to be gone: what streams it has may be claimed at once. A count that stays the same
        shows that its replica is gone, if our own calls succeeded meanwhile.

        None if the streams of this replica were claimed. It owns none from then on, and `replica`
        is a new name.
        """

    async def running(self, replicas: Sequence[str]) -> Mapping[str, int]:
        """How many streams whose calls run each of these replicas owns; "" has those without an
        owner.
        """

    async def release(self) -> None:
        """Give up all streams of this replica, for others to claim at once. See `claim`."""

    async def owned(self, *, after: int, limit: int) -> Sequence[Record]:
        """The streams that this replica owns, in the order of their numbers.

        Only those with numbers above `after`, and at most `limit`.
        """

    async def take(self, stream: str) -> Record | None:
        """Own a stream that has no owner, with a new fence, and return its record.

        The record of a stream that another replica owns is returned as it is: see `Record.owner`.
        A stream that this replica owns already has a new fence if the store may have lost lines of
        it, which are then `lost`. In a journal that is not shared this is `find`.
        """

    async def follow(self, stream: str) -> Record | None:
        """From now on `news` has the changes of this stream. Returns its record."""

    async def unfollow(self, stream: str) -> None:
        """End `follow`."""

    async def post(self, stream: str, *bodies: bytes, is_kept: bool = True) -> bool:
        """Send messages to the owner of a stream, which may be this replica.

        False, and nothing is sent, if it has no owner. A message that is not kept comes sooner, and
        may be lost. It overtakes none that was sent before, but later ones may overtake it.
        """

    async def send(self, replica: str, stream: str, *bodies: bytes, is_kept: bool = True) -> None:
        """Send messages about a stream to a replica, or with "" to all others that live.

        They are lost if it is gone. `is_kept`: see `post`.
        """

    async def news(self) -> News:
        """Wait for news. A post is received once; one task at a time may wait."""

    async def session(self, key: str) -> SessionRecord | None:
        """The record of a session."""

    async def count_sessions(self, principal: str | None = None) -> int:
        """How many sessions there are, of one principal or in all."""

    def turn(self, name: bytes) -> AbstractAsyncContextManager[None]:
        """Only one task of all replicas is in such a block with the same name at a time.

        A replica that is gone leaves it when its streams are claimed, and if none are, after about
        two `lease_s`. Another task may leave the block than has entered it.
        """
