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
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import msgspec
import trio

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
    Events,
    ResultAbandoned,
)
from streams.engine.stream import Stream
from streams.exchange import TraceHeaders, is_anonymous
from streams.journal.records import Outcome, Record
from streams.logs import STANDARD_ERROR, STREAM_LETTERS, escaped, redacted
from streams.protocol.origin import CALL, Origin

LOGGER: Final = "calls"

LONG_S: Final = 1.0  # a call that takes longer has a line before its end
TOGETHER_S: Final = 0.05  # the lines of so long are written together

NAME_LETTERS_MAX: Final = 200  # of a peer's word
# An anonymous principal is the hash of a session: so much of it tells two of them apart.
ANONYMOUS_LETTERS: Final = 16
NAMES_KEPT: Final = 4_096  # in the cache

# A line is rendered when it is written. That of a longer request is rendered at once, so that
# requests need not stay in memory for lines that are not written.
KEPT_BYTES_MAX: Final = 4_096

INTERRUPTED: Final = "interrupted"

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PLAIN: Final = re.compile(r"[^\s\"'=\\]+")


class _Called(msgspec.Struct, gc=False):
    """A call that runs. Times are trio's."""

    began_at: float
    transport: str = ""
    http: TraceHeaders | None = None
    left_at: float | None = None  # by its client


Details = Mapping[str, Any]
Ended = tuple[int, int, Outcome]
"""Of a call at its end: its messages, their bytes, and how it has ended."""


class Form(Protocol):
    """How lines are rendered. No word of a peer has a control character or a secret."""

    def subject(self, kind: str, name: str, principal: str, transport: str) -> str:
        """The tool or method of a call (`kind`), its principal and its transport ("": unknown)."""

    def details(self, details: Details) -> str:
        """Fields; those that are None are left out."""

    def ended(self, duration_s: float, messages: int, bytes: int, outcome: Outcome) -> str:
        """The fields that each call has at its end."""

    def line(self, event: str, level: str, at: str, stream: str, rest: Sequence[str]) -> bytes:
        """The line of an event, with its newline."""


class JsonForm:
    """Lines of JSON."""

    @staticmethod
    @lru_cache(maxsize=NAMES_KEPT)
    def subject(kind: str, name: str, principal: str, transport: str) -> str:
        """See `Form.subject`."""
        words = {kind: word(name), "principal": principal_word(principal)}
        return _members(words | ({"transport": transport} if transport else {}))

    def details(self, details: Details) -> str:
        """See `Form.details`."""
        return _members({name: value for name, value in details.items() if value is not None})

    def ended(self, duration_s: float, messages: int, bytes: int, outcome: Outcome) -> str:
        """See `Form.ended`."""
        return (
            f'"duration_s":{duration_s:.6f},"messages":{messages},"bytes":{bytes},'
            f'"outcome":"{outcome.value}"'
        )

    def line(self, event: str, level: str, at: str, stream: str, rest: Sequence[str]) -> bytes:
        """See `Form.line`."""
        head = (
            f'"event":"{event}","level":"{level}","timestamp":"{at}","logger":"{LOGGER}",'
            f'"stream":"{stream}"'
        )
        return f"{{{head},{','.join(rest)}}}\n".encode()


class TextForm:
    """Lines of text, as structlog's console renderer writes them to a file."""

    @staticmethod
    @lru_cache(maxsize=NAMES_KEPT)
    def subject(kind: str, name: str, principal: str, transport: str) -> str:
        """See `Form.subject`."""
        told = f"{kind}={_shown(word(name))} principal={_shown(principal_word(principal))}"
        return f"{told} transport={transport}" if transport else told

    def details(self, details: Details) -> str:
        """See `Form.details`."""
        given = details.items()
        return " ".join(f"{name}={_shown(value)}" for name, value in given if value is not None)

    def ended(self, duration_s: float, messages: int, bytes: int, outcome: Outcome) -> str:
        """See `Form.ended`."""
        return (
            f"duration_s={duration_s:.6f} messages={messages} bytes={bytes} outcome={outcome.value}"
        )

    def line(self, event: str, level: str, at: str, stream: str, rest: Sequence[str]) -> bytes:
        """See `Form.line`."""
        head = f"{at} [{level:<9}] {event:<30} [{LOGGER}] stream={stream}"
        return f"{head} {' '.join(rest)}\n".encode()


