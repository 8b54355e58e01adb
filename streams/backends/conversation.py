"""The conversation with one child: its requests in flight, its questions, its notifications.

The reader parses each line once and puts it into the inbox of the request that it belongs to. The
handler of that request, a task of the engine, sends it on. So a stream without room delays its own
handler. The reader waits only when an inbox is full, which in turn stops the child.

This is one file because a request in flight and the reader are two ends of one queue.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import msgspec
import trio

from streams import messages
from streams.backends import attribution
from streams.backends.attribution import (
    CANCELLED,
    LOG,
    PROGRESS,
    SUBSCRIPTION,
    Attribution,
)
from streams.backends.lines import Lines, Long
from streams.backends.process import ChildSettings, Ending, Process
from streams.client import wire
from streams.engine.connection import Session
from streams.engine.lifecycle import LIVE
from streams.engine.stream import Stream
from streams.errors import INTERNAL_ERROR, Refusal, StreamsError, refusal
from streams.logs import Warnings, log
from streams.messages import ENDS_BYTES, Kind, Message, RequestId, has_method, id_in, mend
from streams.protocol.extension import KEY

# The messages that the reader puts aside for one request before the handler has taken them.
INBOX_BYTES_MAX: Final = 256 * 1024
INBOX_LINES_MAX: Final = 2_000
GARBAGE_MAX: Final = 100  # lines in a row that are no JSON-RPC
QUESTIONS_MAX: Final = 100  # of one child, without an answer
CANCELLED_MAX: Final = 1_000  # requests that were cancelled and may still be answered
LATER_MAX: Final = 1_000  # notifications that wait for an answer ahead of them
LATER_S: Final = 1.0  # how long they wait for a client that does not read its answer

_TOOL_CALL: Final = "tools/call"
_PING: Final = "ping"


class Died(Exception):  # an event, and no error of this project
    """The child has ended before it has answered a request."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.words)
        self.ending = ending
        self.exchange: Exchange | None = None  # the request, whose questions are still open

    def close_questions(self) -> None:
        """Answers to the questions of the request are awaited no longer."""
        if self.exchange is not None:
            self.exchange.close_questions()


class Question(msgspec.Struct, frozen=True):
    """A request of the child."""

    id: RequestId
    method: str
    params: msgspec.Raw
    sent: msgspec.Raw | msgspec.UnsetType  # the params that it has, if it has any


class Audience(Protocol):
    """The clients behind a child, for messages that belong to no request."""

    def stray(self, message: Message, line: bytes) -> None:
        """Take a notification. The line has no newline."""

    async def ask(self, question: Question, on_sent: Callable[[RequestId], None]) -> Message:
        """Ask a question and wait for the answer. Raises `Refusal`."""

    def check_question(self, question: Question, session: Session) -> None:
        """Raise `Refusal` where the client of a request in flight cannot take this question."""

    def wants_log(self, message: Message, session: Session) -> bool:
        """Whether the client of a request in flight wants this log message."""

    def has_listener(self) -> bool:
        """Whether a client that is connected has subscribed to a resource of the child."""


class Exchange:
    """A request of a client, from the line that is sent to the child to its answer."""

    __slots__ = (
        "_arrived",
        "inbox",
        "method",
        "number",
        "questions",
        "session",
        "size",
        "stream",
        "task",
    )

    is_cancelled: Final = False

    def __init__(self, number: int, stream: Stream, session: Session) -> None:
        self.number = number
        self.stream = stream
        self.session = session
        self.method = ""
        self.task: str | None = None
        self.inbox: list[tuple[Message, bytes] | BaseException] = []
        self.size = 0
        self.questions: dict[RequestId, trio.CancelScope] = {}  # of the child, by its ids
        self._arrived = trio.lowlevel.ParkingLot()

    def may_follow(self) -> bool:
        """See `InFlight`."""
        return False

    def put(self, item: tuple[Message, bytes] | BaseException, size: int = 0) -> None:
        """Put a message into the inbox, or the error that ends the request."""
        self.inbox.append(item)
        self.size += size
        if len(self.inbox) == 1:
            self._arrived.unpark_all()

    async def take(self) -> list[tuple[Message, bytes] | BaseException]:
        """Wait for messages, and take all that have come."""
        while not self.inbox:
            await self._arrived.park()
        taken, self.inbox = self.inbox, []
        return taken

    def close_questions(self) -> None:
        """Answers to its questions are awaited no longer."""
        for scope in list(self.questions.values()):
            scope.cancel()

    @property
    def is_full(self) -> bool:
        """Whether its handler is far behind."""
        return self.size > INBOX_BYTES_MAX or len(self.inbox) > INBOX_LINES_MAX


