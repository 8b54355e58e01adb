"""The operations of clients on streams: resume, poll, ack, answer, cancel.

A stream belongs to the principal that made it. Any other caller needs its resume token, or, where
that principal is anonymous, its id. A caller without these learns nothing, not even that the stream
exists.

This is one file because the operations share their steps: find the stream, check what this client
may have of it, displace the delivery that is attached, and deliver from a position.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.clock import wall
from streams.engine.connection import Connection, Delivery, EventIds, Session
from streams.engine.identity import call_digest
from streams.engine.lifecycle import ProgressToken, StreamState
from streams.engine.posts import Acked, SessionAnswered, Taker, Touched
from streams.engine.sessions import EventId, HttpSession, parts_of
from streams.engine.stream import Follower, Stream
from streams.engine.streams import Streams
from streams.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    Missing,
    Overtaken,
    Refusal,
    StoreAway,
    refusal,
)
from streams.exchange import authenticated, is_anonymous
from streams.journal.contract import Journal
from streams.journal.records import Record
from streams.keys import Keyring, name_of, place_of
from streams.logs import STREAM_LETTERS, log
from streams.messages import Kind, Message, RequestId, Run
from streams.protocol.vocabulary import Announcement, Dialect, Poll, PollAll, Report, Resume

_QUESTION_ID: Final = re.compile(r"[A-Za-z0-9_-]+\.([0-9a-f]{32})", re.ASCII)
_CURSOR: Final = re.compile(r"after-([0-9]{1,18})")
POLL_PAGE_SIZE: Final = 100  # streams on one page of a poll of all
# How long a poll of all waits for records of new streams, which take a commit. After that it leaves
# them out. A client that joins a call waits as long for what the call has just sent.
RECORDED_S: Final = 1.0
MISSED_BYTES: Final = 64 * 1024  # of what a client missed that is read before it is told the rest
_PROGRESS: Final = "notifications/progress"


class Operations:
    """The operations on the streams of one engine."""

    def __init__(
        self,
        journal: Journal,
        streams: Streams,
        keyring: Keyring,
        *,
        enforce_min: bool,
        require_token: bool,
    ) -> None:
        """`require_token`: a stream's id alone opens it only to the principal that made it."""
        self._journal = journal
        self._streams = streams
        self._index = streams.index
        self._cache = streams.cache
        self._answers = streams.answers
        self._keyring = keyring
        self._enforce_min = enforce_min
        self._takes_bare_ids = not require_token

    def announcements(self, stream: Stream, speaks: tuple[Dialect, ...]) -> list[bytes]:
        """The lines that tell a client how to resume, in each dialect that it speaks."""
        record = stream.record
        if not (speaks and record.max_s):
            return []  # without making a token
        made = Announcement(
            stream=stream.id,
            token=self._keyring.token(stream.id),
            request_id=stream.request_id,
            min_s=record.min_s,
            max_s=record.max_s,
        )
        return [line for dialect in speaks if (line := dialect.announce(made))]

    def _beginning(
        self,
        stream: Stream,
        speaks: tuple[Dialect, ...],
        after: int,
        called_as: RequestId | None,
    ) -> list[bytes]:
        """The announcements that a delivery of what follows `after` begins with.

        An announcement names the original request. A client that has made the call again under
        another id does not know that request, so it gets none.
        """
        is_known = called_as is None or called_as == stream.request_id
        return self.announcements(stream, speaks) if after == 0 and is_known else []

    def resume(
        self,
        connection: Connection,
        stream: Stream,
        intent: Resume,
        *,
        reply_id: RequestId,
        speaks: tuple[Dialect, ...],
        takes_over: bool,
    ) -> None:
        """Deliver a stream over this connection from now on: the newest delivery wins.

        Do not await anything between `find` and this call. Raises `Refusal` where the messages
        behind the cursor are not there.
        """
        session = connection.session
        given = _cursor(stream, intent, connection.event_ids)
        _check_cursor(stream, given)
        check_free(session, reply_id, besides=stream)
        if not takes_over:
            _check_ids(stream, session)
        self._check_early(stream)
        after = stream.state.delivered if given is None else given
        if takes_over:
            stream.acknowledge(after)  # first, so that a refused cursor counts as an ack too
            _check_answerable(stream, after)
        elif reply_id == stream.request_id:
            # The resume has the original request's id, so one response answers both.
            takes_over = not stream.state.is_finished(after)
        self._displace(stream, connection, Taker(session.name, reply_id))
        stream.acknowledge(after)
        self._deliver(connection, stream, after, reply_id, speaks, takes_over=takes_over)

    async def load_page(self, token: str) -> Stream | None:
        """The stream of a page token, for `deliver_page`, which must follow without an `await`."""
        name, _ = place_of(token) or (b"", 0)
        if self._streams.replicas is None:
            return self._index.named(name)
        return await self._cache.named(name)

    def deliver_page(
        self,
        connection: Connection,
        stream: Stream | None,
        token: str,
        params: msgspec.Raw,
        *,
        reply_id: RequestId,
    ) -> Stream:
        """Deliver the page that a page token leads to, and the messages ahead of it.

        The client has made the same call again. Everything before that page counts as delivered.

        Raises the same `Refusal` for every token that leads to no page of this call.
        """
        session = connection.session
        stream, seq = self._check_page(session, stream, token, params)
        check_free(session, reply_id, besides=stream)
        self._displace(stream, connection, Taker(session.name, reply_id))
        stream.mark_delivered(seq)
        speaks = session.settings.dialects
        self._deliver(connection, stream, seq, reply_id, speaks, takes_over=True, is_call=True)
        return stream

    def retry(
        self, connection: Connection, stream: Stream, params: msgspec.Raw, *, reply_id: RequestId
    ) -> None:
        """Deliver the rest of a call to a client that repeats it with its idempotency key.

        The newest delivery wins.

        Raises `Refusal` where this is another call, or nothing of the first one is left to deliver.
        """
        session = connection.session
        check_free(session, reply_id, besides=stream)
        _check_same_call(stream, params)
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        after = stream.state.delivered
        _check_undelivered(stream, after)
        self._check_early(stream)
        self._displace(stream, connection, Taker(session.name, reply_id))
        speaks = session.settings.dialects
        self._deliver(connection, stream, after, reply_id, speaks, takes_over=True, is_call=True)

    async def calls(self, principal: str) -> list[Stream | Record]:
        """All streams of a principal that run, or whose messages it may lack; evicted ones as
        records. In the order of creation.
        """
        found: list[Stream | Record] = []
        last: int | None = 0
        while last is not None:
            some, last = await self._cache.page(principal, last, POLL_PAGE_SIZE)
            found += some
        return found

    async def load_call(self, stream_id: str) -> Stream | None:
        """The stream of this id, which `calls` has told; None where it is gone."""
        return await self._cache.find(stream_id)

    def is_here(self, stream: Stream) -> bool:
        """Whether this replica still owns or follows the stream, as this object."""
        return self._streams.here(stream.id) is stream

    async def join(
        self,
        connection: Connection,
        stream: Stream,
        *,
        reply_id: RequestId,
        token: ProgressToken | None,
        is_wait: bool,
        short_name: str = "",
        wait_s: float | None = None,
    ) -> None:
        """Deliver a call, from what no client was sent, to a client that waits for it again.

        Of the progress before this, only the latest is delivered, under this client's `token`. An
        ended call delivers its response, however often that was delivered. With `is_wait` the
        request is another call, and to cancel it does not cancel this one. The newest delivery
        wins. The client has found the call by its `short_name`, and waits for `wait_s` at most.
        Raises `Refusal` where nothing is left to deliver, `StoreAway` where the call has got
        another owner meanwhile.
        """
        session, state = connection.session, stream.state
        check_free(session, reply_id, besides=stream)
        stream.await_again(short_name)
        stream.leave()  # no more progress is numbered under the token of another client
        try:
            missed, after = await self._missed(stream)
            check_free(session, reply_id, besides=stream)  # it may have been taken meanwhile
            _check_kept(state, after)
            self._check_here(stream)
            self._displace(stream, connection, Taker(session.name, reply_id))
        except BaseException:
            stream.stay()
            raise
        preamble = [] if state.is_ended else latest_progress(stream, token)
        preamble += _told(missed)
        preamble += [asked.line for asked in state.questions.values() if asked.seq <= after]
        stream.let_answer(session, after)
        stream.progress_token = token
        connection.attach(
            Delivery(
                stream,
                connection,
                after=after,
                preamble=lambda: preamble,
                speaks=() if is_wait else session.settings.dialects,
                reply_id=reply_id,
                takes_over=True,
                is_call=True,
                is_wait=is_wait,
                wait_s=wait_s,
            )
        )
        stream.hand(missed, after)  # with the preamble: the tool may wait for room

    def _check_here(self, stream: Stream) -> None:
        """Raise `StoreAway` where the call has got another owner: this object hears of it no more.

        An evicted stream has ended, and the journal has all of it.
        """
        if not (self.is_here(stream) or stream.is_evicted):
            raise StoreAway("the call goes from one replica to another")

    async def _missed(self, stream: Stream) -> tuple[Sequence[Run], int]:
        """The lines that no client was sent, but the response; and the seq up to which.

        Where there are more than one read gives, the rest is delivered as it is.
        """
        state = stream.state
        with trio.move_on_after(RECORDED_S):  # a full journal takes longer
            await stream.flush()
        if state.is_paged:
            return (), stream.asked
        # The owner of a followed call may have told of its response, but not that it is one.
        last = state.last - 1 if state.is_ended else min(state.durable, stream.known_last)
        after = min(max(state.handed, state.delivered), last)
        runs: Sequence[Run] = ()
        if after < min(last, state.durable):
            runs = await self._read_missed(stream, after)
        missed = [run.until(last) for run in runs if run.seq <= last]
        return missed, missed[-1].last if missed else after

    async def response_of(self, stream: Stream) -> tuple[bytes, bool] | None:
        """The response of a call that has ended, and whether it is an error; None if it is gone."""
        runs = await self._read_missed(stream, stream.state.last - 1)
        return (runs[0].lines[0], stream.state.has_failed) if runs else None

    async def _read_missed(self, stream: Stream, after: int) -> Sequence[Run]:
        try:
            runs = await self._journal.read(stream.id, after, bytes_max=MISSED_BYTES)
        except Missing:
            if self._streams.replicas is None:
                raise
            return ()  # a store has lost them, perhaps for a moment: see `Connection._explain`
        return runs if runs and runs[0].seq == after + 1 else ()

    def replace(self, stream: Stream) -> None:
        """Forget an ended call, since the same call begins again under the same key.

        A client that has not got its response yet is told so.
        """
        self._streams.replace(stream)

    def end_connection(self, session: Session) -> None:
        """A connection has ended, whose principal was its own: only resume tokens and keys lead to
        its calls from now on.
        """
        if not session.settings.dialects:
            for stream in self._index.wanted(session.principal):
                if not stream.outlives_session:
                    self._streams.drop(stream)

    def _check_page(
        self, session: Session, stream: Stream | None, token: str, params: msgspec.Raw
    ) -> tuple[Stream, int]:
        _, seq = place_of(token) or (b"", 0)
        # The work is the same for unknown streams, so that timing leaks nothing.
        stream_id = token if stream is None else stream.id
        is_bound = stream is None or authenticated(stream.record.principal)
        call = call_digest(params, session.principal if is_bound else "")
        is_theirs = self._keyring.is_page_token_of(stream_id, seq, call, token)
        if stream is None or not is_theirs or seq not in stream.pages:
            raise refusal("invalid_token")
        return stream, seq

    def _deliver(
        self,
        connection: Connection,
        stream: Stream,
        after: int,
        reply_id: RequestId,
        speaks: tuple[Dialect, ...],
        *,
        takes_over: bool,
        is_call: bool = False,
    ) -> None:
        state = stream.state
        preamble = self._beginning(stream, speaks, after, reply_id if is_call else None)
        # Unanswered requests are sent again, even those below the cursor.
        preamble += [asked.line for asked in state.questions.values() if asked.seq <= after]
        stream.let_answer(connection.session, after)
        connection.attach(
            Delivery(
                stream,
                connection,
                after=after,
                preamble=lambda: preamble,
                speaks=speaks,
                reply_id=reply_id,
                takes_over=takes_over,
                is_call=is_call,
            )
        )

    def resume_response(self, connection: Connection, event: EventId) -> None:
        """Continue a response after the last event that the client has received.

        This deletes nothing and sends no request to the client again. Raises `Refusal` where the
        messages are not there, or the response was superseded or cancelled.
        """
        session, stream, granted = connection.session, self._stream_of(event), event.granted
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        if why := stream.why_ended(session.name, granted.name):
            raise refusal(why)
        _check_cursor(stream, event.seq)
        self._displace(
            stream, connection, Taker(session.name, self.request_id(event), granted.name)
        )
        speaks = session.settings.dialects
        called_as = granted.reply_id if granted.is_call else None
        delivery = Delivery(
            stream,
            connection,
            after=event.seq,
            preamble=lambda: self._beginning(stream, speaks, event.seq, called_as),
            speaks=speaks,
            reply_id=granted.reply_id,
            takes_over=granted.takes_over,
            is_call=granted.is_call,
            is_wait=granted.is_wait,
            granted=granted,
        )
        connection.attach(delivery)

    def _displace(self, stream: Stream, by: Connection, taker: Taker) -> None:
        """End the attached delivery, whether its connection lives or not: the newest wins.

        A request may have waited for the owner of the stream while its client has gone, and has
        come back over another connection. Then this one must not displace that. Raises `Refusal`,
        and `Overtaken` where that client must not get an error.
        """
        if not by.channel.is_writable():
            raise Refusal(INTERNAL_ERROR, "The connection is gone.")
        if (current := stream.delivery) is not None and self._is_late(by, current, stream):
            refused = refusal("superseded")
            if taker.is_same(current.taker):
                raise Overtaken(refused.code, refused.message, refused.data)
            raise refused
        if (displaced := stream.displace()) is not None:
            displaced.give_way(taker)

    def _is_late(self, by: Connection, current: Follower, stream: Stream) -> bool:
        """Whether the attached delivery was asked for after this request was sent."""
        if isinstance(current, Delivery):
            return by.asked_at < current.asked_at
        replicas, waited_s = self._streams.replicas, trio.current_time() - by.asked_at
        assert replicas is not None
        is_older = wall() - waited_s < current.attached_at
        return is_older and not replicas.is_in_order(stream.id, waited_s)

    async def load_question(self, message: Message) -> None:
        """Load the stream whose request this message answers, where another replica has it."""
        request_id = message.id
        if self._streams.replicas is None or not isinstance(request_id, str):
            return
        name = _QUESTION_ID.fullmatch(request_id)
        if name is not None and request_id not in self._answers:
            await self._cache.named(bytes.fromhex(name[1]))

    async def load(self, session: HttpSession, event_id: str) -> None:
        """Load the stream of this event id, if this session may resume it by event ids.

        Raises `StoreAway` where this replica ends, or cannot judge the event yet: HTTP has a status
        for that.
        """
        if self._cache.is_leaving:
            raise StoreAway("this replica ends: others have its calls")
        name, seq = parts_of(event_id)
        if name.hex() in session.streams:
            stream = await self._cache.named(name)
        else:
            stream = await self._cache.load_for(name, session.principal, session.key)
        if stream is not None and self._streams.replicas is not None:
            # Another replica may have granted the response.
            grants = await self._journal.grants(stream.id)
            if self._streams.here(stream.id) is stream:  # else nobody would forget it
                self._streams.sessions.load(stream, grants)
            _check_confirmed(stream, seq)

    def has_more(self, session: Session, event: EventId) -> bool:
        """Whether anything follows, or will follow, this event.

        Raises `Refusal` where there never was such an event.
        """
        stream = self._stream_of(event)
        if event.seq > stream.state.durable:
            raise refusal("cursor_ahead", lastSeq=stream.state.durable)
        granted = event.granted
        is_cancelled = stream.why_ended(session.name, granted.name) == "cancelled"
        if event.is_end or is_cancelled:
            return False
        stop = granted.stop or stream.state.answer_after(granted.start)
        if stream.state.is_tombstone or stop is None or event.seq < stop:
            return True
        # The reply to a resume follows the stream's response and has no event id. So the client may
        # lack it.
        replays = granted.reply_id is not None and not granted.takes_over
        return replays and session.settings.replay_response

    def request_id(self, event: EventId) -> RequestId:
        """The id of the request that this HTTP response answers."""
        reply_id = event.granted.reply_id
        return self._stream_of(event).request_id if reply_id is None else reply_id

    def _stream_of(self, event: EventId) -> Stream:
        stream = self._streams.here(event.stream)
        if stream is None:
            raise refusal("stream_not_found")
        return stream

    async def poll(
        self, session: Session, intent: Poll, event_ids: EventIds | None = None
    ) -> Report:
        """The status of a stream. Raises `Refusal` as `find` and `resume` do.

        "the Last-Event-ID header can be used to derive the point from which its view of streams
        will resume and poll from" (899): `event_ids` tell that point.
        """
        stream = await self.find(session, intent)
        after = _cursor(stream, intent, event_ids)
        _check_cursor(stream, after)
        self._check_early(stream)
        return self._report_loaded(stream, after)

    async def poll_all(self, session: Session, intent: PollAll) -> tuple[list[Report], str | None]:
        """The status of this principal's wanted streams: one page, and the next cursor."""
        cursor = _CURSOR.fullmatch("after-0" if intent.cursor is None else intent.cursor)
        if cursor is None:
            raise Refusal(
                INVALID_PARAMS, "Unknown cursor: send nextCursor unchanged, or no cursor."
            )
        look = partial(self._cache.page, session.principal, int(cursor[1]), POLL_PAGE_SIZE)
        found, last = await look()
        unrecorded = [s for s in found if isinstance(s, Stream) and not s.is_recorded]
        if unrecorded:
            # A client that is told of a stream may come back to it, whatever crashes.
            with trio.move_on_after(RECORDED_S):
                for stream in unrecorded:
                    await stream.recorded()
            found, last = await look()  # evicted streams of before may be forgotten now
        found = [await self._asked_about(each) for each in found]
        reports = [
            self._report_loaded(each) if isinstance(each, Stream) else self._report_evicted(each)
            for each in found
            if not isinstance(each, Stream) or each.is_recorded
        ]
        return reports, None if last is None else f"after-{last}"

    async def _asked_about(self, each: Stream | Record) -> Stream | Record:
        """The stream of a record, if another replica alone knows whether it waits for an answer."""
        if isinstance(each, Stream) or not (each.owner and each.last_request):
            return each
        return await self._cache.find(each.stream) or each

    def _report_loaded(self, stream: Stream, after: int | None = None) -> Report:
        stream.touch()
        return _report(stream.id, stream.request_id, stream.state, after)

    def _report_evicted(self, record: Record) -> Report:
        request_id = messages.parse(record.origin).id
        assert isinstance(request_id, int | str)
        if self._streams.replicas is not None and record.owner:
            self._streams.replicas.post(record.stream, Touched())
        return _report(record.stream, request_id, self._cache.touch(record))

    async def find(self, session: Session, intent: Resume | Poll) -> Stream:
        """The stream that is asked for. Raises `Refusal` where this client may not have it."""
        self._cache.check_leaving()
        stream = await self._theirs(session, intent)
        # A stream that was never announced ends with its connection, so it cannot be resumed.
        if stream is None or not stream.record.is_announced:
            raise refusal("stream_not_found")
        if isinstance(intent, Poll) and intent.request_id not in (None, stream.request_id):
            raise refusal("stream_not_found")
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        return stream

    async def _theirs(self, session: Session, intent: Resume | Poll) -> Stream | None:
        """The stream that is asked for, if this client may have it.

        "Servers should validate that clients have appropriate permissions to resume streams". The
        check takes the same time for unknown streams, so that timing leaks nothing.
        """
        token = intent.token
        if intent.stream is None:
            stream = None if token is None else await self._cache.named(name_of(token))
            is_theirs = stream and token and self._keyring.is_token_of(stream.id, token)
            return stream if is_theirs else None
        if token is None:

            def may_have(principal: str) -> bool:
                is_open = self._takes_bare_ids and is_anonymous(principal)
                return is_open or principal == session.principal

            return await self._cache.owned(intent.stream, may_have)
        # A token is checked without the journal, so a wrong one causes no lookup.
        is_theirs = self._keyring.is_token_of(intent.stream, token)
        return await self._cache.find(intent.stream) if is_theirs else None

    def _check_early(self, stream: Stream) -> None:
        early_s = stream.state.early_s(trio.current_time())
        if early_s > 0 and self._enforce_min:
            raise refusal("too_early", retryAfter=math.ceil(early_s))

    def ack(self, session: Session, stream_id: str, seq: int) -> None:
        """A client confirms what it has. An ack that it may not give is dropped."""
        stream, replicas = self._streams.here(stream_id), self._streams.replicas
        may_ack = session.settings.positions
        if may_ack and stream is not None and stream.confirm(session, seq):
            return
        if may_ack and replicas is not None:  # another replica may serve the client
            replicas.post(stream_id, Acked(seq, session.name))
        else:
            log.info(
                "an ack that does not count was dropped", stream=stream_id[:STREAM_LETTERS], seq=seq
            )

    def answer(self, session: Session, message: Message) -> None:
        """A client answers a request of the server. The first answer counts."""
        request_id = message.id if isinstance(message.id, str) else ""
        if session.answered(message):
            return
        answer = self._answers.get(request_id)
        question = None if answer is None else answer.stream.state.questions.get(request_id)
        if answer is None or question is None:
            self._pass_on(session, message)
            return
        stream = answer.stream
        is_theirs = stream.record.principal == session.principal
        if not is_theirs and not stream.may_answer(answer, session.name):
            if not stream.pass_answer(session.name, question.seq, message):
                log.warning(
                    "an answer of another client was dropped", stream=stream.id[:STREAM_LETTERS]
                )
            return
        # Removed now, before the handler wakes up: a second answer may be in the same batch.
        del self._answers[request_id], stream.state.questions[request_id]
        if not session.settings.positions:
            stream.confirm(session, question.seq)
        stream.answered(answer, question.seq, message)

    def _pass_on(self, session: Session, message: Message) -> None:
        """An answer to no request of this replica. Another one may have asked for no call."""
        replicas = self._streams.replicas
        is_of_call = _QUESTION_ID.fullmatch(str(message.id)) is not None
        if replicas is not None and isinstance(session, HttpSession) and not is_of_call:
            replicas.broadcast(SessionAnswered(session.key, messages.answer(message)))
        else:
            log.info("an answer to no open request was dropped", id=str(message.id)[:40])

    def answer_as(self, stream: Stream, message: Message) -> None:
        """The answer to an open request of a stream, which another stream has asked for it."""
        self._streams.answer(stream, message)

    def stop(self, stream: Stream, *, is_told: bool = False) -> None:
        """Cancel a call that no client wants; with `is_told` its client is told so."""
        self._streams.cancel(stream, is_told=is_told)

    def cancel(
        self,
        session: Session,
        request_id: RequestId,
        reason: Any = None,
        *,
        detaches: Callable[[Stream], bool] = lambda _: False,
    ) -> bool:
        """`notifications/cancelled`: stops the handler of a call, or detaches from a resume.

        Where it `detaches`, a call that may go on without a connection goes on without its client.
        Returns whether this client has such a request here.
        """
        if (checking := session.checking.pop(request_id, None)) is not None:
            checking.cancel()
            return True
        deliveries = list(session.deliveries)
        for delivery in deliveries:
            if delivery.reply_id == request_id:
                delivery.end_response("cancelled")
                is_stopped, stream = delivery.stands_for_call, delivery.stream
                if is_stopped and stream.record.max_s and detaches(stream):
                    stream.leave()
                    is_stopped = False
                delivery.drop()
                if is_stopped:
                    stream.cancel_reason = reason
                    self._streams.cancel(stream)
                return True
        # A newer resume of this client may have displaced the delivery before the cancel came. The
        # client may continue the older response all the same, which would displace the newer one.
        for stream_id, response in session.responses_to(request_id):
            if (older := self._streams.here(stream_id)) is not None:
                older.end_response(session.name, response, "cancelled")
        # A call of this connection is cancelled before one from elsewhere with the same id.
        for delivery in sorted(deliveries, key=lambda each: each.reply_id is not None):
            if delivery.stream.request_id == request_id and not delivery.is_wait:
                self._stop(delivery.stream, reason, detaches)
                return True
        for stream in reversed(self._index.wanted(session.principal)):
            is_meant = stream.request_id == request_id and session.has_begun(stream)
            if is_meant and not (_is_answered(stream.state) or stream.is_left):
                self._stop(stream, reason, detaches)
                return True
        return False

    def cancel_plainly(self, session: Session, request_id: RequestId, reason: Any) -> None:
        """As `cancel`, where no call detaches from its client."""
        self.cancel(session, request_id, reason)

    def _stop(self, stream: Stream, reason: Any, detaches: Callable[[Stream], bool]) -> None:
        """The client of a call wants it no more: cancel it, or leave it."""
        if not (stream.record.max_s and detaches(stream)):
            stream.cancel_reason = reason
            self._streams.cancel(stream)
            return
        stream.leave()
        if isinstance(delivery := stream.delivery, Delivery):
            delivery.end_response("cancelled")
            delivery.drop()


