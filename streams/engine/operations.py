"""What clients may do with a stream that is there: resume, poll, confirm, answer, cancel.

A stream belongs to the principal that made it; any other caller needs its token, or, where that
principal is anonymous, its id. A caller without these learns nothing, not even that there is such a
stream.
"""

import math
import re
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from streams import messages
from streams.engine.asking import Answer
from streams.engine.cache import Resting
from streams.engine.checks import (
    check_answerable,
    check_cursor,
    check_free,
    check_ids,
    check_same_call,
    check_undelivered,
)
from streams.engine.connection import Connection, CursorOf, no_cursor
from streams.engine.delivery import Delivery
from streams.engine.identity import call_digest
from streams.engine.index import Registry
from streams.engine.lifecycle import StreamState
from streams.engine.session import Session
from streams.engine.sessions import EventId, HttpSession, name_in
from streams.engine.stream import Stream
from streams.errors import INVALID_PARAMS, Refusal, refusal
from streams.exchange import authenticated, is_anonymous
from streams.journal.contract import Record
from streams.keys import Keyring, name_of, place_of
from streams.logs import log
from streams.messages import Message, RequestId
from streams.protocol.vocabulary import Announcement, Dialect, Poll, PollAll, Report, Resume

_CURSOR: Final = re.compile(r"after-([0-9]{1,18})")
PAGE: Final = 100  # streams on one page of a poll of all


