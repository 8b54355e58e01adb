"""What is measured, and the order in which it is done."""

import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec
import trio

from benchmarks import raw
from benchmarks.events import Check, Session
from benchmarks.numbered import check
from benchmarks.servers import APP, Served, http_server, stdio_server, websocket_server
from streams import Client

What = Literal["resume", "live"]

POLL_EVERY_S: Final = 0.02
# No measurement takes as long, wherever it runs: whatever does has hung.
PATIENCE_S: Final = 300.0

# Which limit a transport is held against.
LIMIT_OF: Final[Mapping[str, str]] = {
    "stdio": "pipe",
    "websocket": "tcp",
    "http": "tcp",
    "sse": "tcp",
}
SERVERS: Final = {
    "stdio": stdio_server,
    "websocket": websocket_server,
    "http": http_server,
    "sse": http_server,
}
# What is not measured: without a journal a stdio server ends with its connection, so there is
# nothing to come back to; and while a tool sends, it is the slower part whatever the framing.
LEFT_OUT: Final = {
    ("resume", "stdio", "memory"),
    ("live", "sse", "file"),
    ("live", "sse", "memory"),
}


class Plan(msgspec.Struct, frozen=True):
    """How much is measured. `counts` has the number of messages for each size in bytes."""

    rounds: int = 5
    counts: Mapping[int, int] = msgspec.field(default_factory=lambda: {200: 200_000, 4096: 20_000})
    limit_bytes: int = 1024 * 1024 * 1024


QUICK: Final = Plan(rounds=1, counts={200: 2_000, 4096: 200}, limit_bytes=8 * 1024 * 1024)


class Case(msgspec.Struct, frozen=True):
    """One row of the results. `journal` is `file`, or `memory` for a server without one."""

    what: What
    transport: str
    journal: Literal["file", "memory"]
    size: int


class Figure(msgspec.Struct, frozen=True):
    """What came of a case: messages a second, of every round, and their median.

    `limit` is what the bare pipe or socket carries in messages of that size, `ratio` how much of
    that was reached; both are made of medians.
    """

    case: Case
    rates: Sequence[float]
    median: float
    limit: float
    ratio: float


class Results(msgspec.Struct, frozen=True):
    """A whole run. `limits` are medians, in bytes a second."""

    plan: Plan
    machine: Mapping[str, str]
    limits: Mapping[str, float]
    figures: Sequence[Figure]


def cases(plan: Plan) -> list[Case]:
    """All that is measured in a round."""
    return [
        Case(what, transport, journal, size)
        for what in ("resume", "live")
        for size in plan.counts
        for transport in SERVERS
        for journal in ("file", "memory")
        if (what, transport, journal) not in LEFT_OUT
    ]


async def run(
    plan: Plan,
    folder: Path,
    *,
    machine: Mapping[str, str],
    app: str = APP,
    on_step: Callable[[str], None] = lambda _: None,
) -> Results:
    """Do all rounds, in each of them everything once. Journals are made in `folder`.

    Raises `Lost` as soon as a message is missing.
    """
    limits: dict[str, list[float]] = {kind: [] for kind in raw.LIMITS}
    rates: dict[Case, list[float]] = {case: [] for case in cases(plan)}
    async with _open_servers(app, folder) as servers:
        for number in range(1, plan.rounds + 1):
            for kind, measure in raw.LIMITS.items():
                on_step(f"round {number}: limit {kind}")
                limits[kind].append(await trio.to_thread.run_sync(measure, plan.limit_bytes))
            for case, found in rates.items():
                on_step(f"round {number}: {case.what} {case.transport} {case.journal} {case.size}")
                served = servers[case.transport, case.journal]
                with trio.fail_after(PATIENCE_S):
                    found.append(await once(case, served, plan))
    medians = {kind: statistics.median(found) for kind, found in limits.items()}
    figures = [_figure(case, found, medians) for case, found in rates.items()]
    return Results(plan, machine, medians, figures)


def _figure(case: Case, rates: Sequence[float], limits: Mapping[str, float]) -> Figure:
    median = statistics.median(rates)
    limit = limits[LIMIT_OF[case.transport]] / case.size
    return Figure(case, rates, median, limit, median / limit)


@asynccontextmanager
async def _open_servers(app: str, folder: Path) -> AsyncIterator[Mapping[tuple[str, str], Served]]:
    async with AsyncExitStack() as stack:
        servers: dict[tuple[str, str], Served] = {}
        for transport, server in SERVERS.items():
            for name, journal in (("file", folder / f"{transport}.db"), ("memory", None)):
                servers[transport, name] = await stack.enter_async_context(server(app, journal))
        yield servers


async def once(case: Case, served: Served, plan: Plan) -> float:
    """Measure a case once; returns messages a second. Raises `Lost`."""
    if case.transport == "sse":
        return await _resume_sse(served, case.size, plan)
    measure = _resume if case.what == "resume" else _live
    return await measure(served, case.size, plan)


async def _resume(served: Served, size: int, plan: Plan) -> float:
    """A call is left after its first message and runs on; all of it is fetched once it is done.

    The time is that from the resume to the result, over a connection that stands already.
    """
    count = plan.counts[size]
    async with (
        Client(served.dialer) as client,
        client.call("fill", {"count": count, "size": size}) as call,
    ):
        await anext(call)
        ticket = call.ticket
    assert ticket is not None  # it was announced ahead of the first message
    async with Client(served.dialer) as client:
        while (await client.poll(ticket)).status != "completed":
            await trio.sleep(POLL_EVERY_S)
        began_at = trio.current_time()
        async with client.resume(ticket) as call:
            came = await check(call, count, ticket.after or 0)
        took_s = trio.current_time() - began_at
    return came / took_s


async def _resume_sse(served: Served, size: int, plan: Plan) -> float:
    """The same for a client that knows only server-sent events and the id of the last one."""
    count = plan.counts[size]
    session = await Session.opened(served.url, {"streams": {}})
    stream, last = await session.leave(count, size)
    while (await session.poll(stream))["status"] != "completed":
        await trio.sleep(POLL_EVERY_S)
    check = Check(last, count)
    with session.get(last) as response:
        await response.connect()
        began_at = trio.current_time()
        await response.ask()
        while not response.is_over:
            check.take(response.take(await response.read()))
        took_s = trio.current_time() - began_at
    await session.drop(stream, count + 1)
    return check.end() / took_s


async def _live(served: Served, size: int, plan: Plan) -> float:
    """A call is read as it runs. The time is that from the call to the result."""
    count = plan.counts[size]
    async with Client(served.dialer) as client:
        began_at = trio.current_time()
        async with client.call("fill", {"count": count, "size": size}) as call:
            came = await check(call, count)
        took_s = trio.current_time() - began_at
    return came / took_s