def _cursor(stream: Stream, intent: Resume | Poll, event_ids: EventIds | None) -> int | None:
    """The position that the client names, in its request or by its `Last-Event-ID`."""
    if intent.after is None and event_ids is not None:
        return event_ids.cursor(stream.id)
    return intent.after


def _is_answered(state: StreamState) -> bool:
    """Whether the original request was answered, if only with the first of many pages."""
    answer = state.answer_after(0)
    return answer is not None and answer <= state.handed


def _report(
    stream_id: str, request_id: RequestId, state: StreamState, after: int | None = None
) -> Report:
    flags = state.flags(after)
    return Report(
        stream=stream_id,
        request_id=request_id,
        is_live=flags.is_live,
        has_failed=flags.has_failed,
        has_pending=flags.pending_messages,
        has_request=flags.has_request,
        has_error=flags.has_error,
    )


# Checks before a stream is delivered. Each raises a `Refusal`.


def check_free(session: Session, request_id: RequestId, *, besides: Stream | None = None) -> None:
    """Raise `Refusal` if the id of a new request is in use.

    The delivery of `besides` does not count, because the new request displaces it.
    """
    if session.is_taken(request_id, besides=besides):
        raise Refusal(INVALID_REQUEST, "This id is in use by this client: use a new one.")


