"""One stream, between the handler that sends on it and the delivery that takes from it.

`StreamState` (`streams.engine.lifecycle`) decides what may happen. A `Stream` adds what takes time:
it waits for room, for commits and for the client's answers. It sees the delivery and its client
through two protocols, so that it knows nothing of connections.

This is one file because a stream is one object with two sides. The handler's side (sending, asking)
and the engine's side (committing, delivering, confirming) wake each other, over the same state.
"""

import math
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import trio
from msgspec.structs import replace

from streams import messages
from streams.clock import wall
from streams.engine.absence import Absence
from streams.engine.committer import Committer
from streams.engine.hooks import Hooks
from streams.engine.identity import call_digest
from streams.engine.lifecycle import LIVE, Event, ProgressToken, Question, StreamState
from streams.engine.posts import Taker
from streams.engine.rerun import Rerun, diverged
from streams.errors import Ended, Fenced, Refusal, refusal
from streams.exchange import authenticated
from streams.journal.records import Ack, Append, Close, Create, Forget, Record, Restore
from streams.keys import Keyring, new_request_id
from streams.limits import Limits, Overflow
from streams.messages import LEVELS, Message, RequestId, Run
from streams.protocol import extension

# How long after its detachment a client with positions may still ack. It acks at least every 1,000
# messages or every second, the last messages too.
ACK_WAIT_S: Final = 10.0

ENDED_MAX: Final = 1000  # responses of a stream that are known to be ended; the oldest go first

# The progress token of a findable call whose client wants no progress. Its latest progress is kept,
# to be told with an interim answer, and no client is sent it.
UNHEARD: Final = "mcp-streams/unheard"

READERS_MAX: Final = 100  # clients that were sent a request which has no answer

_T = TypeVar("_T")


class Reader(Protocol):
    """The client of a delivery. Two deliveries to one client have the same object."""

    @property
    def name(self) -> str:
        """The name of its session."""

    @property
    def level(self) -> str:
        """The least severe log messages that it wants."""

    @property
    def confirms(self) -> bool:
        """Whether it sends cursors and acks."""


class Follower(Protocol):
    """A delivery, as its stream sees it. At most one is attached to a stream."""

    number: int  # in the order of the stream's deliveries; set when it is attached
    attached_at: float  # when its client asked for it, in wall time
    waited_s: float  # since then until it was attached

    @property
    def asked_at(self) -> float | None:
        """No later than this it was asked for, in trio's time of the owner; None: unknown."""

    @property
    def reader(self) -> Reader:
        """The client."""

    @property
    def start(self) -> int:
        """The seq behind which it began."""

    @property
    def position(self) -> int:
        """Up to which seq it has handed the stream to its sender."""

    @property
    def written(self) -> int:
        """Up to which seq the transport has confirmed that it was written."""

    @property
    def reply_id(self) -> RequestId | None:
        """The id of the resume that asked for it; None for the original request's own."""

    @property
    def only_waits(self) -> bool:
        """Whether its client can only wait for the end: it has no way to come back."""

    @property
    def wait_s(self) -> float | None:
        """How long its client wants to wait at most, where it has said so."""

    def wake(self) -> None:
        """The stream may have something to deliver."""

    @property
    def taker(self) -> Taker:
        """The client and its request, for a delivery that is displaced by this one."""

    def give_way(self, by: Taker) -> None:
        """The newest delivery wins: this one was displaced, and tells its client so.

        It tells nothing to a client that has asked again under the same id, or continues the same
        response: that client must not get an error.
        """

    def drop(self) -> None:
        """Detach from the stream and send nothing more."""

    def answer(self, line: bytes) -> None:
        """Detach from the stream and send this line, which the journal does not have."""

    def fail(self, refused: Refusal) -> None:
        """Detach from the stream and send this error to the client."""

    def hang_up(self) -> None:
        """Close the connection: the client comes back, perhaps to another replica."""

    def let_go(self) -> bool:
        """Detach if the client can resume. False, and nothing done, if that would lose a call."""


class StreamEvents(Protocol):
    """Is told what happens to streams (`streams.engine.events`), while it `is_heard`."""

    is_heard: bool  # whether anything listens

    def asked(self, stream: "Stream", request_id: RequestId, method: str) -> None:
        """The handler has sent its client a request."""

    def answered(self, stream: "Stream", request_id: RequestId) -> None:
        """The client has answered a request."""

    def ended(self, stream: "Stream", why: str) -> None:
        """The call has ended, with the outcome of its state. See `CallEnded`."""

    def restarted(self, stream: "Stream") -> None:
        """The handler runs again."""


