"""The recent past, in memory: how far each call had come when, and how busy the server was.

A chart needs values of before, and nothing else keeps them. All of it is bounded, and gone with the
process. A call that ends within `EVERY_S` and keeps its client leaves nothing here.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import trio

from streams.clock import wall
from streams.engine.events import (
    CallAnswered,
    CallAsked,
    CallDetached,
    CallEnded,
    CallEvent,
    CallInterrupted,
    CallReleased,
    CallRestarted,
    CallResumed,
)
from streams.engine.stream import Stream
from streams.observe.tallies import Histogram

EVERY_S: Final = 1.0  # between two samples
RATES_MAX: Final = 600  # samples of the whole server: ten minutes
# Calls whose past is kept: with 120 samples of 40 bytes each, and 100 moments, 500 of them take
# 5 MB at most, and hardly more than 1 MB in practice.
CALLS_MAX: Final = 500
SAMPLES_MAX: Final = 120  # of one call; then every second one is dropped
MOMENTS_MAX: Final = 100  # of one call; the oldest go first

_FIELDS: Final = 5


class Marks(Protocol):
    """How far a stream has come: see `streams.engine.lifecycle`."""

    last: int
    durable: int
    handed: int
    delivered: int


class Moment(msgspec.Struct, frozen=True):
    """Something that happened to a call: `cut`, `resumed`, `asked` …"""

    at: float  # wall time
    what: str
    seq: int
    details: str = ""


class Sample(msgspec.Struct, frozen=True):
    """How far a call had come: its marks, as seqs."""

    at: float  # wall time
    numbered: int
    durable: int
    handed: int
    delivered: int

    @property
    def values(self) -> tuple[float, ...]:
        """The fields, in their order."""
        return self.at, self.numbered, self.durable, self.handed, self.delivered


class Rate(msgspec.Struct, frozen=True):
    """How busy the server was in one interval."""

    at: float  # wall time, at its end
    messages_per_s: float
    commit_s: float  # the mean duration of its commits; 0 without any


class Totals(Protocol):
    """Some of the counts of `streams.observe.tallies`."""

    batches: Histogram  # of messages
    commits: Histogram  # of seconds


class Past:
    """The past of one call."""

    __slots__ = ("_looked_at", "_samples", "moments")

    def __init__(self) -> None:
        self._samples = array("d")
        self._looked_at = 0.0
        self.moments: deque[Moment] = deque(maxlen=MOMENTS_MAX)

    def sample(self, at: float, marks: Marks) -> None:
        """Keep the marks, if they have changed, and since when they were as before."""
        values = (marks.last, marks.durable, marks.handed, marks.delivered)
        samples = self._samples
        before = tuple(samples[1 - _FIELDS :])
        looked_at, self._looked_at = self._looked_at, at
        if before == values:
            return
        if before and looked_at > samples[-_FIELDS]:
            samples.extend((looked_at, *before))
        samples.extend((at, *values))
        if len(samples) > SAMPLES_MAX * _FIELDS:
            kept = list(self.samples)[::2]
            self._samples = array("d", [value for each in kept for value in each.values])

    @property
    def samples(self) -> Iterator[Sample]:
        """The samples, the oldest first."""
        values = self._samples
        for start in range(0, len(values), _FIELDS):
            at, *marks = values[start : start + _FIELDS]
            yield Sample(at, *map(int, marks))


class History:
    """The past of calls, by the ids of their streams, and the rates of the server."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._past: dict[str, Past] = {}  # the one that changed longest ago first
        self.rates: deque[Rate] = deque(maxlen=RATES_MAX)
        self.began_at = wall()

    def past(self, stream: str) -> Past | None:
        """The past of a call, as far as it is known."""
        return self._past.get(stream)

    def note(self, stream: Stream, what: str, details: str = "") -> None:
        """Something has happened to a call."""
        now = wall()
        past = self._of(stream)
        if what not in ("asked", "answered"):  # else its messages are about to be committed
            past.sample(now, stream.state)
        past.moments.append(Moment(now, what, stream.state.last, details))

    def hear(self, event: CallEvent) -> None:
        """Something has happened to a call: see `streams.engine.events`."""
        match event:
            case CallDetached():
                what = _LEFT.get(event.why, "detached")
                self.note(event.stream, what, event.why if what == "detached" else "")
            case CallResumed():
                details = f"over {event.transport}, with {event.replayed} missed"
                self.note(event.stream, "resumed", details)
            case CallAsked():
                self.note(event.stream, "asked", event.method)
            case CallAnswered():
                self.note(event.stream, "answered")
            case CallInterrupted():
                self.note(event.stream, "interrupted")
            case CallReleased():
                self.note(event.stream, "released")
            case CallRestarted():
                self.note(event.stream, "restarted")
            case CallEnded():
                if event.stream.id in self._past:  # of most calls there is nothing to tell
                    self.note(event.stream, event.outcome.value, event.why)

    def sample(self, streams: Iterable[Stream]) -> None:
        """Keep the marks of streams. Once `CALLS_MAX` are known, no more are added here."""
        now = wall()
        for stream in streams:
            past = self._past.get(stream.id)
            if past is None:
                if stream.state.is_ended or len(self._past) >= CALLS_MAX:
                    continue
                past = self._of(stream)
            past.sample(now, stream.state)

    def _of(self, stream: Stream) -> Past:
        """The past of a call, which becomes the last one to be forgotten."""
        past = self._past.pop(stream.id, None)
        if past is None:
            past = Past()
            if stream.record.created_at >= self.began_at:
                past.sample(stream.record.created_at, _NOTHING)
        self._past[stream.id] = past
        if len(self._past) > CALLS_MAX:
            del self._past[next(iter(self._past))]
        return past

    async def run(self, streams: Callable[[], Iterable[Stream]]) -> None:
        """Take samples for ever."""
        before, before_at = self._counted(), trio.current_time()
        while True:
            await trio.sleep(EVERY_S)
            self.sample(streams())
            after, after_at = self._counted(), trio.current_time()
            messages, commits, spent_s = (new - old for new, old in zip(after, before, strict=True))
            per_s = messages / (after_at - before_at)
            self.rates.append(Rate(wall(), per_s, spent_s / commits if commits else 0.0))
            before, before_at = after, after_at

    def _counted(self) -> tuple[float, int, float]:
        """Messages, commits, and the seconds that these took."""
        commits = self._totals.commits
        return self._totals.batches.total, commits.count, commits.total


class _Nothing:
    last = durable = handed = delivered = 0


_NOTHING: Final = _Nothing()
# Why a client is attached no more, as a moment. Any other reason is the server's.
_LEFT: Final = {"gone": "cut", "silent": "silent", "left": "left", "answered": "left"}


def of_interval(rates: Sequence[Rate], count: int) -> list[Rate]:
    """The rates in at most `count` steps: the mean rate and the longest commit of each."""
    size = -(-len(rates) // count) if rates else 1
    parts = [list(rates)[start : start + size] for start in range(0, len(rates), size)]
    return [
        Rate(
            part[-1].at,
            sum(each.messages_per_s for each in part) / len(part),
            max(each.commit_s for each in part),
        )
        for part in parts
    ]
