"""Events of calls, told to those that log, count, trace or forward them.

The engine tells an `Events`, and makes no event while nothing listens. Each listener gets every
event, in order, at once and in the engine's own task. So it must not wait, and it must not raise:
an error is logged and the engine goes on.

A call is any request that has a stream; `Stream.record.origin` is the request. Where several
replicas share a journal, the owner tells of a call's begin and end, and the replica that has the
client tells of deliveries.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, get_args

import msgspec

from streams.engine.connection import Connection, Delivery
from streams.engine.sessions import HttpSession
from streams.engine.stream import Stream
from streams.exchange import TraceHeaders
from streams.faults import log_failure
from streams.journal.records import Outcome
from streams.messages import RequestId


class CallBegan(msgspec.Struct, frozen=True, gc=False):
    """A request has begun a stream. `http` is the trace context of its HTTP request, if any."""

    stream: Stream
    transport: str
    http: TraceHeaders | None


class CallDetached(msgspec.Struct, frozen=True, gc=False):
    """The client of a call is attached no more, and has not got the response.

    `why`: `gone` (the connection was lost, or the client has cancelled its resume), `silent`,
    `left` (it stops waiting, and may ask again), `answered` (with an interim answer), `released`,
    or the reason of a refusal.
    """

    stream: Stream
    why: str


class CallResumed(msgspec.Struct, frozen=True, gc=False):
    """A client is back: by a resume, an event id, a page token, an idempotency key or a name.

    It has what comes up to the seq `after`; `replayed` messages behind that were there already.
    """

    stream: Stream
    transport: str
    after: int
    replayed: int


class ResumeRefused(msgspec.Struct, frozen=True, gc=False):
    """A resume was refused, for this reason of the table of errors, or with this code."""

    reason: str
    transport: str


class CallAsked(msgspec.Struct, frozen=True, gc=False):
    """A call has sent its client a request. `is_attached`: a client is there to answer it."""

    stream: Stream
    request_id: RequestId
    method: str
    is_attached: bool


class CallAnswered(msgspec.Struct, frozen=True, gc=False):
    """The client has answered a request of the call."""

    stream: Stream
    request_id: RequestId


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call has ended, once. Its last messages may still be on their way.

    `why` is "" for a result, `tool_error` for a result that says `isError`, the reason or the code
    of an error, or `cancelled`, `abandoned` or `dropped`: no client can come back to it.
    """

    stream: Stream
    outcome: Outcome
    why: str


class ResultAbandoned(msgspec.Struct, frozen=True, gc=False):
    """A call that had ended was deleted: no client came in time for all of its messages."""

    stream: Stream


class CallInterrupted(msgspec.Struct, frozen=True, gc=False):
    """A restart or a shutdown ends a call; its `CallEnded` follows, with the same reason."""

    stream: Stream


class CallReleased(msgspec.Struct, frozen=True, gc=False):
    """A call goes on elsewhere: in the next process, or at another replica."""

    stream: Stream


class CallRestarted(msgspec.Struct, frozen=True, gc=False):
    """The handler of a call runs again, since its server or its child process has died."""

    stream: Stream


class DeliveryBegan(msgspec.Struct, frozen=True, gc=False):
    """A delivery was attached to its stream."""

    delivery: Delivery


class DeliveryEnded(msgspec.Struct, frozen=True, gc=False):
    """A delivery is over: it has `sent` so many messages, of which `replayed` were there before."""

    delivery: Delivery
    sent: int
    replayed: int


class ConnectionOpened(msgspec.Struct, frozen=True, gc=False):
    """A connection was opened; over HTTP that is the response to one request."""

    connection: Connection


class ConnectionClosed(msgspec.Struct, frozen=True, gc=False):
    """A connection is over."""

    connection: Connection


class SessionEnded(msgspec.Struct, frozen=True, gc=False):
    """A session over HTTP has ended, `lasted_s` seconds after it began in this process."""

    session: HttpSession
    lasted_s: float


CallEvent = (
    CallBegan
    | CallDetached
    | CallResumed
    | CallAsked
    | CallAnswered
    | CallEnded
    | ResultAbandoned
    | CallInterrupted
    | CallReleased
    | CallRestarted
)

Event = (
    CallEvent
    | ResumeRefused
    | DeliveryBegan
    | DeliveryEnded
    | ConnectionOpened
    | ConnectionClosed
    | SessionEnded
)

Listener = Callable[[Any], object]

