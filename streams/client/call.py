"""A call as its caller sees it: what has arrived and is not yet read, and how it ended.

Whole batches of lines come in and wait undecoded; `outlet` hands them out, without a task switch or
a lock for each. Two numbers tell where the call stands: everything up to `_received` is here, so
whatever comes again is dropped; everything up to `_outlet.taken` was handed out.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec
import trio
from msgspec import UNSET

from streams import messages
from streams.client import wire
from streams.client.buffer import Batch, Inbox, Outlet, Runs, try_look
from streams.errors import ClientError, StreamGone
from streams.messages import (
    BATCH_LINES_AIM,
    BATCH_LINES_MAX,
    Incoming,
    Kind,
    Message,
    RequestId,
    Run,
    TooLarge,
)
from streams.protocol.ticket import Ticket

# An ack falls due after as many messages or bytes. Up to a batch may come on top, and no more is
# read until it is on its way: so one goes out every 1,000 messages, unless the server is stuck. A
# write that takes longer than so many turns of the other tasks is.
ACK_LINES: Final = 1_000 - BATCH_LINES_MAX
ACK_BYTES: Final = 1024 * 1024
ACK_TURNS: Final = 10

# A server that leaves the same gap so often has lost what was there.
GAPS_MAX: Final = 3


class NumberingBroken(Exception):
    """The numbers of a connection do not add up: it is given up, and its calls are resumed."""


class CallOwner(Protocol):
    """Who begins and resumes calls, answers the server and confirms to it."""

    async def begin(self, call: "RunningCall") -> None:
        """Send the call's request, or make sure that it is resumed. Raises `CannotConnect`."""

    def leave(self, call: "RunningCall") -> None:
        """Its caller listens no longer."""

    async def cancel(self, call: "RunningCall") -> None:
        """Tell the server to stop the work. Raises `CannotConnect`."""

    def answer(self, message: Message, request_id: RequestId) -> None:
        """A request of the server was taken from the call's messages."""

    def answer_repeated(self, request_id: RequestId) -> None:
        """A request that came before, and may not have been taken, has come again."""

    def want_ack(self, call: "RunningCall", *, now: bool) -> None:
        """More was taken: tell the server, now or within a second."""

    def ended(self, call: "RunningCall") -> None:
        """The final response is here."""


