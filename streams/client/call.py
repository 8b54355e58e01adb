"""A call for its reader: the messages that have come and are not yet read, and the result.

Batches of lines come in and wait undecoded; an `Outlet` hands them out, without a task switch or a
lock for each. Two numbers hold the state of the call. Everything up to `_received` has come, so
that a replay of it is dropped. Everything up to `_outlet.taken` was handed out.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, overload

import msgspec
import trio
from msgspec import UNSET

from streams import messages
from streams.client import wire
from streams.client.buffer import Batch, Inbox, Outlet, Runs, try_look
from streams.client.results import tool_value
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

# An ack is due after this many messages or bytes. Up to a batch may come on top, and reading pauses
# until the ack is written. So one ack goes out every 1,000 messages, unless the server is stuck: if
# the write takes longer than this many turns of other tasks, reading goes on.
ACK_LINES: Final = 1_000 - BATCH_LINES_MAX
ACK_BYTES: Final = 4 * 1024 * 1024  # a server of ours lets 64 MiB wait for an ack
ACK_TURNS: Final = 10

# A server that leaves the same gap this often has lost the messages.
GAPS_MAX: Final = 3

# A call is sent so many times more to a server that has refused the session and not taken it.
PUT_BACK_MAX: Final = 3

_UNCONFIRMED: Final = (
    "The call was cancelled here, and the server has not confirmed that: resume its ticket to "
    "cancel it."
)

_T = TypeVar("_T")


class NumberingBroken(Exception):
    """The seqs of a connection leave a gap: the client closes it and resumes its calls."""


class CallOwner(Protocol):
    """The services of the client that a running call uses."""

    async def begin(self, call: "RunningCall") -> None:
        """Send the call's request, or resume the call. Raises `CannotConnect`."""

    def leave(self, call: "RunningCall") -> None:
        """The reader has left the call."""

    async def cancel(self, call: "RunningCall") -> None:
        """Cancel the call on the server. Raises `CannotConnect`."""

    def answer(self, message: Message, request_id: RequestId, call: "RunningCall") -> None:
        """Answer a request of the server, which was handed out among the call's messages."""

    def answer_repeated(self, request_id: RequestId) -> None:
        """Answer a request that was replayed, if its handler has begun."""

    def want_ack(self, call: "RunningCall", *, now: bool) -> None:
        """The reader has taken more: send an ack, now or within a second."""

    def ended(self, call: "RunningCall") -> None:
        """The final response has come."""

    def send_again(self, call: "RunningCall", pause_s: float) -> None:
        """The server has not begun the call: send its request again, to any server."""