def _check_ids(stream: Stream, session: Session) -> None:
    """The response is replayed under the id of the original request, which must be unused."""
    if session.is_taken(stream.request_id, besides=stream):
        raise refusal("id_in_use")


def _check_answerable(stream: Stream, after: int) -> None:
    """A resume that takes over waits for the response, so there must be one left to deliver."""
    if stream.state.is_finished(after):
        raise refusal("messages_gone", earliestSeq=stream.state.delivered + 1).saying(
            "Nothing is left to resume: the client has confirmed everything, the response included."
        )


def latest_progress(stream: Stream, token: ProgressToken | None) -> list[bytes]:
    """The latest progress of a call under another token, for a client that wants progress."""
    if token is None or not stream.latest_progress:
        return []
    progress = messages.parse(stream.latest_progress)
    try:
        params = messages.decode(progress.params, dict[str, msgspec.Raw])
    except ValueError:
        return []  # a backend has sent it, and it is no progress
    return [messages.notification(_PROGRESS, {**params, "progressToken": token})]


def _check_same_call(stream: Stream, params: msgspec.Raw) -> None:
    """An idempotency key stands for one call, whatever its `_meta`."""
    first = messages.parse(stream.record.origin).params
    if call_digest(params, "") != call_digest(first, ""):
        raise Refusal(
            INVALID_PARAMS, "This idempotencyKey was used for another call: use a new one."
        )


