"""A thousand clients come back at once: ours beside the official Python SDK's server.

Each of them has called `fill` and knows no more of the response than its first event id, as after a
cut; all of them then GET the rest, each over a new connection. That is all that both servers
understand. The SDK's keeps events in memory, ours in its journal.
"""

import re
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from benchmarks.events import Check, Response, Session, fill
from benchmarks.servers import APP, http_server, listening

OURS: Final = "mcp-streams, SQLite"
STOCK: Final = "official Python SDK, memory"
STOCK_SERVER: Final = (sys.executable, "-m", "benchmarks.stock")

CALLS_AT_ONCE: Final = 20  # while the clients make ready
# Neither server needs as long, however busy the machine: whichever does has hung.
PATIENCE_S: Final = 600.0

# Where a client may stop to read: the SDK's server does not end a response that is complete. It is
# not far from the end.
_RESULT: Final = re.compile(rb'"(?:result|error)":[^\r\n]*\r?\n\r?\n')
_TAIL_BYTES: Final = 4096


class Plan(msgspec.Struct, frozen=True):
    """How many clients come back, how often, and how much waits for each of them."""

    rounds: int = 3
    clients: int = 1_000
    count: int = 100
    size: int = 200


QUICK: Final = Plan(rounds=1, clients=20)


class Figure(msgspec.Struct, frozen=True):
    """Resumes a second of one server, of every round, and their median."""

    server: str
    rates: Sequence[float]
    median: float


class Results(msgspec.Struct, frozen=True):
    """A whole run; `ratio` is ours by the SDK's, made of medians."""

    plan: Plan
    machine: Mapping[str, str]
    figures: Sequence[Figure]
    ratio: float


class Absent(NamedTuple):
    """A client that is away, and the last event that it has."""

    session: Session
    last_event_id: bytes


async def run(
    plan: Plan,
    folder: Path,
    *,
    machine: Mapping[str, str],
    app: str = APP,
    on_step: Callable[[str], None] = lambda _: None,
) -> Results:
    """Do all rounds, each server in turn. Raises `Lost` as soon as a message is missing."""
    rates: dict[str, list[float]] = {OURS: [], STOCK: []}
    with trio.fail_after(PATIENCE_S):
        async with _open_servers(app, folder) as urls:
            crowds = {}
            for name, url in urls.items():
                on_step(f"{plan.clients} clients call: {name}")
                crowds[name] = await gather(url, plan)
            for number in range(1, plan.rounds + 1):
                for name, crowd in crowds.items():
                    on_step(f"round {number}: {name}")
                    rates[name].append(await come_back(crowd, plan))
    figures = [Figure(name, found, statistics.median(found)) for name, found in rates.items()]
    return Results(plan, machine, figures, figures[0].median / figures[1].median)


@asynccontextmanager
async def _open_servers(app: str, folder: Path) -> AsyncIterator[Mapping[str, str]]:
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(http_server(app, folder / "reconnect.db"))
        stock = await stack.enter_async_context(listening(STOCK_SERVER))
        yield {OURS: ours.url, STOCK: stock.url}


async def gather(url: str, plan: Plan) -> list[Absent]:
    """So many clients that have called and been cut off."""
    limiter = trio.CapacityLimiter(CALLS_AT_ONCE)
    crowd: list[Absent] = []

    async def call(number: int) -> None:
        async with limiter:
            session = await Session.opened(url, {})
            # The SDK tells streams apart by the ids of their requests, in all sessions.
            with await session.post(
                "tools/call", fill(plan.count, plan.size), request_id=number
            ) as response:
                events = await response.rest()
        crowd.append(Absent(session, events[0].id))

    async with trio.open_nursery() as nursery:
        for number in range(1, plan.clients + 1):
            nursery.start_soon(call, number)
    return crowd


async def come_back(crowd: Sequence[Absent], plan: Plan) -> float:
    """All at once; how many are served a second, from the first connection to the last result.

    What has come is looked at afterwards, so that nobody waits for that. Raises `Lost`.
    """
    asking = [each.session.get(each.last_event_id) for each in crowd]
    came: dict[Response, bytes] = {}

    async def resume(response: Response) -> None:
        with response:
            await response.connect()
            await response.ask()
            came[response] = await up_to_the_result(response)

    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for response in asking:
            nursery.start_soon(resume, response)
    took_s = trio.current_time() - began_at
    for absent, response in zip(crowd, asking, strict=True):
        check = Check(absent.last_event_id, plan.count)
        check.take(response.take(came[response]))
        check.end()
    return len(crowd) / took_s


async def up_to_the_result(response: Response, silence_s: float = inf) -> bytes:
    """What comes before the end of a result, or before a silence of so many seconds."""
    came = bytearray()
    while not _RESULT.search(came, max(0, len(came) - _TAIL_BYTES)):
        data = b""
        with trio.move_on_after(silence_s):
            data = await response.read()
        if not data:
            break  # before its time: something will be missing
        came += data
    return bytes(came)
