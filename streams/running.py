"""A call as its caller sees it: what has arrived and is not yet read, and how it ended.

Whole batches of lines come in and wait undecoded. They are looked at a batch at a time, and what is
nothing but notifications is handed out straight from there, without a task switch, a lock or a
counter. Two numbers tell where the call stands: everything up to `_received` is here, so whatever
comes again is dropped; everything up to `_taken` was handed out.
"""

import operator
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec
import trio
from msgspec import UNSET

from streams import clientwire, messages
from streams.errors import ClientError, StreamGone
from streams.inbox import BATCH_LINES_MAX, Inbox, look_at, try_look
from streams.messages import Incoming, Kind, Message, RequestId, TooLarge
from streams.ticket import Ticket

# An ack falls due after as many messages or bytes. Up to a batch may come on top, and two more may
# be read until it is written: so one goes out every 1,000 messages, unless the server is stuck.
ACK_LINES: Final = 400
ACK_BYTES: Final = 1024 * 1024

# A server that leaves the same gap so often has lost what was there.
GAPS_MAX: Final = 3


class Unsound(Exception):
    """The numbers of a connection do not add up: it is given up, and its calls are resumed."""


class Home(Protocol):
    """What a call needs of its client."""

    async def begin(self, call: "RunningCall") -> None:
        """Send the call's request, or make sure that it is resumed. Raises `CannotConnect`."""

    def leave(self, call: "RunningCall") -> None:
        """Its caller listens no longer."""

    async def cancel(self, call: "RunningCall") -> None:
        """Tell the server to stop the work. Raises `CannotConnect`."""

    def asked(self, message: Message, request_id: RequestId) -> None:
        """A request of the server was taken from the call's messages."""

    def asked_again(self, request_id: RequestId) -> None:
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

    def __init__(self, home: Home, request: bytes | None, request_id: RequestId) -> None:
        self.request = request  # None where the call was begun elsewhere
        self.request_id = request_id
        self.is_left = False
        self.is_complete = False  # the final response is here, though perhaps not read
        self.is_numbered = False
        self.way: object = None  # the connection that it is attached to
        self.resume_id: RequestId | None = None  # of the request that attached it
        self.resuming = trio.CancelScope()
        self.not_before = 0.0  # when the server wants us back
        self._home = home
        self._ticket: Ticket | None = None
        self._failure: ClientError | None = None
        self._final: Message | None = None
        self._acked = 0
        self._seen = 0  # the highest number on the connection that it is attached to
        self._is_settled = False  # the final response was handed out
        self._received: int | None = 0
        self._messages: Iterator[Message] = iter(())  # notifications to be handed out
        self._end = 0  # the number of the last of them
        self._special: Message | None = None  # what follows them: a request, the final response
        self._rest: Sequence[Message] = ()  # what follows that
        self._bad: Incoming | None = None  # what follows that and is no message
        self._before = 0  # what was taken before this object was made
        self._is_waiting = True  # the caller is done with everything that was handed out
        self._inbox = Inbox()
        self._unacked_bytes = 0
        self._until_checkpoint = BATCH_LINES_MAX
        self._gaps = 0  # in front of the same message

    @classmethod
    def of(cls, home: Home, ticket: Ticket) -> "RunningCall":
        """The call that a ticket stands for."""
        call = cls(home, None, ticket.request_id)
        call._ticket = ticket
        call._received = ticket.after
        call._end = call._before = call._acked = ticket.after or 0
        call.is_numbered = ticket.after is not None
        return call

    async def __aenter__(self) -> "RunningCall":
        await self._home.begin(self)
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
        self._home.leave(self)

    # For the caller

    @property
    def ticket(self) -> Ticket | None:
        """How to come back to this call; None until the server says that one can.

        It counts every message that was handed out as done: keep it when you are done with them.
        """
        if self._ticket is None or not self.is_numbered:
            return self._ticket
        return msgspec.structs.replace(self._ticket, after=self._taken or None)

    def __aiter__(self) -> "RunningCall":
        return self

    async def __anext__(self) -> Message:
        """The next message of the stream, its final response excepted.

        Raises `CallLost`, `StreamGone`, `Superseded` or `CannotConnect`, once what came before is
        read.
        """
        for message in self._messages:
            return message
        return await self._next()

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
            raise clientwire.as_error(clientwire.error_of(self._final))
        try:
            return messages.decode(clientwire.result_of(self._final), Any)
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
            await self._home.cancel(self)
        finally:
            self._failure = self._failure or StreamGone("The call was cancelled.", "cancelled")
            self._inbox.stir()

    # Reading, off the fast path

    async def _next(self) -> Message:
        while True:
            if self._special is not None:
                return self._hand_out_special(self._special)
            if self._bad is not None:
                raise self._unreadable(self._bad)
            await self._refill()
            for message in self._messages:
                return message

    async def _refill(self) -> None:
        """Put the next batch in place, when there is one."""
        self._is_waiting = True
        self._report()
        while not self._inbox:
            if self._final is not None:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            if self.is_left:
                raise RuntimeError("this call was left: resume its ticket to read on")
            await self._inbox.change()
            self._until_checkpoint = BATCH_LINES_MAX
        if self._until_checkpoint <= 0:
            await trio.lowlevel.checkpoint()
            self._until_checkpoint = BATCH_LINES_MAX
            if not self._inbox:
                return  # cancelled or left meanwhile
        batch, size = self._inbox.take()
        self._unacked_bytes += size
        self._until_checkpoint -= len(batch)
        self._is_waiting = False
        found, self._bad = look_at(batch)
        self._line_up(found)

    def _line_up(self, found: Sequence[Message]) -> None:
        """Make ready what can be handed out without a second look, and what comes after it."""
        if [message.id for message in found].count(UNSET) < len(found):
            plain = next(at for at, message in enumerate(found) if message.id is not UNSET)
            self._special, self._rest = found[plain], found[plain + 1 :]
            found = found[:plain]
        self._messages = iter(found)
        self._end += len(found)

    def _hand_out_special(self, message: Message) -> Message:
        self._special = None
        if message.method is UNSET:
            self._final = message
            self._is_waiting = True
            self._report()
            raise StopAsyncIteration
        rest, self._rest = self._rest, ()
        self._end += 1
        self._line_up(rest)
        if isinstance(message.id, int | str):
            self._home.asked(message, message.id)
        return message

    def _report(self) -> None:
        unacked = min(self.confirmed, self._seen) - self._acked
        if unacked > 0:
            is_due = unacked >= ACK_LINES or self._unacked_bytes >= ACK_BYTES
            self._home.want_ack(self, now=is_due)

    def _unreadable(self, line: Incoming) -> ClientError:
        self._end += 1  # the ticket leads to what follows it
        self._drop_buffer()
        if isinstance(line, TooLarge):
            why, reason = f"is longer than the {line.limit} bytes that are accepted", "too_large"
        else:
            why, reason = "is no JSON-RPC message", "unreadable"
        self._failure = StreamGone(f"Message {self._taken} of the stream {why}.", reason)
        return self._failure

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._end += 1
            self._home.want_ack(self, now=True)

    def _drop_buffer(self) -> None:
        self._inbox.drop()
        self._end = self._taken
        self._messages, self._special, self._rest, self._bad = iter(()), None, (), None

    @property
    def _taken(self) -> int:
        # An iterator over a list knows how much is left: nobody has to count.
        return self._end - operator.length_hint(self._messages)

    # For the client

    @property
    def confirmed(self) -> int:
        """Everything up to here is done with: the caller has asked for what comes next."""
        return self._taken if self._is_waiting else max(self._taken - 1, self._before)

    @property
    def cursor(self) -> int | None:
        """From where to resume; None where the numbers are not known."""
        return self.confirmed if self.is_numbered else None

    def attach(self, way: object, resume_id: RequestId | None = None) -> None:
        """From now on the messages come over this connection."""
        self.way = way
        self.resume_id = resume_id
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
        return clientwire.ack(self._ticket.stream, seq)

    @property
    def is_confirmed(self) -> bool:
        """Whether the server was told of everything that is done with."""
        return not self.is_numbered or self._acked >= self.confirmed

    @property
    def is_running(self) -> bool:
        """Whether anything more is to be expected, and by anybody."""
        return not (self.is_complete or self.is_left or self._failure)

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
            self._inbox, self._end = Inbox(), self._received or 0
        self.is_left = False
        self._is_waiting = True
        return True

    def announce(self, ticket: Ticket) -> None:
        """The server says how to come back."""
        self._ticket = ticket

    def take_run(self, seq: int, lines: Sequence[Incoming]) -> None:
        """Lines from `seq` on have come. Raises `Unsound` where some before them have not."""
        self.is_numbered = True
        self._seen = seq + len(lines) - 1
        if self._received is None:
            self._received = self._end = self._before = self._acked = seq - 1
        known = self._received + 1 - seq
        if known < 0:
            raise self._gap(seq, self._received + 1)
        if known:
            self._repeated(lines[:known])
            lines = lines[known:]
        if lines:
            self._received += len(lines)
            self._gaps = 0
            self._keep(lines)

    def take_line(self, line: Incoming) -> None:
        """A line without a number has come that seems to be this call's."""
        self._keep([line])

    def _keep(self, lines: Sequence[Incoming]) -> None:
        last = try_look(lines[-1])  # nothing follows the final response
        if last and last.method is UNSET and last.id is not UNSET:
            self.is_complete = True
            self._home.ended(self)
        if not self._failure:
            self._inbox.put(lines)
        if self.is_left and self._inbox.is_too_much_to_keep:
            self._drop_buffer()

    def _gap(self, seq: int, expected: int) -> Unsound:
        self._gaps += 1
        what = f"message {expected} was expected, message {seq} has come"
        if self._gaps >= GAPS_MAX:
            self.fail(StreamGone(f"The server has lost messages: {what}.", "messages_gone"))
        return Unsound(what)

    def _repeated(self, lines: Sequence[Incoming]) -> None:
        """Drop what is here already; but an answer may have been lost with the connection."""
        for line in lines:
            message = try_look(line)
            if message and message.kind is Kind.REQUEST and isinstance(message.id, int | str):
                self._home.asked_again(message.id)
        self._report()

    def fail(self, error: ClientError) -> None:
        """Nothing more will come; what is here can still be read."""
        if not self.is_complete and self._failure is None:
            self._failure = error
            self._inbox.stir()
