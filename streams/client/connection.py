"""One connection of a client: what goes out in what order, and whose each incoming line is.

On our servers a header goes ahead of every run of a stream's messages, and the run is handed to its
call undecoded. Everything else is looked at: a response finds who waits for it by id, progress its
call by token, what is nobody's goes to the client's hooks. The reader waits for nothing but a call
that is full.

This file is longer than others: reader, writer, acks and the watch over a silent server share one
state, which is that of the connection.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.buffer import Batch, cut
from streams.client.call import NumberingBroken, RunningCall
from streams.client.wire import Hello
from streams.errors import INTERNAL_ERROR, ClientError, Refusal
from streams.exchange import ClientChannel, RequestChannel
from streams.logs import log
from streams.messages import (
    POSITION,
    Block,
    Incoming,
    Kind,
    Message,
    Position,
    RequestId,
    TooLarge,
    look,
)
from streams.protocol.ticket import Ticket

# What may wait to be written before who wants to write waits too.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
ACK_EVERY_S: Final = 1.0

# A server that numbers its messages answers pings while its tools work, and ends the silence of a
# response every 15 s. It is pinged after this, and given up when it is silent for so long.
PING_AFTER_S: Final = 30.0
SILENCE_S: Final = 60.0

# Other servers are asked for a sign of life after this, and only while something is awaited.
FOREIGN_PING_AFTER_S: Final = 10.0

# Before a connection is given up: what came while this process did not run is read first.
LAST_LOOK_S: Final = 0.2


class Calls:
    """The calls of a client that are running, or were left while their messages still come."""

    def __init__(self) -> None:
        self.by_id: dict[RequestId, RunningCall] = {}  # of the original request: its progress token
        self.by_stream: dict[str, RunningCall] = {}
        self._all: dict[RunningCall, None] = {}

    def __iter__(self) -> Iterator[RunningCall]:
        return iter(list(self._all))

    def add(self, call: RunningCall) -> None:
        """Hold a call, under all the names that it has."""
        self._all[call] = None
        self.by_id[call.request_id] = call
        if call.ticket is not None and call.ticket.stream:
            self.by_stream[call.ticket.stream] = call

    def remove(self, call: RunningCall) -> None:
        """Let go of a call."""
        self._all.pop(call, None)
        if self.by_id.get(call.request_id) is call:
            del self.by_id[call.request_id]
        if call.ticket is not None and self.by_stream.get(call.ticket.stream) is call:
            del self.by_stream[call.ticket.stream]

    def of(self, ticket: Ticket) -> RunningCall | None:
        """The call that a ticket leads to, where it is here already."""
        calls = (each for each in self._all if each.ticket and each.ticket.leads_to_same(ticket))
        return next(calls, None)

    def __contains__(self, call: RunningCall) -> bool:
        return call in self._all

    def only_unnumbered(self) -> RunningCall | None:
        """The call that a message without a number must belong to; None where that is not clear."""
        plain = [call for call in self._all if not call.is_numbered]
        return plain[0] if len(plain) == 1 else None


class Reply:
    """Where a task waits for the response to one request; None when the connection is over.

    With `is_last` a result counts only where it says that a delivery is over: 899 has no reply to
    a resume, so another server may send one ahead of the messages, or none.
    """

    __slots__ = ("_is_here", "is_last", "message")

    def __init__(self, *, is_last: bool = False) -> None:
        self.is_last = is_last
        self.message: Message | None = None
        self._is_here = trio.Event()

    def give(self, message: Message | None) -> None:
        self.message = message
        self._is_here.set()

    async def wait(self) -> Message | None:
        await self._is_here.wait()
        return self.message


class ClientConnection:
    """One connection. `run` it for as long as it lasts."""

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
        self.is_numbering = False  # the server, and what it sends here
        self.is_over = False
        self.was_useful = False  # something came that somebody waited for
        self.was_silent = False  # and was given up for that
        self._channel = channel
        # To ask `isinstance` of a protocol takes 9 µs, so it is asked once.
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
        self._due: dict[RunningCall, None] = {}  # to be acknowledged in the next write
        self._later: dict[RunningCall, None] = {}  # within a second
        self._has_work = trio.Event()
        self._has_later = trio.Event()
        self._moved = trio.Event()
        self._is_writing = False
        self._turns_pages = False
        self._pages_asked = 0  # whose response has not come
        self._run_left = 0  # lines of the current run that have not come
        self._run_seq = 0
        self._run_stream = ""
        self._run_call: RunningCall | None = None
        self._is_held_up = False
        self._heard_at = trio.current_time()
        self._scope = trio.CancelScope()

    # While it lasts

    async def run(self) -> None:
        """Read and write until either fails or the connection is hung up."""
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
        """Give up the connection."""
        self.is_over = True
        self._scope.cancel()

    # Whether the server is alive

    async def watch(self, silence_s: float, usual_s: float) -> None:
        """Give the connection up when the server is silent and shows no sign of life.

        Of servers that are not ours, only while something is awaited, and where nothing is lost by
        it: one that is busy is slow, not dead. They have `silence_s`; `usual_s`, where that is
        less, once something useful has come.
        """
        is_ours = self.hello.has_positions
        ping_after_s = PING_AFTER_S if is_ours else min(FOREIGN_PING_AFTER_S, silence_s / 2)
        since, is_said = trio.current_time(), False
        while True:
            if not (is_ours or self._awaited()):
                await self._moved.wait()
                since, is_said = trio.current_time(), False
                continue
            quiet_from = max(since, self._quiet_from())
            if is_said or self._is_held_up:  # held up: it is we who do not listen
                is_said &= quiet_from == since
                await trio.sleep(ping_after_s)
                continue
            if trio.current_time() < quiet_from + ping_after_s:
                await trio.sleep_until(quiet_from + ping_after_s)
                continue
            limit_s = min(silence_s, usual_s) if self.was_useful else silence_s
            limit_s = SILENCE_S if is_ours else limit_s
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
        """The requests whose response is waited for."""
        return [*self._replies, *(call.delivery_id for call in self._awaited_calls())]

    def _quiet_from(self) -> float:
        """When the last sign of life came; over HTTP, of the response that is silent longest."""
        if self._requests is None:
            return self._heard_at
        heard = map(self._requests.heard_at, self._awaited())
        return min((at for at in heard if at is not None), default=self._heard_at)

    async def _shows_life(self, quiet_from: float, deadline: float) -> bool:
        """Whether anything comes before the deadline, asked for or not."""
        with trio.CancelScope(deadline=deadline):
            if self._requests is not None and self._awaited():
                # An answer to a ping would have a connection of its own, and say nothing of theirs.
                await trio.sleep_until(deadline)
            elif self.hello.has_positions or not await self._channel_answers():
                await self.ask("ping", {})
            return True
        await trio.sleep(LAST_LOOK_S)
        return self._quiet_from() > quiet_from

    async def _channel_answers(self) -> bool:
        """Whether the transport itself has a ping, which is answered."""
        try:
            return await self._channel.ping()
        except trio.BrokenResourceError:
            return True  # whoever reads will see it

    def _give_up_silent(self) -> None:
        self.was_silent = True
        if self._requests is not None:
            self._requests.abandon("the server is silent")
        else:
            self.hang_up()

    # What goes out

    def prepare_resume(
        self, request_id: RequestId, call: RunningCall, *, may_lack_reply: bool
    ) -> None:
        """Ahead of a request that resumes a call; one with a reply of its own may not get it."""
        if self._requests is not None:
            self._requests.prepare(
                request_id, call.last_event_id, is_resume=True, may_lack_reply=may_lack_reply
            )

    def note_event(self, call: RunningCall) -> None:
        """Remember the last event of a call that came over this connection."""
        if self._requests is not None:
            last_event_id = self._requests.last_event_id(call.delivery_id)
            call.last_event_id = last_event_id or call.last_event_id

    async def ask(
        self, method: str, params: dict[str, Any], about: RunningCall | None = None
    ) -> Message | None:
        """Send a request and wait for its response; None when the connection went before that.

        `about` is the call that it asks about, if any.
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
            await self.send(messages.request(request_id, method, params))
            return await self.reply_to(request_id)
        finally:
            self._pages_asked -= is_page

    async def reply_to(self, request_id: RequestId, *, is_last: bool = False) -> Message | None:
        """Wait for the response to a request, which with `is_last` comes behind a stream's messages
        (`Reply`); None when the connection goes before that.
        """
        if self.is_over:
            return None
        reply = self._replies[request_id] = Reply(is_last=is_last)
        try:
            return await reply.wait()
        finally:
            self._replies.pop(request_id, None)
            if self._requests is not None:
                self._requests.settle(request_id)

    async def send(self, line: bytes) -> None:
        """Hand over a line to be written, when there is room; nobody says whether it arrived."""
        while self._outbox_bytes > OUTBOX_BYTES_MAX and not self.is_over:
            await self._moved.wait()
        self.post(line)

    def post(self, line: bytes) -> None:
        """Hand over a line to be written, room or not: for few and small ones."""
        self._outbox.append(line)
        self._outbox_bytes += len(line)
        self._has_work.set()

    def want_ack(self, call: RunningCall, *, now: bool) -> None:
        """Tell the server what was taken of a call: in the next write, or within a second."""
        if now:
            self._later.pop(call, None)
            self._due[call] = None
            self._has_work.set()
        else:
            self._later[call] = None
            self._has_later.set()

    async def drained(self) -> None:
        """Wait until everything is written, or nothing ever will be."""
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
                self.hang_up()
            self._is_writing = False
            self._stir()

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

    # What comes in

    async def _read_forever(self) -> None:
        try:
            while True:
                received = await self._channel.receive_blocks()
                self._heard_at = trio.current_time()
                for block in received:
                    await self._route(block)
        except (trio.EndOfChannel, trio.ClosedResourceError):
            pass  # what connections are expected to do
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
            await call.has_room()
            self._is_held_up = False

    def _continue_run(self, batch: Batch) -> RunningCall | None:
        call, seq = self._run_call, self._run_seq
        self._run_left -= batch.count
        self._run_seq += batch.count
        if call is not None:
            self.was_useful = True
            call.take_run(seq, batch)
        elif self._run_stream not in self._calls.by_stream:
            for line in batch.lines:  # of a stream that we know nothing of, but perhaps of its call
                self._take_line(line)
        # Else its call has come since the run began: what that asked for comes from its beginning.
        return call

    def _take_line(self, line: Incoming) -> RunningCall | None:
        """Find out whose a line is that stands alone, and return the call if it is a call's."""
        if isinstance(line, TooLarge):
            self._lose(line.limit)
            return None
        try:
            message = look(line)
        except (ValueError, RecursionError) as error:
            self._answers.warnings.warn(
                "the server sent what is no JSON-RPC message", error=str(error)
            )
            return None
        if message.kind is Kind.NOTIFICATION:
            return self._notified(message, line)
        if not isinstance(message.id, int | str):
            self._answers.warnings.warn(
                "the server sent a message without a usable id", **_what(message)
            )
            return None
        if message.kind is Kind.REQUEST:
            self._answers.take(message, message.id, self)
            return None
        return self._responded(message, message.id, line)

    def _responded(
        self, message: Message, request_id: RequestId, line: bytes
    ) -> RunningCall | None:
        reply = self._replies.get(request_id)
        if reply is not None and reply.is_last and wire.says_nothing(message):
            return None
        call = self._calls.by_id.get(request_id)
        self.was_useful |= reply is not None or call is not None
        # Then it is no entry: it says what became of the delivery.
        is_over = message.kind is Kind.ERROR and wire.ends_delivery(message)
        if reply is not None:
            reply.give(message)
            if call is None or is_over:
                return None
        if call is None:
            return None  # to something that nobody waits for any more
        if is_over or (call.is_numbered and message.kind is Kind.ERROR):
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
        # Of a server that numbers, what has no number belongs to no call.
        return None if self.is_numbering else self._calls.only_unnumbered()

    def _begin_run(self, position: Position) -> None:
        self._run_left, self._run_seq = position.count, position.seq
        stream = self._run_stream = position.stream_id
        if stream not in self._calls.by_stream and not self._turns_pages:
            # A token alone may have led here. What is of a page is nobody's.
            tickets = [call.ticket for call in self._calls if call.connection is self]
            nameless = [ticket for ticket in tickets if ticket and not ticket.stream]
            if len(nameless) == 1:
                self._announced(nameless[0].named(stream))
        self._run_call = self._calls.by_stream.get(stream)

    def _heard(self, ticket: Ticket) -> None:
        """A ticket was announced, perhaps without the id of its call.

        Raises `ValueError` where it is not clear whose it is.
        """
        if ticket.request_id != "":
            self._announced(ticket)
            return
        call = self._calls.of(ticket) or self._only_unannounced()
        if call is None:
            raise ValueError("no requestId, and not one unannounced call that waits here")
        self._announced(msgspec.structs.replace(ticket, request_id=call.request_id))

    def _only_unannounced(self) -> RunningCall | None:
        """The call that an announcement without its id must be about; None where that is not clear.

        A request for a page is no such call, but its stream may be announced just as well.
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
        elif known.leads_to_same(ticket) and wire.is_as_good(ticket, known):
            call.announce(msgspec.structs.replace(ticket, token=ticket.token or known.token))
        self._calls.add(call)
        if self._requests is not None:
            self._requests.leave_to_token(ticket.request_id)

    def _ended(self, stream: str) -> None:
        """A stream is over: where its call is resumed here, no reply need follow.

        A server that numbers always replies, and this may be the end of an earlier delivery over
        the same connection.
        """
        if self.hello.has_positions:
            return
        call = self._calls.by_stream.get(stream)
        if call is not None and call.connection is self and call.resume_id is not None:
            reply = self._replies.get(call.resume_id)
            if reply is not None and not call.is_complete:
                reply.give(wire.completed(call.resume_id))

    def _lose(self, limit: int) -> None:
        """A message was thrown away that may have been anybody's: end the waits it could end."""
        self._answers.warnings.warn("a message of the server was too large", limit=limit)
        why = f"The server sent a message above {limit} bytes, perhaps the answer to this."
        for call in self._calls:
            if not call.is_numbered:
                call.fail(ClientError(why))
        for request_id, reply in list(self._replies.items()):
            reply.give(_too_large(request_id, why))


def _what(message: Message) -> dict[str, str]:
    if message.kind is Kind.ERROR:
        return {"error": wire.error_of(message).message}
    return {"method": str(message.method)}


def _too_large(request_id: RequestId, why: str) -> Message:
    refused = Refusal(INTERNAL_ERROR, why, {"reason": "too_large"})
    return look(messages.error(request_id, refused))