KINDS: Final[Collection[type[Event]]] = get_args(Event)
CALL_KINDS: Final[Collection[type[Event]]] = get_args(CallEvent)

LEFT: Final = "left"


class Events:
    """Tells listeners. The engine calls its methods only while it `is_heard`."""

    __slots__ = ("_of", "enter_handler", "is_heard")

    def __init__(self) -> None:
        # Called in the task of each handler before that begins.
        self.enter_handler: Callable[[Stream], object] | None = None
        self._of: dict[type[Event], tuple[Listener, ...]] = dict.fromkeys(KINDS, ())
        self.is_heard = False  # whether anything listens

    def listen(self, listener: Listener, kinds: Collection[type[Event]] = KINDS) -> None:
        """Call this for every event from now on, or for those of some `kinds`.

        Interrupted and restarted calls are told at the start of the engine. So listen before that.
        """
        self.is_heard = True
        for kind in kinds:
            self._of[kind] = (*self._of[kind], listener)

    def listen_by_kind(self, listeners: Mapping[type[Event], Listener]) -> None:
        """Call each of these for the events of its kind: see `listen`."""
        for kind, listener in listeners.items():
            self.listen(listener, [kind])

    def unlisten(self, listener: Listener) -> None:
        """Call this no more."""
        for kind, listeners in self._of.items():
            self._of[kind] = tuple(each for each in listeners if each != listener)
        self.is_heard = any(self._of.values())

    def tell(self, event: Event) -> None:
        """Tell those that listen to events of this kind."""
        for listener in self._of[type(event)]:
            try:
                listener(event)
            except Exception as error:
                log_failure("a listener to events failed", error, of=type(event).__name__)

    def began(self, stream: Stream, connection: Connection) -> None:
        """A request has begun a stream."""
        if self._of[CallBegan]:
            self.tell(CallBegan(stream, connection.transport, connection.http_trace))

    def opened(self, connection: Connection) -> None:
        """A connection was opened."""
        if self._of[ConnectionOpened]:
            self.tell(ConnectionOpened(connection))

    def closed(self, connection: Connection) -> None:
        """A connection is over."""
        if self._of[ConnectionClosed]:
            self.tell(ConnectionClosed(connection))

    # From streams

    def asked(self, stream: Stream, request_id: RequestId, method: str) -> None:
        """See `StreamEvents.asked`."""
        is_attached = stream.delivery is not None and stream.state.idle_since is None
        self.tell(CallAsked(stream, request_id, method, is_attached))

    def answered(self, stream: Stream, request_id: RequestId) -> None:
        """See `StreamEvents.answered`."""
        self.tell(CallAnswered(stream, request_id))

    def ended(self, stream: Stream, why: str) -> None:
        """See `StreamEvents.ended`."""
        self.tell(CallEnded(stream, stream.state.outcome, why))

    def restarted(self, stream: Stream) -> None:
        """See `StreamEvents.restarted`."""
        self.tell(CallRestarted(stream))

    # From connections

    def attached(self, delivery: Delivery) -> None:
        """See `DeliveryEvents.attached`."""
        if self._of[DeliveryBegan]:
            self.tell(DeliveryBegan(delivery))
        if delivery.is_return:
            self.returned(delivery, delivery.backlog)

    def returned(self, delivery: Delivery, replayed: int) -> None:
        """See `DeliveryEvents.returned`."""
        transport = delivery.connection.transport
        self.tell(CallResumed(delivery.stream, transport, delivery.position, replayed))

    def fell_silent(self, delivery: Delivery) -> None:
        """See `DeliveryEvents.fell_silent`."""
        self.tell(CallDetached(delivery.stream, "silent"))

    def detached(self, delivery: Delivery, why: str) -> None:
        """See `DeliveryEvents.detached`."""
        if self._of[DeliveryEnded]:
            sent = delivery.position - delivery.after
            self.tell(DeliveryEnded(delivery, sent, min(sent, delivery.backlog)))
        stream = delivery.stream
        if stream.is_deferred and stream.state.outcome.is_end:
            return  # its response went out as a plain one
        if stream.delivery is delivery and not _is_complete(delivery):
            self.tell(CallDetached(stream, LEFT if stream.is_left else why))


def _is_complete(delivery: Delivery) -> bool:
    """Whether the client lacks nothing that this delivery was for, or never gets it."""
    state = delivery.stream.state
    if state.is_tombstone:
        return True
    stop = delivery.stop
    return stop is not None and delivery.position >= stop
