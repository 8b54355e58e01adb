"""One connection: its client, the streams that are delivered to it, and whether the peer lives.

A connection has one sender, whatever the number of its streams. The sender takes the streams that
have something to deliver in turn, reads from the journal where each of them left off, and writes
everything at once. A replay follows the journal from far behind, live delivery follows it with
nothing left to read. There is no switch between the two, so there is no gap.

This is one file because three classes are one mechanism: a `Session` is the client, a `Delivery` is
one stream on its way to that client, and a `Connection` sends the deliveries. Each of them decides
by the state of the other two.

A delivery has these marks: `start` (the seq behind which it began), `position` (handed to the
sender) and `written` (confirmed by the transport). The mark of what its client is known to have
belongs to the stream (`streams.engine.lifecycle`).

A delivery is entered in `Stream.delivery` and `Session.deliveries`, and in three places of its
connection: `deliveries` until all of it is handed to the sender, `ready` while it may have
something to send, and `_Write.finished` while its last bytes are being written.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, Protocol

import msgspec
import trio

from streams import messages
from streams.clock import wall
from streams.engine.framing import NUMBERED, PLAIN, Framing
from streams.engine.notices import Notices
from streams.engine.posts import Taker
from streams.engine.receipts import Receipts, Separation
from streams.engine.retry import MISSING_LEASES
from streams.engine.stream import Stream, StreamEvents
from streams.errors import INTERNAL_ERROR, Missing, Refusal, Unavailable, refusal
from streams.exchange import Channel, ResponseChannel, TraceHeaders, http_trace_of, transport_of
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.sessions import Grant
from streams.keys import new_request_id
from streams.limits import MIB, STORE_RETRY_S
from streams.logs import STREAM_LETTERS, log
from streams.messages import LEVELS, Message, RequestId, Run
from streams.protocol import dialects, extension
from streams.protocol.clients import ClientInfo
from streams.protocol.extension import Settings
from streams.protocol.vocabulary import Dialect

# The runs in one write together. The first limit is for a peer that may not read, for which they
# stay in memory. The second is for a peer that reads: several runs cost little more than one.
RUNS_BYTES: Final = STORED_BYTES_MAX
RUNS_BYTES_MAX: Final = 4 * STORED_BYTES_MAX
PROMPT_S: Final = 0.1  # a write that takes no longer shows that the peer reads
KERNEL_BYTES: Final = 4 * MIB  # what the kernel takes for a peer that reads nothing
STREAM_BYTES_MIN: Final = 16 * 1024  # the share of one stream in a write when many are ready
# Replies that may wait for a peer that does not read. With more than these, nothing more is read
# from that peer. A thousand replies are framed in about 1 ms, in which no other task runs.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
OUTBOX_REPLIES_MAX: Final = 1_000
# The reader sends what a message causes up to this size, which an empty pipe takes without waiting.
CAUSED_BYTES_MAX: Final = 64 * 1024
REQUESTS_MAX: Final = 100  # to one client, besides those of its calls; a user answers one at a time
PING_EVERY_S: Final = 15.0
YOUNG_S: Final = 1.0  # connections that end earlier need no ping, and no task for it
SILENCE_S: Final = 60.0  # without a pong or a completed write; then the peer counts as detached
BUSY_S: Final = 0.05  # before a journal that could not be read is read again
LOOK_EVERY_S: Final = 0.5  # between looks at whether the peer may still read, while draining
LOOK_OFTEN_S: Final = 0.02  # the same, while another replica waits for the client
SETTLE_S: Final = 1.0  # after a write before a ping asks about it, so that one ping asks about many


class Session:
    """One client: what it has declared, and its deliveries. The `Reader` of their streams.

    On stdio and a WebSocket it lasts as long as the connection. Over HTTP it lasts for any number
    of requests (`streams.engine.sessions`).
    """

    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.revision: str | None = None  # of MCP; None before `initialize`
        self.capabilities: dict[str, Any] = {}  # those that `settings` was made from
        self.client: ClientInfo | None = None  # None before `initialize`
        self.settings = Settings()
        self.level: str = LEVELS[0]  # of log messages, and above
        self.deliveries: dict[Delivery, tuple[RequestId, ...]] = {}  # with the ids that each takes
        # Calls that have not begun, because their arguments are still being checked.
        self.checking: dict[RequestId, trio.CancelScope] = {}
        self._taken: dict[RequestId, int] = {}  # by how many deliveries an id is taken
        self.notices = Notices()
        self.subscriptions: dict[str, None] = {}  # the URIs of resources
        self.has_changed = False  # its subscriptions, since it was stored
        self._answers: dict[RequestId, trio.MemorySendChannel[Message]] = {}  # of `ask`
        self.on_end: Callable[[], None] = _nothing  # called when the session has ended
        self.is_over = False
        # Called for each notice: by the connection that is the whole session, if there is one.
        self.on_notice: Callable[[], None] = _nothing
        self.on_change: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint  # see `save`

    def notify(self, line: bytes, *, key: str | None = None) -> None:
        """Send a notification that belongs to no request, over the session's standing stream.

        While the client reads nothing, only the latest notification of each `key` is kept. Without
        a key it is dropped over HTTP where the client has no standing stream open. Others are
        dropped, the oldest first, at the limits of `streams.engine.notices`.
        """
        self.notices.add(line, key)
        self.on_notice()

    async def ask(
        self, method: str, params: Any, *, on_sent: Callable[[RequestId], object] | None = None
    ) -> Message:
        """Send the client a request that belongs to no call, and wait for the answer.

        It is sent again over each standing stream of a client that has not received it. `on_sent`
        is called with its id. Raises `Refusal` where too many such requests wait.
        """
        if len(self._answers) >= REQUESTS_MAX:
            raise Refusal(
                INTERNAL_ERROR, f"The client has {REQUESTS_MAX} requests to answer: ask it later."
            )
        request_id = new_request_id()
        name = f"request {request_id}"
        put, answer = trio.open_memory_channel[Message](1)
        self._answers[request_id] = put
        self.notices.add(messages.request(request_id, method, params), name, is_request=True)
        self.on_notice()
        if on_sent is not None:
            on_sent(request_id)
        try:
            return await answer.receive()
        finally:
            self._answers.pop(request_id, None)
            self.notices.drop(name)

    def answered(self, message: Message) -> bool:
        """Take the answer to a request of `ask`. False where it answers none of them."""
        put = self._answers.pop(message.id, None) if isinstance(message.id, str) else None
        if put is not None:
            put.send_nowait(message)
        return put is not None

    @property
    def is_listening(self) -> bool:
        """Whether the client has a connection, or over HTTP a standing stream, for notices."""
        return self.notices.has_stream

    def set_level(self, level: str) -> None:
        """Send only log messages that are at least so severe, also of calls that run."""
        self.level = level
        for delivery in self.deliveries:
            delivery.stream.read_differently(delivery)

    def end(self) -> None:
        """The session has ended.

        Its callbacks lead back to it. Dropping them frees it and its connection now: of a thousand
        clients that come and go, the garbage collector would have to find the cycles.
        """
        self.is_over = True
        on_end, self.on_end, self.on_notice = self.on_end, _nothing, _nothing
        on_end()

    async def save(self) -> None:
        """Store its log level and its subscriptions, where the session outlives its connection."""
        await self.on_change()

    @cached_property
    def name(self) -> str:
        """A name that no other session has, at any replica."""
        return new_request_id()

    @property
    def confirms(self) -> bool:
        """Whether the client sends cursors and acks."""
        return self.settings.positions

    @property
    def only_waits(self) -> bool:
        """Whether a client only waits: it has declared nothing by which it could come back."""
        return not (self.settings.dialects or self.settings.positions)

    def is_taken(self, request_id: RequestId, *, besides: Stream | None = None) -> bool:
        """Whether a delivery, or a call that is being checked, uses this request id now.

        The delivery of the stream `besides` does not count, because the new request displaces it.

        A client that was cut off may use the same id again before the server has noticed the cut.
        So deliveries over dead connections are dropped first.
        """
        if request_id not in self._taken and request_id not in self.checking:
            return False
        if not self._is_taken_now(request_id, besides):
            return False
        for delivery in list(self.deliveries):
            if not delivery.connection.channel.is_writable():
                delivery.drop()
        return self._is_taken_now(request_id, besides)

    def _is_taken_now(self, request_id: RequestId, besides: Stream | None) -> bool:
        if request_id in self.checking:
            return True
        if request_id not in self._taken:
            return False
        displaced = None if besides is None else besides.delivery
        own = self.deliveries.get(displaced, ()) if isinstance(displaced, Delivery) else ()
        return self._taken[request_id] > (request_id in own)

    def responses_to(self, request_id: RequestId) -> Sequence[tuple[str, str]]:
        """The streams and the names of the responses to a resume with this id."""
        return ()

    def has_begun(self, stream: Stream) -> bool:
        """Whether this client began the stream, and may cancel its request over any connection."""
        return False

    def attach(self, delivery: "Delivery") -> None:
        """Enter a delivery to this client."""
        self.deliveries[delivery] = taken = delivery.taken_ids
        for each in taken:
            self._taken[each] = self._taken.get(each, 0) + 1

    def detach(self, delivery: "Delivery") -> None:
        """Remove a delivery. Does nothing where it was removed before."""
        for each in self.deliveries.pop(delivery, ()):
            self._taken[each] -= 1
            if not self._taken[each]:
                del self._taken[each]


def _nothing() -> None:
    """Most sessions need no callback: over HTTP the standing stream waits for notices itself."""


class EventIds(Protocol):
    """The event ids of one HTTP request and of the response to it."""

    def cursor(self, stream_id: str) -> int | None:
        """The position in a stream that the request's `Last-Event-ID` names, if it names one."""

    def grant(self, delivery: "Delivery") -> bytes:
        """Set `delivery.granted`: the client may resume this response by its event ids.

        Returns the id of its events, with `%d` in place of the seq.
        """


