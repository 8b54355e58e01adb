"""Which of the streams that have ended stay in memory, and how the others come back into it.

A stream that runs, is followed, or has pages is in memory, always. Of the others, those that were
used last are, `Limits.resident_max` of them. The rest is put to rest: what the journal does not
know of them is written, and when that is durable and nothing has happened meanwhile, all of it
leaves memory. It comes back, as after a restart, when somebody asks for it.

Streams at rest that nobody came for in time are given up. They cost no memory, so nothing waits for
them in it: the journal has them in the order in which they are due. That was written when they went
to rest, and since deadlines only move on, what is due now may turn out to be due later: its client
may have asked for it, or the server have been started again. So it is looked at, and either put
back further down or given up.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final, Protocol

import trio

from streams.clock import wall
from streams.engine.committer import Committer
from streams.engine.index import Elsewhere, Registry, is_probably_read
from streams.engine.lifecycle import StreamState
from streams.engine.retry import patiently
from streams.engine.stream import Stream
from streams.errors import Refusal
from streams.journal.contract import Journal, Outcome, Record, Rest
from streams.journal.sessions import Grant
from streams.keys import Keyring
from streams.limits import Limits

RESTS_AT_ONCE: Final = 1_000  # that go into one commit
TOUCHED_MAX: Final = 1_000  # before who reads page after page waits for a commit
AGAIN_S: Final = 1.0  # until those are looked at again that may still be confirmed
LOOKED_AT_ONCE: Final = 100  # records
SWEPT_AT_ONCE: Final = 500  # then others have their turn
PAUSE_S: Final = 0.05

_number = attrgetter("number")


class Owner(Protocol):
    """What holds the streams of a journal, as their cache sees it."""

    def load(self, record: Record, grants: Sequence[Grant], idle_since: float) -> Stream:
        """Hold a stream again. Nobody has come for it since a time of trio's."""

    def evicted(self, stream: Stream) -> None:
        """A stream has left memory."""

    def expire(self, stream: Stream) -> None:
        """A stream is due to be given up."""


