"""All streams of an engine, and how each of them ends.

They may have begun in an earlier process: at the start the engine takes over those that the journal
has. Evicted ones are loaded when a client asks for them (`streams.engine.cache`).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import trio

from streams.engine.cache import Cache
from streams.engine.committer import Committer
from streams.engine.deadlines import Deadlines
from streams.engine.events import (
    CallInterrupted,
    CallReleased,
    Events,
    ResultAbandoned,
    SessionEnded,
)
from streams.engine.followed import FollowedStream
from streams.engine.index import Registry
from streams.engine.lifecycle import Event
from streams.engine.posts import ToOwner, ToReplica
from streams.engine.rerun import Rerun
from streams.engine.retry import at_start, patiently
from streams.engine.sessions import HttpSession, Sessions
from streams.engine.stream import Answer, Stream
from streams.errors import JournalUnusable, Refusal, refusal
from streams.journal.contract import Journal
from streams.journal.records import Outcome, Record
from streams.journal.sessions import Grant
from streams.keys import Keyring
from streams.limits import Limits, Overflow
from streams.logs import STREAM_LETTERS, log
from streams.messages import Message, RequestId

# How long the record of a call is kept back. A call that takes longer is worth a commit.
DEFERRAL_S: Final = 0.005
# A busy server begins many calls before it runs them. So after that time, all tasks that can run
# get so many turns more.
DEFERRAL_TURNS: Final = 2
STORED_AT_ONCE: Final = 100  # deferred streams, at 20 µs each; then other tasks have their turn

# How long a sum of bytes is used. A principal with thousands of streams may begin thousands more.
WEIGHED_EVERY_S: Final = 1.0


class Others(Protocol):
    """The other replicas of a journal that is shared, as its streams see them."""

    def here(self, stream_id: str) -> FollowedStream | None:
        """The stream of this id that is followed here."""

    async def follow(self, record: Record) -> Stream | None:
        """The stream of a record, which another replica owns; None if that is no longer so."""

    async def adopt(self, record: Record) -> Stream:
        """Hold a stream that this replica owns from now on."""

    def post(self, stream: str, post: ToOwner) -> None:
        """Send this to the owner of a stream."""

    def broadcast(self, post: ToReplica) -> None:
        """Send this to all other replicas."""

    def is_in_order(self, stream_id: str, waited_s: float) -> bool:
        """Whether a request for a stream, which has waited so long, is newer than all before it."""

    def doubt(self) -> None:
        """This replica may own streams that it does not know of."""

    async def be_sure(self) -> None:
        """Wait until it is known which streams this replica owns. Raises `StoreAway`."""

    async def has_waited(self) -> bool:
        """Wait until replicas have put back what the store may have lost. False if it has all."""


class Streams:
    """The streams of one journal. First `take_over`, then `run` in a task of its own."""

    def __init__(
        self,
        journal: Journal,
        committer: Committer,
        keyring: Keyring,
        limits: Limits,
        *,
        events: Events,
        deferral_s: float,
    ) -> None:
        """`deferral_s` is how long the record of a new stream may be kept back."""
        self.events = events
        self._journal = journal
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self.answers: dict[RequestId, Answer] = {}  # that the handlers of all streams wait for
        self.index = Registry(limits, keyring, replica=journal.replica)
        self.sessions = Sessions(journal, committer, keyring, limits, on_end=self._end_session)
        self.cache = Cache(journal, self.index, committer, keyring, limits, self)
        self._deadlines: Deadlines[Stream] = Deadlines(self.expire)
        self._deferral_s = deferral_s
        # Streams whose records are kept back, or were: those that wait now, and the next ones.
        self._due: dict[Stream, None] = {}
        self._deferred: dict[Stream, None] = {}
        self._has_deferred = trio.Event()
        self._weighed: dict[str, int] = {}  # undelivered bytes of each principal
        self._weighed_at = -math.inf
        self.lives = 1  # how many replicas live, which share the limit on bytes
        self.replicas: Others | None = None  # where the journal is shared
        # The principals of ended sessions: never more than there were sessions.
        self._over, self._next_over = trio.open_memory_channel[str](math.inf)

    async def take_over(self) -> list[Stream]:
        """Take over the streams of the journal; returns those whose calls are to be restarted."""
        count = self._journal.totals
        totals = await (count() if self.replicas is None else at_start(count))
        self.index.last_number, self.index.evicted = totals.last_number, totals.evicted
        if self.replicas is not None:  # it takes over what is free, and loads what is asked for
            return []
        for record in await self._journal.claim():
            try:
                self._take_over(record)
            except Refusal as refused:
                raise JournalUnusable(
                    f"The journal is damaged: the request of its stream {record.number} cannot be "
                    f"read ({str(refused).rstrip('.')}): restore it from a backup, or save what "
                    "`mcp-streams export` can read of it and move the file away."
                ) from refused
        self.sessions.take_over(*await self._journal.sessions(), self.index)
        unfinished = []
        for stream in self.index:
            if stream.rerun is not None:
                await stream.reopen_questions()
                unfinished.append(stream)
        return unfinished

    async def run(self) -> None:
        """Let streams expire, and evict them, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deadlines.run)
            nursery.start_soon(self.cache.run)
            nursery.start_soon(self._store_deferred)
            async for principal in self._next_over:
                await self._drop_evicted(principal)

    def _take_over(self, record: Record) -> None:
        stream = self._hold_stored(record, trio.current_time())
        if not record.is_announced:
            self._forget(stream)
        elif record.outcome is Outcome.LIVE and stream.rerun is None:
            self.interrupt(stream)

    def adopt(self, record: Record, grants: Sequence[Grant]) -> Stream:
        """Hold a stream of another replica that is gone. A call that cannot restart ends."""
        stream = self._hold_stored(record, trio.current_time())
        stream.was_evicted = record.due_at is not None
        self.sessions.load(stream, grants)
        is_live = record.outcome is Outcome.LIVE
        if not record.is_announced:
            self._forget(stream)
        elif is_live and (stream.rerun is None or not stream.rerun.is_whole):
            self.interrupt(stream)
        return stream

    def lose(self, stream: Stream) -> None:
        """Another replica has taken over this stream: its handler stops, and its client leaves."""
        if self.index.get(stream.id) is not stream:
            return
        was_released = stream.is_suspended  # at a shutdown, which has told it
        stream.lose()
        is_live = stream.state.outcome is Outcome.LIVE
        if self.events.is_heard and is_live and not was_released:
            self.events.tell(CallReleased(stream))
        stream.end_handler()
        self.index.remove(stream)
        self._deferred.pop(stream, None)
        self._due.pop(stream, None)
        self.cache.lose(stream)
        self._deadlines.forget(stream)
        self.sessions.forget(stream)
        if (delivery := stream.delivery) is not None:
            delivery.hang_up()

    async def follow(self, record: Record) -> Stream | None:
        """See `Owner.follow`."""
        assert self.replicas is not None
        if record.owner == self._journal.replica:
            return await self.replicas.adopt(record)
        return await self.replicas.follow(record)

    async def be_sure(self) -> None:
        """See `Owner.be_sure`."""
        if self.replicas is not None:
            await self.replicas.be_sure()

    async def has_waited(self) -> bool:
        """See `Owner.has_waited`."""
        return self.replicas is not None and await self.replicas.has_waited()

    def doubt(self) -> None:
        """See `Owner.doubt`."""
        if self.replicas is not None:
            self.replicas.doubt()

    def here(self, stream_id: str) -> Stream | None:
        """The stream of this id, if it is in memory, of this replica or followed."""
        stream = self.index.get(stream_id)
        if stream is None and self.replicas is not None:
            return self.replicas.here(stream_id)
        return stream

    def answer(self, stream: Stream, message: Message, session: str | None = None) -> None:
        """The client's answer to an open request of this stream.

        With `session`, that client must have been sent the request.
        """
        answer = self.answers.get(message.id) if isinstance(message.id, str) else None
        if answer is not None and answer.stream is stream:
            if session is not None and not stream.may_answer(answer, session):
                log.warning(
                    "an answer of another client was dropped", stream=stream.id[:STREAM_LETTERS]
                )
                return
            assert isinstance(message.id, str)
            question = stream.state.questions.pop(message.id, None)
            del self.answers[message.id]
            if question is not None:
                stream.answered(answer, question.seq, message)

    def load(self, record: Record, grants: Sequence[Grant], idle_since: float) -> Stream:
        """See `Owner.load`."""
        stream = self._hold_stored(record, idle_since)
        self.sessions.load(stream, grants)
        return stream

    def _hold_stored(self, record: Record, idle_since: float) -> Stream:
        """Hold a stream that the journal has, with no delivery attached."""
        stream = self.hold(record)
        self.index.name(stream)
        stream.is_recorded = True
        stream.state.detach(idle_since)
        if stream.state.is_tombstone or stream.state.is_drained:
            self.index.retire(stream)
        self._look_after(stream)
        return stream

    def hold(
        self, record: Record, overflow: Overflow = "block", origin: Message | None = None
    ) -> Stream:
        """Hold a stream in memory."""
        stream = Stream(
            record,
            self._limits,
            self._committer,
            self._keyring,
            answers=self.answers,
            on_stored=self.index.name,
            on_settled=self._settled,
            events=self.events,
            overflow=overflow,
            origin=origin,
        )
        if record.restart is not None:
            stream.rerun = Rerun(record, self._journal, self._committer, self._limits)
        self.index.add(stream)
        return stream

    def defer(self, stream: Stream, *, is_urgent: bool, is_needless: bool) -> None:
        """Keep the record of a new stream back, since the call may end very soon.

        With `is_urgent` only its announcement is kept back. If both are `is_needless`, they wait
        until a message needs them.
        """
        stream.is_deferred = True
        stream.is_held = self._deferral_s > 0
        if is_urgent or not stream.is_held:
            stream.store()
        if stream.is_held and not is_needless:
            self._deferred[stream] = None
            self._has_deferred.set()

    async def _store_deferred(self) -> None:
        """Store and release what was deferred for `deferral_s`, or up to twice that, for ever."""
        while True:
            await self._has_deferred.wait()
            self._has_deferred = trio.Event()
            self._due, self._deferred = self._deferred, {}
            await trio.sleep(self._deferral_s)
            for _ in range(DEFERRAL_TURNS):
                await trio.lowlevel.checkpoint()
            for number, stream in enumerate(list(self._due), 1):
                stream.store()
                stream.release()
                if number % STORED_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
            self._due.clear()

    async def make_room(self, principal: str) -> None:
        """Make room for one more stream of this principal. Raises `Refusal` at a limit."""
        self._check_bytes(principal)
        for forgotten in await self.cache.make_room(principal):
            if isinstance(forgotten, FollowedStream):
                self.drop(forgotten)
            # With the record of the new stream: otherwise its first message waits for two commits.
            self._forget(forgotten, may_wait=True)

    def _check_bytes(self, principal: str) -> None:
        """Raise `Refusal` where this principal has too many undelivered bytes, or just had."""
        limit = math.ceil(self._limits.bytes_per_principal_max / self.lives)
        now = trio.current_time()
        if now - self._weighed_at >= WEIGHED_EVERY_S:
            self._weighed_at = now
            self._weighed.clear()
        if limit and principal not in self._weighed:
            self._weighed[principal] = self.index.kept_bytes(principal)
        if limit and self._weighed[principal] >= limit:
            raise refusal("too_many_bytes", limit=limit)

    # How streams end

    def interrupt(self, stream: Stream) -> None:
        """End a call whose handler has ended with its process and cannot be restarted."""
        if self.events.is_heard:
            self.events.tell(CallInterrupted(stream))
        stream.fail(refusal("interrupted"))
        stream.end_handler()
        self.cache.used(stream)

    def suspend(self, stream: Stream) -> None:
        """The process ends: the call ends as well, or waits for its restart."""
        if self.ends_with_process(stream):
            self.interrupt(stream)
        elif stream.rerun is not None:
            if self.events.is_heard and not stream.is_suspended:
                self.events.tell(CallReleased(stream))
            stream.store()
            stream.tell_questions()
            stream.rerun.suspend(stream.state.last)
            stream.end_handler()

    @staticmethod
    def ends_with_process(stream: Stream) -> bool:
        """Whether this is a call that runs, and that no other process can continue."""
        is_live = stream.state.outcome is Outcome.LIVE
        return is_live and (stream.rerun is None or not stream.is_reachable)

    def cancel(self, stream: Stream, *, is_told: bool = False) -> None:
        """The client cancels the call. With `is_told` an operator does, and the client is told."""
        if isinstance(stream, FollowedStream):
            stream.stop(is_told=is_told)
        else:
            self._close(stream, Event.CANCEL, is_told=is_told)

    def _settled(self, stream: Stream) -> None:
        """A stream has lost its delivery, or its client has all of it."""
        if stream.is_deferred and stream.state.is_ended:
            self._forget(stream)  # its response is sent, and was all of it
            return
        if stream.is_deferred and stream.is_reachable:
            stream.store()  # its client is gone, and may look for its streams
        is_lost = stream.delivery is None and not stream.is_reachable
        if is_lost and stream.mark is None:
            self.drop(stream)
        elif is_lost and not stream.state.is_ended:
            self.cancel(stream)  # a retry with the same idempotency key is told so
        else:
            if stream.state.is_drained:
                self.index.retire(stream)
            self._look_after(stream)

    def _look_after(self, stream: Stream) -> None:
        """Watch the deadline of a stream, and consider it for eviction."""
        self._deadlines.watch(stream)
        self.cache.used(stream)

    def expire(self, stream: Stream) -> None:
        """See `Owner.expire`."""
        if self.index.get(stream.id) is not stream:
            return
        if stream.state.is_tombstone:
            self._forget(stream)
        else:
            log.debug("abandoned", stream=stream.id[:STREAM_LETTERS], max_s=stream.record.max_s)
            self._close(stream, Event.ABANDON)

    def _close(self, stream: Stream, event: Event, *, is_told: bool = False) -> None:
        """Abandon or cancel: the handler stops, the lines are deleted, a tombstone is kept."""
        is_known = self.index.get(stream.id) is stream
        is_over = stream.state.is_tombstone or (stream.state.is_ended and event is Event.CANCEL)
        if not is_known or is_over:
            return  # a post of another replica may come twice
        if not stream.record.is_announced:
            if is_told and stream.delivery is not None:
                stream.delivery.fail(refusal(Outcome.CANCELLED.value))
            self.drop(stream)
            return
        stream.store()
        if self.events.is_heard and stream.state.is_ended and not stream.state.is_drained:
            self.events.tell(ResultAbandoned(stream))
        self._committer.add(stream.close(event))
        stream.end_handler()
        self.index.retire(stream)
        delivery = stream.delivery
        if delivery is None:
            stream.state.detach(trio.current_time())
        elif delivery.reply_id is None and event is Event.CANCEL and not is_told:
            delivery.drop()  # MCP: no response to a request that its own client cancelled
        else:
            delivery.fail(refusal(stream.state.outcome.value))
        self._look_after(stream)

    def drop(self, stream: Stream) -> None:
        """Stop the handler and keep nothing: no client can resume the stream, or none needs to."""
        if isinstance(stream, FollowedStream):
            stream.stop(is_dropped=True)
            return
        stream.end_handler()
        self._forget(stream)
        if stream.delivery is not None:
            stream.delivery.drop()

    def replace(self, stream: Stream) -> None:
        """Drop an ended call, since it runs again. No client may wait for its response for ever."""
        if stream.delivery is not None:
            stream.delivery.fail(refusal("superseded"))
        self.drop(stream)

    def _forget(self, stream: Stream, *, may_wait: bool = False) -> None:
        if self.index.get(stream.id) is stream:
            self._deferred.pop(stream, None)  # most end so soon, and their memory is used again
            self._due.pop(stream, None)
            self.index.remove(stream)
            self.cache.forget(stream, may_wait=may_wait)
            self._deadlines.forget(stream)
            self.sessions.forget(stream)
            if (change := stream.forget()) is not None:
                # No client can come back to a stream that was not announced, and a start forgets
                # it: the next commit is soon enough.
                may_wait = may_wait or not stream.record.is_announced
                self._committer.add(change, may_wait=may_wait)

    def _end_session(self, session: HttpSession) -> None:
        if self.events.is_heard and session.began_at is not None:
            self.events.tell(SessionEnded(session, trio.current_time() - session.began_at))
        # A client with dialects was told resume tokens, and may resume without the session.
        if not session.settings.dialects:
            for stream in self.index.wanted(session.principal):
                is_found = stream.is_findable and not session.is_anonymous
                if session.has_begun(stream) and not (stream.outlives_session or is_found):
                    self.drop(stream)
            if session.is_anonymous:  # so all other streams of its principal are its own, too
                self._over.send_nowait(session.principal)

    async def _drop_evicted(self, principal: str) -> None:
        """Drop the streams of a session that is over: the evicted, and those of other replicas."""
        after = 0
        while records := await patiently(partial(self.cache.wanted, principal, after)):
            for record in records:
                stream = await patiently(partial(self.cache.find, record.stream))
                if stream is not None and not stream.outlives_session:
                    self.drop(stream)  # without waiting, so that it is not evicted again before
            await self._committer.settled()
            after = records[-1].number

    def evicted(self, stream: Stream) -> None:
        """See `Owner.evicted`."""
        self._deadlines.forget(stream)
        self.sessions.forget(stream)
