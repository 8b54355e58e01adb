"""A journal in memory that several replicas share, in one process and in trio's time.

A `SharedStore` has the data, as a Redis server would. Each replica has a `SharedMemoryJournal` on
it. Nothing in it is random, so a test under trio's mock clock runs the same way each time.
"""

import copy
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain, islice
from operator import attrgetter
from typing import Final

import msgspec
import trio

from streams.clock import wall
from streams.errors import Fenced, JournalError, Unavailable
from streams.journal.contract import News, Post, Shortage, Totals, Wanted
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change, Create, Outcome, Record, Restore
from streams.journal.runs import joined
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.webhooks import SaveWebhook, Webhook
from streams.messages import Run

LEASE_S: Final = 2.0
CLAIMED_AT_ONCE: Final = 2  # streams: few, so that a claim of a test takes several calls
KEPT_S: Final = 5.0  # a store loses less
SKIPPED: Final = 10_000  # numbers: more than an owner uses within what a store may lose

_number = attrgetter("number")
_due = attrgetter("due_at", "number")


class Turn:
    """A turn that a replica has."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.since = trio.current_time()
        self.is_over = trio.Event()


class Copy(msgspec.Struct):
    """The part of a `SharedStore` that may be lost."""

    kept: MemoryJournal
    counts: dict[str, int]
    claimed: set[str]
    posts: dict[str, list[Post]]
    epochs: dict[str, int]


class SharedStore:
    """The state that all replicas share."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.kept = MemoryJournal()  # the streams and sessions
        self.counts: dict[str, int] = {}  # renewals of each replica; -1: it has released
        self.claimed: set[str] = set()  # replicas whose streams were claimed, perhaps not all
        self.renewed_at: dict[str, float] = {}  # trio's time
        self.posts: dict[str, list[Post]] = {"": []}  # of each replica; "": without an owner
        self.turns: dict[bytes, Turn] = {}
        self.listeners: list[SharedMemoryJournal] = []
        self.epoch = 0  # how often the store has gone back
        self.epochs: dict[str, int] = {}  # in which each stream was written by its owner
        self._opened = 0

    def open(self) -> "SharedMemoryJournal":
        """The journal of a new replica."""
        journal = SharedMemoryJournal(self)
        self.listeners.append(journal)
        return journal

    def lose(self, journal: "SharedMemoryJournal") -> None:
        """The process of a replica was killed: its streams have an owner until they are claimed."""
        self.listeners.remove(journal)

    def enter(self) -> str:
        """Name a new replica."""
        self._opened += 1
        replica = f"replica-{self._opened}"
        self.posts[replica] = []
        self.renew(replica)
        return replica

    def copy(self) -> "Copy":
        """The state of another server that gets all changes up to now, and none after."""
        return copy.deepcopy(Copy(self.kept, self.counts, self.claimed, self.posts, self.epochs))

    def go_back(self, to: "Copy") -> None:
        """Have what `to` has, as after a failover to a server that is behind."""
        self.epoch += 1
        self.kept, self.posts, self.epochs = to.kept, to.posts, to.epochs
        # The others count on each replica that they know, until its lease ends.
        self.counts, self.claimed = self.counts | to.counts, to.claimed
        self.turns.clear()
        for journal in self.listeners:
            journal.lose_news()

    def renew(self, replica: str) -> None:
        """Count a renewal."""
        self.counts[replica] = max(0, self.counts.get(replica, 0)) + 1
        self.renewed_at[replica] = trio.current_time()

    def mark_claimed(self, replica: str) -> None:
        """The streams of a replica are claimed from now on, which it is told when it comes back."""
        self.counts.pop(replica, None)
        self.claimed.add(replica)

    @property
    def records(self) -> dict[str, Record]:
        """The record of each stream."""
        return self.kept._records

    def owned_by(self, owner: str) -> list[Record]:
        """The streams of an owner, or those without one, in the order of their numbers."""
        return sorted((r for r in self.records.values() if r.owner == owner), key=_number)

    def wanted(self, principal: str) -> list[Record]:
        """The wanted streams of a principal, in the order of their numbers."""
        records = sorted(self.records.values(), key=_number)
        return [r for r in records if r.principal == principal and r.is_wanted]

    def give(self, record: Record, owner: str) -> Record:
        """Give a stream another owner, which has a new fence."""
        fence = record.fence + bool(owner)
        given = msgspec.structs.replace(record, owner=owner, fence=fence)
        if owner and self.is_doubtful(record.stream):
            given = _skipped(given)
            self.epochs[record.stream] = self.epoch
        self.kept._evicted.remove(self.records[record.stream])
        self.kept._evicted.add(given)
        self.records[record.stream] = given
        self.publish(record.stream)
        return given

    def is_doubtful(self, stream: str) -> bool:
        """Whether the store has gone back since the owner of a stream has written to it."""
        return self.epochs.get(stream, 0) < self.epoch

    def free(self, records: Sequence[Record]) -> None:
        """Leave streams of one owner without an owner."""
        for record in records:
            self.pass_posts(record.owner, "", [self.give(record, "")])

    def pass_posts(self, owner: str, heir: str, records: Iterable[Record]) -> None:
        """Pass the posts about these streams on."""
        streams = {record.stream for record in records}
        posts = self.posts.get(owner, [])
        self.posts[owner] = [post for post in posts if post.stream not in streams]
        self.keep_posts(heir, [post for post in posts if post.stream in streams])

    def keep_posts(self, replica: str, posts: Sequence[Post]) -> None:
        """Keep posts until a replica receives them; they are lost if it is gone."""
        if replica in self.posts and posts:
            self.posts[replica].extend(posts)
            for journal in self.listeners:
                if journal.replica == replica:
                    journal.wake()

    def publish(self, stream: str) -> None:
        """Tell the followers of a stream that it has changed."""
        for journal in self.listeners:
            journal.hear(stream)

    def is_lapsed(self, turn: Turn) -> bool:
        """Whether the holder of a turn is gone."""
        return trio.current_time() >= self.lapses_at(turn)

    def lapses_at(self, turn: Turn) -> float:
        """When a turn ends unless its holder renews before, in trio's time."""
        return max(turn.since, self.renewed_at.get(turn.holder, 0.0)) + self.lease_s


