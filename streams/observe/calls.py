"""The log of calls: one line when a call ends, and more about a call that takes long.

A call that ends within a second has one line. Any other call has a line when it has run for a
second, or when the first thing happens to it, and then a line each time that its client is
detached, resumes, is asked or answers, and when a restart or a shutdown ends it or lets it go on.

No line has arguments, results, tokens or messages. The names of tools, methods and principals are
the words of peers: they are escaped, shortened, and searched for secrets.

A busy server ends thousands of calls a second, so a line costs microseconds: it is rendered here
(structlog takes 30 µs for a line), the words of peers are looked up in a cache, and the lines of up
to 50 ms are written together. `kill -9` loses these.
"""

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.clock import utc, wall
from streams.engine.events import (
    CallAnswered,
    CallAsked,
    CallBegan,
    CallDetached,
    CallEnded,
    CallInterrupted,
    CallReleased,
    CallRestarted,
    CallResumed,
    Event,
    ResultAbandoned,
)
from streams.engine.stream import Stream
from streams.exchange import TraceHeaders, is_anonymous
from streams.logs import STANDARD_ERROR, escaped, redacted

LOGGER: Final = "calls"

LONG_S: Final = 1.0  # a call that takes longer has a line before its end
TOGETHER_S: Final = 0.05  # the lines of so long are written together

NAME_LETTERS_MAX: Final = 200  # of a peer's word
# An anonymous principal is the hash of a session: so much of it tells two of them apart.
ANONYMOUS_LETTERS: Final = 16
NAMES_KEPT: Final = 4_096  # in the cache

INTERRUPTED: Final = "interrupted"

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PLAIN: Final = re.compile(r"[^\s\"'=\\]+")


class _Meta(msgspec.Struct):
    traceparent: Any = None


class _Params(msgspec.Struct):
    name: Any = None
    meta: _Meta | None = msgspec.field(name="_meta", default=None)


class _Origin(msgspec.Struct):
    method: str
    params: _Params | None = None


# Unknown members are skipped at about a gigabyte a second: the arguments may have megabytes.
_read_origin: Final = msgspec.json.Decoder(_Origin).decode


class _Called(msgspec.Struct, gc=False):
    """A call that runs, as far as its record does not tell it."""

    transport: str = ""
    http: TraceHeaders | None = None
    is_told: bool = False  # that it runs
    left_at: float | None = None  # by its client, in trio's time


class Word:
    """A peer's word, fit for a log: escaped, shortened and without secrets.

    It is no struct, because msgspec would encode that as an object.
    """

    __slots__ = ("plain", "quoted")

    def __init__(self, plain: str) -> None:
        self.plain = plain  # for JSON
        self.quoted = plain if _PLAIN.fullmatch(plain) else repr(plain)  # for a line of text


@lru_cache(maxsize=NAMES_KEPT)
def word(text: str, letters_max: int = NAME_LETTERS_MAX) -> Word:
    """Make a word fit for a log."""
    told = redacted(None, "", escaped(text[:letters_max]).replace("\n", "\\n"))
    if len(text) > letters_max:
        told += "…"
    return Word(told)


def principal_word(principal: str) -> Word:
    """The name of a principal, fit for a log."""
    return word(principal, ANONYMOUS_LETTERS if is_anonymous(principal) else NAME_LETTERS_MAX)


