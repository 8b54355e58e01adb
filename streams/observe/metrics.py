"""`GET /metrics`: what Prometheus reads, by prometheus-client (the extra `metrics`).

Numbers are read when they are asked for, from tallies, the registry and the journal. So between two
scrapes they cost nothing. The text is made in a thread, because a server with many tools has
thousands of lines. Each server has a registry of its own; nothing is global.

Each replica tells of itself: sums over instances are those of all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Final

import trio
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from streams.engine.engine import Engine
from streams.errors import Unavailable
from streams.journal.contract import Journal
from streams.observe.registry import Counts, Registry
from streams.observe.tallies import ChildCounts, Histogram, Tallies

PREFIX: Final = "mcp_streams_"
TRANSPORTS: Final = ("http", "websocket", "stdio", "relay")  # told with 0, too
JOURNAL_S: Final = 1.0  # the rest is told without what the journal does not answer by then


class Metrics:
    """The metrics of one server."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        registry: Registry,
        tallies: Tallies,
        *,
        bytes_max: int = 0,
        child_counts: ChildCounts | None = None,
    ) -> None:
        """`bytes_max` is the limit on the journal; 0: none, or unknown."""
        self._engine = engine
        self._journal = journal
        self._streams = registry
        self._tallies = tallies
        self._bytes_max = bytes_max
        self._child_counts = child_counts
        self._families: Sequence[Metric] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(lambda: self._families))
        ProcessCollector(registry=self._registry)
        self._turn = trio.Lock()  # two scrapers must not change what the thread reads

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics, and their media type, for a request with this `Accept`."""
        async with self._turn:
            waiting = await self._webhooks()
            self._families = [
                *self._now(self._streams.counts()),
                *_of_calls(self._tallies),
                *_of_time(self._tallies),
                *self._of_journal(waiting),
                *self._of_backend(),
            ]
            encode, media_type = choose_encoder(accept)
            return await trio.to_thread.run_sync(encode, self._registry), media_type

    async def _webhooks(self) -> int | None:
        """How many webhooks wait; None while the journal does not answer."""
        with trio.move_on_after(JOURNAL_S), suppress(Unavailable):  # `store_up` tells
            return await self._journal.count_webhooks()
        return None

    def _now(self, counts: Counts) -> Iterable[Metric]:
        yield _gauges("build_info", "The version that runs; always 1.", "version", {_VERSION: 1})
        is_ready = not self._engine.unready
        yield _gauge("ready", "1 while the server takes new clients, else 0.", is_ready)
        yield _gauge("live", "Calls that run.", counts.running)
        yield _gauge("asking", "Of these, calls that wait for an answer.", counts.asking)
        yield _gauge("questions_open", "Requests to clients without an answer.", counts.questions)
        yield _gauge("attached", "Streams that a client is attached to.", counts.attached)
        yield _gauge("ended", "Streams in memory whose calls have ended.", counts.ended)
        if not self._journal.replica:  # a shared journal has those of all replicas
            yield _gauge("evicted", "Streams in the journal alone.", counts.evicted)
        yield _gauge(
            "pending_messages",
            "Messages of streams in memory that are not known to be with their clients.",
            counts.pending,
        )
        yield _gauge(
            "pending_bytes",
            "Bytes of such messages, of those that this process has numbered.",
            counts.pending_bytes,
        )
        yield _gauges(
            "connections",
            "Open connections; over HTTP, responses.",
            "transport",
            dict.fromkeys(TRANSPORTS, 0) | counts.connections,
        )
        yield _gauge("sessions", "Sessions over HTTP, in memory.", counts.sessions)

    def _of_journal(self, waiting: int | None) -> Iterable[Metric]:
        journal, engine = self._journal, self._engine
        yield _gauge(
            "store_up", "1 while the journal takes changes, else 0.", not engine.why_no_commits
        )
        yield _gauge(
            "journal_short",
            "1 while the journal has no room for new calls, else 0.",
            journal.shortage is not None,
        )
        yield _gauges("journal_bytes", "Bytes of the journal, by part.", "part", journal.sizes)
        if self._bytes_max:
            yield _gauge("journal_limit_bytes", "The limit on these bytes.", self._bytes_max)
        yield _gauge("replicas", "Processes that share the journal.", engine.replicas_alive)
        if waiting is not None:
            yield _gauge("webhooks_queued", "Webhooks that wait to be sent.", waiting)

    def _of_backend(self) -> Iterable[Metric]:
        if self._child_counts is not None:
            running, restarts = self._child_counts()
            yield _gauge("children", "Child processes that run.", running)
            yield _counter(
                "child_restarts",
                "Children that were started in place of one that had died.",
                restarts,
            )


_VERSION: Final = version("mcp-streams")


class _Families(Collector):
    """Gives the registry what was counted last."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._of = families

    def collect(self) -> Iterable[Metric]:
        return self._of()


def _of_calls(tallies: Tallies) -> Iterable[Metric]:
    yield _counter("calls_begun", "Calls that have begun.", tallies.calls_begun)
    calls = CounterMetricFamily(
        f"{PREFIX}calls", "Calls that have ended, by tool and outcome.", labels=["tool", "outcome"]
    )
    for (tool, outcome), count in tallies.calls.items():
        calls.add_metric([tool, outcome], count)
    yield calls
    durations = HistogramMetricFamily(
        f"{PREFIX}call_duration_seconds",
        "From the begin of a call to its end, restarts included.",
        labels=["tool"],
    )
    for tool, histogram in tallies.durations.items():
        durations.add_metric([tool], _buckets(histogram), histogram.total)
    yield durations
    yield _counter(
        "abandoned", "Streams whose clients did not come back in time.", tallies.abandoned
    )
    yield _counter("detachments", "Times that a call or result lost its client.", tallies.detached)
    yield _counter("call_restarts", "Times that a call was run again.", tallies.restarts)
    resumes = CounterMetricFamily(
        f"{PREFIX}resumes", "Resumes, by their result.", labels=["result"]
    )
    for result, count in tallies.resumes.items():
        resumes.add_metric([result], count)
    yield resumes
    yield _counter("sent_messages", "Messages sent by deliveries that are over.", tallies.sent)
    yield _counter(
        "replayed_messages",
        "Of these, messages that were there before the delivery.",
        tallies.replayed,
    )


def _of_time(tallies: Tallies) -> Iterable[Metric]:
    yield _histogram("commit_seconds", "How long a commit takes.", tallies.commits)
    yield _histogram("commit_batch_messages", "Messages in a commit that has any.", tallies.batches)
    yield _counter("committed_bytes", "Bytes of messages in commits.", tallies.committed_bytes)
    yield _histogram(
        "delivery_lag_seconds",
        "From the commit of a message until it is written to an attached client. Sampled.",
        tallies.delivery_lags,
    )
    yield _histogram(
        "loop_lag_seconds", "How late a task runs that is due. Sampled.", tallies.loop_lags
    )


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, what, value=float(value))


def _gauges(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, what, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, what, value=value)


def _histogram(name: str, what: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(
        PREFIX + name, what, buckets=_buckets(histogram), sum_value=histogram.total
    )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    *below, (_, count) = histogram.cumulative
    return [*((str(bound), count) for bound, count in below), ("+Inf", count)]
