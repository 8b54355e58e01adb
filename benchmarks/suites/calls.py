"""Short calls: a request and its result, from one client and from many at once.

Calls a second, percentiles of the time of one, and the CPU time of one: that of the server, all of
its processes together, and that of the driver, which shares the machine with it.
"""

import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import trio

from benchmarks import calls, idle
from benchmarks.calls import (
    ECHO,
    KEYED,
    NOTE,
    Driver,
    HttpDriver,
    PipeDriver,
    Plan,
    Took,
    Tool,
    WebSocketDriver,
    figures,
)
from benchmarks.harness import Batch, Role, Subject, unmeasured
from benchmarks.harness import Plan as WholePlan
from benchmarks.peers import Missing
from benchmarks.peers.echo import ECHOES, Echo
from benchmarks.servers import (
    APP,
    Served,
    bare_server,
    http_server,
    listening,
    stdio_server,
    websocket_server,
)
from streams.journal.ownership import lock_path

# The last words of the rows' names, and what they measure.
RATE, P50, P99, CPU, DRIVER_CPU = "calls/s", "p50", "p99", "CPU", "driver's CPU"
COLUMNS: Final[Mapping[str, tuple[str, Callable[[Took], float]]]] = {
    RATE: ("calls/s", lambda took: took.per_s),
    P50: ("ms", lambda took: took.p50_ms),
    P99: ("ms", lambda took: took.p99_ms),
    CPU: ("µs", lambda took: took.server_us),
    DRIVER_CPU: ("µs", lambda took: took.driver_us),
}

RUN_MESSAGES: Final = 1_000  # of a stream in the journal with many: one run has at most 252 KiB

DURABLE, NO_JOURNAL = "durable", "no journal"
HTTP, WEBSOCKET, STDIO = "HTTP", "WebSocket", "stdio"
SDK_EVENTS, SDK_JSON = "Python SDK, HTTP, event streams", "Python SDK, HTTP, json_response"
SDK_STDIO: Final = "Python SDK, stdio"
BARE, UVICORN = "limit: h11 + trio", "limit: uvicorn + httptools"
KEY, MESSAGE = "idempotency keys", "with a message"
EMPTY, GROWN = "HTTP, empty journal", "HTTP, journal of 10 million"
FSYNC: Final = "fsync"

TURNS: Final = 4  # of measurements that are compared closely: each then has a share of the time
_FSYNC_BYTES: Final = 4096  # a page of the journal
_FSYNCS_MIN: Final = 5


class Amount(msgspec.Struct, frozen=True):
    """The amounts of the suite."""

    plan: Plan = Plan()
    messages: int = 10_000_000  # in the journal of `GROWN`
    some: int = 32  # calls in flight, where only one number is measured


QUICK: Final = Amount(calls.QUICK, messages=2_000, some=4)

Calls = Callable[[int, Tool, Plan], Awaitable[Took]]


class Cell(NamedTuple):
    """A line of the table: a server, a tool, and the number of calls in flight."""

    name: str
    calls: Calls
    tool: Tool = ECHO
    role: Role = "ours"
    version: str = ""


def row(cell: str, in_flight: int, column: str) -> str:
    """The name of a row."""
    return f"{line(cell, in_flight)}: {column}"


def line(cell: str, in_flight: int) -> str:
    """The name of a line of the table."""
    return f"{cell}, {in_flight} at once"


def ours(transport: str, journal: str, *more: str) -> str:
    """The name of one of our cells."""
    return ", ".join([transport, journal, *more])


def after(of: str) -> str:
    """The name of the line to compare a durable call with: a call without a journal, and a sync."""
    return f"{FSYNC} + {of}"