class Cache:
    """The streams of an engine, in memory or not."""

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
        self._started_at = trio.current_time()
        self.wall_ahead_s = wall() - self._started_at  # of trio's time, which deadlines are in
        self._idle: dict[Stream, None] = {}  # who may leave; the one that was used last is the last
        self._loading: dict[str, trio.Event] = {}
        self._gone: dict[str, Record] = {}  # forgotten, which the journal may not know yet
        self._is_crowded = trio.Event()
        self._crowd = limits.resident_max + limits.resident_max // 10
        self._touched = 0  # since a commit was waited for
        self._sweeper = Sweeper(journal, streams, self, committer, owner)

    # Found

    async def find(self, stream_id: str) -> Stream | None:
        """The stream of this id."""
        while True:
            stream = self._streams.get(stream_id)
            if stream is not None:
                self.note(stream)
                return stream
            if not self._is_away(stream_id):
                return None
            loading = self._loading.get(stream_id)
            if loading is None:
                return await self._load(stream_id)
            await loading.wait()

    async def owned(self, stream_id: str, may_have: Callable[[str], bool]) -> Stream | None:
        """The stream of this id, if `may_have` says so of the principal that it belongs to.

        Any other stream stays where it is, and the answer takes as long as for an unknown id: see
        `Lookups.principal_of`.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and may_have(stream.record.principal):
            self.note(stream)
            return stream
        if not self._streams.at_rest:
            return None
        principal = await self._journal.principal_of(stream_id) or ""
        return await self.find(stream_id) if may_have(principal) else None

    async def recall(self, name: bytes, principal: str, session_key: str) -> None:
        """Have the stream of this name back in memory, if it is this principal's, or this session
        was granted a response of it. As long as for any other it takes for one that there is not.
        """
        if not self._streams.at_rest:
            return
        stream_id = await self._journal.named(name) or ""
        is_theirs = await self._journal.principal_of(stream_id) == principal
        grants = await self._journal.grants(stream_id)
        if is_theirs or any(grant.session == session_key for grant in grants):
            await self.find(stream_id)

    async def named(self, name: bytes) -> Stream | None:
        """The stream of this name (`Stream.names`)."""
        stream = self._streams.named(name)
        if stream is None and self._streams.at_rest:
            stream_id = await self._journal.named(name)
            return None if stream_id is None else await self.find(stream_id)
        if stream is not None:
            self.note(stream)
        return stream

    async def page(
        self, principal: str, after: int, size: int
    ) -> tuple[list[Stream | Record], int | None]:
        """A principal's wanted streams above a number, in the order of creation, and the number to
        go on from; records where they are at rest.
        """
        if self._touched >= TOUCHED_MAX:
            self._touched = 0
            await self._committer.settled()
        records: Sequence[Record] = ()
        if self._streams.at_rest:
            records = await self._journal.listed(principal, after=after, limit=size + 1)
        found: list[Stream | Record] = [r for r in records if self._is_away(r.stream)]
        found += self._streams.page(principal, after, size + 1)[0]
        found.sort(key=_number)
        if len(records) > size:  # what lies beyond them was not looked at
            found = [each for each in found if each.number <= records[-1].number]
        if len(found) > size:
            return found[:size], found[size - 1].number
        return found, records[-1].number if len(records) > size else None

    def touch(self, record: Record) -> StreamState:
        """The client of a stream at rest was heard of; returns how that stands."""
        state = StreamState(record, self._limits)
        state.detach(trio.current_time())
        self.move(record, state)
        self._touched += 1
        return state

    def move(self, record: Record, state: StreamState) -> None:
        """A stream that has rested is due when `state` says, and not before."""
        due = state.deadline
        assert due is not None
        due_at = due + self.wall_ahead_s
        self._committer.add(Rest(record.stream, record.fence, due_at, record.is_read))

    def stand(self, record: Record) -> StreamState:
        """How a stream at rest stands. Nobody has come for it since it was put there.

        "After a restart every stream gets a full `max`".
        """
        assert record.due_at is not None
        state = StreamState(record, self._limits)
        state.detach(self._started_at)
        assert state.deadline is not None
        since_start = record.due_at - self.wall_ahead_s - state.deadline
        state.detach(min(trio.current_time(), self._started_at + max(0.0, since_start)))
        return state

    def keep(self, stream: Stream) -> None:
        """A stream that has rested is in memory: its row in the journal is of no use for now."""
        due = stream.deadline
        if due is None:
            due = trio.current_time() + stream.record.max_s
        due_at = due + self.wall_ahead_s
        is_read = is_probably_read(stream)
        self._committer.add(Rest(stream.id, stream.record.fence, due_at, is_read))

    def is_gone(self, stream_id: str) -> bool:
        """Whether a stream is forgotten, and the journal may not know yet."""
        return stream_id in self._gone

    def _is_away(self, stream_id: str) -> bool:
        """Whether a stream may be in the journal alone."""
        is_known = self._streams.get(stream_id) is not None or stream_id in self._gone
        return self._streams.at_rest > 0 and not is_known

    async def _load(self, stream_id: str) -> Stream | None:
        """One at a time: what was read of a stream must not be older than what becomes of it."""
        done = self._loading[stream_id] = trio.Event()
        try:
            record = await self._journal.find(stream_id)
            if record is None or record.due_at is None:
                return None
            grants = await self._journal.grants(stream_id)
            names = tuple(self._keyring.names(stream_id))
            is_named = await self._journal.named(names[0]) == stream_id
            return self._back(record, grants, () if is_named else names)
        finally:
            del self._loading[stream_id]
            done.set()

    def _back(self, record: Record, grants: Sequence[Grant], names: tuple[bytes, ...]) -> Stream:
        state = self.stand(record)
        assert state.idle_since is not None
        stream = self._owner.load(record, grants, state.idle_since)
        self._streams.at_rest -= 1
        stream.has_rested = True
        if names:
            # Its next token is made under a key that is newer than it is, and nobody may hear of
            # that token before it leads here.
            stream.is_recorded = False
            self._committer.add(self._rest(stream, names))
            self._committer.mark(stream, 0)
        self.note(stream)
        return stream

    # Put to rest

    def note(self, stream: Stream) -> None:
        """A stream was used: among those that may leave memory, it is the last to do so."""
        self._idle.pop(stream, None)
        if self._is_idle(stream):
            self._idle[stream] = None
            if len(self._idle) > self._crowd:
                self._is_crowded.set()

    def forget(self, stream: Stream) -> None:
        """Nothing is kept of a stream; until that is durable, the journal would still find it."""
        self._idle.pop(stream, None)
        if stream.has_rested:
            self._gone[stream.id] = stream.record
            self._committer.when_settled(partial(self._gone.pop, stream.id))

    async def run(self) -> None:
        """Put streams to rest when there are too many in memory, and give up those that are due,
        for ever.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sweeper.run)
            nursery.start_soon(self._evict)

    async def _evict(self) -> None:
        """Put streams to rest, for ever, when there are too many in memory.

        A commit of many costs little more than a commit of one, so a tenth more than may stay is
        let in before.
        """
        while True:
            await self._is_crowded.wait()
            self._is_crowded = trio.Event()
            while len(self._idle) > self._limits.resident_max:
                if self._let_go():
                    await self._committer.settled()
                else:
                    await trio.sleep(AGAIN_S)

    def _let_go(self) -> bool:
        """Let those go that have not been used for longest; whether any could."""
        excess = len(self._idle) - self._limits.resident_max
        has_let_go = False
        for stream in list(islice(self._idle, min(excess, RESTS_AT_ONCE))):
            if self._may_rest(stream):
                del self._idle[stream]
                self._committer.mark(_Leaving(self, stream), 0)
                has_let_go = True
            else:
                self.note(stream)
        return has_let_go

    def _is_idle(self, stream: Stream) -> bool:
        """Whether the stream has ended, and nobody follows it. Who has pages never is."""
        record, state = stream.record, stream.state
        has_ended = state.outcome is not Outcome.LIVE and record.pages is None
        is_alone = stream.delivery is None and state.idle_since is not None
        is_here = self._streams.get(stream.id) is stream
        return has_ended and is_alone and record.is_announced and is_here

    def _may_rest(self, stream: Stream) -> bool:
        """Whether nothing will happen to the stream before somebody asks for it."""
        is_durable = stream.is_recorded and stream.state.durable == stream.state.last
        return (
            self._is_idle(stream)
            and is_durable
            and not stream.may_be_confirmed(trio.current_time())
        )

    def rest(self, stream: Stream) -> Rest | None:
        """What is to be kept of a stream when it leaves; None where it may not."""
        if not self._may_rest(stream):
            return None
        return self._rest(stream, stream.names)

    def _rest(self, stream: Stream, names: tuple[bytes, ...]) -> Rest:
        due = stream.deadline
        assert due is not None
        is_read = is_probably_read(stream)
        return Rest(stream.id, stream.record.fence, due + self.wall_ahead_s, is_read, names)

    def leave(self, stream: Stream, rest: Rest) -> None:
        """The stream's rest is durable, and nothing has happened to it meanwhile."""
        self._streams.evict(stream)
        self._owner.evicted(stream)
        self._sweeper.note(rest)
        stream.is_at_rest = True

    # Room

    async def make_room(self, principal: str) -> list[Stream]:
        """What must be forgotten before this principal has one more stream.

        Raises `Refusal` where that would be something that is still wanted.
        """
        try:
            return await self._make_room(principal)
        except Refusal:
            if not self._streams.at_rest:
                raise
        # The journal may not know yet what was confirmed just now.
        await self._committer.settled()
        return await self._make_room(principal)

    async def _make_room(self, principal: str) -> list[Stream]:
        elsewhere = Elsewhere()
        if self._streams.at_rest:
            counted = await self._journal.count(principal)
            gone = sum(r.is_wanted and r.principal == principal for r in self._gone.values())
            elsewhere = Elsewhere(wanted=counted - gone)
            if self._streams.is_full(principal, elsewhere):
                elsewhere.read = await self._oldest_read(principal)
                elsewhere.leftover = await self._oldest_leftover()
        forgotten = self._streams.make_room(principal, elsewhere)
        found = [s if isinstance(s, Stream) else await self.find(s.stream) for s in forgotten]
        return [stream for stream in found if stream is not None]

    async def _oldest_read(self, principal: str) -> Record | None:
        after = 0
        while records := await self._journal.listed(
            principal, after=after, limit=LOOKED_AT_ONCE, only_read=True
        ):
            for record in records:
                if self._is_away(record.stream):
                    return record
            after = records[-1].number
        return None

    async def _oldest_leftover(self) -> Record | None:
        limit = LOOKED_AT_ONCE
        while records := await self._journal.due(limit=limit, only_leftover=True):
            for record in records[limit - LOOKED_AT_ONCE :]:
                if self._is_away(record.stream):
                    return record
            if len(records) < limit:
                break
            limit += LOOKED_AT_ONCE
        return None

    async def wanted(self, principal: str, after: int) -> Sequence[Record]:
        """Some of a principal's wanted streams that are at rest, by their numbers: those above
        `after`; none where there are none.
        """
        if not self._streams.at_rest:
            return []
        return await self._journal.listed(principal, after=after, limit=LOOKED_AT_ONCE)


