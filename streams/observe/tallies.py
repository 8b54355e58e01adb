"""Counts of what a server does, for metrics and for the live page.

Counting must cost nearly nothing: a tally is a plain number that one task changes. It is rendered
only when it is asked for (`streams.observe.metrics`). The number of streams, and all else that
the engine knows anyway, is not counted here but read from it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Final

import trio

from streams.clock import wall
from streams.engine.engine import Engine
from streams.engine.events import (
    CallBegan,
    CallDetached,
    CallEnded,
    CallRestarted,
    CallResumed,
    DeliveryEnded,
    Events,
    ResultAbandoned,
    ResumeRefused,
)
from streams.engine.stream import Stream
from streams.journal.records import Append, Change, Outcome
from streams.protocol.origin import tool_in

# Upper bounds of buckets, in seconds. A commit takes 0.1 ms without fsync, and 10 ms with it.
COMMIT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LAG_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
# The buckets that OpenTelemetry names for `mcp.server.operation.duration`, and longer ones.
CALL_S: Final = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
    *(1800.0, 7200.0),
)
BATCH_MESSAGES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)

LOOP_EVERY_S: Final = 0.25
SAMPLE_EVERY_S: Final = 0.05  # at most one delivery is timed in this time
SAMPLES_MAX: Final = 32  # deliveries that are timed now: a slow client must not stop the others
SAMPLE_S_MAX: Final = 60.0  # a delivery that takes longer counts as one of this time
NAMES_MAX: Final = 100  # of tools with counts of their own
NAME_LETTERS_MAX: Final = 100
OTHER: Final = "other"
SUCCESS: Final = Outcome.COMPLETED.value
RESUMED: Final = "resumed"  # the result of a resume that was not refused
# Ends of calls that an outcome does not tell apart: a result that says `isError`, a server that has
# died, and a client that is lost and could not come back.
REASONS: Final = frozenset({"tool_error", "interrupted", "dropped"})

# How many child processes run, and how many were started in place of one that had died.
ChildCounts = Callable[[], tuple[int, int]]
# Makes the text for a request with this `Accept`, and its media type.
Renderer = Callable[[str], Awaitable[tuple[bytes, str]]]


class Histogram:
    """Counts of values, by upper bounds that are inclusive."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, and for infinity, how many values are not above it."""
        return list(zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True))


class Names:
    """The names of tools that have counts of their own; all others are counted as `other`.

    A wrapped or remote server answers any name with an error. Its clients could invent names
    without end, so there a name counts only once a call of it has succeeded.
    """

    def __init__(self, *, are_ours: bool) -> None:
        """`are_ours`: a call begins only if the server has such a tool."""
        self._are_ours = are_ours
        self._known: set[str] = set()

    def label(self, name: str, *, has_succeeded: bool) -> str:
        """The label for a call of this name."""
        name = name[:NAME_LETTERS_MAX]
        if name in self._known:
            return name
        if (self._are_ours or has_succeeded) and len(self._known) < NAMES_MAX:
            self._known.add(name)
            return name
        return OTHER