class Answer:
    """The client's answer to one request of a stream, which may still have to come."""

    __slots__ = ("_is_here", "_message", "readers", "stream")

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        # The names of the clients that the request was sent to, the oldest go first.
        self.readers: dict[str, None] = {}
        self._is_here = trio.Event()
        self._message: Message | None = None

    def sent_to(self, reader: str) -> None:
        """The client of this name may answer."""
        self.readers[reader] = None
        if len(self.readers) > READERS_MAX:
            del self.readers[next(iter(self.readers))]

    def give(self, message: Message) -> None:
        """Hand over the client's answer."""
        self._message = message
        self._is_here.set()

    async def wait(self) -> Message:
        """Wait for the client's answer."""
        await self._is_here.wait()
        assert self._message is not None
        return self._message


class Stream:
    """All messages of one original request, from its handler to its deliveries."""

    cancel_reason: Any  # why its client has cancelled it, if it said so

    __slots__ = (
        "__weakref__",
        "_absence",
        "_answers",
        "_asked_for_progress",
        "_changed",
        "_committer",
        "_early_ack",
        "_events",
        "_keyring",
        "_left_at",
        "_limits",
        "_newest_handed",
        "_on_settled",
        "_on_stored",
        "_progress_token",
        "_reader",
        "_rerun_answers",
        "ahead_of_messages",
        "asked",
        "cancel_reason",
        "delivery",
        "digest",
        "ended_responses",
        "id",
        "is_anonymous",
        "is_deferred",
        "is_evicted",
        "is_findable",
        "is_held",
        "is_left",
        "is_lost",
        "is_progress_wanted",
        "is_reachable",
        "is_recorded",
        "latest_progress",
        "mark",
        "newest",
        "number",
        "on_attach",
        "on_displace",
        "overflow",
        "record",
        "request_id",
        "rerun",
        "scope",
        "short_name",
        "state",
        "stays",
        "was_evicted",
        "witness",
    )

    def __init__(
        self,
        record: Record,
        limits: Limits,
        committer: Committer,
        keyring: Keyring,
        *,
        answers: dict[RequestId, Answer],
        on_stored: Callable[["Stream"], None],
        on_settled: Callable[["Stream"], None],
        events: StreamEvents,
        overflow: Overflow = "block",
        origin: Message | None = None,
    ) -> None:
        """`answers` are those that the handlers of all streams wait for. `origin` is the
        original request, where that was parsed already.
        """
        self.record = record
        self.id = record.stream  # the streamId
        self.number = record.number  # in the order of creation
        self.state = StreamState(record, limits)
        if origin is None:
            origin = messages.parse(record.origin)
        assert isinstance(origin.id, int | str)
        self.request_id = origin.id
        owner = authenticated(record.principal)
        self.is_anonymous = not owner
        self.mark = extension.mark_of(origin.params)  # of its idempotency key
        # Its page tokens are bound to this call and its caller. Without authentication they are
        # bound to the call alone: then any caller that has such a token may use it.
        self.digest = call_digest(origin.params, owner) if self.state.is_paged else b""
        self.asked = 0  # a client has asked for the page that follows this seq
        self._progress_token: ProgressToken | None = None
        # Searched in the text of the original request: a restarted server has not parsed it.
        self._asked_for_progress = b'"progressToken"' in record.origin
        # Whether any call for this stream, the first one or a retry, has asked for progress.
        self.is_progress_wanted = self._asked_for_progress
        # Sends the pages that are ready, which must come before any other message.
        self.ahead_of_messages: Callable[[], Awaitable[None]] | None = None
        self.overflow = overflow
        self.rerun: Rerun | None = None  # for a call that is restarted when its server dies
        self.delivery: Follower | None = None
        self.is_reachable = record.is_announced  # whether a client can resume it
        self.is_recorded = False  # whether its record is durable; it is announced after that
        # A new stream is *deferred* while it is unknown to the journal, and so no client can come
        # back to it. If its result is the first thing that the handler sends, it is sent as a plain
        # response, and nothing is ever stored. A new stream is *held* while its delivery waits for
        # the first message. Then one write has the announcement and a result that comes soon.
        # A stream is *lost* once another replica has taken it over.
        self.is_deferred = self.is_held = self.is_left = self.is_lost = False
        # A *findable* call can be found by its caller again, by a short name or by making the same
        # call (`streams.server.patience`). While it is *left*, its last client has stopped waiting
        # for it: then progress is not numbered. The response of a call that may be asked for again
        # `stays` when it was delivered.
        self.is_findable = self.stays = self.mark is not None and self.mark.is_once
        self.latest_progress = b""
        self.on_attach: Callable[[Stream], None] | None = None
        # Called before a client that waits at another replica displaces the one that is attached.
        self.on_displace: Callable[[Stream], None] | None = None
        # A client at another replica can find it by its short name.
        self.short_name, self.cancel_reason = "", None
        # Responses that their clients must not continue, at any replica: `superseded` by another
        # session or `cancelled` by their own. By the names of the session and of the grant.
        self.ended_responses: dict[tuple[str, str], str] | None = None
        # After it `was_evicted` it was loaded from the journal, which can find it too. While it
        # `is_evicted`, a later load makes another object of the same stream.
        self.was_evicted = self.is_evicted = False
        self.scope: trio.CancelScope | None = None  # around the handler, while that runs
        # The answers to the requests that a restarted call is expected to send once more.
        self._rerun_answers: dict[RequestId, Answer] = {}
        self._answers, self._on_stored, self._on_settled = answers, on_stored, on_settled
        self._limits, self._committer, self._keyring, self._events, self._absence = (
            limits,
            committer,
            keyring,
            events,
            None if committer.hooks is None else Absence(committer.hooks, committer.add),
        )
        self._changed: trio.Event | None = None
        # The newest delivery, even if it is over: its number, its client, and the last seq that was
        # handed to it. Only that client, about that delivery, can move the delivered mark.
        self.newest = self._newest_handed = self._early_ack = 0
        self._reader: Reader | None = None
        self._left_at = -math.inf  # when that delivery was detached or fell silent last
        # Whether data from the peer may still prove that it has read what was written to it.
        self.witness: Callable[[Stream], bool] | None = None

    @property
    def deadline(self) -> float | None:
        """When it expires, in trio's time."""
        return self.state.deadline

    @property
    def names(self) -> tuple[bytes, ...]:
        """The names by which its tokens and its idempotency key lead to it."""
        names = self._keyring.names(self.id)
        return names if self.mark is None else (*names, bytes.fromhex(self.mark.name))

    @property
    def is_open_to_key(self) -> bool:
        """Whether its idempotency key leads to it from another connection or session too."""
        return self.mark is not None and not self.mark.is_own

    @property
    def outlives_session(self) -> bool:
        """Whether its key or a page token leads to it once its connection or session is over."""
        return self.state.is_paged or self.is_open_to_key

    # Its record

    def keep_caller(self, caller: bytes) -> None:
        """Keep this of the caller of a new call, for its restart. The record is not stored yet."""
        assert self.record.restart is not None
        restart = replace(self.record.restart, caller=caller)
        self.record = replace(self.record, restart=restart)

    def store(self) -> None:
        """Give the record to the journal, if that is deferred."""
        if self.is_deferred:
            self.is_deferred = False
            # In a shared journal other replicas find it by its names from now on.
            names = self.names if self.record.owner and self.record.is_announced else ()
            # Where the turn was lost, they may find another call with the same key by now.
            mark = self.mark if self.record.owner else None
            turn = b"" if mark is None else bytes.fromhex(mark.name)
            self._committer.add(Create(self.record, names, turn))
            self._committer.mark(self, 0)  # calls `committed` when the record is durable
            self._on_stored(self)

    def release(self) -> None:
        """Let a delivery begin, although there may be no message yet."""
        self.is_held = False
        if self.delivery is not None:
            self.delivery.wake()

    async def recorded(self) -> None:
        """Wait until its record is durable, so that no crash can make it unknown.

        Returns as well once nothing is kept of it, or another replica has it: then the journal has
        perhaps refused the record, and nothing else may tell of it.
        """
        self.store()
        while not (self.is_recorded or self.is_lost or self.state.is_tombstone):
            await self._committer.commit_done()

    async def send(self, line: bytes, *, is_droppable: bool = False) -> None:
        """Send a notification. Waits while there is no room, returns when it has its place.

        `is_droppable`: after a restart the tool need not send it again. Raises `Refusal` where the
        line is too large, where there is no room and `overflow` is "fail", or where the call was
        restarted and its first run sent another line in this place. Where it waits, it raises
        `Unavailable` if the server has shut down, and `Fenced` if another replica has the call.
        """
        await self._let_out_ahead_of(line)
        rerun = self.rerun
        if rerun is None or not await self._compared(rerun.swallow(line, is_droppable)):
            await self._offer(lambda: self.state.add(line))

    async def send_droppable(self, lines: Sequence[bytes]) -> None:
        """Send several notifications, as `send` does one, at less cost for each.

        After a restart the tool need not send them again.
        """
        limit = self._limits.message_bytes_max
        is_plain = self.rerun is None and self.ahead_of_messages is None
        sent, size = 0, self.state.batch_bytes
        if is_plain and lines and max(map(len, lines)) <= limit:
            await trio.lowlevel.checkpoint_if_cancelled()
            while sent < len(lines) and self.state.add(lines[sent]):
                sent += 1
            if sent:
                await self._accepted(size)
        for line in lines[sent:]:
            await self.send(line, is_droppable=True)

    async def send_page(self, line: bytes) -> None:
        """Send a response that is not the last one. Raises as `send` does."""
        self._check_size(line)
        await self._offer(lambda: self.state.add(line, is_page=True))

    async def send_progress(self, token: ProgressToken, line: bytes) -> None:
        """Send progress. Where there is no room, only the latest of each token is kept."""
        await self._let_out_ahead_of(line)
        self.latest_progress = line
        rerun = self.rerun
        if rerun is not None and await self._compared(rerun.swallow(line, is_droppable=True)):
            return
        if self.is_left or token == UNHEARD:
            await trio.lowlevel.checkpoint()
            return
        await trio.lowlevel.checkpoint_if_cancelled()
        size = self.state.batch_bytes
        if self.state.add_progress(token, line):
            await self._accepted(size)
        else:
            await trio.lowlevel.checkpoint()

    async def ask(
        self, method: str, params: Any, *, on_sent: Callable[[RequestId], object] | None = None
    ) -> Message:
        """Send a request to the client and wait for the answer, whichever connection it comes over.

        `on_sent` is called with its id when it has its place. Raises as `send` does.
        """
        rerun = self.rerun
        first_id = None if rerun is None else await self._compared(rerun.asked(method, params))
        request_id = self._new_request_id() if first_id is None else first_id
        answer = Answer(self) if first_id is None else self._rerun_answers[first_id]
        try:
            if first_id is None:
                self._answers[request_id] = answer
                await self._send_request(request_id, messages.request(request_id, method, params))
                if self._events.is_heard:
                    self._events.asked(self, request_id, method)
            if on_sent is not None:
                on_sent(request_id)
            return await answer.wait()
        finally:
            if self._answers.get(request_id, answer) is answer:  # else it is asked once more
                self._answers.pop(request_id, None)
                question = self.state.questions.pop(request_id, None)
                if question is not None and not self.is_suspended:
                    self._take_back_webhooks(question.seq)

    def _new_request_id(self) -> str:
        """An id for a request. Any replica that gets the answer finds the stream by it."""
        request_id = new_request_id()
        if not self.record.owner:
            return request_id
        return f"{request_id}.{self._keyring.names(self.id)[0].hex()}"

    async def _send_request(self, request_id: RequestId, line: bytes) -> None:
        await self._let_out_ahead_of(line)
        is_forced = self.overflow == "fail"
        await self._offer(lambda: self.state.add_request(request_id, line, is_forced=is_forced))

    @property
    def progress_token(self) -> ProgressToken | None:
        """The token under which progress is reported; None while no request wants it.

        MCP: "Progress notifications MUST only reference tokens that: were provided in an active
        request". So a page that is made before it is asked for has no progress token.
        """
        is_awaited = not self.state.is_paged or self.state.answer_after(self.asked) is None
        token = self._progress_token
        if token is None and (self.is_findable or self.is_rerunning):
            token = UNHEARD
        return token if is_awaited else None

    @progress_token.setter
    def progress_token(self, token: ProgressToken | None) -> None:
        self.take_progress_token(token)

    def take_progress_token(self, token: ProgressToken | None) -> None:
        """Report progress under this token, that of the client that is attached now."""
        self._progress_token = token
        self.is_progress_wanted = self._asked_for_progress or token is not None

    @property
    def is_rerunning(self) -> bool:
        """Whether the handler still sends what it sent before the server died."""
        return self.rerun is not None and not self.rerun.is_over

    @property
    def is_suspended(self) -> bool:
        """Whether the call goes on later, in a server that is back or at another replica."""
        return self.is_lost or (self.rerun is not None and self.rerun.is_suspended)

    @property
    def level(self) -> str:
        """The least severe log messages that its client wants."""
        return LEVELS[0] if self._reader is None else self._reader.level

    async def flush(self) -> None:
        """Wait until everything sent so far is durable, and the record of the call as well."""
        await self.recorded()
        if self.is_held:
            self.release()
        seq = self.state.last
        while self.state.durable < min(seq, self.state.last):  # `close` may lower `last`
            self._check_owned()
            await self._committer.commit_done()

    async def written(self, seq: int) -> None:
        """Wait until everything up to `seq` was written, or no delivery is attached."""
        while self.delivery is not None and self.delivery.written < seq:
            await self.change()

    async def _offer(self, add: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        size = self.state.batch_bytes
        while not add():
            self._check_owned()
            if self.overflow == "fail":
                raise self._fail()
            await self.change()
            await self._committer.check_running()
            size = self.state.batch_bytes
        await self._accepted(size)

    async def _accepted(self, size_before: int) -> None:
        self._mark(size_before)
        committer = self._committer
        while self.state.batch_bytes >= committer.stream_bytes_max or committer.is_full(
            is_anonymous=self.is_anonymous
        ):
            await committer.commit_begun()

    def lose(self) -> None:
        """Another replica has the stream now: its handler waits for nothing here any more."""
        self.is_lost = True
        self._forget_reopened()
        self.notify()

    def _check_owned(self) -> None:
        if self.is_lost:
            raise Fenced("another replica runs this call now")

    def _mark(self, size_before: int) -> None:
        self.store()
        self._committer.mark(self, self.state.batch_bytes - size_before)

    async def _let_out_ahead_of(self, line: bytes) -> None:
        self._check_size(line)
        if self.ahead_of_messages is not None:
            await self.ahead_of_messages()

    def _check_size(self, line: bytes) -> None:
        if len(line) > self._limits.message_bytes_max:
            raise refusal("too_large", limit=self._limits.message_bytes_max)

    def _fail(self) -> Exception:
        failure = refusal("too_slow", limit=self._limits.unsent_entries_max)
        self.fail(failure)
        return failure

    # For the handler of a restarted call

    async def checkpoint(self, state: bytes) -> None:
        """Store the state, in JSON, that the next restart begins with. Returns when it is durable.

        Raises `ValueError` where the state is too long, `Ended` once the stream has ended, `Fenced`
        where another replica has it.
        """
        assert self.rerun is not None
        limit = self._limits.checkpoint_bytes_max
        if len(state) > limit:
            raise ValueError(f"a checkpoint of {len(state)} bytes, of which there may be {limit}")
        outcome = self.state.outcome
        if outcome is not LIVE:
            raise Ended(f"a checkpoint: the stream is {outcome.value} already")
        self.store()
        # Progress that was held back belongs before the checkpoint.
        self.make_use_of_room(is_forced=True)
        await self.rerun.checkpoint(self.state.last, state)
        self._check_owned()

    async def reopen_questions(self) -> None:
        """Open the unanswered requests of the first run: an answer may come before the tool asks
        once more.
        """
        assert self.rerun is not None
        self._reopen(self.rerun, await self.rerun.questions())
        if self._absence is not None and self.delivery is None:
            if self.rerun.was_suspended:
                self._absence.restarted(self.state.questions.values())
            else:
                self.tell_questions()

    def _reopen(self, rerun: Rerun, questions: dict[RequestId, Question]) -> None:
        self._rerun_answers = {}
        for request_id, question in questions.items():
            answer = self._rerun_answers[request_id] = Answer(self)
            line = rerun.answer_to(question.seq)
            if line is not None:
                answer.give(messages.parse(line))
            else:
                if (asked := self._answers.get(request_id)) is not None:
                    answer.readers = asked.readers
                self._answers[request_id] = answer
                self.state.questions[request_id] = question

    def _forget_reopened(self) -> None:
        """Requests of an earlier run that the handler has not sent again want no answer."""
        for request_id, answer in self._rerun_answers.items():
            if self._answers.get(request_id) is answer:
                del self._answers[request_id]

    async def run_again(self) -> None:
        """Begin the next run of a call whose child process has died, in a live server.

        Its requests must stay open meanwhile: a client gives each answer once. Raises `Refusal`
        where the call has died too often.
        """
        assert self.rerun is not None
        self.state.held_back.clear()  # without a number, it was not sent
        await self.flush()
        missed = set[RequestId]()
        while True:
            rerun = await self.rerun.again()
            questions = await rerun.questions()
            missing = {
                request_id
                for request_id, question in questions.items()
                if request_id not in self._answers and rerun.answer_to(question.seq) is None
            }
            if missing <= missed:
                break
            missed |= missing  # perhaps answered meanwhile: then the answer is stored by now
        self.rerun = rerun
        self._reopen(rerun, questions)
        await rerun.begin()
        if self._events.is_heard:
            self._events.restarted(self)

    async def _compared(self, ask: Awaitable[_T]) -> _T:
        """The answer of the rerun. A difference from the first run, a `Refusal`, ends the call."""
        try:
            return await ask
        except Refusal as difference:
            if not self.state.is_ended:
                self.fail(difference)
            raise

    # For the engine

    def end_handler(self) -> None:
        """Cancel the handler, if it runs."""
        if self.scope is not None:
            self.scope.cancel()

    def finish(self, line: bytes, *, is_error: bool) -> None:
        """Send a result as the final response; `is_error` where it says `isError`."""
        if len(line) > self._limits.message_bytes_max:
            self.fail(refusal("too_large", limit=self._limits.message_bytes_max))
        elif self.rerun is not None and self.rerun.is_different(is_error=is_error):
            self.fail(diverged("it is done, and has not sent all of that again"))
        else:
            self._end(line, Event.END, "tool_error" if is_error else "")

    def fail(self, refused: Refusal) -> None:
        """Send an error as the final response."""
        self._end(messages.error(self.request_id, refused), Event.FAIL, refused.reason)

    def _end(self, line: bytes, event: Event, why: str) -> None:
        """`why` it is an error; "" for a result."""
        size = self.state.batch_bytes
        self.state.end(line, event, is_error=bool(why), at=wall())
        self._take_back_webhooks()
        self._forget_reopened()
        self.notify()  # a sender that waits for room in vain
        if self._events.is_heard:
            self._events.ended(self, why)
        if self.is_deferred and self.delivery is not None:
            self.delivery.answer(line)
        else:
            self._mark(size)

    @property
    def can_wait(self) -> bool:
        """Whether its lines may wait until there is room in the journal."""
        # The lines before a checkpoint must be committed together with it.
        is_saving = self.rerun is not None and self.state.durable < self.rerun.checkpoint_seq
        return self.state.outcome is LIVE and not is_saving

    def take(self) -> list[Append]:
        """The batch, as changes for the journal."""
        taken = list(iter(partial(self.state.take, self.record.fence), None))
        hooks = self._committer.hooks
        return taken if hooks is None else [self._told(hooks, each) for each in taken]

    def _told(self, hooks: Hooks, append: Append) -> Append:
        """The change with the webhooks that tell of it."""
        questions = []
        # A delivery whose peer is silent is detached in all but name.
        if self.delivery is None or self.state.idle_since is not None:
            first, last = append.run.seq, append.run.last
            asked = self.state.questions.values()
            questions = [each for each in asked if first <= each.seq <= last]
            if questions and self._absence is not None:
                questions = list(self._absence.asked(questions))
        if not (questions or append.outcome.is_end):
            return append
        return hooks.told(self.record, append, questions)

    def committed(self, seq: int) -> None:
        """The record and everything up to `seq` are durable, and may be delivered."""
        if self.is_lost:
            return  # the journal has perhaps refused its record
        self.is_recorded = True
        self.state.committed(seq)
        if seq or not self.is_held:
            self.release()

    def hand_elsewhere(self, last: int) -> None:
        """The delivery at another replica has handed so much; see `StreamState.hand_elsewhere`."""
        self._newest_handed = last
        self.state.committed(last)
        if self.state.hand_elsewhere(last):
            self._delivered(self.newest)
        if 0 < self._early_ack <= last:
            seq, self._early_ack = self._early_ack, 0
            self.acknowledge(seq, self.newest)
        if self.state.questions:
            self.let_answer(self._reader, last)
        self.make_use_of_room()

    def hand(self, runs: Sequence[Run], last: int) -> None:
        """The attached delivery has handed these runs, up to `last`, to its sender."""
        self._newest_handed = last
        is_news = False
        for run in runs:
            is_news |= self.state.hand(run)
        if is_news:
            self._delivered(self.newest)
        if self.state.questions:
            self.let_answer(self._reader, last)
        self.make_use_of_room()

    def let_answer(self, reader: Reader | None, seq: int) -> None:
        """Let this client answer the open requests up to `seq`, which it was sent."""
        assert reader is not None
        for request_id, question in self.state.questions.items():
            if question.seq <= seq:
                self._answers[request_id].sent_to(reader.name)

    @property
    def numbered(self) -> int:
        """The seq that its owner has given last.

        Another replica may have delivered it before it is durable here: that one reads the store,
        while the owner still waits for the copies of the store.
        """
        return self.state.last

    @property
    def known_last(self) -> int:
        """Up to which seq it is known which messages are responses."""
        return self.state.last

    @property
    def is_introduced(self) -> bool:
        """Whether the owner of the stream knows of the delivery that is attached here."""
        return True

    def may_answer(self, answer: Answer, session: str) -> bool:
        """Whether the client of this session was sent the request, or is attached now."""
        delivery = self.delivery
        is_attached = delivery is not None and delivery.reader.name == session
        return is_attached or session in answer.readers

    def pass_answer(self, session: str, seq: int, message: Message) -> bool:
        """Let the owner decide about a client's answer to the request at `seq`.

        False where this replica owns the stream. The request may have been sent to the client by
        another replica than this one.
        """
        return False

    def answered(self, answer: Answer, seq: int, message: Message) -> None:
        """The client has answered the request at `seq`."""
        self._take_back_webhooks(seq)
        if self._events.is_heard:
            assert isinstance(message.id, int | str)
            self._events.answered(self, message.id)
        if self.rerun is None:
            answer.give(message)
        else:
            line = messages.answer(message)
            self.rerun.keep_answer(seq, line, lambda: answer.give(message))

    def restoration(self) -> Restore:
        """The change that puts its record back where a store has lost the newest one."""
        return Restore(self.record.fence, self.state.restored(self.record))

    def close(self, event: Event, why: str = "") -> Close:
        """Abandon or cancel the stream; returns the change for the journal.

        `why` is told of a call that has not ended; by default it is the outcome.
        """
        was_live = self.state.outcome is LIVE
        change = self.state.close(event, self.record.fence, at=wall())
        self._take_back_webhooks()
        self._forget_reopened()
        self.notify()  # as in `_end`
        if was_live and self._events.is_heard:
            self._events.ended(self, why or change.outcome.value)
        return change

    def forget(self) -> Forget | None:
        """Keep nothing of the stream; returns the change for the journal, if that has the stream.

        All that the handler sends from now on is dropped.
        """
        if not self.state.is_tombstone:
            self.close(Event.ABANDON if self.state.is_ended else Event.CANCEL, "dropped")
        was_deferred, self.is_deferred = self.is_deferred, False
        return None if was_deferred else Forget(self.id, self.record.fence)

    def acknowledge(self, seq: int, by: int = 0) -> None:
        """The client is known to have everything up to `seq`, as `mark_delivered` has it.

        In a stream with pages this deletes nothing, because a client may ask for a page again. A
        response that stays is kept for the same reason.
        """
        if self.stays and self.state.is_ended:
            seq = min(seq, self.state.last - 1)
        if not self.state.is_paged:
            self.mark_delivered(seq, by)

    def mark_delivered(self, seq: int, by: int = 0) -> None:
        """Count everything up to `seq` as delivered, pages too.

        `by` is the number of the delivery that shows it, or 0 for the cursor of a new request.
        The delivered mark never passes the attached delivery. Only this method, `hand` and
        `hand_elsewhere` move it.
        """
        if not (self.is_evicted or self.is_lost) and self.state.deliver(seq):
            self._delivered(by)
            self.make_use_of_room()

    @property
    def pages(self) -> Container[int]:
        """The seqs behind which a page may be asked for."""
        state = self.state
        if state.is_tombstone or not state.is_paged:
            return ()
        return (state.delivered, *state.pages) if state.delivered else state.pages

    def tell_page(self, seq: int) -> str:
        """The page token for what follows `seq`, by which a client can come back from now on."""
        self.is_reachable = True
        return self._keyring.page_token(self.id, seq, self.digest)

    @property
    def reader(self) -> Reader | None:
        """The client of the newest delivery, even if that is over."""
        return self._reader

    def confirm(self, reader: Reader, seq: int) -> bool:
        """A client says by an ack or an answer that it has everything up to `seq`.

        False, and nothing has changed, where the newest delivery is another client's or has not
        come so far.
        """
        if reader is not self._reader or seq > self._newest_handed:
            return False
        self.acknowledge(seq, self.newest)
        return True

    def confirm_as(self, session: str, seq: int) -> None:
        """As `confirm`, by the client of the session with this name, from another replica.

        It may be heard of before the delivery has told how far it is, and counts then.
        """
        reader = self._reader
        if reader is not None and reader.name == session and not self.confirm(reader, seq):
            self._early_ack = seq

    def prove(self, delivery_number: int, seq: int) -> None:
        """A sign of life shows that a delivery was read up to `seq`. Only the newest one counts."""
        if delivery_number == self.newest:
            self.acknowledge(seq, self.newest)

    def may_be_confirmed(self, now: float) -> bool:
        """Whether an ack or a sign of life may still move the delivered mark."""
        if self.witness is not None and self.witness(self):
            return True
        is_asked = self.state.client_confirms and self.state.delivered < self._newest_handed
        return is_asked and now - self._left_at < ACK_WAIT_S

    def attach(self, delivery: Follower) -> None:
        """Attach a delivery, or attach it again after it fell silent."""
        if delivery is not self.delivery:
            self.newest += 1
            delivery.number = self.newest
            self._reader, self._newest_handed = delivery.reader, delivery.position
            self._early_ack = 0
            self.witness = None
        self.delivery = delivery
        if delivery.start > self.asked:
            self.asked = delivery.start
            self.notify()
        confirms = delivery.reader.confirms or self.state.is_paged
        self.state.attach(delivery.position, confirms=confirms)
        self.is_left = False
        if self._absence is not None:
            self._absence.returned(self.record)
        if self.on_attach is not None:
            self.on_attach(self)

    def touch(self) -> None:
        """The client has asked how the stream is: the clock of `max` starts again."""
        self.state.touch(trio.current_time())

    def await_again(self, short_name: str) -> None:
        """A client waits for the call by its name, or by making the same call."""
        self.is_findable = self.stays = True
        self.short_name = short_name or self.short_name

    @property
    def is_taken(self) -> bool:
        """Whether a client is attached that does not only wait."""
        return self.delivery is not None and not self.delivery.only_waits

    def end_response(self, session: str, response: str, why: str) -> None:
        """The client of a session must not continue this response, at no replica.

        `response` is its name among the grants of the session, and `why` a reason of refusals.
        """
        if self.ended_responses is None:
            self.ended_responses = {}
        self.ended_responses[session, response] = why
        if len(self.ended_responses) > ENDED_MAX:
            del self.ended_responses[next(iter(self.ended_responses))]

    def why_ended(self, session: str, response: str) -> str:
        """Why this response must not be continued; "" if it may."""
        return (self.ended_responses or {}).get((session, response), "")

    def leave(self) -> None:
        """The attached client stops waiting and can find the stream again: detach it next."""
        self.is_reachable = self.is_left = True
        # A client with positions says what it has, and comes back for the rest.
        self.stays = self.stays or not self.state.client_confirms

    def stay(self) -> None:
        """The client that is attached, if there is one, does not stop waiting after `leave`."""
        self.is_left = self.delivery is None

    def detach(self, delivery: Follower) -> None:
        """Detach a delivery; nothing changes where another one has taken its place."""
        if self.delivery is delivery:
            self.delivery = None
            if self.is_deferred and self.state.is_ended:
                self._on_settled(self)  # nothing is kept of it, so it needs no clock
            else:
                self._leave(self.state.detach)
            self.notify()

    def displace(self) -> Follower | None:
        """Remove the attached delivery and return it. The caller attaches another one next.

        Does not call `on_settled`, which would end a stream that no client can resume.
        """
        self.store()
        self.is_held = False
        displaced, self.delivery = self.delivery, None
        if displaced is not None:
            self.state.detach(trio.current_time())
            self.notify()
        return displaced

    def fall_silent(self, delivery: Follower) -> None:
        """The delivery's peer is silent. That counts as detached until `attach` is called again."""
        if self.delivery is delivery and self.state.idle_since is None:
            self._leave(self.state.fall_silent)

    def _leave(self, leave: Callable[[float], None]) -> None:
        self._left_at = trio.current_time()
        leave(self._left_at)
        self._on_settled(self)  # which may end the stream
        self.tell_questions()

    def tell_questions(self) -> None:
        """Tell webhooks of the open questions, because their client is gone."""
        if self._absence is not None and self.state.questions and not self.is_lost:
            self._absence.left(self.record, self.state.questions.values())

    def _take_back_webhooks(self, seq: int | None = None) -> None:
        """The question at `seq`, or each of them, wants no answer any more."""
        if self._absence is not None:
            self._absence.over(self.record, seq)

    def read_differently(self, delivery: Follower) -> None:
        """The client of this delivery wants log messages of another level."""

    async def change(self) -> None:
        """Wait for the next `notify`, whatever has changed."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _delivered(self, by: int) -> None:
        self._committer.ack(Ack(self.id, self.record.fence, self.state.delivered))
        if self.state.is_drained:
            self._on_settled(self)

    def make_use_of_room(self, *, is_forced: bool = False) -> None:
        """Send the progress that was held back, if there is room now or `is_forced`."""
        state = self.state
        if state.held_back:
            size = state.batch_bytes
            if state.release_held(is_forced=is_forced):
                self._mark(size)
        self.notify()
