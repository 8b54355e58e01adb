"""The cache of ended streams: it evicts those that were not used for long, and loads them on use.

A stream that runs, is attached, or has pages stays in memory, always. Of the others, the
`Limits.resident_max` that were used last stay. The rest are evicted: the cache writes to the
journal what it does not know of them yet. When that is durable and nothing has happened meanwhile,
they leave memory. They are loaded when a client asks for them, in the way of a restart.

Evicted streams expire too. They cost no memory, so no deadline waits for them there: the journal
has them in the order in which they are due. That order was written at eviction. Since deadlines
only move on, a stream that is due there may really be due later: its client may have asked for it,
or the server may have been restarted. So the cache looks at each, and either postpones it in the
journal or lets it expire.

This is one file because evicting, loading, expiring and making room must agree, at each moment, on
whether a stream is in memory, in the journal alone, or about to be forgotten.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from streams.clock import WallAhead
from streams.engine.committer import Committer
from streams.engine.index import Elsewhere, Evicted, Registry, is_probably_read
from streams.engine.lifecycle import StreamState
from streams.engine.retry import patiently, surely
from streams.engine.stream import Stream
from streams.errors import Refusal, StoreAway, Unavailable, refusal
from streams.journal.contract import Journal
from streams.journal.records import Evict, Forget, Outcome, Record
from streams.journal.sessions import Grant
from streams.keys import Keyring
from streams.limits import Limits

EVICTED_AT_ONCE: Final = 64  # that go into one commit, which holds up those of calls
TOUCHED_MAX: Final = 1_000  # before a client that reads page after page waits for a commit
LOOK_AGAIN_S: Final = 1.0  # until streams that may still be confirmed are looked at again
LOOKED_AT_ONCE: Final = 100  # records
SWEPT_AT_ONCE: Final = 500  # records, then other tasks have their turn
PAUSE_S: Final = 0.05
# How late a stream may expire that another replica has evicted, before it died.
SWEPT_EVERY_S: Final = 10.0
LOADS_MAX: Final = 20  # of a stream that changes its owner
COUNTED_S: Final = 1.0  # how long the streams of other replicas are not counted again
COUNTED_MAX: Final = 10_000  # principals whose last count of evicted streams is kept
OLDEST_MAX: Final = 1_000  # principals of whose oldest streams the ids are kept

_number = attrgetter("number")

_T = TypeVar("_T")


class Owner(Protocol):
    """The holder of a journal's streams, as their cache sees it."""

    def load(self, record: Record, grants: Sequence[Grant], idle_since: float) -> Stream:
        """Hold an evicted stream, which no client has used since `idle_since` (trio's time)."""

    def evicted(self, stream: Stream) -> None:
        """A stream has left memory."""

    def doubt(self) -> None:
        """The journal may say that we own a stream which is not in memory."""

    async def be_sure(self) -> None:
        """Wait until it is known which streams are ours: after a pause others may have them.

        Raises `StoreAway` where that cannot be known.
        """

    async def has_waited(self) -> bool:
        """Wait until replicas have put back what a store that has gone back may have lost.

        False, at once, if it has not gone back. Else a lookup that found nothing may succeed now.
        """

    async def follow(self, record: Record) -> Stream | None:
        """The stream of a record that another replica owns, or that has just become ours.

        None where that has changed meanwhile.
        """

    def expire(self, stream: Stream) -> None:
        """A stream is past its deadline."""