class _Leaving:
    """One stream on its way out of memory, as the committer sees it."""

    can_wait = False
    is_anonymous = False

    __slots__ = ("_cache", "_delivered", "_outcome", "_rest", "_stream")

    def __init__(self, cache: Cache, stream: Stream) -> None:
        self._cache = cache
        self._stream = stream
        self._rest: Rest | None = None

    def take(self) -> Rest | None:
        """Its rest, behind all that was said of it before; None where it was used meanwhile."""
        stream = self._stream
        self._delivered, self._outcome = stream.state.delivered, stream.state.outcome
        self._rest = self._cache.rest(stream)
        stream.has_rested |= self._rest is not None
        return self._rest

    def committed(self, seq: int) -> None:
        stream, rest = self._stream, self._rest
        is_same = (stream.state.delivered, stream.state.outcome) == (self._delivered, self._outcome)
        if rest is not None and is_same and self._cache.rest(stream) == rest:
            self._cache.leave(stream, rest)
        else:
            self._cache.note(stream)


class Sweeper:
    """Gives up what is due among the streams at rest; `run` it in a task of its own."""

    def __init__(
        self,
        journal: Journal,
        streams: Registry,
        cache: Cache,
        committer: Committer,
        owner: Owner,
    ) -> None:
        self._journal = journal
        self._streams = streams
        self._cache = cache
        self._committer = committer
        self._owner = owner
        self._next_at = math.inf  # wall time
        self._is_earlier = trio.Event()

    def note(self, rest: Rest) -> None:
        """A stream was put to rest."""
        if rest.due_at < self._next_at:
            self._is_earlier.set()

    async def run(self) -> None:
        """Give up what is due, for ever."""
        while True:
            self._is_earlier = trio.Event()
            if await self._look():
                await trio.sleep(PAUSE_S)
            else:
                with trio.move_on_at(self._next_at - self._cache.wall_ahead_s):
                    await self._is_earlier.wait()

    async def _look(self) -> bool:
        """Look at those that are due first; whether any were due."""
        self._next_at = math.inf
        records = await patiently(lambda: self._journal.due(limit=SWEPT_AT_ONCE))
        is_any_due = False
        for record in records:
            assert record.due_at is not None
            if record.due_at - self._cache.wall_ahead_s > trio.current_time():
                self._next_at = record.due_at
                break
            await self._look_at(record)
            is_any_due = True
        if is_any_due:
            await self._committer.settled()  # else the same ones would come up again
        return is_any_due

    async def _look_at(self, record: Record) -> None:
        if self._cache.is_gone(record.stream):
            return
        stream = self._streams.get(record.stream)
        if stream is not None:
            self._cache.keep(stream)  # in memory it has a deadline of its own
            return
        state = self._cache.stand(record)
        assert state.deadline is not None
        if state.deadline > trio.current_time():
            self._cache.move(record, state)
            return
        stream = await patiently(lambda: self._cache.find(record.stream))
        if stream is not None and stream.record.due_at == record.due_at:
            self._owner.expire(stream)
