"""Replicas of a server on one store, behind a balancer, and the measurements of them.

The replicas, HAProxy and its configuration are those of `mcp-streams torture --replicas`. Clients
connect to a replica directly, so that the figures are the server's, or to the balancer where a row
says so.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from benchmarks.harness import Batch
from benchmarks.numbered import FIRST, Lost, check_messages
from benchmarks.peers import Missing
from benchmarks.servers import APP, Served
from benchmarks.store import Store
from streams import Client
from streams.cli.selftest.replicas.processes import Balancer, Program, Replica, balancer_program
from streams.protocol.ticket import Ticket
from transports import dial

# Handlers that are to begin at the same time are told so this long before, for each call.
LEAD_S: Final = 0.2
LEAD_EACH_S: Final = 0.02
POLL_EVERY_S: Final = 0.05
CONNECTS_MAX: Final = 30  # until the balancer has chosen the replica that is wanted
PER_SECOND: Final = 1_000
# A call without a ticket is never resumed, and counts towards the first limit.
_LIMITS: Final = ("streams_per_principal_max=1000000", "sessions_max=1000000")


class Cluster(msgspec.Struct, frozen=True):
    """Replicas of the measured server; `balanced` leads to any of them."""

    served: Sequence[Served]
    balanced: Served | None = None


@asynccontextmanager
async def cluster(
    store: Store, replicas: int, folder: Path, *, is_balanced: bool = False
) -> AsyncIterator[Cluster]:
    """Start replicas on a journal of their own in the store. Raises `Missing` without HAProxy."""
    await trio.Path(folder).mkdir()
    haproxy = balancer_program() if is_balanced else None
    if is_balanced and haproxy is None:
        raise Missing("no haproxy here; it comes with Debian's haproxy")
    limits = [word for limit in _LIMITS for word in ("--limit", limit)]
    options = ["--journal", store.url(folder.name), *limits]
    started = [Replica(number, APP, options, folder) for number in range(1, replicas + 1)]
    programs: list[Program] = [*started]
    found = Cluster([_served(f"ws://127.0.0.1:{one.ws}") for one in started])
    if haproxy is not None:
        balancer = Balancer(haproxy, started, folder)
        programs.append(balancer)
        balanced = _served(f"ws://127.0.0.1:{balancer.port}/ws")
        found = msgspec.structs.replace(found, balanced=balanced)
    try:
        for program in programs:
            await program.start()
            await program.up()
        yield found
    finally:
        with trio.CancelScope(shield=True):
            for program in programs:
                await program.stop()


def _served(url: str) -> Served:
    return Served(dial(url), url)


# Durable messages


class Amount(msgspec.Struct, frozen=True):
    """So many messages of `size` bytes in all, from `streams` handlers.

    With `is_flushed` a handler sends a message when the one before it is durable.
    """

    streams: int
    messages: int
    size: int
    is_flushed: bool = False

    @property
    def each(self) -> int:
        """The messages of one stream, of which one comes before the clock runs."""
        return max(2, self.messages // self.streams)


async def stored(served: Sequence[Served], amount: Amount) -> float:
    """Durable messages a second of handlers whose clients are away. Raises `Lost`.

    The handlers, in equal parts at each server, begin at the same time. Each returns when all that
    it has sent is durable. Afterwards each stream is resumed and checked.
    """
    lead_s = LEAD_S + LEAD_EACH_S * amount.streams
    at_ns = time.monotonic_ns() + int(1e9 * lead_s)
    tickets: list[list[Ticket]] = [[] for _ in served]
    async with trio.open_nursery() as nursery:
        for number, one in enumerate(served):
            streams = len(range(number, amount.streams, len(served)))
            nursery.start_soon(_begin, one, streams, amount, at_ns, tickets[number])
    times: list[tuple[int, int]] = []
    for one, its in zip(served, tickets, strict=True):
        times += await _collect(one, its, amount)
    took_ns = max(end for _, end in times) - min(begin for begin, _ in times)
    return (amount.each - 1) * amount.streams / (took_ns / 1e9)


async def _begin(
    served: Served, streams: int, amount: Amount, at_ns: int, tickets: list[Ticket]
) -> None:
    """Make the calls, and hang up."""
    arguments = {
        "count": amount.each,
        "size": amount.size,
        "at_ns": at_ns,
        "is_flushed": amount.is_flushed,
    }

    async def begin(client: Client) -> None:
        async with client.call("store", arguments) as call:
            await anext(call)
            assert call.ticket is not None  # it was announced before the first message
            tickets.append(call.ticket)

    async with Client(served.dialer) as client, trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(begin, client)


async def _collect(
    served: Served, tickets: Sequence[Ticket], amount: Amount
) -> list[tuple[int, int]]:
    """When each handler began and ended. Checks all messages. Raises `Lost`."""
    times = []
    async with Client(served.dialer) as client:
        for ticket in tickets:
            while (await client.poll(ticket)).status != "completed":
                await trio.sleep(POLL_EVERY_S)
            lines: list[bytes] = []
            async with client.resume(ticket) as call:
                async for run in call.runs():
                    lines += run.lines
                result = await call.result()
            if result.get("isError"):
                raise Lost(f"the tool failed: {result}")
            check_messages(lines, ticket.after or 0, amount.each)
            begin, end = result["structuredContent"]["result"]
            times.append((begin, end))
    return times


# The live tail


class _Data(msgspec.Struct):
    n: int
    sent_at_ns: int


class _Params(msgspec.Struct):
    data: _Data


def tails(cluster: Cluster, count: int, size: int, *, at_owner: bool) -> Batch[Sequence[float]]:
    """The latencies of a live tail through the balancer in ms, sorted."""
    return Batch(partial(_tail, cluster, count, size, at_owner=at_owner))


async def _tail(cluster: Cluster, count: int, size: int, *, at_owner: bool) -> Sequence[float]:
    """A client begins a call and leaves it to another one, at the owner or at another replica.

    Both are behind the balancer. Raises `Lost`.
    """
    assert cluster.balanced is not None
    dialer = cluster.balanced.dialer
    arguments = {"count": count, "size": size, "per_second": PER_SECOND}
    async with Client(dialer) as client:
        owner = await _process(client)
        async with client.call("pace", arguments) as call:
            await anext(call)
            ticket = call.ticket
    assert ticket is not None  # it was announced before the first message
    for _ in range(CONNECTS_MAX):
        async with Client(dialer) as client:
            if (await _process(client) == owner) == at_owner:
                return await _follow(client, ticket, count)
    raise Lost("the balancer leads to one replica only")


async def _process(client: Client) -> int:
    return await client.call_tool("process", type=int)


async def _follow(client: Client, ticket: Ticket, count: int) -> Sequence[float]:
    """The latencies of the messages that were sent after the first has come here."""
    came: list[tuple[int, bytes]] = []
    async with client.resume(ticket) as call:
        async for message in call:
            came.append((time.monotonic_ns(), bytes(message.params)))
        if (result := await call.result()).get("isError"):
            raise Lost(f"the tool failed: {result}")
    told = [msgspec.json.decode(params, type=_Params).data for _, params in came]
    if [data.n - FIRST for data in told] != list(range(ticket.after or 0, count)):
        raise Lost(f"{count} messages were to come, one by one: {len(told)} have")
    taken = [(at - data.sent_at_ns, data) for (at, _), data in zip(came, told, strict=True)]
    live = [took for took, data in taken if data.sent_at_ns > came[0][0]]
    return sorted(took / 1e6 for took in live or [took for took, _ in taken])


def percentile(percent: int, sorted_values: Sequence[float]) -> float:
    """A percentile of sorted values."""
    return sorted_values[min(len(sorted_values) * percent // 100, len(sorted_values) - 1)]


# The stored form of a stream


async def with_stream_left(
    served: Served, count: int, size: int, measure: Callable[[str], Awaitable[float]]
) -> float:
    """A figure of a stream that has ended, with all its messages in the journal. Raises `Lost`."""
    async with (
        Client(served.dialer) as client,
        client.call("fill", {"count": count, "size": size}) as call,
    ):
        await anext(call)
        ticket = call.ticket
    assert ticket is not None  # it was announced before the first message
    async with Client(served.dialer) as client:
        while (await client.poll(ticket)).status != "completed":
            await trio.sleep(POLL_EVERY_S)
        figure = await measure(ticket.stream)
        async with client.resume(ticket) as call:  # so that the journal keeps none of it
            await call.result()
    return figure