class Granted:
    """The right of a client to resume one response by the ids of its events."""

    __slots__ = ("grant", "is_call", "is_wait", "stop")

    def __init__(
        self, grant: Grant | None, *, is_call: bool = False, is_wait: bool = False
    ) -> None:
        self.grant = grant  # None for the response to the original request
        self.is_wait = is_wait  # see `Delivery`
        self.is_call = is_call or grant is None  # else it is the response to a resume
        self.stop: int | None = None  # the seq of its last message, once that was handed

    @property
    def name(self) -> str:
        """Its name among the grants of its session and stream."""
        return "" if self.grant is None else self.grant.delivery

    @property
    def start(self) -> int:
        """The seq behind which the response began."""
        return 0 if self.grant is None else self.grant.start

    @property
    def reply_id(self) -> RequestId | None:
        """The request id under which the response ends; None for the original request's."""
        return None if self.grant is None else self.grant.reply_id

    @property
    def takes_over(self) -> bool:
        """Whether it ends with the stream's own response, under the id of another request."""
        return self.grant is not None and self.grant.takes_over


class DeliveryEvents(StreamEvents, Protocol):
    """Is told what happens to deliveries, while it `is_heard`."""

    def attached(self, delivery: "Delivery") -> None:
        """A delivery was attached."""

    def detached(self, delivery: "Delivery", why: str) -> None:
        """A delivery is over, and about to be detached. See `CallDetached`."""

    def fell_silent(self, delivery: "Delivery") -> None:
        """The peer of a delivery is silent, which counts as detached."""

    def returned(self, delivery: "Delivery", replayed: int) -> None:
        """The client of a call is back; see `CallResumed`."""


