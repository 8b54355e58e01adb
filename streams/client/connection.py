"""One connection of a client: it writes requests and acks, and routes every line that comes in.

Our servers send a header ahead of each run of a stream's messages, and the run goes to its call
undecoded. Every other line is decoded. A response goes to the task that waits for its id, progress
to the call with its token, and a notification that belongs to no call to `on_notification`. The
reader waits for nothing except a call that is full.

This is one file because the reader, the writer, the acks and the watch for a silent server share
the state of the connection.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.buffer import Batch, cut
from streams.client.call import NumberingBroken, RunningCall
from streams.client.wire import Hello
from streams.errors import INTERNAL_ERROR, CallFailed, Refusal, StreamGone, refusal
from streams.exchange import ClientChannel, RequestChannel, has_refused_length
from streams.logs import log
from streams.messages import (
    ENDS_BYTES,
    POSITION,
    Block,
    Incoming,
    Kind,
    Message,
    Position,
    RequestId,
    TooLarge,
    has_method,
    id_in,
    look,
)
from streams.protocol.ticket import Ticket

# How much may wait to be written; above it, `send` waits.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
ACK_EVERY_S: Final = 1.0

# A server of ours answers pings while its tools work, and writes to an idle response every 15 s. It
# is pinged after the first time without input, and given up after the second.
PING_AFTER_S: Final = 30.0
SILENCE_S: Final = 60.0

# The same for a client that is to notice a dead connection within seconds while a call waits.
SOON_PING_AFTER_S: Final = 2.0
SOON_SILENCE_S: Final = 5.0

# The same over HTTP, where a server of ours writes to an idle response every 15 s.
SOON_RESPONSE_SILENCE_S: Final = 20.0

# Other servers are pinged after this, and only while an answer is awaited.
FOREIGN_PING_AFTER_S: Final = 10.0

# The time to read what has come while this process was stopped, before the connection is given up.
LAST_LOOK_S: Final = 0.2

# The time to read why the server has ended the connection, once it takes nothing more.
LAST_WORD_S: Final = 1.0


class Calls:
    """The calls of a client that are running, or that were left and whose messages still come."""

    def __init__(self) -> None:
        self.by_id: dict[
            RequestId, RunningCall
        ] = {}  # the id of the original request is also its progress token
        self.by_stream: dict[str, RunningCall] = {}
        self._all: dict[RunningCall, None] = {}

    def __iter__(self) -> Iterator[RunningCall]:
        return iter(list(self._all))

    def add(self, call: RunningCall) -> None:
        """Add a call, or enter it under a stream id that was announced later."""
        self._all[call] = None
        self.by_id[call.request_id] = call
        if call.ticket is not None and call.ticket.stream:
            self.by_stream[call.ticket.stream] = call

    def remove(self, call: RunningCall) -> None:
        """Forget a call."""
        self._all.pop(call, None)
        if self.by_id.get(call.request_id) is call:
            del self.by_id[call.request_id]
        if call.ticket is not None and self.by_stream.get(call.ticket.stream) is call:
            del self.by_stream[call.ticket.stream]

    def of(self, ticket: Ticket) -> RunningCall | None:
        """The call that a ticket leads to, if this client has it."""
        calls = (each for each in self._all if each.ticket and each.ticket.leads_to_same(ticket))
        return next(calls, None)

    def __contains__(self, call: RunningCall) -> bool:
        return call in self._all

    def only_unnumbered(self) -> RunningCall | None:
        """The call that a message without a seq belongs to; None if it may be of several."""
        plain = [call for call in self._all if not call.is_numbered]
        return plain[0] if len(plain) == 1 else None


class Reply:
    """A response that a task waits for; None if the connection is lost before it.

    With `is_last`, a result counts only if it says that a delivery has ended. SEP-899 defines no
    reply to a resume, so another server may send one ahead of the messages, or none. `size` is that
    of the request, in bytes; 0 where it may be that of a call.
    """

    __slots__ = ("_is_here", "is_last", "message", "size")

    def __init__(self, *, is_last: bool = False, size: int = 0) -> None:
        self.is_last = is_last
        self.size = size
        self.message: Message | None = None
        self._is_here = trio.Event()

    def give(self, message: Message | None) -> None:
        self.message = message
        self._is_here.set()

    async def wait(self) -> Message | None:
        await self._is_here.wait()
        return self.message


class ClientConnection:
    """One connection. `run` lasts as long as it does."""

    def __init__(
        self,
        channel: ClientChannel,
        calls: Calls,
        answers: Answers,
        *,
        new_id: Callable[[], str],
        on_notification: Callable[[Message], None],
    ) -> None:
        self.hello = Hello("")
        self.is_numbering = False  # the server numbers what it sends over this connection
        self.is_over = False
        self.ended_by = ""  # why it is over, as far as the transport says
        self.was_useful = False  # a response or message came that was waited for
        self.was_silent = False  # it was given up because the server was silent
        self._channel = channel
        # `isinstance` of a protocol takes 9 µs, so the result is kept.
        self._requests = channel if isinstance(channel, RequestChannel) else None
        self._calls = calls
        self._answers = answers
        self._new_id = new_id
        self._on_notification = on_notification
        self._replies: dict[RequestId, Reply] = {}
        self._announcements = wire.announcements()
        self._endings = wire.endings()
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._longest_bytes = 0  # the longest line that was queued
        self._due: dict[RunningCall, None] = {}  # to be acked in the next write
        self._later: dict[RunningCall, None] = {}  # to be acked within a second
        self._has_work = trio.Event()
        self._has_later = trio.Event()
        self._moved = trio.Event()
        self._is_writing = False
        self._turns_pages = False
        self._pages_asked = 0  # requests for pages without a response yet
        self._run_left = 0  # lines of the current run that are still to come
        self._run_seq = 0
        self._run_stream = ""
        self._run_call: RunningCall | None = None
        self._is_held_up = False
        self._heard_at = trio.current_time()
        self._scope = trio.CancelScope()

    # Running

    async def run(self) -> None:
        """Read and write until either fails or `hang_up` is called."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_forever)
                    nursery.start_soon(self._acknowledge_forever)
                    await self._read_forever()
        finally:
            self.is_over = True
            for call in self._calls:
                if call.connection is self:
                    self.note_event(call)
            for reply in self._replies.values():
                reply.give(None)
            self._stir()

    def hang_up(self) -> None:
        """Close the connection."""
        self.is_over = True
        self._scope.cancel()

    # Whether the server is alive

    async def watch(self, silence_s: float, usual_s: float, is_watchful: bool = False) -> None:
        """Close the connection if the server is silent and does not answer a ping.

        Another server than ours may be busy and not dead. It is given up only while an answer is
        awaited, and only if every call can be resumed. It has `silence_s`; once something useful
        has come, `usual_s` if that is less. With `is_watchful` a server of ours has 5 s while an
        answer is awaited, and a response over HTTP 20 s.
        """
        is_ours = self.hello.has_positions
        may_be_soon = is_watchful and is_ours
        soon_silence_s = SOON_SILENCE_S if self._requests is None else SOON_RESPONSE_SILENCE_S
        since, is_said = trio.current_time(), False
        while True:
            if not (is_ours or self._awaited()):
                await self._moved.wait()
                since, is_said = trio.current_time(), False
                continue
            is_soon = may_be_soon and bool(self._awaited())
            ping_after_s = PING_AFTER_S if is_ours else min(FOREIGN_PING_AFTER_S, silence_s / 2)
            ping_after_s = SOON_PING_AFTER_S if is_soon else ping_after_s
            quiet_from = max(since, self._quiet_from())
            if is_said or self._is_held_up:  # held up: this client does not read
                is_said &= quiet_from == since
                await trio.sleep(ping_after_s)
                continue
            if trio.current_time() < quiet_from + ping_after_s:
                with trio.move_on_at(quiet_from + ping_after_s):
                    if may_be_soon and not is_soon:
                        await self._moved.wait()  # a call may begin
                    else:
                        await trio.sleep_forever()
                continue
            limit_s = min(silence_s, usual_s) if self.was_useful else silence_s
            if is_ours:
                limit_s = soon_silence_s if is_soon else SILENCE_S
            if await self._shows_life(quiet_from, quiet_from + limit_s) or self._is_held_up:
                since = trio.current_time()
            elif is_ours or all(call.is_resumable for call in self._awaited_calls()):
                log.info("the server is silent", limit_s=limit_s)
                self._give_up_silent()
                return
            else:
                self._answers.warnings.warn(
                    "the server is silent, and a call that cannot be resumed waits for it"
                )
                since, is_said = self._quiet_from(), True

    def _awaited_calls(self) -> list[RunningCall]:
        return [call for call in self._calls if call.connection is self and call.is_running]

    def _awaited(self) -> list[RequestId]:
        """The ids of the requests that wait for a response."""
        return [*self._replies, *(call.delivery_id for call in self._awaited_calls())]

    def _quiet_from(self) -> float:
        """The time of the last input; over HTTP, that of the response that was silent longest."""
        if self._requests is None:
            return self._heard_at
        heard = map(self._requests.heard_at, self._awaited())
        return min((at for at in heard if at is not None), default=self._heard_at)

    async def _shows_life(self, quiet_from: float, deadline: float) -> bool:
        """Whether anything comes before the deadline, a pong included."""
        with trio.CancelScope(deadline=deadline):
            if self._requests is not None and self._awaited():
                # A ping would have a response of its own, and would say nothing about the awaited
                # ones.
                await trio.sleep_until(deadline)
            elif self.hello.has_positions or not await self._channel_answers():
                await self.ask("ping", {})
            return True
        await trio.sleep(LAST_LOOK_S)
        return self._quiet_from() > quiet_from

    async def _channel_answers(self) -> bool:
        """Whether the transport has pings of its own, and one is answered."""
        try:
            return await self._channel.ping()
        except trio.BrokenResourceError:
            return True  # the reader sees it too

    def _give_up_silent(self) -> None:
        self.was_silent = True
        self.abandon("the server is silent")

    def abandon(self, why: str) -> None:
        """Close the connection, but not the session: the server may still work for it."""
        if self._requests is not None:
            self._requests.abandon(why)
        else:
            self.hang_up()

    # Sending

    def prepare_resume(
        self, request_id: RequestId, call: RunningCall, *, may_lack_reply: bool
    ) -> None:
        """Called ahead of a resume request. `may_lack_reply`: it may end without a response of its
        own.
        """
        if self._requests is not None:
            self._requests.prepare(
                request_id, call.last_event_id, is_resume=True, may_lack_reply=may_lack_reply
            )

    def listen(self) -> None:
        """Receive notifications that belong to no call, where they do not come by themselves."""
        if self._requests is not None:
            self._requests.listen()

    def note_event(self, call: RunningCall) -> None:
        """Keep the last event id of a call that is attached to this connection."""
        if self._requests is not None:
            last_event_id = self._requests.last_event_id(call.delivery_id)
            call.last_event_id = last_event_id or call.last_event_id

    async def ask(
        self, method: str, params: Mapping[str, Any], about: RunningCall | None = None
    ) -> Message | None:
        """Send a request and wait for its response; None if the connection is lost before it.

        `about` is the call that the request asks about, if any.
        """
        request_id = self._new_id()
        if about is not None and self._requests is not None:
            if about.connection is self:
                self.note_event(about)
            self._requests.prepare(request_id, about.last_event_id)
        is_page = method == "tools/call"
        self._turns_pages |= is_page
        self._pages_asked += is_page
        try:
            line = messages.request(request_id, method, params)
            await self.send(line)
            return await self.reply_to(request_id, size=len(line))
        finally:
            self._pages_asked -= is_page

    async def reply_to(
        self, request_id: RequestId, *, is_last: bool = False, size: int = 0
    ) -> Message | None:
        """Wait for the response to a request; None if the connection is lost before it.

        With `is_last`, the response comes behind the messages of a stream (see `Reply`).
        """
        if self.is_over:
            return None
        reply = self._replies[request_id] = Reply(is_last=is_last, size=size)
        try:
            return await reply.wait()
        finally:
            self._replies.pop(request_id, None)
            if self._requests is not None:
                self._requests.settle(request_id)

    async def send(self, line: bytes) -> None:
        """Queue a line to be written, when there is room. It may be lost with the connection."""
        while self._outbox_bytes > OUTBOX_BYTES_MAX and not self.is_over:
            await self._moved.wait()
        self.post(line)

    def post(self, line: bytes) -> None:
        """Queue a line to be written, without waiting for room: for few and small lines."""
        self._outbox.append(line)
        self._outbox_bytes += len(line)
        self._longest_bytes = max(self._longest_bytes, len(line))
        self._has_work.set()

    def want_ack(self, call: RunningCall, *, now: bool) -> None:
        """Ack what was taken of a call, in the next write or within a second."""
        if now:
            self._later.pop(call, None)
            self._due[call] = None
            self._has_work.set()
        else:
            self._later[call] = None
            self._has_later.set()

    async def drained(self) -> None:
        """Wait until everything is written, or the connection is lost."""
        while (self._outbox or self._due or self._is_writing) and not self.is_over:
            await self._moved.wait()

    async def _write_forever(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            acks = [call.ack() for call in self._due]
            lines = b"".join(itertools.chain(self._outbox, acks))
            self._outbox, self._outbox_bytes = [], 0
            self._due.clear()
            if not lines:
                self._stir()
                continue
            self._is_writing = True
            try:
                await self._channel.send(lines)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await self._hear_last_word()
            self._is_writing = False
            self._stir()

    async def _hear_last_word(self) -> None:
        """Nothing can be written any more. The reader finds the reason, or the time is over."""
        self.is_over = True
        self._stir()
        await trio.sleep(LAST_WORD_S)
        self.hang_up()

    async def _acknowledge_forever(self) -> None:
        while True:
            await self._has_later.wait()
            await trio.sleep(ACK_EVERY_S)
            self._has_later = trio.Event()
            for call in list(self._later):
                self.want_ack(call, now=True)

    def _stir(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    # Receiving

    async def _read_forever(self) -> None:
        try:
            while True:
                received = await self._channel.receive_blocks()
                self._heard_at = trio.current_time()
                for block in received:
                    await self._route(block)
        except (trio.EndOfChannel, trio.ClosedResourceError) as end:  # the usual end
            self.ended_by = str(end)
            if has_refused_length(self._channel):
                self._refuse_longest()
        except NumberingBroken as error:
            self._answers.warnings.warn("the server broke the protocol", error=str(error))
        self.hang_up()

    async def _route(self, block: Block | TooLarge) -> None:
        if isinstance(block, TooLarge):
            await self._take(Batch.of(block))
            return
        at = block.start
        while at < block.end:
            batch, at = cut(block, at, self._run_left)
            if batch.count:
                await self._take(batch)

    async def _take(self, batch: Batch) -> None:
        call = self._continue_run(batch) if self._run_left else self._take_line(batch.last)
        if call is not None and call.is_full:
            self._is_held_up = True
            await call.wait_for_room()
            self._is_held_up = False

    def _continue_run(self, batch: Batch) -> RunningCall | None:
        call, seq = self._run_call, self._run_seq
        self._run_left -= batch.count
        self._run_seq += batch.count
        if call is not None:
            self.was_useful = True
            call.take_run(seq, batch)
        elif self._run_stream not in self._calls.by_stream:
            for line in batch.lines:  # the stream is unknown, but the call may be known
                self._take_line(line)
        # Otherwise the call was resumed since the run began, and the resume replays it from its
        # start.
        return call

    def _take_line(self, line: Incoming) -> RunningCall | None:
        """Route a line that belongs to no run; return the call if it belongs to one."""
        if isinstance(line, TooLarge):
            self._lose(line)
            return None
        try:
            message = look(line)
        except (ValueError, RecursionError) as error:
            mended = messages.mend(line)
            if mended is not None:
                return self._take_line(mended)
            self._refuse_line(line, error)
            return None
        if message.kind is Kind.NOTIFICATION:
            return self._notified(message, line)
        if not isinstance(message.id, int | str):
            self._answers.warnings.warn(
                "the server sent a message without a usable id", **_what(message)
            )
            return None
        if message.kind is Kind.REQUEST:
            asks = self._whose_unnumbered()
            self._answers.take(message, message.id, self, asks)
            return None
        return self._responded(message, message.id, line)

    def _refuse_line(self, line: bytes, error: Exception) -> None:
        """A line that cannot be read ends the wait for its own response, and no other one."""
        self._answers.warnings.warn(
            "the server sent a line that is no JSON-RPC message", error=str(error)
        )
        head, tail = line[:ENDS_BYTES], line[-ENDS_BYTES:]
        request_id = None if has_method(head) else id_in(head, tail)
        if request_id is not None:
            why = (
                "The server sent an answer that is no JSON-RPC, and cannot be mended: see the log."
            )
            self._fail_awaited(request_id, why, "unreadable")

    def _responded(
        self, message: Message, request_id: RequestId, line: bytes
    ) -> RunningCall | None:
        reply = self._replies.get(request_id)
        if reply is not None and reply.is_last and wire.says_nothing(message):
            return None
        call = self._calls.by_id.get(request_id)
        if call is not None and wire.is_untaken(message) and call.put_back():
            if reply is not None:
                reply.give(None)
            return None
        self.was_useful |= reply is not None or call is not None
        # Such an error is not a message of the stream: it ends the delivery.
        is_over = message.kind is Kind.ERROR and wire.ends_delivery(message)
        if reply is not None:
            reply.give(message)
            if call is None or is_over:
                return None
        if call is None:
            return None  # its request is no longer waited for
        if is_over and call.is_unannounced and wire.is_draining(message):
            call.refuse(wire.error_of(message).retry_after_s or 0.0)
        elif is_over or (call.is_numbered and message.kind is Kind.ERROR):
            call.fail(wire.as_error(wire.error_of(message)))
        else:
            call.take_line(line)
        return call

    def _notified(self, message: Message, line: bytes) -> RunningCall | None:
        method = str(message.method)
        if method == POSITION:
            try:
                self._begin_run(messages.decode(message.params, Position))
            except ValueError as error:
                raise NumberingBroken(f"{method}: {error}") from None
            return None
        if method in self._announcements or method in self._endings:
            try:
                if method in self._announcements:
                    self._heard(self._announcements[method](message.params))
                else:
                    self._ended(self._endings[method](message.params))
            except ValueError as error:
                self._answers.warnings.warn(
                    "a notification cannot be used", method=method, why=str(error)
                )
            return None
        call = self._whose(message)
        if call is None:
            self._on_notification(message)
        else:
            self.was_useful = True
            call.take_line(line)
        return call

    def _whose(self, message: Message) -> RunningCall | None:
        if message.method == wire.PROGRESS:
            token = wire.progress_token(message.params)
            call = None if token is None else self._calls.by_id.get(token)
            return call if call is not None and not call.is_numbered else None
        return self._whose_unnumbered()

    def _whose_unnumbered(self) -> RunningCall | None:
        """The call of a message without a seq and without a progress token, as far as is known."""
        if self.is_numbering:
            return None  # a message of a call would have a seq
        if self._requests is not None and (asked := self._requests.received_for) is not None:
            call = self._calls.by_id.get(asked)
            if call is not None and not call.is_numbered:
                return call
        return self._calls.only_unnumbered()

    def _begin_run(self, position: Position) -> None:
        self._run_left, self._run_seq = position.count, position.seq
        stream = self._run_stream = position.stream_id
        if stream not in self._calls.by_stream and not self._turns_pages:
            # A call may be resumed by its resume token alone, without a stream id. Runs of pages
            # belong to no call.
            tickets = [call.ticket for call in self._calls if call.connection is self]
            nameless = [ticket for ticket in tickets if ticket and not ticket.stream]
            if len(nameless) == 1:
                self._announced(nameless[0].named(stream))
        self._run_call = self._calls.by_stream.get(stream)

    def _heard(self, ticket: Ticket) -> None:
        """Take a ticket that was announced, perhaps without the request id of its call.

        Raises `ValueError` if several calls could be meant.
        """
        if ticket.request_id != "":
            self._announced(ticket)
            return
        call = self._calls.of(ticket) or self._only_unannounced()
        if call is None:
            raise ValueError("no requestId, and no single unannounced call that it could belong to")
        self._announced(msgspec.structs.replace(ticket, request_id=call.request_id))

    def _only_unannounced(self) -> RunningCall | None:
        """The one call that an announcement without an id can belong to, or None.

        A request for a page is not among the calls, but its stream may be announced too.
        """
        here = [call for call in self._calls if call.connection is self and call.is_unannounced]
        return here[0] if len(here) == 1 and not self._pages_asked else None

    def _announced(self, ticket: Ticket) -> None:
        call = self._calls.by_id.get(ticket.request_id)
        if call is None:
            return
        known = call.ticket
        if known is None:
            call.announce(ticket)
        elif known.leads_to_same(ticket) and wire.is_preferred(ticket, known):
            call.announce(msgspec.structs.replace(ticket, token=ticket.token or known.token))
        self._calls.add(call)
        if self._requests is not None:
            self._requests.leave_to_token(ticket.request_id)

    def _ended(self, stream: str) -> None:
        """A stream has ended: a call that was resumed here may get no other reply.

        A server that numbers messages always replies. There this may be the end of an earlier
        delivery over the same connection.
        """
        if self.hello.has_positions:
            return
        call = self._calls.by_stream.get(stream)
        if call is not None and call.connection is self and call.resume_id is not None:
            reply = self._replies.get(call.resume_id)
            if reply is not None and not call.is_complete:
                reply.give(wire.completed(call.resume_id))

    def _refuse_longest(self) -> None:
        """Fail what waits for the longest message that was sent: it is longer than the server
        accepts, and the next connection would end by it too.
        """
        size = self._longest_bytes
        why = f"A message of {size} bytes is longer than the server accepts: send a shorter one."
        refused = refusal("too_large").saying(why)
        self._answers.warnings.warn("the server ended the connection", why=why)
        self.was_useful |= bool(self.hello.protocol_version)  # the next one is made soon
        for call in self._calls:
            if call.connection is self and call.is_sent_as(size):
                call.fail(CallFailed(refused.code, why, refused.data))
        for request_id, reply in list(self._replies.items()):
            if reply.size == size:
                reply.give(look(messages.error(request_id, refused)))
        self._answers.refuse(self, size, refused)

    def _lose(self, lost: TooLarge) -> None:
        """Fail the wait that a message which was too large might have ended, or each of them."""
        self._answers.warnings.warn("a message of the server was too large", limit=lost.limit)
        why = f"The server sent a message above {lost.limit} bytes, perhaps the answer to this."
        self._fail_awaited(lost.id, why, "too_large")

    def _fail_awaited(self, request_id: RequestId | None, why: str, reason: str) -> None:
        """Fail the wait for the response to a request; with None, every wait."""
        for call in self._calls:
            if not call.is_numbered and request_id in (None, call.request_id):
                call.fail(StreamGone(why, reason))
        for awaited, reply in list(self._replies.items()):
            if request_id in (None, awaited):
                refused = Refusal(INTERNAL_ERROR, why, {"reason": reason})
                reply.give(look(messages.error(awaited, refused)))


def _what(message: Message) -> dict[str, str]:
    if message.kind is Kind.ERROR:
        return {"error": wire.error_of(message).message}
    return {"method": str(message.method)}