class CancelledExchange:
    """A cancelled request, without its stream: enough to know its late messages."""

    __slots__ = ("_cancelled_at", "_conversation", "number", "task")

    is_cancelled: Final = True

    def __init__(self, conversation: "Conversation", exchange: Exchange) -> None:
        self._conversation = conversation
        self._cancelled_at = trio.current_time()
        self.number = exchange.number
        self.task = exchange.task

    def may_follow(self) -> bool:
        """See `InFlight`."""
        return self._conversation.may_follow(self._cancelled_at)

    def put(self, item: BaseException) -> None:
        """Drop the error that ends the request."""


class Conversation:
    """One child, from its `initialize` to its end. `run` reads its output."""

    def __init__(
        self,
        process: Process,
        settings: ChildSettings,
        audience: Audience,
        nursery: trio.Nursery,
        *,
        is_shared: bool,
    ) -> None:
        """Questions are asked in tasks of `nursery`, which outlives the child."""
        self.process = process
        self.is_greeted = False  # it has answered `initialize`
        self.is_initialized = False  # the client's `notifications/initialized` was passed on
        self.is_ending = False  # it is told to end
        self._settings = settings
        self._audience = audience
        self._nursery = nursery
        self._is_shared = is_shared  # by sessions of several principals
        self._attribution: Attribution[Exchange | CancelledExchange] = Attribution()
        self._cancelled: dict[int, CancelledExchange] = {}
        self._own: dict[int, trio.MemorySendChannel[Message]] = {}  # requests of this process
        self._strays: dict[RequestId, trio.CancelScope] = {}  # questions of no request
        self._sent: dict[RequestId, RequestId] = {}  # our ids of the child's questions
        self._last = 0
        self._lines = Lines(settings.message_bytes_max)
        # Notifications that follow an answer wait until the client has it, so that they stay behind
        # it: the answers that are not written, by the requests, and the notifications, each with
        # the number of the last answer ahead of it.
        self._answers = 0
        self._answered: dict[Exchange, int] = {}
        self._later: deque[tuple[int, Message, bytes]] = deque()
        self._garbage = 0  # lines in a row
        self._warnings = Warnings()
        self._refusals = Warnings()
        self._has_garbage = False
        self._is_deaf = False  # it speaks no MCP: its output is ignored
        self._room = trio.lowlevel.ParkingLot()
        self._full: set[Exchange] = set()  # those that may be, since the last read

    @property
    def is_alive(self) -> bool:
        """Whether it can take another request."""
        return self.process.ending is None and not self.is_ending

    @property
    def has_questions(self) -> bool:
        """Whether a question of no request waits for its answer."""
        return bool(self._strays)

    def may_follow(self, cancelled_at: float) -> bool:
        """Whether messages of a request that was cancelled then may still come."""
        is_recent = trio.current_time() - cancelled_at < self._settings.cancel_timeout_s
        return is_recent or self._is_shared

    # Its life

    async def run(self) -> None:
        """Read until the child has ended; then end all that was in flight."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                await self.process.run()
                nursery.cancel_scope.cancel()
        finally:
            self._on_bytes(self.process.read_rest())
            for exchange in list(self._attribution.requests.values()):
                exchange.put(Died(self.ending))
            for waiting in self._own.values():
                waiting.close()
            self.close_strays()

    async def _read(self) -> None:
        while data := await self.process.read():
            self._on_bytes(data)
            while self._full:
                self._full = {each for each in self._full if each.is_full}
                if self._full:
                    await self._room.park()

    async def killed(self, why: str) -> None:
        """End the child now, for this reason, and wait until it has ended."""
        self.process.kill(why)
        await self.process.has_ended.wait()

    @property
    def ending(self) -> Ending:
        """How the child has ended."""
        assert self.process.ending is not None
        return self.process.ending

    def close_strays(self) -> None:
        """Answers to questions of no request are awaited no longer."""
        for scope in list(self._strays.values()):
            scope.cancel()

    # Requests of this process

    async def ask(self, method: str, params: Any) -> Message:
        """Send a request of our own and wait for the answer. Raises `Died`."""
        put, answer = trio.open_memory_channel[Message](1)
        number = self._next()
        self._own[number] = put
        try:
            self.process.write(messages.request(number, method, params))
            return await answer.receive()
        except trio.EndOfChannel:
            raise Died(self.ending) from None
        finally:
            self._own.pop(number, None)

    def post(self, method: str, params: Any) -> None:
        """Send a request of our own, whose answer is dropped."""
        self.process.write(messages.request(self._next(), method, params))

    def tell(self, line: bytes) -> None:
        """Send a notification, or drop it where the child does not read."""
        if self.process.has_room:
            self.process.write(line)
        else:
            self._warnings.warn("a notification was dropped: a child reads nothing", child=self.pid)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    def _next(self) -> int:
        self._last += 1
        return self._last

    # Requests of clients

    async def exchange(self, stream: Stream, session: Session) -> tuple[bytes, bool]:
        """Send the request of a stream; returns the response. Raises `Died` and `Refusal`."""
        await self.process.wait_for_room()
        if self.process.ending is not None:
            raise Died(self.process.ending)
        exchange = Exchange(self._next(), stream, session)
        line = request_line(exchange)
        self._attribution.requests[exchange.number] = exchange
        try:
            self.process.write(line)
            answer = await self._answer_to(exchange)
        except Died as died:
            died.exchange = exchange  # its questions stay open: it may be sent again
            self._end(exchange)
            self._settled(exchange)
            raise
        except BaseException:  # the handler was cancelled, or its stream has ended with an error
            self._cancel(exchange)
            exchange.close_questions()
            raise
        self._end(exchange)
        exchange.close_questions()
        if exchange in self._answered:
            self._nursery.start_soon(self._settle, exchange)
        return answer

    async def _answer_to(self, exchange: Exchange) -> tuple[bytes, bool]:
        """Send on all messages of a request up to its answer."""
        while True:
            plain: list[bytes] = []  # log messages, which are sent together
            for item in await exchange.take():
                if isinstance(item, BaseException):
                    await exchange.stream.send_droppable(plain)
                    raise item
                message, line = item
                if message.method == LOG and message.id is msgspec.UNSET:
                    if self._audience.wants_log(message, exchange.session):
                        plain.append(line + b"\n")
                    continue
                if plain:
                    await exchange.stream.send_droppable(plain)
                    plain = []
                if message.method is msgspec.UNSET:
                    return answer_line(exchange, message, line)
                if message.id is msgspec.UNSET:
                    await self._forward(exchange, message, line)
                else:
                    await self._nursery.start(
                        self._ask_client, exchange, question_in(message, line)
                    )
            await exchange.stream.send_droppable(plain)
            exchange.size = 0
            self._room.unpark_all()

    async def _forward(self, exchange: Exchange, message: Message, line: bytes) -> None:
        """Send a notification of the child to the client, in the request's stream."""
        stream, method = exchange.stream, message.method
        if method == PROGRESS:
            token = stream.progress_token
            if token is not None:  # else the progress was for this process alone
                await stream.send_progress(token, attribution.with_token(line, token))
        elif method == CANCELLED:
            await self._withdraw(exchange, message, line)
        else:
            if SUBSCRIPTION.encode() in line:
                line = attribution.with_subscription(line, stream.request_id).rstrip(b"\n")
            await stream.send(line + b"\n")

    def _end(self, exchange: Exchange) -> None:
        """The request is answered, or will never be."""
        self._attribution.requests.pop(exchange.number, None)
        self._clear(exchange)

    def _clear(self, exchange: Exchange) -> None:
        """Its handler takes nothing more."""
        self._full.discard(exchange)
        self._room.unpark_all()
        # Also of those that it has taken, and has not asked.
        asked = self._attribution.questions
        for its_id in [each for each, of in asked.items() if of is exchange]:
            if its_id not in exchange.questions:
                del asked[its_id]
        exchange.inbox.clear()

    def _cancel(self, exchange: Exchange) -> None:
        """Tell the child that no answer is awaited. Messages of it may still come."""
        self._clear(exchange)
        self._settled(exchange)
        is_answered = exchange.number not in self._attribution.requests
        if is_answered or self.process.ending is not None:
            return
        cancelled = CancelledExchange(self, exchange)
        self._cancelled[exchange.number] = cancelled
        self._attribution.requests[exchange.number] = cancelled
        for its_id in exchange.questions:
            self._attribution.questions[its_id] = cancelled
        if len(self._cancelled) > CANCELLED_MAX:
            self._forget_cancelled(next(iter(self._cancelled)))
        self.tell(wire.cancelled(exchange.number, exchange.stream.cancel_reason))

    def _has_answered(self, exchange: Exchange | CancelledExchange) -> None:
        """The child has answered this request: a second answer belongs to none."""
        if isinstance(exchange, CancelledExchange):
            self._forget_cancelled(exchange.number)
        else:
            self._attribution.requests.pop(exchange.number)

    def _forget_cancelled(self, number: int) -> None:
        """A cancelled request is answered, or too many others were cancelled since."""
        del self._cancelled[number]
        del self._attribution.requests[number]

    # Questions of the child

    async def _ask_client(
        self, exchange: Exchange, question: Question, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Ask a question of a request in flight, in the request's stream."""
        their_id = question.id
        has_started = False

        def on_sent(our_id: RequestId) -> None:
            nonlocal has_started
            has_started = True
            self._sent[their_id] = our_id
            task_status.started()

        with trio.CancelScope() as scope:
            exchange.questions[their_id] = scope
            try:
                self._audience.check_question(question, exchange.session)
                ask = exchange.stream.ask
                answer = await ask(question.method, question.sent, on_sent=on_sent)
                await self._give(their_id, answer)
            except StreamsError as error:
                self._refuse(their_id, error)
            finally:
                self._forget(their_id)
                exchange.questions.pop(their_id, None)
        if not has_started:
            task_status.started()

    async def _ask_stray(self, question: Question, scope: trio.CancelScope) -> None:
        """Ask a question that belongs to no request."""
        their_id = question.id
        with scope:

            def on_sent(our_id: RequestId) -> None:
                self._sent[their_id] = our_id

            try:
                answer = await self._audience.ask(question, on_sent)
                await self._give(their_id, answer)
            except StreamsError as error:
                self._refuse(their_id, error)
            finally:
                self._forget(their_id)
                self._strays.pop(their_id, None)

    async def _give(self, their_id: RequestId, answer: Message) -> None:
        line = one_line(messages.answer(msgspec.structs.replace(answer, id=their_id)))
        await self.process.wait_for_room()
        self.process.write(line)

    def _refuse(self, their_id: RequestId, error: StreamsError) -> None:
        refused = error if isinstance(error, Refusal) else Refusal(INTERNAL_ERROR, str(error))
        self._refusals.warn(
            "a question of a child was refused", child=self.pid, why=refused.message[:200]
        )
        self.tell(messages.error(their_id, refused))

    def _forget(self, their_id: RequestId) -> None:
        self._sent.pop(their_id, None)
        self._attribution.questions.pop(their_id, None)

    async def _withdraw(self, exchange: Exchange, message: Message, line: bytes) -> None:
        """The child cancels a question: the client hears it under the id that it knows."""
        their_id = attribution.cancelled_id(message.params)
        our_id = self._sent.get(their_id) if their_id is not None else None
        if their_id is None or our_id is None:
            return
        scope = exchange.questions.get(their_id)
        if scope is not None:
            scope.cancel()
        await exchange.stream.send(attribution.with_member(line, ("params", "requestId"), our_id))

    # Messages of the child

    def _on_bytes(self, data: bytes) -> None:
        lines = self._lines.feed(data)
        if (found := _looked_at_all(lines)) is not None:
            self._garbage = 0
            for line, message in found:
                self._on_message(line, message)
            return
        for each in lines:
            if self._is_deaf:
                return
            if isinstance(each, Long):
                self._on_long_line(each)
            else:
                self._on_line(each)

    def _on_line(self, line: bytes) -> None:
        try:
            if not line.isascii():
                line.decode()  # msgspec does not check UTF-8 in values that it skips
            message = messages.look(line)
        except (ValueError, RecursionError):
            if (mended := mend(line)) is None:
                self._on_batch(line)
                return
            line, message = mended, messages.look(mended)
        self._garbage = 0
        self._on_message(line, message)

    def _on_batch(self, line: bytes) -> None:
        """Take the messages of a batch, which revision 2025-03-26 has; else the line is garbage."""
        found: list[tuple[bytes, Message]] = []
        if line.lstrip().startswith(b"["):
            with suppress(ValueError, RecursionError):
                parts = [bytes(each) for each in messages.decode(line, list[msgspec.Raw])]
                found = [(each, messages.look(each)) for each in parts]
        if not found:
            self._on_unreadable(line)
        for part, message in found:
            self._garbage = 0
            self._on_message(part, message)

    def _on_unreadable(self, line: bytes) -> None:
        """A line that is no message. If it looks like an answer, it ends its call."""
        head, tail = line[:ENDS_BYTES], line[-ENDS_BYTES:]
        number = None if has_method(head) else id_in(head, tail)
        exchange = None if number is None else self._attribution.named(number)
        if exchange is None or not line.startswith(b"{"):
            self._on_garbage(line)
            return
        why = "The answer of the wrapped server is no JSON-RPC: see the log."
        exchange.put(Refusal(INTERNAL_ERROR, why))
        self._has_answered(exchange)
        self._warnings.warn("an answer of a child is no JSON-RPC", child=self.pid, start=str(head))

    def _on_garbage(self, line: bytes) -> None:
        self._garbage += 1
        if not self._has_garbage:
            self._has_garbage = True
            log.warning(
                "a child writes to standard output what is no JSON-RPC: it is dropped",
                child=self.pid,
                line=line[:200].decode(errors="replace"),
            )
        if self._garbage > GARBAGE_MAX:
            self._is_deaf = True
            self.process.kill(
                f"it is no MCP server: {self._garbage} lines in a row are no JSON-RPC"
            )

    def _on_long_line(self, line: Long) -> None:
        limit = self._settings.message_bytes_max
        too_large = refusal("too_large", limit=limit)
        if has_method(line.head):
            if (number := id_in(line.head, line.tail)) is not None:
                self._refuse(number, too_large)
        elif (exchange := self._attribution.of_long(line.head, line.tail)) is not None:
            why = f"The answer of the wrapped server is longer than {limit} bytes: start "
            exchange.put(too_large.saying(f"{why}mcp-streams with a larger --max-message-bytes."))
            self._has_answered(exchange)
        self._warnings.warn("a line of a child is too long: it was dropped", child=self.pid)

    def _on_message(self, line: bytes, message: Message) -> None:
        if message.method is msgspec.UNSET:
            self._on_answer(line, message)
        elif message.id is msgspec.UNSET:
            exchange = self._attribution.of(message)
            if exchange is not None:
                self._put(exchange, message, line)
            elif message.method == PROGRESS:
                self._drop()
            elif (self._answered or self._later) and len(self._later) < LATER_MAX:
                self._later.append((self._answers, message, line))
            else:
                self._on_stray(message, line)
        else:
            self._on_question(line, message)

    def _on_answer(self, line: bytes, message: Message) -> None:
        exchange: Exchange | CancelledExchange | None
        if message.id is None:
            exchange = self._attribution.only  # it could not read the request
        else:
            exchange = self._attribution.named(message.id)
        if isinstance(exchange, Exchange):
            if message.result is msgspec.UNSET and message.error is msgspec.UNSET:
                exchange.put(Refusal(INTERNAL_ERROR, "The wrapped server has sent no result."))
            else:
                self._put(exchange, message, line)
            self._answers += 1
            self._answered[exchange] = self._answers
        if exchange is not None:
            self._has_answered(exchange)
        elif isinstance(message.id, int) and message.id in self._own:
            self._own.pop(message.id).send_nowait(message)
        else:
            self._drop()

    def _on_question(self, line: bytes, message: Message) -> None:
        if not isinstance(message.id, int | str):
            self._drop()
            return
        if message.method == _PING:
            self.tell(messages.result(message.id, {}))
            return
        if len(self._attribution.questions) >= QUESTIONS_MAX or (
            message.id in self._attribution.questions
        ):
            self._refuse(message.id, Refusal(INTERNAL_ERROR, "Too many questions are open."))
            return
        exchange = self._attribution.of(message)
        if isinstance(exchange, CancelledExchange):
            self._refuse(message.id, Refusal(INTERNAL_ERROR, "The request was cancelled."))
            return
        self._attribution.questions[message.id] = exchange
        if exchange is not None:
            self._put(exchange, message, line)
        else:
            scope = self._strays[message.id] = trio.CancelScope()
            self._nursery.start_soon(self._ask_stray, question_in(message, line), scope)

    def _on_stray(self, message: Message, line: bytes) -> None:
        if message.method == CANCELLED:
            self._withdraw_stray(message, line)
        else:
            self._audience.stray(message, line)

    async def _settle(self, exchange: Exchange) -> None:
        """Wait until the answer of a request is written, or its client is away."""
        stream = exchange.stream
        with trio.move_on_after(LATER_S):
            while stream.state.outcome is LIVE:
                await stream.change()
            await stream.written(stream.state.last)
        self._settled(exchange)

    def _settled(self, exchange: Exchange) -> None:
        """Notifications need not wait for the answer of this request any more."""
        self._answered.pop(exchange, None)
        first = next(iter(self._answered.values()), self._answers + 1)
        while self._later and self._later[0][0] < first:
            _, message, line = self._later.popleft()
            self._on_stray(message, line)

    def _withdraw_stray(self, message: Message, line: bytes) -> None:
        their_id = attribution.cancelled_id(message.params)
        if their_id is None or their_id not in self._strays:
            self._drop()
            return
        our_id = self._sent.get(their_id)
        self._strays[their_id].cancel()
        if our_id is not None:
            told = attribution.with_member(line, ("params", "requestId"), our_id)
            self._audience.stray(message, told.rstrip(b"\n"))

    def _put(self, exchange: Exchange | CancelledExchange, message: Message, line: bytes) -> None:
        if isinstance(exchange, CancelledExchange):
            self._drop()
            return
        exchange.put((message, line), len(line))
        self._full.add(exchange)

    def _drop(self) -> None:
        log.debug("a message of a child came too late: it was dropped", child=self.pid)


# Lines


def _looked_at_all(lines: Sequence[bytes | Long]) -> Iterable[tuple[bytes, Message]] | None:
    """The messages in several lines, parsed at once; None where one of them is no message."""
    if len(lines) > 1 and not any(isinstance(line, Long) for line in lines):
        block = b"\n".join(cast(Sequence[bytes], lines))
        if block.isascii():
            with suppress(ValueError, RecursionError):
                found = messages.look_at_lines(block)
                if len(found) == len(lines):
                    return zip(cast(Sequence[bytes], lines), found, strict=True)
    return None


def request_line(exchange: Exchange) -> bytes:
    """The request of a stream as the child gets it: with an id and a progress token of ours."""
    stream, number = exchange.stream, exchange.number
    members = messages.decode(one_line(stream.record.origin), dict[str, msgspec.Raw])
    members["id"] = ours = msgspec.Raw(b"%d" % number)
    exchange.method = method = messages.decode(members["method"], str)
    raw = members.get("params")
    if method.startswith("tasks/") and raw is not None:
        exchange.task = attribution.task_of(raw)
    if method == _TOOL_CALL or (raw is not None and b'"progressToken"' in bytes(raw)):
        members["params"] = _with_our_token(raw or msgspec.Raw(b"{}"), ours, method)
    return messages.encode(members) + b"\n"


def _with_our_token(raw: msgspec.Raw, ours: msgspec.Raw, method: str) -> msgspec.Raw:
    """Params with our progress token: calls are always asked for progress, to attribute it."""
    try:
        params = messages.decode(raw, dict[str, msgspec.Raw])
        meta = messages.decode(params.get("_meta", b"{}"), dict[str, msgspec.Raw])
    except ValueError:
        return raw  # the child refuses them
    if method != _TOOL_CALL and "progressToken" not in meta:
        return raw
    meta.pop(KEY, None)  # it is for this process
    meta["progressToken"] = ours
    params["_meta"] = msgspec.Raw(messages.encode(meta))
    return msgspec.Raw(messages.encode(params))


def question_in(message: Message, line: bytes) -> Question:
    """The question in a request of the child."""
    assert isinstance(message.id, int | str)
    has_params = b'"params"' in line
    sent = message.params if has_params else msgspec.UNSET
    return Question(message.id, str(message.method), message.params, sent)


def answer_line(exchange: Exchange, message: Message, line: bytes) -> tuple[bytes, bool]:
    """The response of the child under the client's id, and whether it is an error."""
    is_error = message.kind is Kind.ERROR or (
        b'"isError"' in line and messages.is_tool_error(message.result)  # type: ignore[arg-type]
    )
    return attribution.with_id(line, exchange.stream.request_id), is_error


def one_line(line: bytes) -> bytes:
    """A message of a client without newlines between its members."""
    ended = line.endswith(b"\n")
    body = line[:-1] if ended else line
    if b"\n" in body or b"\r" in body:
        body = msgspec.json.format(body, indent=-1)
    return body + b"\n" if ended else body