class Delivery:
    """One stream on its way over one connection: the `Follower` of the stream."""

    __slots__ = (
        "after",
        "asked_at",
        "attached_at",
        "backlog",
        "connection",
        "continues",
        "dialects",
        "granted",
        "has_progress",
        "is_call",
        "is_closed",
        "is_granted",
        "is_held",
        "is_open",
        "is_over",
        "is_wait",
        "may_be_lone",
        "missing",
        "number",
        "position",
        "preamble",
        "reply_id",
        "start",
        "stream",
        "takes_over",
        "wait_s",
        "waited_s",
        "written",
    )

    def __init__(
        self,
        stream: Stream,
        connection: "Connection",
        *,
        after: int,
        preamble: Callable[[], Sequence[bytes]],
        speaks: tuple[Dialect, ...],
        reply_id: RequestId | None = None,
        takes_over: bool = False,
        is_call: bool = False,
        is_wait: bool = False,
        wait_s: float | None = None,
        granted: Granted | None = None,
    ) -> None:
        """Deliver what follows `after`. With `granted` this continues that response.

        `preamble` makes the lines without numbers that go first, in the dialects that the client
        speaks.
        """
        self.stream = stream
        self.connection = connection
        self.start = after if granted is None else granted.start
        self.number = 0
        self.asked_at = connection.asked_at
        self.waited_s = trio.current_time() - self.asked_at
        self.attached_at = wall() - self.waited_s
        self.position = self.after = after
        self.backlog = 0  # messages that were there when it was attached
        self.missing = (-1, 0.0)  # the position behind which lines are missing, and since when
        self.written = after - 1  # becomes `after` once the preamble is written
        self.preamble = preamble
        self.dialects = speaks
        self.reply_id = reply_id
        self.takes_over = takes_over  # the stream's response is the answer to the resume
        self.is_call = is_call  # it answers a call, and not a resume
        self.is_wait = is_wait  # it answers another call than the stream's: `wait_for_call`
        self.wait_s = wait_s  # how long the client wants to wait at most
        self.granted = granted  # where the client may resume it by event ids
        self.continues = granted is not None  # it goes on with a response
        self.is_granted = True  # whether `granted` is durable, where there is one
        self.has_progress = False  # see `Separated`
        self.is_held = False
        self.may_be_lone = stream.is_held  # else each call is announced, however soon it ends
        self.is_open = False  # the preamble was handed to the sender
        self.is_over = self.is_closed = False  # nothing more is handed to it; it was detached

    @property
    def is_return(self) -> bool:
        """Whether its client comes back to the stream, rather than begins it."""
        return self.reply_id is not None or self.continues

    @property
    def reader(self) -> Session:
        """The client."""
        return self.connection.session

    @property
    def taken_ids(self) -> tuple[RequestId, ...]:
        """The request ids that no new request may have until this delivery is over, each once."""
        waiting, first = self.reply_id, self.stream.request_id
        if waiting is None:
            return (first,)
        if self.replays and not self.reader.confirms and first != waiting:
            return waiting, first
        return (waiting,)

    @property
    def waiting_id(self) -> RequestId:
        """The id of the request that the end of this delivery answers."""
        return self.stream.request_id if self.reply_id is None else self.reply_id

    @property
    def stands_for_call(self) -> bool:
        """Whether a client that cancels the request for this delivery cancels the call."""
        is_resumed = self.takes_over and self.waiting_id == self.stream.request_id
        return not self.is_wait and (self.is_call or is_resumed)

    @property
    def only_waits(self) -> bool:
        """See `Follower.only_waits`."""
        return self.is_wait or (self.is_call and self.reader.only_waits)

    @property
    def replays(self) -> bool:
        """Whether the resume has a reply of its own, besides the stream's response."""
        return self.reply_id is not None and not self.takes_over

    @property
    def stop(self) -> int | None:
        """The seq of the response that this delivery ends with; None before it was sent."""
        return self.stream.state.answer_after(self.start)

    @property
    def may_open(self) -> bool:
        """Whether the client may be told how to resume: all that this takes is durable, and the
        owner of the stream knows of the delivery.
        """
        return self.stream.is_recorded and self.is_granted and self.stream.is_introduced

    @property
    def may_lose_progress(self) -> bool:
        """Whether the client may lose progress that shares a read with the response.

        A client with positions does not lose any: it must process all that it confirms.
        """
        return not self.reader.confirms and self.stream.is_progress_wanted

    def is_lone(self, run: Run) -> bool:
        """Whether `run` is all that the client is sent: the response to its call."""
        is_all = run.seq == run.count == 1 and self.stream.state.is_finished(1)
        return is_all and self.may_be_lone and self.reply_id is None

    @property
    def embeds_response(self) -> bool:
        """Whether the final response travels inside the reply to the resume.

        A stock client takes any JSON-RPC response in an HTTP response for the answer to its own
        request.
        """
        return self.replays and self.connection.embeds_responses

    def shown(self, run: Run) -> tuple[Run, bytes | None]:
        """A run that the response ends, as this client is to have it.

        Where the response is to be embedded, it is returned apart, and the run comes without it.
        """
        if not (self.takes_over or self.embeds_response or self.stream.state.is_paged):
            return run, None
        rest, line = run.without_last()
        line = self._response(line, run.last)
        if self.embeds_response:
            return rest, line
        return Run(run.seq, run.count, rest.body + line), None

    def _response(self, line: bytes, seq: int) -> bytes:
        """The stream's response under the id that this client waits for.

        The response to a page has the token of the next page in it.
        """
        stream, record = self.stream, self.stream.record
        request_id = self.waiting_id if self.takes_over else stream.request_id
        if stream.state.is_paged and not stream.state.is_finished(seq):
            token = stream.tell_page(seq)
            result = messages.parse(line).result
            assert isinstance(result, msgspec.Raw)
            return messages.result(request_id, dialects.leading_on(result, token, record.max_s))
        return messages.readdressed(line, request_id) if self.takes_over else line

    def farewells(self) -> list[bytes]:
        """The lines that tell the client that the stream is over, if it is over with this delivery.

        Called when all of the delivery is in a write.
        """
        if self.granted is not None:
            self.granted.stop = self.position
        if not self.stream.state.is_finished(self.position):
            return []
        return [line for dialect in self.dialects if (line := dialect.end(self.stream.id))]

    @property
    def taker(self) -> Taker:
        """See `Follower.taker`."""
        response = self.granted.name if self.continues and self.granted is not None else None
        return Taker(self.reader.name, self.waiting_id, response)

    def give_way(self, by: Taker) -> None:
        """See `Follower.give_way`."""
        response = None if self.granted is None else self.granted.name
        if by.is_same(Taker(self.reader.name, self.waiting_id, response)):
            self.drop()
            return
        if by.session != self.reader.name:
            self.end_response("superseded")  # else the client would resume and displace in turn
        self.end("superseded")

    def end_response(self, why: str) -> None:
        """The client must not continue the HTTP response that this is, if it is one."""
        if self.granted is not None:
            self.stream.end_response(self.reader.name, self.granted.name, why)

    def end(self, reason: str) -> None:
        """Detach from the stream and tell the client why: `superseded` or `released`."""
        if self.replays:
            self._close(extension.resumed(self.waiting_id, reason), reason)
        elif self.takes_over or reason == "superseded":
            self._close(messages.error(self.waiting_id, refusal(reason)), reason)
        else:
            self._close(b"", reason)

    def move(self, stream: Stream) -> None:
        """Go on with another object of the same stream, which this replica has taken over."""
        self.stream = stream
        stream.attach(self)
        self.wake()

    def answer(self, line: bytes) -> None:
        """See `Follower.answer`."""
        self._close(line, "answered")

    def fail(self, refused: Refusal) -> None:
        """See `Follower.fail`."""
        is_page = self.is_call and self.stream.state.is_paged and self.reply_id is not None
        if is_page and not self.is_open:
            refused = refusal("invalid_token")  # of a page; another replica knew that it is gone
        self._close(messages.error(self.waiting_id, refused), refused.reason)

    def wake(self) -> None:
        """See `Follower.wake`."""
        if not self.is_over:
            self.connection.ready[self] = None
            self.connection.stir()

    def allow(self) -> None:
        """The grant is durable, so the client may be told of it."""
        self.is_granted = True
        self.wake()

    def let_go(self) -> bool:
        """See `Follower.let_go`.

        A resume is answered with `released`. For an original call, and where there are event ids,
        the whole connection is closed, unless that would lose a call that cannot be resumed.
        """
        if self.reply_id is not None and not self.connection.has_event_ids:
            self.end("released")
            return True
        if not all(each.stream.is_reachable for each in self.connection.deliveries):
            return False
        self.connection.hang_up()
        return True

    def hang_up(self) -> None:
        """See `Follower.hang_up`."""
        self.connection.hang_up()

    def drop(self) -> None:
        """See `Follower.drop`."""
        self._close(b"", "gone")

    def _close(self, farewell: bytes, why: str) -> None:
        if not self.is_over:
            self.connection.forget(self)
            if farewell:
                self.connection.reply(farewell)
        if (events := self.connection.events).is_heard and not self.is_closed:
            self.is_closed = True
            events.detached(self, why)
        self.stream.detach(self)