class Cache:
    """The streams of an engine, in memory or evicted."""

    def __init__(
        self,
        journal: Journal,
        streams: Registry,
        committer: Committer,
        keyring: Keyring,
        limits: Limits,
        owner: Owner,
    ) -> None:
        self._journal = journal
        self._streams = streams
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self._owner = owner
        self._is_shared = bool(journal.replica)
        self.is_leaving = False  # this replica ends: it must own no stream any more
        self._started_at = trio.current_time()
        self._wall_ahead_s = WallAhead(trio.current_time)  # of trio's time, which deadlines are in
        # Streams that may be evicted, in the order of their last use.
        self._idle: dict[Stream, None] = {}
        self._loading: dict[str, trio.Event] = {}
        # Forgotten streams that the journal may still find, since that is not durable yet; and the
        # principals that it still counts them for, or "".
        self._forgotten: dict[str, str] = {}
        self._is_crowded = trio.Event()
        self._crowd = limits.resident_max + limits.resident_max // 10
        self._touched = 0  # since the last wait for a commit
        # To count the evicted streams of a principal takes long where they are many. So the last
        # count is kept, less `_evictions` of then: each eviction since has added one at most.
        self._counted: dict[str, int] = {}
        self._evictions = 0
        self._counted_at: dict[str, float] = {}  # in a shared journal
        # The oldest evicted streams of a principal that were read, by their numbers and in that
        # order. The journal may have more with higher numbers.
        self._oldest: dict[str, dict[int, Evicted]] = {}
        self._next_due_at = math.inf  # when the next evicted stream is due, in wall time
        self._is_earlier = trio.Event()  # an evicted stream is due before that

    # Finding and loading

    @property
    def _has_others(self) -> bool:
        """Whether there may be streams that are not in memory."""
        return self._is_shared or self._streams.evicted > 0

    async def find(self, stream_id: str) -> Stream | None:
        """The stream of this id."""
        await self._owner.be_sure()
        while True:
            stream = self._streams.get(stream_id)
            if stream is not None:
                self.used(stream)
                return stream
            if not self._may_be_evicted(stream_id):
                return None
            loading = self._loading.get(stream_id)
            if loading is None:
                return await self._load_surely(stream_id)
            await loading.wait()

    async def owned(self, stream_id: str, may_have: Callable[[str], bool]) -> Stream | None:
        """The stream of this id, if `may_have` says so of the principal that it belongs to.

        Any other stream stays evicted, and the answer takes as long as for an unknown id, so that
        timing leaks nothing: see `Lookups.principal_of`.
        """
        await self._owner.be_sure()
        stream = self._streams.get(stream_id)
        if stream is not None and may_have(stream.record.principal):
            self.used(stream)
            return stream
        if not self._has_others:
            return None
        principal = await self._surely(partial(self._journal.principal_of, stream_id)) or ""
        return await self.find(stream_id) if may_have(principal) else None

    async def load_for(self, name: bytes, principal: str, session_key: str) -> Stream | None:
        """The stream of this name, if it is evicted or another replica's, and belongs to this
        principal or this session was granted a response of it.

        Takes the same time for unknown names, so that timing leaks nothing.
        """
        if not self._has_others:
            return None
        await self._owner.be_sure()
        stream_id = await self._surely(partial(self._journal.named, name)) or ""
        is_theirs = await self._journal.principal_of(stream_id) == principal
        grants = await self._journal.grants(stream_id)
        if is_theirs or any(grant.session == session_key for grant in grants):
            return await self.find(stream_id)
        return None

    def begun(self, name: bytes) -> Stream | None:
        """The stream of this name, if it is in memory."""
        return self._streams.named(name)

    async def named(self, name: bytes) -> Stream | None:
        """The stream of this name (`Stream.names`), which is a hash of a token or a key."""
        await self._owner.be_sure()
        stream = self._streams.named(name)
        if stream is None and self._has_others:
            look_up = partial(self._journal.named, name, is_secret=True)
            stream_id = await self._surely(look_up)
            return None if stream_id is None else await self.find(stream_id)
        if stream is not None:
            self.used(stream)
        return stream

    async def _surely(self, look_up: Callable[[], Awaitable[_T | None]]) -> _T | None:
        return await surely(look_up, self._owner.has_waited)

    def check_leaving(self) -> None:
        """Raise `Refusal` where this replica ends: the client must ask another one."""
        if self.is_leaving:
            raise refusal("released")

    async def page(
        self, principal: str, after: int, size: int
    ) -> tuple[list[Stream | Record], int | None]:
        """A principal's wanted streams above a number, in the order of creation, and the number to
        continue from; records where they are evicted.
        """
        if self._touched >= TOUCHED_MAX:
            self._touched = 0
            await self._committer.settled()
        records: Sequence[Record] = ()
        if self._has_others:
            records = await self._journal.listed(principal, after=after, limit=size + 1)
        found: list[Stream | Record] = [r for r in records if self._may_be_evicted(r.stream)]
        found += self._streams.page(principal, after, size + 1)[0]
        found.sort(key=_number)
        if len(records) > size:  # the journal has more beyond the last of these records
            found = [each for each in found if each.number <= records[-1].number]
        if len(found) > size:
            return found[:size], found[size - 1].number
        return found, records[-1].number if len(records) > size else None

    async def wanted(self, principal: str, after: int) -> Sequence[Record]:
        """Some of a principal's wanted streams that are evicted: the first with numbers above
        `after`, in that order.
        """
        if not self._has_others:
            return []
        return await self._journal.listed(principal, after=after, limit=LOOKED_AT_ONCE)

    def _is_own(self, record: Record) -> bool:
        """Whether this replica owns a stream, which is in its memory now or soon."""
        return self._is_shared and record.owner == self._journal.replica

    def _may_be_evicted(self, stream_id: str) -> bool:
        """Whether a stream may be in the journal alone."""
        is_known = self._streams.get(stream_id) is not None or stream_id in self._forgotten
        return self._has_others and not is_known

    async def _load_surely(self, stream_id: str) -> Stream | None:
        """Load a stream, whose owner may change while it is looked for.

        `_loading` keeps other tasks from loading it meanwhile: a record that was read must not be
        used after the stream has changed.
        """
        done = self._loading[stream_id] = trio.Event()
        try:
            for _ in range(LOADS_MAX):
                stream = await self._load(stream_id)
                if stream is not None or not self._is_shared:
                    return stream
                if await self._surely(partial(self._journal.find, stream_id)) is None:
                    return None
                await trio.sleep(PAUSE_S)
        except (Unavailable, trio.Cancelled):  # perhaps after it was taken
            self._owner.doubt()
            raise
        finally:
            del self._loading[stream_id]
            done.set()
        raise StoreAway("the call goes from one replica to another")

    async def _load(self, stream_id: str) -> Stream | None:
        if self.is_leaving:
            raise StoreAway("this replica ends: others have its calls")
        record = await self._journal.take(stream_id)
        if record is not None and self._is_shared:
            is_ours = record.owner == self._journal.replica
            if not is_ours or record.due_at is None:
                return await self._owner.follow(record)
        if record is None or record.due_at is None:
            return None
        grants = await self._journal.grants(stream_id)
        names = self._keyring.names(stream_id)
        is_named = await self._journal.named(names[0]) == stream_id
        if (taken_over := self._streams.get(stream_id)) is not None:  # for a client that follows it
            return taken_over
        return self._loaded(record, grants, () if is_named else names)

    def _loaded(self, record: Record, grants: Sequence[Grant], names: tuple[bytes, ...]) -> Stream:
        """Hold a stream whose record was read; the journal does not have its `names` yet."""
        state = self._state_of(record)
        assert state.idle_since is not None
        stream = self._owner.load(record, grants, state.idle_since)
        self._streams.evicted -= 1
        stream.was_evicted = True
        self._oldest.get(record.principal, {}).pop(record.number, None)
        if names:
            # The keyring has a newer key than at eviction, and the next token is made under it. No
            # client may be told of that token before the journal finds the stream by it.
            stream.is_recorded = False
            self._committer.add(msgspec.structs.replace(self._eviction(stream, names), stays=True))
            self._committer.mark(stream, 0)
        self.used(stream)
        return stream

    # Deadlines of evicted streams

    def _state_of(self, record: Record) -> StreamState:
        """The state of an evicted stream, which no client has used since its eviction.

        "After a restart every stream gets a full `max`".
        """
        assert record.due_at is not None
        state = StreamState(record, self._limits)
        state.detach(self._started_at)
        assert state.deadline is not None
        since_start = record.due_at - self._wall_ahead_s() - state.deadline
        state.detach(min(trio.current_time(), self._started_at + max(0.0, since_start)))
        return state

    def touch(self, record: Record) -> StreamState:
        """The client of an evicted stream was heard of; returns the state that follows."""
        state = StreamState(record, self._limits)
        state.detach(trio.current_time())
        if record.due_at is None or record.owner:  # another replica has it in memory
            return state
        self._postpone(record, state)
        self._touched += 1
        return state

    def _postpone(self, record: Record, state: StreamState) -> None:
        """Move an evicted stream in the journal to the deadline of `state`."""
        due = state.deadline
        assert due is not None
        due_at = due + self._wall_ahead_s()
        self._committer.add(Evict(record.stream, record.fence, due_at, record.is_read))

    def _postpone_loaded(self, stream: Stream) -> None:
        """Move a stream in the journal that is in memory, which has the true deadline."""
        due = stream.deadline
        if due is None:
            due = trio.current_time() + stream.record.max_s
        due_at = due + self._wall_ahead_s()
        is_read = is_probably_read(stream)
        self._committer.add(Evict(stream.id, stream.record.fence, due_at, is_read, stays=True))

    # Evicting

    def used(self, stream: Stream) -> None:
        """A stream was used: it becomes the last to be evicted, if it may be at all."""
        self._idle.pop(stream, None)
        if self._is_idle(stream):
            self._idle[stream] = None
            if len(self._idle) > self._crowd:
                self._is_crowded.set()

    def lose(self, stream: Stream) -> None:
        """Another replica has taken over this stream."""
        self._idle.pop(stream, None)

    def forget(self, stream: Stream, *, may_wait: bool) -> None:
        """Nothing is kept of a stream; until that is durable, the journal would still find it."""
        self._idle.pop(stream, None)
        if stream.was_evicted:
            self._note_forgotten(stream.id, Evicted.of(stream.record).wanted_by, may_wait=may_wait)
        elif self._is_shared:  # where streams of ours are found too, which count for nobody
            self._note_forgotten(stream.id, "", may_wait=may_wait)

    def _note_forgotten(self, stream_id: str, wanted_by: str, *, may_wait: bool) -> None:
        self._forgotten[stream_id] = wanted_by
        # A replica may take it over twice, and forget it each time.
        is_durable = partial(self._forgotten.pop, stream_id, None)
        self._committer.when_settled(is_durable, may_wait=may_wait)

    async def run(self) -> None:
        """Evict streams when there are too many, and let evicted ones expire, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._evict)
            nursery.start_soon(self._sweep)

    async def _evict(self) -> None:
        """Evict streams when there are too many in memory, for ever.

        A commit of many costs little more than a commit of one. So the cache waits until a tenth
        more than may stay are there.
        """
        while True:
            await self._is_crowded.wait()
            self._is_crowded = trio.Event()
            while len(self._idle) > self._limits.resident_max:
                if self._evict_some():
                    await self._committer.settled()
                else:
                    await trio.sleep(LOOK_AGAIN_S)

    def _evict_some(self) -> bool:
        """Begin to evict the least recently used streams; whether any may be evicted now."""
        excess = len(self._idle) - self._limits.resident_max
        is_any = False
        for stream in list(islice(self._idle, min(excess, EVICTED_AT_ONCE))):
            if self._is_evictable(stream):
                del self._idle[stream]
                self._committer.mark(_Eviction(self, stream), 0)
                is_any = True
            else:
                self.used(stream)
        return is_any

    def _is_idle(self, stream: Stream) -> bool:
        """Whether the stream has ended and has no follower. A stream with pages never is idle."""
        record, state = stream.record, stream.state
        has_ended = state.outcome is not Outcome.LIVE and record.pages is None
        is_alone = stream.delivery is None and state.idle_since is not None
        is_here = self._streams.get(stream.id) is stream
        return has_ended and is_alone and record.is_announced and is_here

    def _is_evictable(self, stream: Stream) -> bool:
        """Whether nothing will happen to the stream before a client asks for it."""
        is_durable = stream.is_recorded and stream.state.durable == stream.state.last
        return (
            self._is_idle(stream)
            and is_durable
            and not stream.may_be_confirmed(trio.current_time())
        )

    def eviction(self, stream: Stream) -> Evict | None:
        """The change that evicts a stream as it is now; None where it may not be evicted."""
        if not self._is_evictable(stream):
            return None
        # In a shared journal its key leads to it since its record is stored, or by now to a newer
        # call that another replica has begun with the key.
        names = self._keyring.names(stream.id) if self._is_shared else stream.names
        return self._eviction(stream, names)

    def _eviction(self, stream: Stream, names: tuple[bytes, ...]) -> Evict:
        due = stream.deadline
        assert due is not None
        is_read = is_probably_read(stream)
        return Evict(stream.id, stream.record.fence, due + self._wall_ahead_s(), is_read, names)

    def evicting(self) -> None:
        """The eviction of a stream is committed now, or was: a count of before may lack it."""
        self._evictions += 1

    def evicted(self, stream: Stream, change: Evict) -> None:
        """A stream's eviction is durable, and nothing has happened to the stream meanwhile."""
        self._streams.evict(stream)
        self._owner.evicted(stream)
        oldest = self._oldest.get(stream.record.principal)
        if oldest and stream.number < next(reversed(oldest)):
            oldest.clear()  # it may be one of them
        if change.due_at < self._next_due_at:
            self._is_earlier.set()
        stream.is_evicted = True

    # Expiring evicted streams

    async def _sweep(self) -> None:
        """Let evicted streams expire, for ever."""
        while True:
            self._is_earlier = trio.Event()
            if await self._sweep_some():
                await trio.sleep(PAUSE_S)
            else:
                sweep_at = self._next_due_at - self._wall_ahead_s()
                if self._is_shared:
                    sweep_at = min(sweep_at, trio.current_time() + SWEPT_EVERY_S)
                with trio.move_on_at(sweep_at):
                    await self._is_earlier.wait()

    async def _sweep_some(self) -> bool:
        """Look at the evicted streams that are due first; whether any was due."""
        self._next_due_at = math.inf
        if self._is_shared:  # other replicas have evicted, loaded and forgotten some meanwhile
            self._streams.evicted = (await patiently(self._journal.totals)).evicted
        records = await patiently(lambda: self._journal.due(limit=SWEPT_AT_ONCE))
        is_any_due = False
        expired: list[Record] = []
        for record in records:  # without waiting: what is forgotten meanwhile cannot be postponed
            assert record.due_at is not None
            if record.due_at - self._wall_ahead_s() > trio.current_time():
                self._next_due_at = record.due_at
                break
            is_any_due = True
            if not self._postponed(record):
                expired.append(record)
        for record in expired:
            await self._expire(record)
        if is_any_due:
            await self._committer.settled()  # else the next sweep would find the same streams
        return is_any_due

    def _postponed(self, record: Record) -> bool:
        """Whether the stream of a record that is due need not expire; then it is due later."""
        if record.stream in self._forgotten:
            return True
        stream = self._streams.get(record.stream)
        if stream is not None:
            self._postpone_loaded(stream)
            return True
        state = self._state_of(record)
        assert state.deadline is not None
        if is_later := state.deadline > trio.current_time():
            self._postpone(record, state)
        return is_later

    async def _expire(self, record: Record) -> None:
        stream = await patiently(lambda: self.find(record.stream))
        if stream is not None and stream.record.due_at == record.due_at:
            self._owner.expire(stream)

    # Room for new streams

    async def make_room(self, principal: str) -> list[Stream]:
        """Forget what must be forgotten before this principal has one more stream; the caller
        forgets the streams that are returned, which are in memory.

        Raises `Refusal` where no stream can be chosen.
        """
        if not self._has_others:
            return [s for s in self._streams.make_room(principal) if isinstance(s, Stream)]
        with suppress(Refusal):
            return await self._make_room(principal)
        # The journal may lack the newest acks, which make streams unwanted.
        await self._committer.settled()
        return await self._make_room(principal)

    async def _make_room(self, principal: str) -> list[Stream]:
        elsewhere = Elsewhere(wanted=await self._wanted_about(principal))
        if self._streams.is_principal_full(principal, elsewhere):
            elsewhere.wanted = await self._count_wanted(principal)
        if self._streams.is_principal_full(principal, elsewhere):
            elsewhere.read = await self._oldest_read(principal)
        elif self._streams.is_server_full:
            elsewhere.unwanted = await self._oldest_unwanted()
        found: list[Stream] = []
        for chosen in self._streams.make_room(principal, elsewhere):
            if isinstance(chosen, Stream):
                found.append(chosen)
            elif not self._is_shared and chosen.id not in self._loading:
                self._forget_evicted(chosen)
            elif (stream := await self.find(chosen.id)) is not None:
                found.append(stream)
        return found

    def _forget_evicted(self, evicted: Evicted) -> None:
        """Forget a stream without loading it, with the next commit."""
        self._streams.evicted -= 1
        self._oldest.get(evicted.wanted_by, {}).pop(evicted.number, None)
        self._note_forgotten(evicted.id, evicted.wanted_by, may_wait=True)
        self._committer.add(Forget(evicted.id, evicted.fence), may_wait=True)

    async def _wanted_about(self, principal: str) -> int:
        """How many of the principal's streams elsewhere are wanted, often without a lookup.

        An upper bound; in a shared journal other replicas may have begun some for `COUNTED_S`.
        """
        if self._is_shared:
            now = trio.current_time()
            is_old = now - self._counted_at.get(principal, -math.inf) > COUNTED_S
            if is_old or principal not in self._counted:
                if len(self._counted_at) >= COUNTED_MAX:
                    self._counted_at.clear()
                self._counted_at[principal] = now
                return await self._count_wanted(principal)
            return self._counted[principal]
        total = self._streams.total
        if principal not in self._counted:
            return total
        return min(total, self._counted[principal] + self._evictions)

    async def _count_wanted(self, principal: str) -> int:
        evictions = self._evictions
        counted = await self._journal.count(principal)
        if len(self._counted) >= COUNTED_MAX:
            self._counted.clear()
        self._counted[principal] = counted - evictions
        return counted - sum(wanted_by == principal for wanted_by in self._forgotten.values())

    async def _oldest_read(self, principal: str) -> Evicted | None:
        """The oldest of the principal's wanted streams elsewhere that was probably read.

        A principal at its limit asks with each call, so the answers of one lookup are kept.
        """
        oldest = self._oldest.get(principal) or await self._look_for_read(principal)
        return next(iter(oldest.values()), None)

    async def _look_for_read(self, principal: str) -> Mapping[int, Evicted]:
        after = 0
        while records := await self._journal.listed(
            principal, after=after, limit=LOOKED_AT_ONCE, only_read=True
        ):
            evicted = [r for r in records if self._may_be_evicted(r.stream)]
            found = {r.number: Evicted.of(r) for r in evicted if not self._is_own(r)}
            if found:
                if not self._is_shared:  # there other replicas change them
                    if len(self._oldest) >= OLDEST_MAX:
                        self._oldest.clear()
                    self._oldest[principal] = found
                return found
            after = records[-1].number
        return {}

    async def _oldest_unwanted(self) -> Evicted | None:
        limit = LOOKED_AT_ONCE
        while records := await self._journal.due(limit=limit, only_unwanted=True):
            for record in records[limit - LOOKED_AT_ONCE :]:
                if self._may_be_evicted(record.stream):
                    return Evicted.of(record)
            if len(records) < limit:
                break
            limit += LOOKED_AT_ONCE
        return None


class _Eviction:
    """The eviction of one stream, as the committer sees it."""

    can_wait = False
    is_anonymous = False

    __slots__ = ("_cache", "_change", "_delivered", "_outcome", "_stream")

    def __init__(self, cache: Cache, stream: Stream) -> None:
        self._cache = cache
        self._stream = stream
        self._change: Evict | None = None

    def take(self) -> list[Evict]:
        """The change, behind all earlier ones of the stream, unless the stream was used since."""
        stream = self._stream
        self._delivered, self._outcome = stream.state.delivered, stream.state.outcome
        self._change = self._cache.eviction(stream)
        if self._change is None:
            return []
        stream.was_evicted = True
        self._cache.evicting()
        return [self._change]

    def committed(self, seq: int) -> None:
        stream, change = self._stream, self._change
        self._cache.evicting()
        is_same = (stream.state.delivered, stream.state.outcome) == (self._delivered, self._outcome)
        if change is not None and is_same and self._cache.eviction(stream) == change:
            self._cache.evicted(stream, change)
        else:
            self._cache.used(stream)
