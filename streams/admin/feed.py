"""Server-sent events for operators: the calls that change, at most four times a second.

    event: calls      {"calls": […], "more": false}     calls as `/api/calls` shows them
    event: counts     {…}                               as `/api/stats`, when they have changed

A call is sent when something happens to it, such as its begin, a resume or its end. The marks of a
running call move all the time: those of the calls in `?watch=ID,ID` are sent too.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
import trio

from streams.admin.endpoint import Route, journal_errors, query_of
from streams.admin.sse import Responses, while_connected
from streams.engine.events import CALL_KINDS, CallEvent, Events
from streams.engine.stream import Stream
from streams.exchange import HttpError, Request, Responder
from streams.observe.registry import CallView, Counts, Registry

EVERY_S: Final = 0.25
COUNTED_S: Final = 1.0  # between two counts, and longer where they take long
COUNTED_PART: Final = 50  # of the time is spent with counting at most, one part
FEEDS_MAX: Final = 16
WATCHED_MAX: Final = 50  # calls, for each feed
CHANGED_MAX: Final = 200  # calls in one event; of more, the list must be read again

_Marks = tuple[object, ...]


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    watch: str = ""


class Feeds:
    """The feeds of one server."""

    def __init__(self, registry: Registry, events: Events) -> None:
        self._registry = registry
        self._events = events
        self._open = Responses(FEEDS_MAX, "feeds")

    @property
    def routes(self) -> tuple[Route, ...]:
        """The table."""
        return (Route("GET", "/api/events", self._feed),)

    async def _feed(self, request: Request, responder: Responder) -> None:
        asked = query_of(request, _Asked)
        watched = [each for each in asked.watch.split(",") if each]
        if len(watched) > WATCHED_MAX:
            raise HttpError(400, f"watch: name {WATCHED_MAX} calls at most.")
        await self._open.answer(request, responder, partial(self._send, responder, watched))

    async def _found(self, prefixes: Sequence[str]) -> set[str]:
        with journal_errors():
            return {await self._registry.find(each) for each in prefixes}

    async def _send(self, responder: Responder, watched: Sequence[str]) -> None:
        feed = _Feed(self._registry, await self._found(watched))
        self._events.listen(feed.hear, CALL_KINDS)
        try:
            async with while_connected(responder) as send:
                while True:
                    await send(feed.news())
                    await trio.sleep(EVERY_S)
        finally:
            self._events.unlisten(feed.hear)


class _Changed(msgspec.Struct):
    calls: tuple[CallView, ...]
    more: bool


class _Feed:
    """The news for one operator: calls and counts that were not sent yet."""

    def __init__(self, registry: Registry, watched: set[str]) -> None:
        self._registry = registry
        self._watched = watched
        self._marks: dict[str, _Marks] = {}
        self._changed: dict[str, Stream] = {}
        self._has_more = False
        self._counts: Counts | None = None
        self._count_at = -math.inf

    def hear(self, event: CallEvent) -> None:
        """Something has happened to a call: see `Events.listen`."""
        stream = event.stream
        if len(self._changed) < CHANGED_MAX or stream.id in self._changed:
            self._changed[stream.id] = stream
        else:
            self._has_more = True

    def news(self) -> bytes:
        """The events since the last call; empty without any."""
        self._look_at_marks()
        told = b""
        if self._changed or self._has_more:
            calls = tuple(map(self._registry.view, self._changed.values()))
            told = _event("calls", _Changed(calls, self._has_more))
            self._changed.clear()
            self._has_more = False
        return told + self._counted()

    def _look_at_marks(self) -> None:
        for stream_id in self._watched:
            stream = self._registry.here(stream_id)
            if stream is None:
                self._marks.pop(stream_id, None)
                continue
            state, delivery = stream.state, stream.delivery
            written = None if delivery is None else delivery.written
            marks = (state.last, state.durable, state.handed, written, state.delivered)
            if self._marks.get(stream_id) != marks:
                self._marks[stream_id] = marks
                self._changed[stream_id] = stream

    def _counted(self) -> bytes:
        began = trio.current_time()
        if began < self._count_at:
            return b""
        counts = self._registry.counts()
        took = trio.current_time() - began
        self._count_at = began + max(COUNTED_S, COUNTED_PART * took)
        if counts == self._counts:
            return b""
        self._counts = counts
        return _event("counts", counts)


def _event(name: str, value: object) -> bytes:
    # JSON has no newline outside of its strings, where it is escaped.
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
