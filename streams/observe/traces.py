"""Spans and metrics of OpenTelemetry for calls, by MCP's semantic conventions (the extra `otel`).

A call has a span of kind SERVER. Its parent is the context that the client has put into
`params._meta` (SEP-414); the context of the HTTP request is then a link, because one call may come
over several requests. Without a context in `_meta`, that of HTTP is the parent.

A call that runs again has another span, linked to the first one, whose context is kept with the
record of a call that may restart. A span that a crash took along is made anew if the restart ends
the call: it begins when the call began.

A delivery has a span of its own, linked to that of its call, unless it is the first one and the
call has ended with it: then it would tell nothing that the call's span does not.

Nothing here has arguments, results, session ids or tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Final
from weakref import WeakKeyDictionary

import trio
from opentelemetry import context as contexts
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
)

from streams.clock import wall
from streams.engine.connection import Delivery
from streams.engine.events import (
    CallAnswered,
    CallAsked,
    CallBegan,
    CallDetached,
    CallEnded,
    CallReleased,
    CallRestarted,
    CallResumed,
    ConnectionClosed,
    DeliveryBegan,
    DeliveryEnded,
    Events,
    SessionEnded,
)
from streams.engine.stream import Stream
from streams.errors import code_of
from streams.exchange import TraceHeaders
from streams.journal.records import Outcome
from streams.logs import STREAM_LETTERS
from streams.observe.tallies import Names, outcome_of
from streams.protocol.origin import CALL, Origin

NAME: Final = "mcp-streams"
# The buckets that the conventions name, in seconds.
BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NS: Final = 1_000_000_000

# "It SHOULD be set to `pipe` if the transport is stdio."
_TRANSPORTS: Final[Mapping[str, Mapping[str, str]]] = {
    "stdio": {"network.transport": "pipe"},
    "relay": {"network.transport": "pipe"},
    "http": {"network.transport": "tcp", "network.protocol.name": "http"},
    "websocket": {"network.transport": "tcp", "network.protocol.name": "websocket"},
}

Attributes = dict[str, str | int | bool]


class _Called:
    """The span of a call that runs."""

    __slots__ = ("attributes", "context", "origin", "span")

    def __init__(self, span: Span, context: Context, origin: Origin, attributes: Attributes):
        self.span = span
        self.context = context  # what the client has sent, with its baggage
        self.origin = origin
        self.attributes = attributes  # of its metrics


class Traces:
    """Traces the calls and deliveries that events tell of."""

    def __init__(
        self,
        keep: Callable[[bytes, str], bytes],
        kept: Callable[[bytes], str],
        *,
        are_names_ours: bool = True,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        """`keep` adds a `traceparent` to what the journal keeps of a caller, and `kept` returns it.

        Without providers, those of the process are used. See `Names` for `are_names_ours`.
        """
        self._keep, self._kept = keep, kept
        self._tracer = trace.get_tracer(NAME, version(NAME), tracer_provider)
        meter = metrics.get_meter(NAME, version(NAME), meter_provider)
        self._operations = meter.create_histogram(
            "mcp.server.operation.duration",
            "s",
            "The duration of an MCP request as observed on the receiver from the time it was "
            "received until the result is sent.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        self._sessions = meter.create_histogram(
            "mcp.server.session.duration",
            "s",
            "The duration of the MCP session as observed on the MCP server.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        self._names = Names(are_ours=are_names_ours)
        self._called: dict[Stream, _Called] = {}
        # Also of calls that have ended, for the links of later deliveries.
        self._contexts: WeakKeyDictionary[Stream, SpanContext] = WeakKeyDictionary()

    def listen_to(self, events: Events) -> None:
        """Trace what these events tell from now on; handlers of calls run in the calls' spans."""
        events.enter_handler = self._enter
        events.listen_by_kind(
            {
                CallBegan: self._began,
                CallDetached: self._detached,
                CallResumed: self._resumed,
                CallAsked: self._asked,
                CallAnswered: self._answered,
                CallEnded: self._ended,
                CallReleased: self._released,
                CallRestarted: self._restarted,
                DeliveryBegan: self._attached,
                DeliveryEnded: self._delivered,
                ConnectionClosed: self._closed,
                SessionEnded: self._session_ended,
            }
        )

    def _enter(self, stream: Stream) -> None:
        """Make the span of a call the current one, in the task that runs its handler.

        The task ends with the handler, and its context with it.
        """
        called = self._called.get(stream)
        if called is not None:
            contexts.attach(trace.set_span_in_context(called.span, called.context))

    # Calls

    def _began(self, event: CallBegan) -> None:
        stream = event.stream
        origin = Origin.of(stream.record.origin)
        parent, http = _extracted(origin.trace), _extracted(event.http)
        links = []
        if not _has_span(parent):
            parent = http
        elif _has_span(http):
            links.append(Link(_span_context(http)))
        span = self._start(stream, origin, parent, links, _TRANSPORTS.get(event.transport, {}))
        restart = stream.record.restart
        if restart is not None and restart.caller:
            traceparent = _traceparent(span.get_span_context())
            stream.keep_caller(self._keep(restart.caller, traceparent))

    def _restarted(self, event: CallRestarted) -> None:
        stream = event.stream
        died = self._called.pop(stream, None)
        if died is not None:  # its child process
            _fail(died.span, "interrupted")
            died.span.end()
        origin = Origin.of(stream.record.origin)
        first = self._first(stream, origin)
        links = [] if first is None else [Link(first)]
        more = {"mcp_streams.restart": True}
        self._start(stream, origin, _extracted(origin.trace), links, more)

    def _start(
        self,
        stream: Stream,
        origin: Origin,
        parent: Context,
        links: Sequence[Link],
        more: Mapping[str, str | bool],
        *,
        began_at: float | None = None,
    ) -> Span:
        is_tool, method = origin.method == CALL, origin.method or "unknown"
        attributes: Attributes = {"mcp.method.name": method, **more}
        if is_tool:
            attributes["gen_ai.operation.name"] = "execute_tool"
        if origin.target:
            attributes[f"gen_ai.{'tool' if is_tool else 'prompt'}.name"] = origin.target
        metered = dict(attributes)
        if origin.uri:
            attributes["mcp.resource.uri"] = origin.uri
        attributes["jsonrpc.request.id"] = str(stream.request_id)
        attributes["mcp_streams.stream"] = stream.id[:STREAM_LETTERS]
        span = self._tracer.start_span(
            f"{method} {origin.target}" if origin.target else method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            links=links,
            start_time=None if began_at is None else int(began_at * NS),
        )
        self._called[stream] = _Called(span, parent, origin, metered)
        self._contexts[stream] = span.get_span_context()
        return span

    def _first(self, stream: Stream, origin: Origin | None = None) -> SpanContext | None:
        """The context of the call's span, as far as it is known: at last, the client's."""
        known = self._contexts.get(stream)
        if known is not None:
            return known
        restart = stream.record.restart
        kept = "" if restart is None else self._kept(restart.caller)
        if kept:
            context = _extracted(TraceHeaders(kept))
        else:
            context = _extracted((origin or Origin.of(stream.record.origin)).trace)
        return _span_context(context) if _has_span(context) else None

    def _ended(self, event: CallEnded) -> None:
        stream, why = event.stream, event.why
        called = self._called.pop(stream, None) or self._lost(stream)
        span, attributes, outcome = called.span, called.attributes, outcome_of(event)
        span.set_attribute("mcp_streams.outcome", outcome)
        error = _error_of(event, called.origin)
        if error:
            attributes["error.type"] = error
            if event.outcome is Outcome.FAILED:
                attributes["rpc.response.status_code"] = error
                span.set_attribute("rpc.response.status_code", error)
            _fail(span, error, why)
        span.end()
        if "gen_ai.tool.name" in attributes:  # a span may have any name, a metric only some
            attributes["gen_ai.tool.name"] = self._names.label(
                called.origin.target, has_succeeded=outcome == Outcome.COMPLETED.value
            )
        seconds = max(0.0, wall() - stream.record.created_at)
        self._operations.record(seconds, attributes)

    def _lost(self, stream: Stream) -> _Called:
        """The span of a call that ends at a restart: a crash has taken the first one along."""
        origin = Origin.of(stream.record.origin)
        first = self._first(stream, origin)
        links = [] if first is None else [Link(first)]
        began_at, parent = stream.record.created_at, _extracted(origin.trace)
        self._start(stream, origin, parent, links, {}, began_at=began_at)
        return self._called.pop(stream)

    def _released(self, event: CallReleased) -> None:
        called = self._called.pop(event.stream, None)
        if called is not None:
            called.span.set_attribute("mcp_streams.outcome", "released")
            called.span.end()

    # Events within a call

    def _tell(self, stream: Stream, name: str, **attributes: str | int | bool) -> None:
        called = self._called.get(stream)
        if called is not None:
            named = {f"mcp_streams.{key}": value for key, value in attributes.items()}
            called.span.add_event(f"mcp.streams.{name}", named)

    def _detached(self, event: CallDetached) -> None:
        self._tell(event.stream, "detached", why=event.why)

    def _resumed(self, event: CallResumed) -> None:
        self._tell(event.stream, "resumed", after=event.after, replayed=event.replayed)

    def _asked(self, event: CallAsked) -> None:
        self._tell(event.stream, "asked", method=event.method, is_attached=event.is_attached)

    def _answered(self, event: CallAnswered) -> None:
        self._tell(event.stream, "answered")

    # Deliveries and sessions

    def _attached(self, event: DeliveryBegan) -> None:
        delivery = event.delivery
        called = self._called.get(delivery.stream)
        revision = delivery.connection.session.revision
        if called is not None and revision is not None:
            called.span.set_attribute("mcp.protocol.version", revision)
            called.attributes["mcp.protocol.version"] = revision

    def _delivered(self, event: DeliveryEnded) -> None:
        delivery = event.delivery
        stream, connection = delivery.stream, delivery.connection
        if _is_whole(delivery):
            return
        first = self._first(stream)
        # A WebSocket's handshake belongs to all that follows, and so to none of it.
        http = connection.http_trace if connection.is_response else None
        span = self._tracer.start_span(
            "mcp.streams.delivery",
            context=_extracted(http),
            attributes={
                "mcp_streams.stream": stream.id[:STREAM_LETTERS],
                "mcp_streams.after": delivery.after,
                "mcp_streams.count": event.sent,
                "mcp_streams.replayed": event.replayed,
                **_TRANSPORTS.get(connection.transport, {}),
            },
            links=[] if first is None else [Link(first)],
            start_time=int(min(delivery.attached_at, wall()) * NS),
        )
        span.end()

    def _closed(self, event: ConnectionClosed) -> None:
        connection = event.connection
        if not connection.is_response:
            seconds = trio.current_time() - connection.opened_at
            self._over(connection.session.revision, connection.transport, seconds)

    def _session_ended(self, event: SessionEnded) -> None:
        self._over(event.session.revision, "http", event.lasted_s)

    def _over(self, revision: str | None, transport: str, seconds: float) -> None:
        if revision is not None:  # else it was a probe, and no session began
            told = {"mcp.protocol.version": revision, **_TRANSPORTS.get(transport, {})}
            self._sessions.record(max(0.0, seconds), told)


