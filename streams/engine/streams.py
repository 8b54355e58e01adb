"""The streams of an engine, from when it holds them until nothing is kept of them.

Whoever held one before may have been another process: what the journal has is taken over, and comes
into memory when it is asked for.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from streams.engine.asking import Answer
from streams.engine.cache import Resting
from streams.engine.committer import Committer
from streams.engine.deadlines import Deadlines
from streams.engine.index import Registry
from streams.engine.lifecycle import Event
from streams.engine.rerun import Rerun
from streams.engine.retry import patiently
from streams.engine.sessions import HttpSession, Sessions
from streams.engine.stream import Stream
from streams.engine.sweeping import Sweeper
from streams.errors import refusal
from streams.journal.contract import Journal, Outcome, Record, Rest
from streams.journal.sessions import Grant
from streams.keys import Keyring
from streams.limits import Limits, Overflow
from streams.logs import log
from streams.messages import Message, RequestId

WEIGHED_EVERY_S: Final = 1.0  # who has thousands of streams may begin thousands of calls


class Holding:
    """Every stream of a journal. `restore` it first, then `run` it in a task of its own."""

    def __init__(
        self, journal: Journal, committer: Committer, keyring: Keyring, limits: Limits
    ) -> None:
        self._journal = journal
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self.answers: dict[RequestId, Answer] = {}
        self.streams = Registry(limits, keyring)
        self.sessions = Sessions(committer, keyring, limits, on_end=self._end_session)
        self.resting = Resting(
            journal,
            self.streams,
            committer,
            keyring,
            limits,
            revive=self._revive,
            on_rest=self._put_to_rest,
        )
        self._deadlines: Deadlines[Stream] = Deadlines(self._expire)
        self._sweeper = Sweeper(journal, self.streams, self.resting, committer, on_due=self._expire)
        self._weighed: dict[str, int] = {}  # the bytes that wait for each principal
        self._weighed_at = -math.inf
        # The principals of sessions that have ended, no more than there were sessions.
        self._over, self._next_over = trio.open_memory_channel[str](math.inf)

    async def restore(self) -> list[Stream]:
        """Take over what the journal has; returns those whose calls are to be run again."""
        totals = await self._journal.totals()
        self.streams.last_number, self.streams.at_rest = totals.last_number, totals.at_rest
        for record in await self._journal.claim():
            self._restore(record)
        self.sessions.restore(*await self._journal.sessions(), self.streams)
        unfinished = []
        for stream in self.streams:
            if stream.rerun is not None:
                await stream.rerun.recall(self.answers)
                unfinished.append(stream)
        return unfinished

    async def run(self) -> None:
        """Give up what nobody comes for, and put to rest what nobody uses, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deadlines.run)
            nursery.start_soon(self.resting.run)
            nursery.start_soon(self._sweeper.run)
            async for principal in self._next_over:
                await self._drop_at_rest(principal)

    def _restore(self, record: Record) -> None:
        stream = self._known(record, trio.current_time())
        if not record.is_announced:
            self._forget(stream)
        elif record.outcome is Outcome.LIVE and stream.rerun is None:
            self.interrupt(stream)

    def _revive(self, record: Record, grants: Sequence[Grant], idle_since: float) -> Stream:
        stream = self._known(record, idle_since)
        self.sessions.remember(stream, grants)
        return stream

    def _known(self, record: Record, idle_since: float) -> Stream:
        """A stream that the journal has, and that nobody follows."""
        stream = self.hold(record)
        stream.is_recorded = True
        stream.state.detach(idle_since)
        if stream.state.is_tombstone or stream.state.is_drained:
            self.streams.retire(stream)
        self._look_after(stream)
        return stream

    def hold(
        self, record: Record, overflow: Overflow = "block", origin: Message | None = None
    ) -> Stream:
        stream = Stream(
            record,
            self._limits,
            self._committer,
            self._keyring,
            answers=self.answers,
            on_settled=self._settled,
            overflow=overflow,
            origin=origin,
        )
        if record.restart is not None:
            stream.rerun = Rerun(stream, self._journal, self._committer, self._limits)
        self.streams.add(stream)
        return stream

    async def make_room(self, principal: str) -> None:
        """See to it that this principal may have one more stream. Raises `Refusal` where it may
        not.
        """
        self._check_bytes(principal)
        for forgotten in await self.resting.make_room(principal):
            self._forget(forgotten)

    def _check_bytes(self, principal: str) -> None:
        """Whether too much waits for this principal, or did a moment ago."""
        limit, now = self._limits.bytes_per_principal_max, trio.current_time()
        if now - self._weighed_at >= WEIGHED_EVERY_S:
            self._weighed_at = now
            self._weighed.clear()
        if limit and principal not in self._weighed:
            self._weighed[principal] = self.streams.kept_bytes(principal)
        if limit and self._weighed[principal] >= limit:
            raise refusal("too_many_bytes", limit=limit)

    # How streams end

    def interrupt(self, stream: Stream) -> None:
        """The handler dies with the process and may not be run again: its call ends here."""
        stream.fail(refusal("interrupted"))
        stream.scope.cancel()
        self.resting.note(stream)

    def leave_off(self, stream: Stream) -> None:
        """The process ends: its call ends here, or goes on when it is run again."""
        if stream.rerun is None:
            self.interrupt(stream)
        else:
            stream.rerun.suspend()
            stream.scope.cancel()

    def cancel(self, stream: Stream) -> None:
        """The client does not want it any more."""
        self._close(stream, Event.CANCEL)

    def _settled(self, stream: Stream) -> None:
        """A stream has lost its connection, or its client has all of it."""
        is_lost = stream.delivery is None and not stream.is_reachable
        if is_lost and stream.mark is None:
            self._drop(stream)
        elif is_lost and not stream.state.is_ended:
            self.cancel(stream)  # which its key shall tell
        else:
            if stream.state.is_drained:
                self.streams.retire(stream)
            self._look_after(stream)

    def _look_after(self, stream: Stream) -> None:
        """It is given up when nobody comes for it, and may leave memory before that."""
        self._deadlines.watch(stream)
        self.resting.note(stream)

    def _expire(self, stream: Stream) -> None:
        if self.streams.get(stream.id) is not stream:
            return
        if stream.state.is_tombstone:
            self._forget(stream)
        else:
            log.debug("abandoned", stream=stream.id[:8], max_s=stream.record.max_s)
            self._close(stream, Event.ABANDON)

    def _close(self, stream: Stream, event: Event) -> None:
        """Abandon or cancel: the work stops, the entries go, the memory of it stays a while."""
        is_known = self.streams.get(stream.id) is stream
        if not is_known or (stream.state.is_ended and event is Event.CANCEL):
            return
        if not stream.record.is_announced:
            self._drop(stream)
            return
        self._committer.add(stream.close(event))
        stream.scope.cancel()
        self.streams.retire(stream)
        delivery = stream.delivery
        if delivery is None:
            stream.state.detach(trio.current_time())
        elif delivery.reply_id is None and event is Event.CANCEL:
            delivery.drop()  # MCP: no response to a request that its own client cancelled
        else:
            delivery.fail(refusal(stream.state.outcome.value))
        self._look_after(stream)

    def _drop(self, stream: Stream) -> None:
        """Nobody can come back for it, or nobody needs to: the work stops and nothing is kept."""
        stream.scope.cancel()
        self._forget(stream)
        if stream.delivery is not None:
            stream.delivery.drop()

    def _forget(self, stream: Stream) -> None:
        if self.streams.get(stream.id) is stream:
            self.streams.remove(stream)
            self.resting.forget(stream)
            self._deadlines.forget(stream)
            self.sessions.forget(stream)
            self._committer.add(stream.forget())

    def _end_session(self, session: HttpSession) -> None:
        """Streams whose tokens the client was told may be resumed from elsewhere."""
        if not session.settings.dialects:
            for stream in self.streams.wanted(session.principal):
                is_kept = stream.state.is_paged or stream.is_open_to_key
                if session.has_begun(stream) and not is_kept:
                    self._drop(stream)
            if session.is_anonymous:  # what is at rest was its own
                self._over.send_nowait(session.principal)

    async def _drop_at_rest(self, principal: str) -> None:
        after = 0
        while records := await patiently(partial(self.resting.wanted, principal, after)):
            for record in records:
                stream = await patiently(partial(self.resting.find, record.stream))
                if stream is not None and not stream.is_open_to_key:
                    self._drop(stream)  # at once, before it is at rest again
            await self._committer.settled()
            after = records[-1].number

    def _put_to_rest(self, stream: Stream, rest: Rest) -> None:
        self._deadlines.forget(stream)
        self.sessions.forget(stream)
        self._sweeper.note(rest)