class Tallies:
    """The counts of one server. `run` measures lags."""

    def __init__(self, *, are_names_ours: bool = True) -> None:
        self.names = Names(are_ours=are_names_ours)
        self.commits = Histogram(COMMIT_S)
        self.batches = Histogram(BATCH_MESSAGES)
        self.committed_bytes = 0
        self.delivery_lags = Histogram(LAG_S)
        self.loop_lags = Histogram(LAG_S)
        self.calls_begun = 0
        self.calls: Counter[tuple[str, str]] = Counter()  # that have ended, by tool and outcome
        self.durations: dict[str, Histogram] = {}  # by tool
        self.abandoned = self.restarts = self.detached = 0
        self.resumes: Counter[str] = Counter({RESUMED: 0})  # by result
        self.sent = self.replayed = 0  # messages, by deliveries that are over
        self._find: Callable[[str], Stream | None] = lambda _: None
        self._sample_at = 0.0
        self._timed = 0  # deliveries that are timed now
        self._nursery: trio.Nursery | None = None

    def listen_to(self, events: Events) -> None:
        """Count what these events tell. Restarted calls are told at the start of the engine."""
        events.listen_by_kind(
            {
                CallBegan: self._began,
                CallEnded: self._ended,
                ResultAbandoned: self._abandoned,
                CallRestarted: self._restarted,
                CallDetached: self._detached,
                CallResumed: self._resumed,
                ResumeRefused: self._refused,
                DeliveryEnded: self._delivered,
            }
        )

    def measure(self, engine: Engine) -> None:
        """Measure the commits of this engine from now on, and the deliveries that follow them."""
        self._find = engine.here
        engine.on_commit(self.committed)

    # Calls and deliveries

    def _began(self, _: CallBegan) -> None:
        self.calls_begun += 1

    def _ended(self, event: CallEnded) -> None:
        outcome = outcome_of(event)
        record = event.stream.record
        tool = self.names.label(tool_in(record.origin), has_succeeded=outcome == SUCCESS)
        self.calls[tool, outcome] += 1
        if (durations := self.durations.get(tool)) is None:
            durations = self.durations[tool] = Histogram(CALL_S)
        durations.observe(max(0.0, wall() - record.created_at))  # the clock may be set back
        self.abandoned += event.outcome is Outcome.ABANDONED

    def _abandoned(self, _: ResultAbandoned) -> None:
        self.abandoned += 1

    def _restarted(self, _: CallRestarted) -> None:
        self.restarts += 1

    def _detached(self, _: CallDetached) -> None:
        self.detached += 1

    def _resumed(self, _: CallResumed) -> None:
        self.resumes[RESUMED] += 1

    def _refused(self, event: ResumeRefused) -> None:
        self.resumes[event.reason] += 1

    def _delivered(self, event: DeliveryEnded) -> None:
        self.sent += event.sent
        self.replayed += event.replayed

    # Commits

    def committed(self, took_s: float, changes: Sequence[Change]) -> None:
        """A commit is done."""
        self.commits.observe(took_s)
        messages, newest = 0, None
        for change in changes:
            if type(change) is Append:
                messages += change.run.count
                self.committed_bytes += len(change.run.body)
                newest = change
        if newest is None:
            return
        self.batches.observe(messages)
        if trio.current_time() >= self._sample_at:
            self._sample(newest)

    def _sample(self, change: Append) -> None:
        """Time the delivery of one stream of a commit, if a client is attached to it."""
        stream = self._find(change.stream)
        if self._nursery is None or self._timed >= SAMPLES_MAX or stream is None:
            return
        if stream.delivery is not None and stream.delivery.written < change.run.last:
            self._sample_at = trio.current_time() + SAMPLE_EVERY_S
            self._nursery.start_soon(self._time, stream, change.run.last)

    async def _time(self, stream: Stream, seq: int) -> None:
        began_at = trio.current_time()
        self._timed += 1
        delivery = stream.delivery
        try:
            with trio.move_on_after(SAMPLE_S_MAX):
                await stream.written(seq)
                if delivery is None or delivery.written < seq:
                    return  # its client has left, or another one has taken its place
            self.delivery_lags.observe(trio.current_time() - began_at)
        finally:
            self._timed -= 1

    # Running

    async def run(self) -> None:
        """Measure how late tasks and deliveries are, for ever."""
        async with trio.open_nursery() as self._nursery:
            while True:
                due_at = trio.current_time() + LOOP_EVERY_S
                await trio.sleep_until(due_at)
                self.loop_lags.observe(trio.current_time() - due_at)


def outcome_of(event: CallEnded) -> str:
    """How a call has ended, as a label: an outcome, or what it leaves open."""
    return event.why if event.why in REASONS else event.outcome.value