def word(text: str, letters_max: int = NAME_LETTERS_MAX) -> str:
    """A peer's word, fit for a log: escaped, shortened and without secrets."""
    told = redacted(None, "", escaped(text[:letters_max]).replace("\n", "\\n"))
    return f"{told}..." if len(text) > letters_max else told


def principal_word(principal: str) -> str:
    """The name of a principal, fit for a log."""
    return word(principal, ANONYMOUS_LETTERS if is_anonymous(principal) else NAME_LETTERS_MAX)


def _members(fields: dict[str, Any]) -> str:
    """The members of an object in JSON, without its braces."""
    return msgspec.json.encode(fields)[1:-1].decode()


def _shown(value: Any) -> str:
    """A value in a line of text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else repr(text)


class CallLog:
    """The log of the calls that events tell of. `run` it in a task of its own."""

    def __init__(self, level: int = logging.INFO, *, as_json: bool = False) -> None:
        self._level = level
        self._form: Form = JsonForm() if as_json else TextForm()
        self._young: dict[Stream, _Called] = {}  # calls that have no line yet, oldest first
        # Calls that have. Of a stream that another replica owns the end is not told here.
        self._called: WeakKeyDictionary[Stream, _Called] = WeakKeyDictionary()
        self._has_work = trio.Event()
        self._is_working = False

    def listen_to(self, events: Events) -> None:
        """Write what these events tell from now on. Nothing is told above the level warning."""
        if self._level <= logging.WARNING:
            events.listen(self._interrupted, [CallInterrupted])
        if self._level > logging.INFO:
            return
        events.listen_by_kind(
            {
                CallBegan: self._began,
                CallDetached: self._detached,
                CallResumed: self._resumed,
                CallAsked: self._asked,
                CallAnswered: self._answered,
                CallEnded: self._ended,
                ResultAbandoned: self._result_abandoned,
                CallReleased: self._released,
                CallRestarted: self._restarted,
            }
        )

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
                self._is_working = False
        finally:
            STANDARD_ERROR.write_waiting()

    def _work(self) -> None:
        self._is_working = True
        self._has_work.set()

    def _tell_of_long(self) -> None:
        long_ago = trio.current_time() - LONG_S
        while self._young:
            stream, called = next(iter(self._young.items()))
            if called.began_at > long_ago:
                break
            self._tell_that_it_runs(stream)

    # Events

    def _began(self, event: CallBegan) -> None:
        self._young[event.stream] = _Called(trio.current_time(), event.transport, event.http)
        if self._level < logging.INFO:
            self._tell_that_it_runs(event.stream)
        if not self._is_working:
            self._work()

    def _tell_that_it_runs(self, stream: Stream) -> None:
        """Write the line for the begin of a call, unless that was written."""
        if (called := self._young.pop(stream, None)) is not None:
            self._called[stream] = called
            age_s = round(trio.current_time() - called.began_at, 3)
            self._write("call began", stream, called, {"age_s": age_s or None})

    def _detached(self, event: CallDetached) -> None:
        stream = event.stream
        if not stream.is_reachable and event.why == "gone":
            return  # it is cancelled now, which has a line of its own
        called = self._happened("call detached", stream, why=event.why)
        called.left_at = trio.current_time()

    def _resumed(self, event: CallResumed) -> None:
        state, called = event.stream.state, self._called.get(event.stream)
        away_s = None
        if called is not None and called.left_at is not None:
            away_s = round(trio.current_time() - called.left_at, 3)
            called.left_at = None
        asked = sum(each.seq > event.after for each in state.questions.values())
        self._happened(
            "call resumed",
            event.stream,
            by=event.transport,
            after=event.after,
            away_s=away_s,
            missed=event.replayed,
            questions=asked or None,
            has_result=state.is_ended or None,
        )

    def _asked(self, event: CallAsked) -> None:
        asks, is_attached = word(event.method), event.is_attached
        self._happened("call asks", event.stream, asks=asks, is_attached=is_attached)

    def _answered(self, event: CallAnswered) -> None:
        self._happened("call answered", event.stream)

    def _ended(self, event: CallEnded) -> None:
        stream = event.stream
        called = self._young.pop(stream, None) or self._called.pop(stream, None)
        if event.why == INTERRUPTED:
            return  # `_interrupted` has told it
        state = stream.state
        ended = state.last, state.bytes_numbered, event.outcome
        more: Details | None = None
        is_away = called is not None and called.left_at is not None
        if event.why or is_away:
            more = {"why": event.why or None, "is_attached": False if is_away else None}
        self._write("call ended", stream, called, more, ended=ended)

    def _result_abandoned(self, event: ResultAbandoned) -> None:
        kept_s = round(max(0.0, wall() - event.stream.state.ended_at), 3)
        self._write("result abandoned", event.stream, None, {"kept_s": kept_s})

    def _interrupted(self, event: CallInterrupted) -> None:
        stream = event.stream
        called = self._young.get(stream) or self._called.get(stream)
        is_attached = stream.delivery is not None
        details = {"messages": stream.state.last, "is_attached": is_attached}
        self._write("call interrupted", stream, called, details, level="warning")
        STANDARD_ERROR.write_waiting()

    def _released(self, event: CallReleased) -> None:
        self._happened("call released", event.stream, messages=event.stream.state.last)
        self._called.pop(event.stream, None)

    def _restarted(self, event: CallRestarted) -> None:
        restart = event.stream.record.restart
        after = 0 if restart is None else restart.seq
        self._happened("call restarted", event.stream, after=after)

    # Lines

    def _happened(self, event: str, stream: Stream, **details: Any) -> _Called:
        """Write a line about a call, and the one before it that its begin needs."""
        self._tell_that_it_runs(stream)
        if (called := self._called.get(stream)) is None:
            called = self._called[stream] = _Called(trio.current_time())
        self._write(event, stream, called, details)
        return called

    def _write(
        self,
        event: str,
        stream: Stream,
        called: _Called | None,
        details: Details | None,
        *,
        ended: Ended | None = None,
        level: str = "info",
    ) -> None:
        transport, http = ("", None) if called is None else (called.transport, called.http)
        told = (event, level, wall(), stream.record, transport, http, ended, details)
        render = partial(_line, self._form, *told)
        if len(stream.record.origin) > KEPT_BYTES_MAX:
            render = partial(bytes, render())
        STANDARD_ERROR.add(render)
        if not self._is_working:
            self._work()


def _line(
    form: Form,
    event: str,
    level: str,
    at: float,
    record: Record,
    transport: str,
    http: TraceHeaders | None,
    ended: Ended | None,
    details: Details | None,
) -> bytes:
    """A line about the call of a record. Of one that has `ended`, with what that tells."""
    origin = Origin.of(record.origin)
    kind = "tool" if origin.method == CALL else "method"
    rest = [form.subject(kind, origin.tool, record.principal, transport)]
    if (trace := _trace_id(origin.trace, http)) is not None:
        rest.append(form.details({"trace_id": trace}))
    if ended is not None:
        duration_s = max(0.0, at - record.created_at)
        rest.append(form.ended(duration_s, *ended))
    if details is not None and (told := form.details(details)):
        rest.append(told)
    return form.line(event, level, utc(at), record.stream[:STREAM_LETTERS], rest)


def _trace_id(meta: TraceHeaders | None, http: TraceHeaders | None) -> str | None:
    """The trace of a call: that of its `_meta`, else that of its HTTP request."""
    for given in (meta, http):
        if given is not None and (found := _TRACEPARENT.match(given.traceparent)) is not None:
            return found[1]
    return None