class RunningCall:
    """A call: iterate over its messages, then ask for its `result`.

    `Client.call` and `Client.resume` make it, and it is used in `async with`, once. One task at a
    time may read from it. If nothing reads from it, its connection stops reading at a megabyte or
    10,000 messages. `name` and `arguments` are the tool's; they are empty where only a ticket is
    known.
    """

    def __init__(
        self,
        home: CallOwner,
        request: bytes | None,
        request_id: RequestId,
        *,
        has_key: bool = False,
        name: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.arguments = dict(arguments or {})
        self.request = request  # None if the call is resumed by its ticket
        self.request_id = request_id
        self.has_key = has_key  # the request has an idempotency key
        self.is_refused = False  # the server has not begun it, and the request goes out again
        self.key_memory = ""  # the server's memory of idempotency keys that has the request
        self.is_left = False
        self.is_unanswered = True  # nothing has come for it
        self.is_complete = False  # the final response has come, though it may be unread
        self.is_numbered = False
        self.connection: object = None  # the connection that it is attached to
        self.resume_id: RequestId | None = None  # the id of the resume that attached it
        self.resuming = trio.CancelScope()
        self.not_before = 0.0  # when the server allows a resume
        self.has_progressed = False  # a message has come over the current delivery
        self.last_event_id = b""  # the event id before that delivery, over HTTP
        self._owner = home
        self._is_entered = False
        self._has_reader = False  # a task waits for the next batch
        self._is_cancelling = False  # and the server has not confirmed it
        self.cancel_reason: Any = None  # of a host whose call this is
        self._ticket: Ticket | None = None
        self._failure: ClientError | None = None
        self._final: Message | None = None
        self._acked = 0
        self._seen = 0  # the highest seq that came over the current connection
        self._is_settled = False  # `result` has returned it
        self._received: int | None = 0
        self._outlet = Outlet(0)
        self._is_waiting = True  # the reader is done with all that was handed out
        self._inbox = Inbox()
        self._unacked_bytes = 0
        self._until_checkpoint = BATCH_LINES_AIM
        self._gaps = 0  # how often the same message was missing
        self._put_back = 0  # how often the server has refused the session for it

    @classmethod
    def of(cls, home: CallOwner, ticket: Ticket) -> Self:
        """A call that is resumed by its ticket."""
        call = cls(home, None, ticket.request_id)
        call._ticket = ticket
        call._received = ticket.after
        call._acked = ticket.after or 0
        call._outlet = Outlet(call._acked)
        call.is_numbered = ticket.after is not None
        return call

    async def __aenter__(self) -> "RunningCall":
        if self._is_entered:  # the request would go out again
            raise RuntimeError("a call is entered once: make another one, or resume its ticket")
        self._is_entered = True
        await self._owner.begin(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the call: the work goes on, and the ticket resumes it."""
        self._is_waiting = self._is_waiting or error is None
        self.is_left = True
        self._inbox.make_room()
        self._owner.leave(self)

    # For the reader

    @property
    def ticket(self) -> Ticket | None:
        """The ticket that resumes this call; None until the server has announced it.

        A call that ends before that keeps None: its result is all of it, and there is nothing to
        resume. The ticket counts every message that was handed out as done, so keep it once they
        are processed.
        """
        if self._ticket is None or not self.is_numbered:
            return self._ticket
        return msgspec.structs.replace(self._ticket, after=self._outlet.taken or None)

    def __aiter__(self) -> "RunningCall":
        return self

    async def __anext__(self) -> Message:
        """The next message of the stream; the final response ends the iteration.

        Raises `CallLost`, `StreamGone`, `Superseded` or `CannotConnect`, behind the last message
        that has come.
        """
        for message in self._outlet.messages:
            return message
        await self._have_some()
        return self._next()

    def runs(self) -> "Runs":
        """Iterate over the messages as they came, many in one piece: `messages.Run`.

        They are the same messages, each once and in order, and both ways of reading may be mixed. A
        run counts as done when the next one is asked for. Its lines are not decoded, except to find
        requests of the server and the final response. A request is the last line of its run, and
        goes to its handler when the run is handed out. The final response is in no run. Raises the
        same errors as iterating over messages.
        """
        return Runs(self._next_run)

    @overload
    async def result(self) -> Any: ...
    @overload
    async def result(self, type: type[_T]) -> _T: ...
    @overload
    async def result(self, type: Any) -> Any: ...

    async def result(self, type: Any = None) -> Any:
        """The result as the server sent it (for a tool: content, isError, …), decoded.

        With a `type`, the value that the tool returned: the structured content, else the text, as
        a value of that type (a dataclass, `TypedDict`, `msgspec.Struct`, model of pydantic, `str`,
        `list[int]`, …). `streams.CallToolResult` is the whole result. Then a result with `isError`
        raises `ToolFailed`, and a value of another type `ClientError`.

        Unread messages are skipped. Raises `CallFailed` if the server answered with an error, and
        otherwise the same errors as iterating.
        """
        if self._final is None:
            async for _ in self:
                pass
        assert self._final is not None
        self._settle()
        if self._final.kind is Kind.ERROR:
            raise wire.as_error(wire.error_of(self._final))
        try:
            raw = wire.result_of(self._final)
            if type is None:
                return messages.decode(raw, Any)
        except ValueError as error:
            raise StreamGone(f"The result cannot be read: {error}.", "unreadable") from None
        try:
            return tool_value(raw, type)
        except ValueError as error:
            raise ClientError(
                f"The result of {self.name or 'the call'} does not fit: {error}."
            ) from None

    async def cancel(self) -> None:
        """Cancel the work, unless it is done. No more messages come.

        Returns when the server has confirmed it, over as many connections as that takes. Raises
        `CannotConnect`; for a call that has failed and may still run, the error of the call.
        """
        self._check_entered()
        if self.is_complete:
            return
        if self.is_left:
            raise RuntimeError("this call was left: resume its ticket to cancel it")
        self._check_ended()
        self._drop_buffer()  # the connection must not wait for a reader
        self._is_cancelling = True
        try:
            await self._owner.cancel(self)
            self._is_cancelling = False
        finally:
            why = _UNCONFIRMED if self._is_cancelling else "The call was cancelled."
            self._failure = self._failure or StreamGone(why, "cancelled")
            self._inbox.stir()
        self._check_ended()

    def _check_ended(self) -> None:
        """Raise the error of a call that has failed and may still run."""
        error = self._failure
        if error is not None and (self._is_cancelling or not wire.tells_of_end(error)):
            raise error

    # Reading, off the fast path

    def _next(self) -> Message:
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
        return self._take_run()

    def _take_run(self) -> Run:
        run, special = self._outlet.run()
        if run is None:
            raise self._unreadable() if special is None else self._over(special)
        self._is_waiting = False
        if special is not None:
            self._pass_on(special)
        return run

    async def _have_some(self) -> None:
        """Wait for the next batch, unless one is in hand."""
        if self._final is not None:
            raise StopAsyncIteration
        if not self._outlet.is_empty:
            return
        self._check_entered()
        if self._has_reader:  # each of the two would lose messages to the other
            raise RuntimeError("another task reads this call: only one may")
        self._has_reader = True
        try:
            await self._next_batch()
        finally:
            self._has_reader = False

    def _check_entered(self) -> None:
        """Raise `RuntimeError` for a call that was not begun, which nothing would ever come for."""
        if not self._is_entered:
            raise RuntimeError("this call has not begun: use it within `async with`")

    async def _next_batch(self) -> None:
        self._is_waiting = True
        await self._let_others_run()
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            if self.is_left:
                raise RuntimeError("this call was left: resume its ticket to read more")
            await self._inbox.change()
            self._until_checkpoint = BATCH_LINES_AIM
        batch = self._inbox.take()
        self._unacked_bytes += len(batch.body)
        self._until_checkpoint -= batch.count
        self._outlet.put(batch)

    async def _let_others_run(self) -> None:
        """Yield to other tasks after a batch, and longer while an ack is due."""
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
            self._owner.answer(message, message.id, self)

    def _report(self) -> bool:
        """Have an ack sent if there is something to confirm; return whether it is due."""
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
        self._outlet.step()  # the ticket resumes behind it
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
            if self.is_numbered:
                self._owner.want_ack(self, now=True)

    def _drop_buffer(self) -> None:
        self._inbox.drop()
        self._outlet.drop()

    # For the client

    @property
    def confirmed(self) -> int:
        """The seq up to which the reader is done: it has asked for what comes next."""
        return self._outlet.taken if self._is_waiting else self._outlet.done

    @property
    def cursor(self) -> int | None:
        """The seq to resume from; None if the server does not number messages."""
        return self.confirmed if self.is_numbered else None

    def attach(self, connection: object, resume_id: RequestId | None = None) -> None:
        """From now on the messages come over this connection."""
        self.connection = connection
        self.resume_id = resume_id
        self.has_progressed = False
        self._seen = self._acked = self.cursor or 0

    def ack(self) -> bytes:
        """The line that acks what the reader is done with; empty if that was acked before.

        An ack covers only what came over this connection.
        """
        seq = min(self.confirmed, self._seen)
        if self._ticket is None or self._failure or seq <= self._acked:
            return b""
        self._acked = seq
        self._unacked_bytes = 0
        return wire.ack(self._ticket.stream, seq)

    @property
    def wants_confirming(self) -> bool:
        """Whether all messages are read, and the server does not know it."""
        is_read = self.is_complete and self.confirmed == self._received
        return is_read and self.is_numbered and self._acked < self.confirmed

    @property
    def is_unannounced(self) -> bool:
        """Whether the call runs, and the server has not announced a ticket for it."""
        return self._ticket is None and not (self.is_complete or self._failure)

    @property
    def is_running(self) -> bool:
        """Whether more messages are expected, and a reader waits for them."""
        return not (self.is_complete or self.is_left or self._failure)

    @property
    def is_resumable(self) -> bool:
        """Whether the call can be resumed, or its request be sent a second time, over another
        connection.
        """
        may_repeat = self.is_refused or self.key_memory
        return self._ticket is not None or bool(self.is_unanswered and may_repeat)

    def is_sent_as(self, size: int) -> bool:
        """Whether the call's request has so many bytes, and nothing shows that it was taken."""
        return self.is_unannounced and self.request is not None and len(self.request) == size

    @property
    def delivery_id(self) -> RequestId:
        """The id of the request whose response ends the current delivery."""
        return self.request_id if self.resume_id is None else self.resume_id

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a final response."""
        return self._failure is not None

    @property
    def is_full(self) -> bool:
        """Whether too much waits for a reader that has not left."""
        return self._inbox.is_full and not self.is_left

    async def wait_for_room(self) -> None:
        """Wait until the reader has read enough."""
        while self.is_full:
            await self._inbox.room()

    def rejoin(self, ticket: Ticket | None) -> bool:
        """Read on in a call that was left, if it was left at the position of `ticket`; return
        whether.

        With None any position will do, even behind messages that were thrown away.
        """
        is_coming = self.is_left and self.resume_id is None  # leaving a resumed call detaches it
        if not is_coming or self._failure or self.ticket is None:
            return False
        if ticket and (self._inbox.is_dropped or ticket.after != self.ticket.after):
            return False
        if self._inbox.is_dropped:
            self._inbox = Inbox()
            self._outlet.start_at(self._received or 0)
        self.is_left = self._is_entered = False
        self._is_waiting = True
        return True

    def announce(self, ticket: Ticket) -> None:
        """Set the ticket that the server has announced."""
        self._ticket = ticket

    def take_run(self, seq: int, batch: Batch) -> None:
        """Take lines from `seq` on. Raises `NumberingBroken` if messages are missing."""
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
        """Take a line without a seq, which belongs to this call."""
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
        """Drop messages that came before, but answer requests: an answer may have been lost."""
        for line in lines:
            message = try_look(line)
            if message and message.kind is Kind.REQUEST and isinstance(message.id, int | str):
                self._owner.answer_repeated(message.id)
        self._report()

    def refuse(self, pause_s: float) -> None:
        """The server is about to end, and has not begun the call."""
        self.is_refused = True
        self.connection = None
        self._owner.send_again(self, pause_s)

    def put_back(self) -> bool:
        """The server has refused the session and not taken the call, so the next connection sends
        it again. Returns False if that has happened too often.
        """
        if not self.is_unannounced or self._put_back >= PUT_BACK_MAX:
            return False
        self._put_back += 1
        self.is_refused = True
        self.connection = None
        return True

    def fail(self, error: ClientError) -> None:
        """End the call with an error, behind the messages that have come."""
        if not self.is_complete and self._failure is None:
            self._failure = error
            self._inbox.stir()
