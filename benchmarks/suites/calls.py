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

from benchmarks import calls
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
)
from benchmarks.harness import Batch, Role, Subject, unmeasured
from benchmarks.harness import Plan as WholePlan
from benchmarks.history import write_history
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

DURABLE, NO_JOURNAL = "durable", "no journal"
HTTP, WEBSOCKET, STDIO = "HTTP", "WebSocket", "stdio"
SDK_EVENTS, SDK_JSON = "Python SDK, HTTP, event streams", "Python SDK, HTTP, json_response"
SDK_STDIO: Final = "Python SDK, stdio"
BARE, UVICORN = "limit: h11 + trio", "limit: uvicorn + httptools"
KEY, MESSAGE = "idempotency keys", "with a message"
EMPTY, GROWN = "HTTP, empty journal", "HTTP, journal of 10 million"
FSYNC: Final = "fsync"

_FSYNC_BYTES: Final = 4096  # a page of the journal
_FEW_FSYNCS: Final = 5


class Amount(msgspec.Struct, frozen=True):
    """The amounts of the suite."""

    plan: Plan = Plan()
    messages: int = 10_000_000  # in the journal of `GROWN`
    some: int = 32  # calls in flight, where only one number is measured


QUICK: Final = Amount(calls.QUICK, messages=2_000, some=4)

Calls = Callable[[int, Tool], Awaitable[Took]]


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
        servers = _Servers(stack, amount.plan)
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
            subjects += [each for cell in cells for each in _subjects(cell, in_flight)]
        subjects += await _with_history(servers, amount, folder)
        for transport in (HTTP, STDIO):
            subjects += _lone(transport, mine, amount.plan, folder)
        yield [*subjects, *gone]


def _subjects(cell: Cell, in_flight: int) -> list[Subject]:
    figure = Batch(partial(cell.calls, in_flight, cell.tool)).figure
    return [
        Subject(
            row(cell.name, in_flight, column),
            0,
            figure(read),
            role=cell.role,
            unit=unit,
            version=cell.version,
        )
        for column, (unit, read) in COLUMNS.items()
    ]


async def _with_history(servers: "_Servers", amount: Amount, folder: Path) -> list[Subject]:
    """Calls on a journal of many messages and on an empty one."""
    subjects = []
    journals = {EMPTY: folder / "empty.db", GROWN: folder / "grown.db"}
    await write_history(journals[GROWN], amount.messages)
    for name, journal in journals.items():
        calling = await servers.http(http_server(APP, journal), clients=amount.some)
        for cell in (Cell(name, calling), Cell(f"{name}, {MESSAGE}", calling, NOTE)):
            subjects += _subjects(cell, amount.some)
    return subjects


# A lone call with a message, beside a bare sync and the call without a journal


class _Lone(NamedTuple):
    durable: Took
    bare: Took
    fsync_ms: float


def _lone(
    transport: str, mine: Mapping[tuple[str, str], Calls], plan: Plan, folder: Path
) -> list[Subject]:
    async def run() -> _Lone:
        return _Lone(
            await mine[transport, DURABLE](1, NOTE),
            await mine[transport, NO_JOURNAL](1, NOTE),
            await trio.to_thread.run_sync(fsync_ms, folder / "fsync", plan.timed_s),
        )

    figure = Batch(run).figure
    durable, bare = (ours(transport, each, MESSAGE) for each in (DURABLE, NO_JOURNAL))

    def subject(name: str, read: Callable[[_Lone], float], role: Role = "ours") -> Subject:
        return Subject(row(name, 1, P50), 0, figure(read), role=role, unit="ms")

    return [
        subject(durable, lambda lone: lone.durable.p50_ms),
        subject(bare, lambda lone: lone.bare.p50_ms),
        subject(after(bare), lambda lone: lone.bare.p50_ms + lone.fsync_ms, "limit"),
        Subject(
            f"{FSYNC}, beside {transport}: {P50}",
            0,
            figure(lambda lone: lone.fsync_ms),
            role="limit",
            unit="ms",
        ),
    ]


def fsync_ms(path: Path, timed_s: float) -> float:
    """The median time to append a page to a file and sync it."""
    taken: list[float] = []
    page = os.urandom(_FSYNC_BYTES)
    until = time.perf_counter() + timed_s
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while len(taken) < _FEW_FSYNCS or time.perf_counter() < until:
            began_at = time.perf_counter()
            os.write(fd, page)
            os.fsync(fd)
            taken.append(time.perf_counter() - began_at)
    finally:
        os.close(fd)
    return 1e3 * statistics.median(taken)


# The servers


class _Servers:
    """Starts servers; all of them end with `stack`."""

    def __init__(self, stack: AsyncExitStack, plan: Plan) -> None:
        self._stack = stack
        self._plan = plan

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
        """A server over HTTP, with so many clients, or with as many as the plan has at most."""
        served = await self._stack.enter_async_context(opening)
        make = partial(
            HttpDriver,
            served.url,
            [served.pid],
            clients or max(self._plan.clients),
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
        driver = await trio.to_thread.run_sync(make)

        async def close() -> None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(driver.close)

        async def calls(in_flight: int, tool: Tool) -> Took:
            return await trio.to_thread.run_sync(driver.calls, in_flight, tool, self._plan)

        self._stack.push_async_callback(close)
        return calls


def owner(journal: Path | None) -> list[int]:
    """The process that serves behind a relay; none without a journal."""
    return [] if journal is None else [int(lock_path(journal).read_text())]