class Access:
    """The streams of an engine, as clients reach them."""

    def __init__(
        self,
        streams: Registry,
        resting: Resting,
        keyring: Keyring,
        answers: dict[RequestId, Answer],
        *,
        enforce_min: bool,
        require_token: bool,
        on_cancel: Callable[[Stream], None],
    ) -> None:
        """`require_token`: a stream's id alone opens it to no caller but the one that made it."""
        self._streams = streams
        self._resting = resting
        self._keyring = keyring
        self._answers = answers
        self._enforce_min = enforce_min
        self._takes_bare_ids = not require_token
        self._on_cancel = on_cancel

    def announcements(self, stream: Stream, speaks: tuple[Dialect, ...]) -> list[bytes]:
        """What tells a client how to come back, in each dialect that it speaks."""
        record = stream.record
        if not (speaks and record.max_s):
            return []  # and a token is not worked out for nobody
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
        """What is announced ahead of the messages behind `after`.

        Who made the call again under another id knows nothing of the one that it would be about.
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
        """Deliver a stream, just found, over this connection from now on: the newest wins.

        Raises `Refusal` where it is not there from this cursor on.
        """
        session = connection.session
        given = connection.cursor_of(stream.id) if intent.after is None else intent.after
        check_cursor(stream, given)
        check_free(session, reply_id, besides=stream)
        if not takes_over:
            check_ids(stream, session)
        self._check_early(stream)
        after = stream.state.delivered if given is None else given
        if takes_over:
            stream.deliver(after)  # a client that has all of it is refused, but has said so
            check_answerable(stream, after)
        elif reply_id == stream.request_id:
            # Two responses cannot have one id: the stream's own, if it is to come, is the reply.
            takes_over = not stream.state.is_finished(after)
        _displace(stream, connection, reply_id)
        stream.deliver(after)
        self._deliver(connection, stream, after, reply_id, speaks, takes_over=takes_over)

    def turn(
        self,
        connection: Connection,
        token: str,
        params: msgspec.Raw,
        *,
        reply_id: RequestId,
    ) -> Stream:
        """Deliver the page that a token leads to, and what comes ahead of it, to who makes the same
        call again. What lies before that page is let go.

        Raises `Refusal` where the token leads to no page of that call: one answer, whatever it is.
        """
        stream, seq = self._find_page(connection.session, token, params)
        session = connection.session
        check_free(session, reply_id, besides=stream)
        _displace(stream, connection, reply_id)
        stream.turn(seq)
        speaks = session.settings.dialects
        self._deliver(connection, stream, seq, reply_id, speaks, takes_over=True, is_call=True)
        return stream

    def repeat(
        self, connection: Connection, stream: Stream, params: msgspec.Raw, *, reply_id: RequestId
    ) -> None:
        """Deliver what is not delivered of a call to who makes it again, under the key that has led
        here: the newest wins.

        Raises `Refusal` where this is another call, or nothing is left of that one.
        """
        session = connection.session
        check_free(session, reply_id, besides=stream)
        check_same_call(stream, params)
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        after = stream.state.delivered
        check_undelivered(stream, after)
        self._check_early(stream)
        _displace(stream, connection, reply_id)
        speaks = session.settings.dialects
        self._deliver(connection, stream, after, reply_id, speaks, takes_over=True, is_call=True)

    def _find_page(self, session: Session, token: str, params: msgspec.Raw) -> tuple[Stream, int]:
        name, seq = place_of(token) or (b"", 0)
        stream = self._streams.named(name)
        # As much is worked out for a stream that there is not: the time must not tell them apart.
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
        # An answer is still wanted, whatever the cursor says.
        preamble += [asked.line for asked in state.questions.values() if asked.seq <= after]
        stream.asking.note(connection.session, after)
        connection.attach(
            Delivery(
                stream,
                connection,
                after=after,
                preamble=preamble,
                speaks=speaks,
                reply_id=reply_id,
                takes_over=takes_over,
                is_call=is_call,
            )
        )

    def go_on(self, connection: Connection, told: EventId) -> None:
        """Deliver more of a response, from the event on that the client had last.

        Nothing is deleted, and no request to the client is sent again. Raises `Refusal` where the
        stream or the messages are gone, or the response has ended otherwise.
        """
        session, stream, granted = connection.session, self._told(told), told.granted
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        if granted.ended:
            raise refusal(granted.ended)
        check_cursor(stream, told.seq)
        if (current := stream.displace()) is not None:
            # The response goes on over here: its client must not hear that it failed.
            current.drop() if current.granted is granted else current.supersede(connection)
        speaks = session.settings.dialects
        called_as = granted.reply_id if granted.is_call else None
        delivery = Delivery(
            stream,
            connection,
            after=told.seq,
            preamble=self._beginning(stream, speaks, told.seq, called_as),
            speaks=speaks,
            reply_id=granted.reply_id,
            takes_over=granted.takes_over,
            is_call=granted.is_call,
            granted=granted,
        )
        connection.attach(delivery)

    async def recall(self, session: HttpSession, event_id: str) -> None:
        """Have the stream of this event id in memory, for what is asked next, if there is one that
        this session may go on with.
        """
        name = name_in(event_id)
        if name.hex() in session.streams:
            await self._resting.named(name)
        else:
            await self._resting.recall(name, session.principal, session.key)

    def has_more(self, session: Session, told: EventId) -> bool:
        """Whether there is, or will be, anything to say after this event.

        Raises `Refusal` where there never was such an event.
        """
        stream = self._told(told)
        if told.seq > stream.state.durable:
            raise refusal("cursor_ahead", lastSeq=stream.state.durable)
        if told.is_end or told.granted.ended == "cancelled":
            return False
        stop = told.granted.stop or stream.state.answer_after(told.granted.start)
        if stream.state.is_tombstone or stop is None or told.seq < stop:
            return True
        # A reply that follows a response of its own has no event id, and may not have come.
        replays = told.granted.reply_id is not None and not told.granted.takes_over
        return replays and session.settings.replay_response

    def request_id(self, told: EventId) -> RequestId:
        """Under which id the client waits for the end of this response."""
        reply_id = told.granted.reply_id
        return self._told(told).request_id if reply_id is None else reply_id

    def _told(self, told: EventId) -> Stream:
        stream = self._streams.get(told.stream)
        if stream is None:
            raise refusal("stream_not_found")
        return stream

    async def poll(self, session: Session, intent: Poll, cursor_of: CursorOf = no_cursor) -> Report:
        """How a stream stands. Raises `Refusal` as `find` and `resume` do.

        "the Last-Event-ID header can be used to derive the point from which its view of streams
        will resume and poll from" (899): `cursor_of` tells that point.
        """
        stream = await self.find(session, intent)
        after = cursor_of(stream.id) if intent.after is None else intent.after
        check_cursor(stream, after)
        self._check_early(stream)
        return self._stand(stream, after)

    async def poll_all(self, session: Session, intent: PollAll) -> tuple[list[Report], str | None]:
        """How this client's running and undelivered streams stand: a page, and the next cursor."""
        cursor = _CURSOR.fullmatch("after-0" if intent.cursor is None else intent.cursor)
        if cursor is None:
            raise Refusal(
                INVALID_PARAMS, "Not a cursor of ours: use nextCursor as it came, or none."
            )
        found, last = await self._resting.page(session.principal, int(cursor[1]), PAGE)
        reports = [
            self._stand(each) if isinstance(each, Stream) else self._stand_at_rest(each)
            for each in found
        ]
        return reports, None if last is None else f"after-{last}"

    def _stand(self, stream: Stream, after: int | None = None) -> Report:
        stream.state.touch(trio.current_time())
        return _report(stream.id, stream.request_id, stream.state, after)

    def _stand_at_rest(self, record: Record) -> Report:
        request_id = messages.parse(record.origin).id
        assert isinstance(request_id, int | str)
        return _report(record.stream, request_id, self._resting.touch(record))

    async def find(self, session: Session, intent: Resume | Poll) -> Stream:
        """The stream that is meant. Raises `Refusal` where it is not there for this client."""
        stream = await self._theirs(session, intent)
        # What was never announced ends with its own connection: there is nothing to come back to.
        if stream is None or not stream.record.is_announced:
            raise refusal("stream_not_found")
        if isinstance(intent, Poll) and intent.request_id not in (None, stream.request_id):
            raise refusal("stream_not_found")
        if stream.state.is_tombstone:
            raise refusal(stream.state.outcome.value)
        return stream

    async def _theirs(self, session: Session, intent: Resume | Poll) -> Stream | None:
        """The stream that is meant, if this client may have it.

        "Servers should validate that clients have appropriate permissions to resume streams". Nor
        may the time that it takes say whether there is one: what differs comes after that.
        """
        token = intent.token
        if intent.stream is None:
            stream = None if token is None else await self._resting.named(name_of(token))
            is_theirs = stream and token and self._keyring.is_token_of(stream.id, token)
            return stream if is_theirs else None
        if token is None:

            def may_have(principal: str) -> bool:
                is_open = self._takes_bare_ids and is_anonymous(principal)
                return is_open or principal == session.principal

            return await self._resting.owned(intent.stream, may_have)
        # A token follows from the id alone, so nothing is looked up for a wrong one.
        is_theirs = self._keyring.is_token_of(intent.stream, token)
        return await self._resting.find(intent.stream) if is_theirs else None

    def _check_early(self, stream: Stream) -> None:
        early_s = stream.state.is_early(trio.current_time())
        if early_s > 0 and self._enforce_min:
            raise refusal("too_early", retryAfter=math.ceil(early_s))

    def ack(self, session: Session, stream_id: str, seq: int) -> None:
        """A client confirms what it has; what is not its to confirm is dropped."""
        stream = self._streams.get(stream_id)
        if stream is None or not (session.settings.positions and stream.confirm(session, seq)):
            log.info("an ack that does not count was dropped", stream=stream_id[:8], seq=seq)

    def answer(self, session: Session, message: Message) -> None:
        """A response of the client to a request of ours: the first one counts."""
        request_id = message.id if isinstance(message.id, str) else ""
        answer = self._answers.get(request_id)
        question = None if answer is None else answer.stream.state.questions.get(request_id)
        if answer is None or question is None:
            log.info("an answer to no open request was dropped", id=str(message.id)[:40])
            return
        stream = answer.stream
        if stream.record.principal != session.principal and session not in answer.asked:
            log.warning("an answer from a stranger was dropped", stream=stream.id[:8])
            return
        # At once, before the handler wakes up: a second answer may be in the same batch.
        del self._answers[request_id], stream.state.questions[request_id]
        if not session.settings.positions:
            stream.confirm(session, question.seq)
        stream.asking.answered(answer, question.seq, message)

    def cancel(self, session: Session, request_id: RequestId) -> None:
        """`notifications/cancelled`: stops the work of a call, detaches from a resume."""
        if (checking := session.checking.pop(request_id, None)) is not None:
            checking.cancel()
            return
        deliveries = list(session.deliveries)
        for delivery in deliveries:
            if delivery.reply_id == request_id:
                if delivery.granted is not None:
                    delivery.granted.ended = "cancelled"
                delivery.drop()
                if delivery.stands_for_call:
                    self._on_cancel(delivery.stream)
                return
        # What is in flight here comes before what was made elsewhere under the same id.
        for delivery in sorted(deliveries, key=lambda each: each.reply_id is not None):
            if delivery.stream.request_id == request_id:
                self._on_cancel(delivery.stream)
                return
        for stream in reversed(self._streams.wanted(session.principal)):
            is_meant = stream.request_id == request_id and session.has_begun(stream)
            if is_meant and not _is_answered(stream.state):
                self._on_cancel(stream)
                return


def _displace(stream: Stream, by: Connection, reply_id: RequestId) -> None:
    """End the delivery that is attached now, noticed to be dead or not: the newest wins."""
    current = stream.displace()
    if current is None:
        return
    if current.connection.session is by.session and current.waiting_id == reply_id:
        current.drop()  # its client asks again, and must not hear under this id that it failed
    else:
        current.supersede(by)


def _is_answered(state: StreamState) -> bool:
    """Whether the originating request was, be it with the first of many pages."""
    answer = state.answer_after(0)
    return answer is not None and answer <= state.written


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
