"""Replicas on one store: durable messages, live tails through a balancer, and resumes.

The store, bare clients of it, and a server on SQLite with the same handlers are measured between.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from benchmarks import rawclient, replicas, store
from benchmarks.harness import Batch, Plan, Subject, unmeasured
from benchmarks.numbered import check_messages
from benchmarks.peers import Missing, Replayed
from benchmarks.peers.children import with_clients
from benchmarks.replicas import Amount, Cluster
from benchmarks.servers import APP, Served, websocket_server
from benchmarks.store import Store
from benchmarks.suites.latency import PERCENTILES
from benchmarks.suites.resume import resumed_in_hand

REPLICAS: Final = 3
STREAMS: Final = 99  # handlers that send at once: as many at each of three replicas
FLUSHED_PART: Final = 10  # handlers that wait for each message get so many times fewer

# The limits, and the same with the client library that we use ourselves.
XADD, COREDIS_XADD = "limit: XADD, pipelined", "coredis: XADD, pipelined"
XRANGE, LRANGE = "limit: XRANGE, an entry each", "limit: LRANGE, an element each"
XRANGE_OF_RUNS: Final = "limit: XRANGE of our stored runs"
COREDIS_XRANGE: Final = "coredis: XRANGE, an entry each"

SQLITE, ONE, THREE = "SQLite, 1 process", "1 replica", "3 replicas"
OWNER, OTHER = "at the owner", "at another replica"
UNIT: Final = "ms"


def durable(where: str) -> str:
    """The name of the row for handlers that send in bulk."""
    return f"durable, {where}"


def flushed(where: str) -> str:
    """The name of the row for handlers that wait for each message."""
    return f"durable one by one, {where}"


def tail(where: str, percent: int) -> str:
    """The name of the row for a percentile of the latency of a live tail."""
    return f"live tail, {where}: p{percent}"


def raw_row(where: str) -> str:
    """The name of the row for a client that only takes bytes."""
    return f"resume, {where}: raw client"


def in_hand(where: str) -> str:
    """The name of the row for our client, which has each message in hand."""
    return f"resume, {where}: our client"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """One store with two journals: of one replica, and of three behind a balancer."""
    async with AsyncExitStack() as stack:
        try:
            found = stack.enter_context(store.opened(folder / "store"))
            one = await stack.enter_async_context(replicas.cluster(found, 1, folder / "one"))
            opening = replicas.cluster(found, REPLICAS, folder / "three", is_balanced=True)
            three = await stack.enter_async_context(opening)
        except Missing as missing:
            yield [Subject("replicas", 0, unmeasured, missing=str(missing))]
            return
        file = await stack.enter_async_context(websocket_server(APP, folder / "file.db"))
        rows = _Rows(plan, found, one, three, Cluster([file], file))
        yield [
            subject
            for size, count in plan.counts.items()
            for subject in (
                *rows.durable(count, size),
                *rows.tails(size),
                *rows.resumes(count, size),
            )
        ]


class _Rows:
    def __init__(
        self, plan: Plan, found: Store, one: Cluster, three: Cluster, file: Cluster
    ) -> None:
        self._plan = plan
        self._store = found
        self._version = with_clients(found.version, store.SYNC, "coredis")
        self._clusters: Mapping[str, Cluster] = {ONE: one, THREE: three, SQLITE: file}

    def durable(self, count: int, size: int) -> list[Subject]:
        """Messages a second, from the first message to the time when all are durable."""
        streams = min(STREAMS, self._plan.streams)
        bare = partial(_in_thread, store.xadd, self._store, streams, count, size)
        peer = partial(store.xadd_by_coredis, self._store, streams, count, size)
        found = [
            Subject(XADD, size, bare, role="limit"),
            Subject(COREDIS_XADD, size, peer, role="peer", version=self._version),
        ]
        bulk = Amount(streams, count, size)
        each = Amount(streams, count // FLUSHED_PART, size, is_flushed=True)
        for amount, row in ((bulk, durable), (each, flushed)):
            for where, cluster in self._clusters.items():
                measure = partial(replicas.stored, cluster.served, amount)
                found.append(Subject(row(where), size, measure, of=XADD))
        return found

    def tails(self, size: int) -> list[Subject]:
        """The latency from the tool to a client that has the message in hand."""
        three, file = self._clusters[THREE], self._clusters[SQLITE]
        count = self._plan.paced
        batches = {
            SQLITE: replicas.tails(file, count, size, at_owner=True),
            OWNER: replicas.tails(three, count, size, at_owner=True),
            OTHER: replicas.tails(three, count, size, at_owner=False),
        }
        return [
            _percentile(batch, where, percent, size)
            for percent in PERCENTILES
            for where, batch in batches.items()
        ]

    def resumes(self, count: int, size: int) -> list[Subject]:
        """Messages a second, from the request to the last message."""
        first, second = self._clusters[THREE].served[:2]
        [file] = self._clusters[SQLITE].served
        limits = {
            XRANGE: partial(_in_thread, store.xrange, self._store, count, size),
            LRANGE: partial(_in_thread, store.lrange, self._store, count, size),
            XRANGE_OF_RUNS: partial(self._runs, first, count, size),
        }
        found = [Subject(name, size, each, role="limit") for name, each in limits.items()]
        peer = partial(self._by_coredis, count, size)
        found.append(Subject(COREDIS_XRANGE, size, peer, role="peer", version=self._version))
        for where, left, resumed in (
            (SQLITE, file, file),
            (OWNER, first, first),
            (OTHER, first, second),
        ):
            measure = partial(_raw, left, resumed, count, size)
            found.append(Subject(raw_row(where), size, measure, of=LRANGE))
            taken = partial(resumed_in_hand, left, count, size, at=resumed)
            found.append(Subject(in_hand(where), size, taken, of=COREDIS_XRANGE))
        return found

    async def _runs(self, served: Served, count: int, size: int) -> float:
        async def measure(stream: str) -> float:
            key = store.lines_key("three", stream)
            return await _in_thread(store.xrange_of_runs, self._store, key, count)

        return await replicas.with_stream_left(served, count, size, measure)

    async def _by_coredis(self, count: int, size: int) -> float:
        found: Replayed = await store.xrange_by_coredis(self._store, count, size)
        return check_messages(found.messages, 0, count) / found.took_s


def _percentile(batch: Batch[Sequence[float]], where: str, percent: int, size: int) -> Subject:
    measure = batch.figure(partial(replicas.percentile, percent))
    of = "" if where == SQLITE else tail(SQLITE, percent)
    return Subject(tail(where, percent), size, measure, unit=UNIT, of=of)


async def _in_thread(measure: Callable[..., float], *given: object) -> float:
    return await trio.to_thread.run_sync(measure, *given)


async def _raw(left: Served, resumed: Served, count: int, size: int) -> float:
    measure: Callable[[], Awaitable[rawclient.Resumed]] = partial(
        trio.to_thread.run_sync, rawclient.websocket_lines, left.url, count, size, resumed.url
    )
    found = await measure()
    return found.messages / found.seconds