def _is_whole(delivery: Delivery) -> bool:
    """Whether it is the first delivery of a call, and has brought its end."""
    if delivery.reply_id is not None or delivery.continues or not delivery.is_call:
        return False
    stream, stop = delivery.stream, delivery.stop
    is_plain = stream.is_deferred and stream.state.is_ended
    return is_plain or (stop is not None and delivery.position >= stop)


def _error_of(event: CallEnded, origin: Origin) -> str:
    """The `error.type` of a call that has ended; "" for none.

    "This attribute SHOULD be set to the string representation of the JSON-RPC error code, if one
    is returned", and to `tool_error` for a result that says `isError`.
    """
    if event.outcome is Outcome.FAILED:
        return str(code_of(event.why))
    if event.outcome is Outcome.COMPLETED and event.why:
        return event.why if origin.method == CALL else "_OTHER"
    # Its own client has cancelled it: nothing failed.
    return "" if event.outcome is Outcome.CANCELLED and event.why == "cancelled" else event.why


def _fail(span: Span, error: str, why: str = "") -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, why or error))


def _extracted(headers: TraceHeaders | None) -> Context:
    """The context that a peer has sent; an empty one for none, or for one that is not valid."""
    if headers is None:
        return Context()
    carrier = {
        "traceparent": headers.traceparent,
        "tracestate": headers.tracestate,
        "baggage": headers.baggage,
    }
    return propagate.extract(
        {name: value for name, value in carrier.items() if value}, context=Context()
    )


def _span_context(context: Context) -> SpanContext:
    return trace.get_current_span(context).get_span_context()


def _has_span(context: Context) -> bool:
    return _span_context(context).is_valid


def _traceparent(context: SpanContext) -> str:
    return (
        f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
        f"-{context.trace_flags:02x}"
    )