class CallLog:
    """A listener to events that writes the log of calls. `run` it in a task of its own."""

    def __init__(self, level: int = logging.INFO, *, as_json: bool = False) -> None:
        self._level = level
        self._render = _as_json if as_json else _as_text
        self._called: dict[Stream, _Called] = {}
        self._young: dict[Stream, float] = {}  # those that have no line yet, and when they began
        self._has_work = trio.Event()
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            CallBegan: self._began,
            CallDetached: self._detached,
            CallResumed: self._resumed,
            CallAsked: self._asked,
            CallAnswered: self._answered,
            CallEnded: self._ended,
            ResultAbandoned: self._result_abandoned,
            CallInterrupted: self._interrupted,
            CallReleased: self._released,
            CallRestarted: self._restarted,
        }

    def listen(self, event: Event) -> None:
        """Write what is to be written about this event."""
        handle = self._handlers.get(type(event))
        if handle is not None:
            handle(event)

    async def run(self) -> None:
        """Write lines that wait, and tell of calls that take long, for ever."""
        try:
            while True:
                await self._has_work.wait()
                self._has_work = trio.Event()
                while STANDARD_ERROR.is_waiting or self._young:
                    await trio.sleep(TOGETHER_S)
                    self._tell_of_long()
                    STANDARD_ERROR.write_waiting()
        finally:
            STANDARD_ERROR.write_waiting()

    def _tell_of_long(self) -> None:
        long_ago = trio.current_time() - LONG_S
        while self._young:
            stream, began_at = next(iter(self._young.items()))
            if began_at > long_ago:
                break
            self._tell_that_it_runs(stream)

    # Events

    def _began(self, event: CallBegan) -> None:
        stream = event.stream
        self._called[stream] = _Called(event.transport, event.http)
        if self._level <= logging.INFO:
            self._young[stream] = trio.current_time()
            if self._level < logging.INFO:
                self._tell_that_it_runs(stream)
        self._has_work.set()

    def _tell_that_it_runs(self, stream: Stream) -> None:
        """Write the line for the begin of a call, unless that was written."""
        called = self._called.get(stream)
        if called is None or called.is_told:
            return
        called.is_told = True
        del self._young[stream]
        age_s = round(max(0.0, wall() - stream.record.created_at), 3)
        self._write("call began", stream, {"age_s": age_s} if age_s >= TOGETHER_S else {})

    def _detached(self, event: CallDetached) -> None:
        stream = event.stream
        if not stream.is_reachable and event.why == "gone":
            return  # it is cancelled now, which has a line of its own
        if (called := self._called.get(stream)) is not None:
            called.left_at = trio.current_time()
        self._happened("call detached", stream, {"why": event.why})

    def _resumed(self, event: CallResumed) -> None:
        stream, called = event.stream, self._called.get(event.stream)
        details: dict[str, Any] = {"by": event.transport, "after": event.after}
        if called is not None and called.left_at is not None:
            details["away_s"] = round(trio.current_time() - called.left_at, 3)
            called.left_at = None
        if event.replayed:
            details["missed"] = event.replayed
            open_questions = stream.state.questions.values()
            if asked := sum(question.seq > event.after for question in open_questions):
                details["questions"] = asked
            if stream.state.is_ended:
                details["has_result"] = True
        self._happened("call resumed", stream, details)

    def _asked(self, event: CallAsked) -> None:
        details = {"asks": word(event.method), "is_attached": event.is_attached}
        self._happened("call asks", event.stream, details)

    def _answered(self, event: CallAnswered) -> None:
        self._happened("call answered", event.stream, {})

    def _ended(self, event: CallEnded) -> None:
        stream, state = event.stream, event.stream.state
        called = self._called.pop(stream, None)
        self._young.pop(stream, None)
        if event.why == INTERRUPTED or self._level > logging.INFO:
            return  # `_interrupted` has told it
        details: dict[str, Any] = {
            "duration_s": round(max(0.0, wall() - stream.record.created_at), 6),
            "messages": state.last,
            "bytes": state.bytes_numbered,
            "outcome": event.outcome.value,
        }
        if event.why:
            details["why"] = event.why
        if called is not None and called.left_at is not None:
            details["is_attached"] = False
        self._write("call ended", stream, details, called)

    def _result_abandoned(self, event: ResultAbandoned) -> None:
        kept_s = round(max(0.0, wall() - event.stream.state.ended_at), 3)
        self._happened("result abandoned", event.stream, {"kept_s": kept_s})

    def _interrupted(self, event: CallInterrupted) -> None:
        stream = event.stream
        details = {"messages": stream.state.last, "is_attached": stream.delivery is not None}
        self._write("call interrupted", stream, details, self._called.get(stream), logging.WARNING)
        STANDARD_ERROR.write_waiting()

    def _released(self, event: CallReleased) -> None:
        self._happened("call released", event.stream, {"messages": event.stream.state.last})
        self._called.pop(event.stream, None)

    def _restarted(self, event: CallRestarted) -> None:
        restart = event.stream.record.restart
        from_seq = 0 if restart is None else restart.seq
        self._called.setdefault(event.stream, _Called(is_told=True))
        self._happened("call restarted", event.stream, {"after": from_seq})

    # Lines

    def _happened(self, event: str, stream: Stream, details: dict[str, Any]) -> None:
        """Write a line about a call that needs one, and the one before that its begin needs."""
        if self._level <= logging.INFO:
            self._tell_that_it_runs(stream)
            self._write(event, stream, details)

    def _write(
        self,
        event: str,
        stream: Stream,
        details: dict[str, Any],
        called: _Called | None = None,
        level: int = logging.INFO,
    ) -> None:
        if level < self._level:
            return
        called = called or self._called.get(stream)
        line = {
            "event": event,
            "level": "info" if level == logging.INFO else "warning",
            "timestamp": utc(wall()),
            "logger": LOGGER,
            "stream": stream.id[:8],
        }
        _name(line, stream, called)
        STANDARD_ERROR.add(self._render(line | details))
        self._has_work.set()


def _name(line: dict[str, Any], stream: Stream, called: _Called | None) -> None:
    """Add the call's tool or method, principal, transport and trace."""
    record = stream.record
    try:
        origin = _read_origin(record.origin)
    except ValueError:  # params of another shape, of a request that a backend understands
        origin = _Origin(str(messages.parse(record.origin).method))
    params = origin.params or _Params()
    if origin.method == "tools/call":
        line["tool"] = word(str(params.name))
    else:
        line["method"] = word(origin.method)
    line["principal"] = principal_word(record.principal)
    if called is not None and called.transport:
        line["transport"] = called.transport
    trace = _trace_id(params.meta and params.meta.traceparent)
    if trace is None and called is not None and called.http is not None:
        trace = _trace_id(called.http.traceparent)
    if trace is not None:
        line["trace_id"] = trace


def _trace_id(traceparent: Any) -> str | None:
    found = _TRACEPARENT.match(traceparent) if isinstance(traceparent, str) else None
    return None if found is None else found[1]


def _as_json(line: dict[str, Any]) -> bytes:
    return _encode(line) + b"\n"


def _plain(value: Any) -> str:
    assert isinstance(value, Word)
    return value.plain


_encode: Final = msgspec.json.Encoder(enc_hook=_plain).encode


def _as_text(line: dict[str, Any]) -> bytes:
    """A line as structlog's console renderer writes it to a file."""
    told = iter(line.items())
    (_, event), (_, level), (_, at), (_, logger) = next(told), next(told), next(told), next(told)
    rest = " ".join(f"{name}={_shown(value)}" for name, value in told)
    return f"{at} [{level:<9}] {event:<30} [{logger}] {rest}\n".encode()


def _shown(value: Any) -> str:
    return value.quoted if isinstance(value, Word) else str(value)