class RunningCall:
    """One call: iterate over its messages, then ask for its `result`.

    Made by `Client.call` and `Client.resume`, and used in `async with`. One task may read from it.
    A call that nobody reads holds up its connection, once a megabyte or 10,000 messages wait.
    """

    def __init__(self, home: CallOwner, request: bytes | None, request_id: RequestId) -> None:
        self.request = request  # None where the call was begun elsewhere
        self.request_id = request_id
        self.key_memory = ""  # where the request can be found by its key; empty for nowhere
        self.is_left = False
        self.is_unanswered = True  # nothing of it has come
        self.is_complete = False  # the final response is here, though perhaps not read
        self.is_numbered = False
        self.connection: object = None  # the connection that it is attached to
        self.resume_id: RequestId | None = None  # of the request that attached it
        self.resuming = trio.CancelScope()
        self.not_before = 0.0  # when the server wants us back
        self.has_progressed = False  # the delivery that it is attached to, anything
        self.last_event_id = b""  # of what came over HTTP, before that delivery
        self._owner = home
        self._ticket: Ticket | None = None
        self._failure: ClientError | None = None
        self._final: Message | None = None
        self._acked = 0
        self._seen = 0  # the highest number on the connection that it is attached to
        self._is_settled = False  # the final response was handed out
        self._received: int | None = 0
        self._outlet = Outlet(0)
        self._is_waiting = True  # the caller is done with everything that was handed out
        self._inbox = Inbox()
        self._unacked_bytes = 0
        self._until_checkpoint = BATCH_LINES_AIM
        self._gaps = 0  # in front of the same message

    @classmethod
    def of(cls, home: CallOwner, ticket: Ticket) -> "RunningCall":
        """The call that a ticket stands for."""
        call = cls(home, None, ticket.request_id)
        call._ticket = ticket
        call._received = ticket.after
        call._acked = ticket.after or 0
        call._outlet = Outlet(call._acked)
        call.is_numbered = ticket.after is not None
        return call

    async def __aenter__(self) -> "RunningCall":
        await self._owner.begin(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach: the work goes on, and the ticket leads back to it."""
        self._is_waiting = self._is_waiting or error is None
        self.is_left = True
        self._inbox.make_room()
        self._owner.leave(self)

    # For the caller

    @property
    def ticket(self) -> Ticket | None:
        """How to come back to this call; None until the server says that one can.

        It counts every message that was handed out as done: keep it when you are done with them.
        """
        if self._ticket is None or not self.is_numbered:
            return self._ticket
        return msgspec.structs.replace(self._ticket, after=self._outlet.taken or None)

    def __aiter__(self) -> "RunningCall":
        return self

    async def __anext__(self) -> Message:
        """The next message of the stream, its final response excepted.

        Raises `CallLost`, `StreamGone`, `Superseded` or `CannotConnect`, once what came before is
        read.
        """
        for message in self._outlet.messages:
            return message
        return await self._next()

    def runs(self) -> "Runs":
        """Iterate over the messages as they came, many in one piece: `messages.Run`.

        They are the same messages, each once and in order, and the two ways of reading may take
        turns. A run counts as done when the next one is asked for. Its lines are not looked at, but
        for this: a request of the server is the last line of its run, and goes to its handler when
        that is handed out; the final response stands in no run. Iterating raises what reading the
        messages does.
        """
        return Runs(self._next_run)

    async def result(self) -> Any:
        """The result as the server sent it (for a tool: content, isError, …), decoded.

        Messages that were not read are passed over. Raises `CallFailed` where the server answered
        with an error, else as iterating does.
        """
        if self._final is None:
            async for _ in self:
                pass
        assert self._final is not None
        self._settle()
        if self._final.kind is Kind.ERROR:
            raise wire.as_error(wire.error_of(self._final))
        try:
            return messages.decode(wire.result_of(self._final), Any)
        except ValueError as error:
            raise StreamGone(f"The result cannot be read: {error}.", "unreadable") from None

    async def cancel(self) -> None:
        """Stop the work, unless it is done: nothing more comes of the call.

        Returns when the server knows, however many connections that takes. Raises `CannotConnect`.
        """
        if self.is_complete:
            return
        self._drop_buffer()  # nobody is to wait for it to be read
        try:
            await self._owner.cancel(self)
        finally:
            self._failure = self._failure or StreamGone("The call was cancelled.", "cancelled")
            self._inbox.stir()

    # Reading, off the fast path

    async def _next(self) -> Message:
        await self._have_some()
        special = self._outlet.line_up()
        self._is_waiting = False
        for message in self._outlet.messages:
            return message
        if special is None:
            raise self._unreadable()
        if special.method is UNSET:
            raise self._over(special)
        self._outlet.step()
        self._pass_on(special)
        return special

    async def _next_run(self) -> Run:
        self._is_waiting = True
        await self._have_some()
        run, special = self._outlet.run()
        if run is None:
            raise self._unreadable() if special is None else self._over(special)
        self._is_waiting = False
        if special is not None:
            self._pass_on(special)
        return run

    async def _have_some(self) -> None:
        """Put the next batch in place, unless there is one; wait until one is here."""
        if self._final is not None:
            raise StopAsyncIteration
        if not self._outlet.is_empty:
            return
        self._is_waiting = True
        await self._let_others_run()
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            if self.is_left:
                raise RuntimeError("this call was left: resume its ticket to read on")
            await self._inbox.change()
            self._until_checkpoint = BATCH_LINES_AIM
        batch = self._inbox.take()
        self._unacked_bytes += len(batch.body)
        self._until_checkpoint -= batch.count
        self._outlet.put(batch)

    async def _let_others_run(self) -> None:
        """Now and then, and for an ack that is due."""
        turns = ACK_TURNS if self._report() else int(self._until_checkpoint <= 0)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
            self._until_checkpoint = BATCH_LINES_AIM
            if self._unacked < ACK_LINES:
                break

    def _over(self, final: Message) -> StopAsyncIteration:
        self._final = final
        self._is_waiting = True
        self._report()
        return StopAsyncIteration()

    def _pass_on(self, message: Message) -> None:
        if isinstance(message.id, int | str):
            self._owner.answer(message, message.id)

    def _report(self) -> bool:
        """Have an ack sent, where there is anything to say; whether it is due."""
        unacked = self._unacked
        is_due = unacked >= ACK_LINES or self._unacked_bytes >= ACK_BYTES
        if unacked > 0:
            self._owner.want_ack(self, now=is_due)
        return is_due

    @property
    def _unacked(self) -> int:
        return min(self.confirmed, self._seen) - self._acked

    def _unreadable(self) -> ClientError:
        line = self._outlet.bad
        self._outlet.step()  # the ticket leads to what follows it
        self._drop_buffer()
        if isinstance(line, TooLarge):
            why, reason = f"is longer than the {line.limit} bytes that are accepted", "too_large"
        else:
            why, reason = "is no JSON-RPC message", "unreadable"
        self._failure = StreamGone(f"Message {self._outlet.taken} of the stream {why}.", reason)
        return self._failure

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._outlet.step()
            self._owner.want_ack(self, now=True)

    def _drop_buffer(self) -> None:
        self._inbox.drop()
        self._outlet.drop()

    # For the client

    @property
    def confirmed(self) -> int:
        """Everything up to here is done with: the caller has asked for what comes next."""
        return self._outlet.taken if self._is_waiting else self._outlet.done

    @property
    def cursor(self) -> int | None:
        """From where to resume; None where the numbers are not known."""
        return self.confirmed if self.is_numbered else None

    def attach(self, connection: object, resume_id: RequestId | None = None) -> None:
        """From now on the messages come over this connection."""
        self.connection = connection
        self.resume_id = resume_id
        self.has_progressed = False
        self._seen = self._acked = self.cursor or 0

    def ack(self) -> bytes:
        """The line that confirms what is done with; nothing where that was confirmed before.

        Only what came over the connection can be confirmed over it.
        """
        seq = min(self.confirmed, self._seen)
        if self._ticket is None or self._failure or seq <= self._acked:
            return b""
        self._acked = seq
        self._unacked_bytes = 0
        return wire.ack(self._ticket.stream, seq)

    @property
    def wants_confirming(self) -> bool:
        """Whether all of it is here and done with, and the server was not told."""
        is_read = self.is_complete and self.confirmed == self._received
        return is_read and self.is_numbered and self._acked < self.confirmed

    @property
    def is_unannounced(self) -> bool:
        """Whether it is under way, and the server has not said how to come back to it."""
        return self._ticket is None and not (self.is_complete or self._failure)

    @property
    def is_running(self) -> bool:
        """Whether anything more is to be expected, and by anybody."""
        return not (self.is_complete or self.is_left or self._failure)

    @property
    def is_resumable(self) -> bool:
        """Whether another connection can go on with it, or send its request again."""
        return self._ticket is not None or bool(self.is_unanswered and self.key_memory)

    @property
    def delivery_id(self) -> RequestId:
        """Of the request whose response brings the messages."""
        return self.request_id if self.resume_id is None else self.resume_id

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a final response."""
        return self._failure is not None

    @property
    def is_full(self) -> bool:
        """Whether too much waits to be read, by somebody who will."""
        return self._inbox.is_full and not self.is_left

    async def has_room(self) -> None:
        """Wait until the caller has read enough."""
        while self.is_full:
            await self._inbox.room()

    def rejoin(self, ticket: Ticket | None) -> bool:
        """Read on where this call was left, if that is where `ticket` stands; whether it is.

        Without one any place will do, also one behind messages that nobody has kept.
        """
        is_coming = self.is_left and self.resume_id is None  # a resumed call is detached then
        if not is_coming or self._failure or self.ticket is None:
            return False
        if ticket and (self._inbox.is_dropped or ticket.after != self.ticket.after):
            return False
        if self._inbox.is_dropped:
            self._inbox = Inbox()
            self._outlet.start_at(self._received or 0)
        self.is_left = False
        self._is_waiting = True
        return True

    def announce(self, ticket: Ticket) -> None:
        """The server says how to come back."""
        self._ticket = ticket

    def take_run(self, seq: int, batch: Batch) -> None:
        """Lines from `seq` on have come. Raises `NumberingBroken` at a gap."""
        self.is_numbered = True
        self._seen = seq + batch.count - 1
        if self._received is None:
            self._received = self._acked = seq - 1
            self._outlet = Outlet(self._received)
        known = self._received + 1 - seq
        if known < 0:
            raise self._gap(seq, self._received + 1)
        if known >= batch.count:
            self._repeated(batch.lines)
            return
        if known:
            self._repeated(batch.until(known).lines)
            batch = batch.after(known)
        self._received += batch.count
        self._gaps = 0
        self._keep(batch)

    def take_line(self, line: Incoming) -> None:
        """A line without a number has come that seems to be this call's."""
        self._keep(Batch.of(line))

    def _keep(self, batch: Batch) -> None:
        self.is_unanswered = False
        self.has_progressed = True
        # Nothing follows the final response.
        last = None if batch.is_plain else try_look(batch.last)
        if last and last.method is UNSET and last.id is not UNSET:
            self.is_complete = True
            self._owner.ended(self)
        if not self._failure:
            self._inbox.put(batch)
        if self.is_left and self._inbox.is_too_much_to_keep:
            self._drop_buffer()

    def _gap(self, seq: int, expected: int) -> NumberingBroken:
        self._gaps += 1
        what = f"message {expected} was expected, message {seq} has come"
        if self._gaps >= GAPS_MAX:
            self.fail(StreamGone(f"The server has lost messages: {what}.", "messages_gone"))
        return NumberingBroken(what)

    def _repeated(self, lines: Iterable[Incoming]) -> None:
        """Drop what is here already; but an answer may have been lost with the connection."""
        for line in lines:
            message = try_look(line)
            if message and message.kind is Kind.REQUEST and isinstance(message.id, int | str):
                self._owner.answer_repeated(message.id)
        self._report()

    def fail(self, error: ClientError) -> None:
        """Nothing more will come; what is here can still be read."""
        if not self.is_complete and self._failure is None:
            self._failure = error
            self._inbox.stir()