class _Write:
    """The content of one write, and the deliveries that are in it."""

    __slots__ = ("began_at", "finished", "lines", "runs", "size")

    def __init__(self, lines: list[bytes], size: int) -> None:
        self.began_at = trio.current_time()
        self.lines = lines
        self.size = size
        self.runs: list[tuple[Delivery, int]] = []  # with the seq up to which they are in it
        self.finished: list[Delivery] = []  # those that are complete with this write

    def add(self, *lines: bytes) -> None:
        self.lines += filter(None, lines)
        self.size += sum(map(len, lines))


class Connection:
    """Sends everything to one peer. Either `run` it, or `respond` once."""

    # Over HTTP each request has one. Beyond 30 attributes Python makes each a table of its own.
    __slots__ = (
        "__weakref__",
        "_asked_at",
        "_changed",
        "_framing_given",
        "_has_written",
        "_is_attended",
        "_is_hung_up",
        "_is_silent",
        "_is_watched",
        "_journal",
        "_notices",
        "_nursery",
        "_outbox",
        "_outbox_bytes",
        "_ping_at",
        "_prompt_bytes",
        "_reader",
        "_receipts",
        "_response",
        "_scope",
        "_seen_at",
        "_separation",
        "_write",
        "channel",
        "deliveries",
        "event_ids",
        "events",
        "has_work",
        "is_response",
        "number",
        "opened_at",
        "ready",
        "session",
    )

    def __init__(
        self,
        channel: Channel,
        journal: Journal,
        events: DeliveryEvents,
        session: Session | None = None,
        *,
        framing: Framing | None = None,
        event_ids: EventIds | None = None,
        asked_at: float | None = None,
    ) -> None:
        """With a `session` this is the response to one of its HTTP requests, which came at
        `asked_at`.
        """
        self.channel = channel
        self.number = 0  # in the order of arrival; set by the engine
        self.events = events
        self.session = session or Session(channel.principal)
        self.is_response = session is not None
        self._notices = {} if self.is_response else self.session.notices.kept
        if not self.is_response:
            self.session.on_notice = self.stir
            self.session.notices.has_stream = True
        self.event_ids = event_ids
        self.deliveries: dict[Delivery, None] = {}
        self.ready: dict[Delivery, None] = {}  # those that may have something to read, in turn
        self.has_work = trio.Event()
        self._framing_given = framing
        self._journal = journal
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._changed: trio.Event | None = None  # while a task waits for a write to be out
        self._write: _Write | None = None  # the one that is being gathered or written
        self._prompt_bytes = 0  # of the last writes that took no longer than `PROMPT_S`
        self._scope: trio.CancelScope | None = None
        self._nursery: trio.Nursery | None = None  # for the tasks of `run`
        self._is_attended = False  # a task sends what is ready, or will soon
        self._reader: trio.lowlevel.Task | None = None  # the task that will, after a message
        self._is_watched = False
        self._is_hung_up = False
        self._has_written = False
        self._response: ResponseChannel | None = None
        self.opened_at = trio.current_time() if asked_at is None else asked_at
        self._seen_at = self._asked_at = self.opened_at
        self._ping_at = self.opened_at + PING_EVERY_S
        self._is_silent = False
        self._receipts = Receipts()
        self._separation: Separation | None = None  # not over HTTP

    @property
    def transport(self) -> str:
        """The name of its transport: stdio, relay, websocket, http, memory."""
        return transport_of(self.channel)

    @property
    def http_trace(self) -> TraceHeaders | None:
        """The trace context of the HTTP request that it answers or was opened by."""
        return http_trace_of(self.channel)

    @property
    def embeds_responses(self) -> bool:
        """Whether replies to resumes contain the final response, which is not sent apart then."""
        has_room = self.session.settings.replay_response and self._framing.announces
        return self.is_response and not has_room

    @property
    def asked_at(self) -> float:
        """When the client sent the request that is handled now, in trio's time.

        The request may have waited since then: for the owner of a stream, or for the journal.
        """
        return self._asked_at

    @property
    def has_event_ids(self) -> bool:
        """Whether a client can resume what is sent here by event ids alone."""
        return self._framing.has_ids

    @property
    def _framing(self) -> Framing:
        if self._framing_given is not None:
            return self._framing_given
        return NUMBERED if self.session.settings.positions else PLAIN

    # Sending

    def reply(self, line: bytes) -> None:
        """Send a line that belongs to no stream."""
        framed = self._framing.line(line)
        self._outbox.append(framed)
        self._outbox_bytes += len(framed)
        self.stir()

    def attach(self, delivery: Delivery) -> None:
        """Deliver a stream from now on."""
        stream, framing, is_return = delivery.stream, self._framing, delivery.is_return
        self.deliveries[delivery] = None
        self.session.attach(delivery)
        if is_return:
            self._identify(delivery)  # now, because a grant takes a commit
        if not framing.announces:
            delivery.preamble, delivery.dialects = tuple, ()
        stream.attach(delivery)
        if is_return:
            delivery.backlog = max(0, stream.state.durable - delivery.after)
        if self.events.is_heard:
            self.events.attached(delivery)
        if not stream.is_held:
            delivery.wake()

    def _identify(self, delivery: Delivery) -> None:
        """Give the messages of this stream event ids, if the response has such."""
        if self._framing.has_ids and self.event_ids is not None:
            event_id = self.event_ids.grant(delivery)
            self._framing.identify(event_id if delivery.stream.record.is_announced else b"")

    def forget(self, delivery: Delivery) -> None:
        """Deliver nothing more of a stream; what is in the current write is still written."""
        delivery.is_over = True
        self.deliveries.pop(delivery, None)
        self.session.detach(delivery)
        self.ready.pop(delivery, None)
        self.has_work.set()  # `respond` ends when nothing is owed any more
        self._notify()

    def stir(self) -> None:
        """There may be something to send."""
        self.has_work.set()
        reader = self._reader
        if self._is_attended and (reader is None or reader is trio.lowlevel.current_task()):
            return
        if (nursery := self._open_nursery()) is not None:
            self._reader, self._is_attended = None, True
            nursery.start_soon(self._repeat, self._send_next)

    def attend(self) -> None:
        """The calling task handles the last message that it has read, then calls `send_caused`.

        So replies and resumes need no task for sending, until another message needs one.
        """
        if not self._is_attended:
            self._reader, self._is_attended = trio.lowlevel.current_task(), True

    async def send_caused(self) -> None:
        """Send what the last message has caused, if the write does not wait for the peer."""
        if self._reader is None:
            return
        self._reader = None
        try:
            if self._outbox or self.ready or self._notices:
                write = await self._prepare()
                if write.size <= CAUSED_BYTES_MAX and self.channel.unsent_bytes() == 0:
                    await self._put(write)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.hang_up()
        self._is_attended = False
        if self._outbox or self.ready or self._notices or self._write:
            self.stir()

    async def wait_for_room(self) -> None:
        """Wait until the peer has read enough of its replies to be sent more."""
        while not self._has_room:
            await self._change()

    def _notify(self) -> None:
        """Wake all tasks that wait for a `_change`."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _change(self) -> None:
        """Wait until a write is out, or a delivery is over."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    @property
    def _has_room(self) -> bool:
        return self._outbox_bytes <= OUTBOX_BYTES_MAX and len(self._outbox) <= OUTBOX_REPLIES_MAX

    async def drained(self) -> None:
        """Wait until all that is owed is written, or the peer can read no more."""
        while self._is_owing:
            if not self.channel.is_writable():
                return
            with trio.move_on_after(LOOK_EVERY_S):
                await self._change()

    async def caught_up(self) -> None:
        """Wait until all that is durable is written, or the peer can read no more."""
        while self._is_behind:
            if not self.channel.is_writable():
                return
            with trio.move_on_after(LOOK_OFTEN_S):
                await self._change()

    @property
    def _is_behind(self) -> bool:
        has_news = any(each.position < each.stream.state.durable for each in self.deliveries)
        return bool(has_news or self._outbox or self._notices or self._write)

    @property
    def has_unannounced(self) -> bool:
        """Whether a call is delivered that no client can come back to."""
        return any(not each.stream.record.is_announced for each in self.deliveries)

    def release(self) -> None:
        """End all deliveries: their clients may come back."""
        for delivery in list(self.deliveries):
            delivery.end("released")

    # Running

    def run(self, nursery: trio.Nursery) -> None:
        """Send, and watch whether the peer lives, in tasks of `nursery`: each with its first work.

        `hang_up` cancels the nursery.
        """
        self._live_in(nursery)
        self._nursery = nursery
        self._separation = Separation(self.channel, nursery)

    def watch(self) -> None:
        """Watch from now on whether the peer lives."""
        if not self._is_watched and (nursery := self._open_nursery()) is not None:
            self._is_watched = True
            nursery.start_soon(self._repeat, self._watch)

    def _open_nursery(self) -> trio.Nursery | None:
        """The nursery of `run`, while it takes new tasks."""
        nursery = self._nursery
        return None if nursery is None or nursery.cancel_scope.cancel_called else nursery

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                await step()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.hang_up()  # the peer has closed the connection, which is no failure

    def _live_in(self, nursery: trio.Nursery) -> None:
        self._scope = nursery.cancel_scope
        if self._is_hung_up:
            self._scope.cancel()

    async def respond(self, response: ResponseChannel) -> None:
        """Send all that is owed, as the response to one request, and watch whether the peer lives.

        `response` is the connection's own channel. Most responses are complete at once, or as soon
        as a deferred call ends. So the first write comes before the tasks are started.
        """
        self._response = response
        try:
            if self._is_owing:
                await self.has_work.wait()
            if not self.deliveries:  # no stream depends on how far its peer has read this
                await self._send_replies()
            elif self.channel.unsent_bytes() == 0:  # the write will not wait for the peer
                await self._send_once()
        except trio.BrokenResourceError:
            return
        if self._is_owing:
            try:
                async with trio.open_nursery() as nursery:
                    self._live_in(nursery)
                    nursery.start_soon(self._repeat, self._watch)
                    nursery.start_soon(self._hang_up_when_gone)
                    while self._is_owing:
                        await self._send_next()
                    nursery.cancel_scope.cancel()
            except* trio.BrokenResourceError:
                pass
        if not (self._has_written or self._is_hung_up or self._framing.is_json):
            # The delivery was dropped without an answer: its request was cancelled, or repeated
            # over another connection. MCP has no response then. HTTP must have one, so it is empty.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await response.send_whole(b"")

    async def _hang_up_when_gone(self) -> None:
        with suppress(trio.EndOfChannel):
            await self.channel.receive()
        self.hang_up()

    @property
    def _is_owing(self) -> bool:
        return bool(self.deliveries or self._outbox or self._notices or self._write)

    def hurry(self) -> None:
        """The server shuts down: see `Separation.hurry`."""
        if self._separation is not None:
            self._separation.hurry()

    def hang_up(self) -> None:
        """Close the connection."""
        self._is_hung_up = True
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        """The connection is over: detach from all its streams."""
        for delivery in list(self.deliveries):
            delivery.drop()
        if self._write is not None:
            self._finish(self._write)
        self._receipts.clear()

    async def _send_next(self) -> None:
        """Wait until there may be something to send, and send all that is ready."""
        if self._write is not None:
            await self._put(self._write)  # the reader has left it
        await self.has_work.wait()
        self.has_work = trio.Event()
        while self._outbox or self.ready or self._notices:
            await self._send_once()

    async def _send_replies(self) -> None:
        """Send what is no part of a stream."""
        lines, self._outbox = self._outbox, []
        if lines:
            await self._send(lines)

    async def _send_once(self) -> None:
        await self._put(await self._prepare())

    async def _prepare(self) -> _Write:
        write = self._write = _Write(self._outbox, self._outbox_bytes)
        self._outbox, self._outbox_bytes = [], 0
        if self._notices:
            write.add(*map(self._framing.line, self.session.notices.take()))
        if self.ready:
            await self._gather(write)
        return write

    async def _put(self, write: _Write) -> None:
        if write.lines:
            await self._send(write.lines)
            self._saw_life()
            is_prompt = self._seen_at - write.began_at < PROMPT_S
            self._prompt_bytes = self._prompt_bytes + write.size if is_prompt else 0
        self._write = None
        self._note(write)

    async def _send(self, lines: Sequence[bytes]) -> None:
        is_first, self._has_written = not self._has_written, True
        if is_first and self._response is not None and not (self.deliveries or self._outbox):
            await self._response.send_whole(*lines)
        else:
            await self.channel.send(*lines)

    async def _gather(self, write: _Write) -> None:
        bytes_max = RUNS_BYTES_MAX if self._prompt_bytes > KERNEL_BYTES else RUNS_BYTES
        share = max(STREAM_BYTES_MIN, bytes_max // max(1, len(self.ready)))
        for delivery in list(self.ready):
            if write.size >= bytes_max:
                break
            if delivery not in self.ready:
                continue  # it has ended during an earlier read
            del self.ready[delivery]
            try:
                await self._read(delivery, write, share)
            except Unavailable:
                await trio.sleep(BUSY_S)
                delivery.wake()
                break  # what was gathered must not wait any longer

    async def _read(self, delivery: Delivery, write: _Write, share: int) -> None:
        state = delivery.stream.state
        if delivery.is_held or not delivery.may_open:
            return  # it is woken when that changes
        runs = await self._read_runs(delivery, share)
        if delivery.is_over or delivery.is_held or not delivery.may_open:
            return
        stop = delivery.stop
        until = delivery.stream.known_last if stop is None else stop
        if runs and runs[-1].last > until:
            runs = [run.until(until) for run in runs if run.seq <= until]
        if runs and delivery.may_lose_progress and self._separation is not None:
            runs = self._separation.hold(delivery, runs, is_last=runs[-1].last == stop)
        if not delivery.is_open:
            self._open(delivery, runs, write)
        response = None
        if runs:
            response = self._hand_over(delivery, runs, stop, write)
        if stop is not None and delivery.position >= stop:
            self._conclude(delivery, response, write)
        elif delivery.position < min(state.durable, until) and not delivery.is_held:
            self.ready[delivery] = None

    async def _read_runs(self, delivery: Delivery, share: int) -> Sequence[Run]:
        """The runs that follow the delivery's position.

        The journal has all of them: it keeps what is above `delivered`, and that mark never passes
        the attached delivery. Only a delivery that ends meanwhile may find a gap, since a newer one
        has moved the mark. If the rule was broken all the same, only this client gets an error.
        """
        state, position = delivery.stream.state, delivery.position
        if position >= state.durable:
            return ()
        runs: Sequence[Run] = ()
        try:
            runs = await self._journal.read(delivery.stream.id, position, bytes_max=share)
        except Missing as gap:
            if not delivery.is_over and position >= state.delivered:
                await self._explain(delivery, gap)
        if not delivery.is_over and position < state.delivered:
            delivery.fail(refusal("messages_gone", earliestSeq=state.delivered + 1))
        if not (runs or delivery.is_over):
            await self._explain(delivery, Missing(position + 1, state.durable))
        if runs and runs[0].seq > position + 1 and not delivery.is_over:
            _tell_gap(delivery, runs[0].seq)
        return runs

    async def _explain(self, delivery: Delivery, gap: Missing) -> None:
        """Lines are missing. In a shared journal another client of the stream may have acked them,
        or the store has lost them, or its owner is about to put them back.

        Raises `Unavailable`, so that the delivery goes on later, unless it was ended. Lines that
        stay missing were deleted in the store by hand.
        """
        if not self._journal.replica:
            raise gap
        record, position = await self._journal.find(delivery.stream.id), delivery.position
        if record is not None and record.trimmed > position:
            if delivery.is_open or delivery.continues:
                delivery.fail(refusal("messages_gone", earliestSeq=record.trimmed + 1))
            else:  # it began where the client was when the owner was asked: it may ask again
                delivery.fail(refusal("unavailable", retryAfter=STORE_RETRY_S))
            return
        if record is not None and record.has_lost(position + 1):
            assert record.lost is not None
            _tell_gap(delivery, record.lost[1] + 1)
            return
        if record is None:  # another replica has it now, and has forgotten it
            delivery.hang_up()
        elif delivery.missing[0] != position:
            delivery.missing = position, trio.current_time()
        elif trio.current_time() - delivery.missing[1] > MISSING_LEASES * self._journal.lease_s:
            log.warning(
                "the store lacks lines", stream=record.stream[:STREAM_LETTERS], why=str(gap)
            )
            _tell_gap(delivery, gap.last + 1)
            return
        raise Unavailable(str(gap)) from gap

    def _open(self, delivery: Delivery, runs: Sequence[Run], write: _Write) -> None:
        delivery.is_open = True
        stream, preamble = delivery.stream, delivery.preamble()
        if delivery.granted is None:
            self._identify(delivery)
        opening = self._framing.opening(
            preamble,
            delivery.position,
            retry_s=stream.record.min_s,
            is_lone=bool(runs) and not preamble and delivery.is_lone(runs[0]),
        )
        write.add(opening)
        write.runs.append((delivery, delivery.position))
        if delivery.reply_id is None:
            is_told = bool(delivery.dialects) or self.has_event_ids
            is_reachable = is_told or stream.is_findable or stream.is_open_to_key
            stream.is_reachable = stream.record.is_announced and is_reachable

    def _hand_over(
        self, delivery: Delivery, runs: Sequence[Run], stop: int | None, write: _Write
    ) -> bytes | None:
        """Put the runs into the write; returns the response where that is to be embedded."""
        stream, framing, last, response = delivery.stream, self._framing, runs[-1].last, None
        is_stop = last == stop
        for run in runs[:-1] if is_stop else runs:
            write.add(*framing.run(stream.id, run, is_last=False))
        if is_stop:
            shown, response = delivery.shown(runs[-1])
            if shown.count:
                write.add(*framing.run(stream.id, shown, is_last=not delivery.replays))
        write.runs.append((delivery, last))
        delivery.position = last
        stream.hand(runs, last)  # now, because an ack may come before the write returns
        return response

    def _conclude(self, delivery: Delivery, response: bytes | None, write: _Write) -> None:
        for line in delivery.farewells():
            write.add(self._framing.line(line))
        if delivery.replays:
            reply = extension.resumed(delivery.waiting_id, "completed", response)
            # Without embedding, the final response has the event id of this position.
            position = delivery.position if delivery.embeds_response else None
            write.add(self._framing.reply(reply, position))
        write.finished.append(delivery)
        self.forget(delivery)

    def _note(self, write: _Write) -> None:
        """The write has returned. Only a ping that is sent after this can show that it was read."""
        for delivery, seq in write.runs:
            delivery.written = seq
            stream = delivery.stream
            is_awaited = self._may_get_receipts and stream.record.is_announced
            if seq and is_awaited and delivery.number == stream.newest:
                self._receipts.wrote(stream, delivery.number, seq)
                self.watch()
            stream.notify()
        if self._separation is not None:
            self._separation.wrote(write.size)
        self._finish(write)
        self._notify()

    def _finish(self, write: _Write) -> None:
        for delivery in write.finished:
            delivery.drop()

    # Watching the peer

    def heard(self) -> None:
        """The peer sent something."""
        self._receipts.heard()
        self._saw_life()
        self._asked_at = self._seen_at

    def _saw_life(self) -> None:
        self._seen_at = trio.current_time()
        if self._is_silent:
            self._is_silent = False
            for delivery in self.deliveries:
                delivery.stream.attach(delivery)
                if self.events.is_heard:
                    self.events.returned(delivery, 0)

    async def _watch(self) -> None:
        with trio.move_on_at(self._ping_at):
            await self._receipts.needed()
            await trio.sleep(SETTLE_S)
        marks = self._receipts.marks
        has_pong = None
        with trio.move_on_after(SILENCE_S):
            has_pong = await self.channel.ping()
        if has_pong:
            self._receipts.read(marks)
            self.heard()
        elif has_pong is False and marks and self.channel.unsent_bytes() == 0:
            self._receipts.left(marks)
        self._check_silence(is_asked=has_pong is None)
        self._ping_at = trio.current_time() + PING_EVERY_S

    @property
    def _may_get_receipts(self) -> bool:
        # A client with positions sends acks. After an HTTP response no sign of life can follow.
        return not (self.session.confirms or self.is_response)

    def _check_silence(self, *, is_asked: bool) -> None:
        # A peer that was sent nothing and asked nothing is idle, not silent.
        if is_asked:
            since = self._seen_at
        elif self._write is not None:
            since = max(self._seen_at, self._write.began_at)
        else:
            return
        if trio.current_time() - since >= SILENCE_S:
            was_silent, self._is_silent = self._is_silent, True
            for delivery in self.deliveries:
                delivery.stream.fall_silent(delivery)
                if self.events.is_heard and not was_silent:
                    self.events.fell_silent(delivery)


def _tell_gap(delivery: Delivery, earliest: int) -> None:
    """Tell the client that the store has lost the messages between its position and `earliest`."""
    lost = refusal("messages_gone", earliestSeq=earliest)
    delivery.fail(
        lost.saying(
            f"The store has lost the messages before {earliest}: resume from earliestSeq - 1, "
            f"after {earliest - 1}."
        )
    )