def _skipped(record: Record) -> Record:
    """The record of a stream whose last owner may have used numbers that the store has lost."""
    if record.outcome is not Outcome.LIVE:
        return record
    return record.losing(record.last + SKIPPED)


class SharedMemoryJournal:
    """`streams.journal.contract.Journal`, of one replica."""

    shortage: Shortage | None = None
    anonymous_shortage: Shortage | None = None

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._replica = store.enter()
        self._followed: set[str] = set()
        self._changed: set[str] = set()  # of those that are followed, since the last news
        self._is_all = False
        self._released: set[str] = set()
        self._wake = trio.Event()
        self._epoch = store.epoch
        self._claims: dict[float, list[Record]] = {}  # the newest, by trio's time
        self._turns: dict[bytes, Turn] = {}
        self.put_back: Sequence[Record] = ()  # claims, at the last renewal

    @property
    def replica(self) -> str:
        return self._replica

    @property
    def lease_s(self) -> float:
        return self._store.lease_s

    # Leases

    async def claim(self, owner: str = "", wanted: Wanted | None = None) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        self._check_lease()
        store = self._store
        if owner:
            store.mark_claimed(owner)
            store.free([_resting(r) for r in store.owned_by(owner) if _may_rest(r)])
        resident = [
            record
            for record in store.owned_by(owner)
            if record.due_at is None and (wanted is None or wanted(record.stream))
        ]
        claimed = [store.give(record, self._replica) for record in resident[:CLAIMED_AT_ONCE]]
        self._note_claims(claimed)
        store.pass_posts(owner, self._replica, claimed)
        if owner and not claimed:
            store.posts.pop(owner, None)
        return claimed

    async def owned(self, *, after: int, limit: int) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        owned = self._store.owned_by(self._replica)
        return [record for record in owned if record.number > after][:limit]

    async def renew(self) -> Mapping[str, int] | None:
        await trio.lowlevel.checkpoint()
        if self._replica in self._store.claimed:
            self._replica = self._store.enter()
            return None
        self._store.posts.setdefault(self._replica, [])  # a store that has gone back lacks it
        self._store.renew(self._replica)
        self.put_back = self._put_claims_back()
        unclaimed = {each: -1 for each in self._store.claimed if self._store.owned_by(each)}
        return self._store.counts | unclaimed

    async def running(self, replicas: Sequence[str]) -> Mapping[str, int]:
        await trio.lowlevel.checkpoint()
        owned = {each: self._store.owned_by(each) for each in replicas}
        return {
            each: sum(record.outcome is Outcome.LIVE for record in records)
            for each, records in owned.items()
        }

    def _note_claims(self, claimed: Sequence[Record]) -> None:
        self._claims.setdefault(trio.current_time(), []).extend(claimed)

    def _put_claims_back(self) -> list[Record]:
        """Tell a store that has gone back of the claims which it has lost, and return them."""
        store, put_back = self._store, []
        if store.epoch == self._epoch:
            since = trio.current_time() - KEPT_S
            self._claims = {at: each for at, each in self._claims.items() if at > since}
            return []
        self._epoch = store.epoch
        for record in chain(*self._claims.values()):
            known = store.records.get(record.stream)
            if known is not None and known.fence < record.fence:
                self._commit_one(Restore(record.fence, record))
                put_back.append(store.records[record.stream])
        return put_back

    async def release(self) -> None:
        await trio.lowlevel.checkpoint()
        store = self._store
        if self._replica not in store.counts:
            return
        store.counts[self._replica] = -1
        store.free(store.owned_by(self._replica))
        for journal in store.listeners:
            if journal is not self:
                journal.hear_of_release(self._replica)

    async def take(self, stream: str) -> Record | None:
        await trio.lowlevel.checkpoint()
        self._check_lease()
        record = self._store.records.get(stream)
        if record is not None and record.owner == self._replica and self._store.is_doubtful(stream):
            return self._store.give(record, self._replica)
        if record is None or record.owner:
            return record
        taken = self._store.give(record, self._replica)
        self._note_claims([taken])
        self._store.pass_posts("", self._replica, [taken])
        return taken

    def _check_lease(self) -> None:
        # Its new streams would have an owner that no other replica knows of.
        if self._replica in self._store.claimed:
            raise Unavailable(f"the streams of {self._replica} were claimed: renew first")

    # Streams and sessions

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await trio.lowlevel.checkpoint()  # first: a cancelled commit has written nothing
        return [self._commit_one(change) for change in changes]

    def _commit_one(self, change: Change) -> JournalError | None:
        kept = self._store.kept
        if change.stream is None:
            return kept._commit_one(change)
        before = self._store.records.get(change.stream)
        if isinstance(change, Restore) or (before is None and isinstance(change, Create)):
            if self._replica in self._store.claimed:
                return Fenced(f"the streams of {self._replica} were claimed: renew first")
            if change.record.owner not in ("", self._replica):
                return Fenced(f"{change.record.owner} was claimed, and is {self._replica} now")
            if isinstance(change, Create) and change.turn and not self._has_turn(change.turn):
                return Fenced("the turn is over")
            record = msgspec.structs.replace(change.record, owner=self._replica)
            change = msgspec.structs.replace(change, record=record)
        elif before is not None and not isinstance(change, Create) and not self._may(before):
            return Fenced(f"stream {before.stream[:8]}… belongs to {before.owner or 'no replica'}")
        error = kept._commit_one(change)
        if (after := self._store.records.get(change.stream)) is not before:
            if after is None:
                self._store.epochs.pop(change.stream, None)
            elif after.owner:
                self._store.epochs[change.stream] = self._store.epoch
            self._store.publish(change.stream)
        return error

    def _has_turn(self, name: bytes) -> bool:
        mine = self._turns.get(name)
        return mine is not None and self._store.turns.get(name) is mine

    def _may(self, record: Record) -> bool:
        """Whether this replica may change a stream, with its fence.

        An evicted stream without an owner may be postponed or forgotten by any replica.
        """
        is_free = not record.owner and record.due_at is not None
        is_claimed = self._replica in self._store.claimed
        return (is_free and not is_claimed) or record.owner == self._replica

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        await trio.lowlevel.checkpoint()
        runs = (run for run in self._store.kept._runs.get(stream, []) if run.last > after)
        record = self._store.records.get(stream)
        if record is not None and record.lost is not None:
            first, last = record.lost
            if after < first - 1:
                runs = (run for run in runs if run.last < first)
            else:
                after = max(after, last)
                runs = (run for run in runs if run.seq > last)
        return joined(runs, after, bytes_max)

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        return await self._store.kept.sessions()

    async def session(self, key: str) -> SessionRecord | None:
        return await self._store.kept.session(key)

    async def count_sessions(self, principal: str | None = None) -> int:
        return await self._store.kept.count_sessions(principal)

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        return await self._store.kept.webhooks(limit=limit)

    async def count_webhooks(self) -> int:
        return await self._store.kept.count_webhooks()

    async def take_webhooks(self, now: float, until: float, *, limit: int) -> Sequence[Webhook]:
        taken = await self._store.kept.take_webhooks(now, until, limit=limit)
        postponed = [msgspec.structs.replace(each, due_at=until) for each in taken]
        for each in postponed:
            self._store.kept._commit_one(SaveWebhook(each))
        return postponed

    async def aclose(self) -> None:
        """Leave the store. The streams of this replica stay its own until they are claimed."""
        await trio.lowlevel.checkpoint()
        if self in self._store.listeners:
            self._store.lose(self)

    # Lookups

    async def totals(self) -> Totals:
        return await self._store.kept.totals()

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        return await self._store.kept.newest(before=before, limit=limit)

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        return await self._store.kept.beginning_with(prefix, limit=limit)

    async def find(self, stream: str) -> Record | None:
        return await self._store.kept.find(stream)

    async def principal_of(self, stream: str) -> str | None:
        return await self._store.kept.principal_of(stream)

    async def named(self, name: bytes, *, is_secret: bool = False) -> str | None:
        return await self._store.kept.named(name, is_secret=is_secret)

    async def grants(self, stream: str) -> Sequence[Grant]:
        return await self._store.kept.grants(stream)

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        await trio.lowlevel.checkpoint()
        wanted = (r for r in self._store.wanted(principal) if r.number > after)
        return list(islice((r for r in wanted if r.is_read or not only_read), limit))

    async def count(self, principal: str) -> int:
        await trio.lowlevel.checkpoint()
        return sum(r.owner != self._replica for r in self._store.wanted(principal))

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        # The owner of a stream knows itself when that is due.
        await trio.lowlevel.checkpoint()
        evicted = [r for r in self._store.owned_by("") if r.due_at is not None]
        due = (r for r in sorted(evicted, key=_due) if not (only_unwanted and r.is_wanted))
        return list(islice(due, limit))

    # News

    async def follow(self, stream: str) -> Record | None:
        await trio.lowlevel.checkpoint()
        self._followed.add(stream)
        return self._store.records.get(stream)

    def expect(self, stream: str, after: int, *, bytes_max: int) -> None:
        pass

    async def unfollow(self, stream: str) -> None:
        await trio.lowlevel.checkpoint()
        self._followed.discard(stream)

    async def post(self, stream: str, *bodies: bytes, is_kept: bool = True) -> bool:
        await trio.lowlevel.checkpoint()
        record = self._store.records.get(stream)
        if record is None or not record.owner:
            return False
        posts = [Post(self._replica, stream, body) for body in bodies]
        self._store.keep_posts(record.owner, posts)
        return True

    async def send(self, replica: str, stream: str, *bodies: bytes, is_kept: bool = True) -> None:
        await trio.lowlevel.checkpoint()
        others = [each for each in self._store.counts if each != self._replica]
        for each in [replica] if replica else others:
            self._store.keep_posts(each, [Post(self._replica, stream, body) for body in bodies])

    async def news(self) -> News:
        await trio.lowlevel.checkpoint()
        while not self.has_news:
            self._wake = trio.Event()
            await self._wake.wait()
        changed, released = frozenset(self._changed), frozenset(self._released)
        news = News(changed, tuple(self._posts), self._is_all, released)
        self._changed.clear()
        self._posts.clear()
        self._released.clear()
        self._is_all = False
        return news

    @property
    def has_news(self) -> bool:
        """Whether `news` would return at once."""
        return bool(self._changed or self._posts or self._is_all or self._released)

    @property
    def _posts(self) -> list[Post]:
        return self._store.posts.get(self._replica, [])

    def wake(self) -> None:
        """There may be news."""
        self._wake.set()

    def hear(self, stream: str) -> None:
        """A stream has changed."""
        if stream in self._followed:
            self._changed.add(stream)
            self.wake()

    def hear_of_release(self, replica: str) -> None:
        """Another replica has released its streams."""
        self._released.add(replica)
        self.wake()

    def lose_news(self) -> None:
        """News may have been lost, as in a reconnect to a server."""
        self._is_all = True
        self.wake()

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        store = self._store
        while (own := self._turns.get(name)) is not None:
            await own.is_over.wait()
        while (turn := store.turns.get(name)) is not None and not store.is_lapsed(turn):
            with trio.move_on_at(store.lapses_at(turn)):
                await turn.is_over.wait()
        mine = store.turns[name] = self._turns[name] = Turn(self._replica)
        try:
            yield
        finally:
            mine.is_over.set()
            if self._turns.get(name) is mine:
                del self._turns[name]
            if store.turns.get(name) is mine:
                del store.turns[name]


def _may_rest(record: Record) -> bool:
    """Whether a stream needs no owner: it is evicted, or has ended and waits for its client."""
    has_ended = record.outcome is not Outcome.LIVE and record.pages is None
    return has_ended or record.due_at is not None


def _resting(record: Record) -> Record:
    due_at = wall() + record.max_s if record.due_at is None else record.due_at
    return msgspec.structs.replace(record, due_at=due_at)