def _told(missed: Sequence[Run]) -> list[bytes]:
    """The notifications among lines that a client has missed, but progress.

    Open questions are sent again in any case.
    """
    told = []
    for run in missed:
        for line in run.lines:
            message = messages.parse(line)
            if message.kind is Kind.NOTIFICATION and message.method != _PROGRESS:
                told.append(line)
    return told


def _check_kept(state: StreamState, after: int) -> None:
    """A client that joins a call needs what follows `after`, if only the response."""
    if state.is_tombstone:
        raise refusal(state.outcome.value)
    if state.is_finished(after) or after < state.delivered:
        raise refusal("messages_gone", earliestSeq=state.delivered + 1).saying(
            "The result of this call was delivered already, and is kept no longer."
        )


def _check_undelivered(stream: Stream, after: int) -> None:
    """A retry is for the first response. Further pages are reached by their page tokens."""
    if stream.state.is_finished(after) or (stream.state.is_paged and after):
        raise refusal("messages_gone", earliestSeq=after + 1).saying(
            "The result of the call with this idempotencyKey was delivered already: "
            "use a new key to make the call once more."
        )


def _check_cursor(stream: Stream, after: int | None) -> None:
    """A cursor N says "I have processed everything up to N". There is never a silent gap."""
    if after is None:
        return
    _check_confirmed(stream, after)
    if after > stream.state.durable:
        raise refusal("cursor_ahead", lastSeq=stream.state.durable)
    if after < stream.state.delivered:
        raise refusal("messages_gone", earliestSeq=stream.state.delivered + 1)


def _check_confirmed(stream: Stream, after: int) -> None:
    """A cursor that is numbered and not durable came from another replica: see `numbered`."""
    if stream.state.durable < after <= stream.numbered:
        raise StoreAway("the copies of the store have not confirmed the last messages yet")