@asynccontextmanager
async def opened(plan: WholePlan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """All servers, and clients of theirs that have initialized."""
    amount = QUICK if plan.is_quick else Amount()
    async with AsyncExitStack() as stack:
        servers = _Servers(stack, max(amount.plan.clients))
        mine = {
            (transport, journal): await servers.ours(transport, folder, journal)
            for transport in (HTTP, WEBSOCKET, STDIO)
            for journal in (DURABLE, NO_JOURNAL)
        }
        grid = [Cell(ours(*which), calls) for which, calls in mine.items()]
        keyed = Cell(ours(HTTP, DURABLE, KEY), mine[HTTP, DURABLE], KEYED)
        limits = [Cell(BARE, await servers.bare("trio"), role="limit")]
        gone: list[Subject] = []
        if plan.has_peers:
            limits.append(Cell(UVICORN, await servers.bare("uvicorn"), role="limit"))
            for name, find in ECHOES.items():
                found = await servers.peer(name, find)
                if isinstance(found, Cell):
                    grid.append(found)
                else:
                    gone.append(found)
        subjects = []
        for in_flight in amount.plan.clients:
            cells = [*grid, *limits]
            if in_flight <= amount.some:
                cells.insert(1, keyed)
            subjects += [each for cell in cells for each in _measured(cell, in_flight, amount.plan)]
        subjects += await _with_history(servers, amount, folder)
        for transport in (HTTP, STDIO):
            subjects += _lone(transport, mine, amount.plan, folder)
        yield [*subjects, *gone]


def _measured(cell: Cell, in_flight: int, plan: Plan) -> list[Subject]:
    batch = Batch(partial(cell.calls, in_flight, cell.tool, plan))
    return _rows(line(cell.name, in_flight), batch.figure, cell.role, cell.version)


Figure = Callable[[Callable[[Took], float]], Callable[[], Awaitable[float]]]


def _rows(
    name: str,
    figure: Figure,
    role: Role = "ours",
    version: str = "",
    columns: Sequence[str] = tuple(COLUMNS),
) -> list[Subject]:
    """The columns of a line."""
    rows = []
    for column in columns:
        unit, read = COLUMNS[column]
        measure = figure(read)
        rows.append(Subject(f"{name}: {column}", 0, measure, role, unit, version=version))
    return rows


class _InTurn:
    """Lines that are measured by turns within a round, so that other work affects all alike."""

    def __init__(self, lines: Mapping[str, Callable[[Plan], Awaitable[Took]]], plan: Plan) -> None:
        part = msgspec.structs.replace(
            plan, timed_s=plan.timed_s / TURNS, ramp_s=plan.ramp_s / TURNS
        )

        async def run() -> Mapping[str, Took]:
            turns = [{name: await each(part) for name, each in lines.items()} for _ in range(TURNS)]
            return {name: median([turn[name] for turn in turns]) for name in lines}

        self.figure = Batch(run).figure

    def of(self, name: str) -> Figure:
        """The figures of one line."""
        return lambda read: self.figure(lambda found: read(found[name]))


def median(turns: Sequence[Took]) -> Took:
    """The median of each figure."""
    return Took(*(statistics.median(figures) for figures in zip(*turns, strict=True)))


async def _with_history(servers: "_Servers", amount: Amount, folder: Path) -> list[Subject]:
    """Calls on a journal of many messages and on an empty one."""
    journals = {EMPTY: folder / "empty.db", GROWN: folder / "grown.db"}
    streams = -(-amount.messages // RUN_MESSAGES)
    each = amount.messages // streams
    await trio.to_thread.run_sync(idle.write, journals[GROWN], streams, each)
    calling = {
        name: await servers.http(http_server(APP, journal), clients=amount.some)
        for name, journal in journals.items()
    }
    subjects = []
    for tool, more in ((ECHO, ""), (NOTE, f", {MESSAGE}")):
        lines = {
            line(name + more, amount.some): partial(calls, amount.some, tool)
            for name, calls in calling.items()
        }
        turns = _InTurn(lines, amount.plan)
        subjects += [row for name in lines for row in _rows(name, turns.of(name))]
    return subjects


def _lone(
    transport: str, mine: Mapping[tuple[str, str], Calls], plan: Plan, folder: Path
) -> list[Subject]:
    """A lone call with a message, beside a bare sync and the call without a journal."""
    kept, bare = (ours(transport, each, MESSAGE) for each in (DURABLE, NO_JOURNAL))
    durable, quick, sync = line(kept, 1), line(bare, 1), f"{FSYNC}, beside {transport}"

    async def syncs(part: Plan) -> Took:
        return await trio.to_thread.run_sync(fsyncs, folder / "fsync", part)

    turns = _InTurn(
        {
            durable: partial(mine[transport, DURABLE], 1, NOTE),
            quick: partial(mine[transport, NO_JOURNAL], 1, NOTE),
            sync: syncs,
        },
        plan,
    )
    both = turns.figure(lambda found: found[quick].p50_ms + found[sync].p50_ms)
    return [
        *_rows(durable, turns.of(durable)),
        *_rows(quick, turns.of(quick)),
        *_rows(sync, turns.of(sync), "limit", columns=(P50, P99)),
        Subject(row(after(bare), 1, P50), 0, both, "limit", "ms"),
    ]


def fsyncs(path: Path, plan: Plan) -> Took:
    """Append a page to a file and sync it, for some time."""
    taken: list[float] = []
    page = os.urandom(_FSYNC_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while len(taken) < _FSYNCS_MIN or sum(taken) < plan.timed_s:
            began_at = time.perf_counter()
            os.write(fd, page)
            os.fsync(fd)
            taken.append(time.perf_counter() - began_at)
    finally:
        os.close(fd)
    return figures(taken, sum(taken))


# The servers


class _Servers:
    """Starts servers; all of them end with `stack`."""

    def __init__(self, stack: AsyncExitStack, clients: int) -> None:
        self._stack = stack
        self._clients = clients

    async def ours(self, transport: str, folder: Path, kept: str) -> Calls:
        """One of our servers, with a journal of its own or without one."""
        journal = folder / f"{transport}.db" if kept == DURABLE else None
        if transport == HTTP:
            return await self.http(http_server(APP, journal))
        if transport == WEBSOCKET:
            served = await self._stack.enter_async_context(websocket_server(APP, journal))
            return await self._driven(lambda: WebSocketDriver(served.url, [served.pid]))
        served = await self._stack.enter_async_context(stdio_server(APP, journal))
        return await self._driven(lambda: PipeDriver(served.command, partial(owner, journal)))

    async def http(
        self,
        opening: AbstractAsyncContextManager[Served],
        *,
        clients: int = 0,
        has_sessions: bool = True,
    ) -> Calls:
        """A server over HTTP, with so many clients, or with as many as are measured at most."""
        served = await self._stack.enter_async_context(opening)
        make = partial(
            HttpDriver,
            served.url,
            [served.pid],
            clients or self._clients,
            has_sessions=has_sessions,
        )
        return await self._driven(make)

    async def bare(self, kind: Literal["trio", "uvicorn"]) -> Calls:
        """A server that only answers."""
        return await self.http(bare_server(kind), has_sessions=False)

    async def peer(self, name: str, find: Callable[[], Echo]) -> Cell | Subject:
        """A peer; or the row that says why it is missing."""
        try:
            echo = find()
            if echo.transport == HTTP:
                opening = listening(echo.command)
                driven = await self.http(opening, has_sessions=echo.has_sessions)
            else:
                driven = await self._driven(partial(PipeDriver, echo.command))
        except Missing as error:
            absent = f"{name}: {RATE}"
            return Subject(absent, 0, unmeasured, role="peer", missing=str(error))
        return Cell(name, driven, role="peer", version=echo.version)

    async def _driven(self, make: Callable[[], Driver]) -> Calls:
        """The calls of a driver, which is closed in the end."""
        driver = await trio.to_thread.run_sync(make)

        async def close() -> None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(driver.close)

        async def calls(in_flight: int, tool: Tool, plan: Plan) -> Took:
            return await trio.to_thread.run_sync(driver.calls, in_flight, tool, plan)

        self._stack.push_async_callback(close)
        return calls


def owner(journal: Path | None) -> list[int]:
    """The process that serves behind a relay; none without a journal."""
    return [] if journal is None else [int(lock_path(journal).read_text())]
