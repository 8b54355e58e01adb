"""The latency of a message at 1,000 a second, from the tool that sends it to the client.

Both read the same clock, CLOCK_MONOTONIC of one machine.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness import Batch, Plan, Subject
from benchmarks.numbered import FIRST, Lost
from benchmarks.servers import APP, Served, websocket_server
from streams import Client
from streams.limits import Durability

NONE, PROCESS, POWER = "no journal", "durability=process", "durability=power"
# The percentiles of the latencies.
PERCENTILES: Final = (50, 99)
UNIT: Final = "µs"
_JOURNALS: Final[Mapping[str, Durability]] = {PROCESS: "process", POWER: "power"}


class _Data(msgspec.Struct):
    n: int
    sent_at_ns: int


class _Params(msgspec.Struct):
    data: _Data


def row(journal: str, percentile: int) -> str:
    """The name of a row."""
    return f"{journal}: p{percentile}"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """A server without a journal, and one for each durability."""
    async with AsyncExitStack() as stack:
        servers = {NONE: await stack.enter_async_context(websocket_server(APP, None))}
        for name, durability in _JOURNALS.items():
            opening = websocket_server(APP, folder / f"{durability}.db", durability=durability)
            servers[name] = await stack.enter_async_context(opening)
        yield [
            subject
            for size in plan.counts
            for name, served in servers.items()
            for subject in _subjects(name, served, plan.paced, size)
        ]


def _subjects(journal: str, served: Served, count: int, size: int) -> list[Subject]:
    batch = Batch(partial(_sent, served, count, size))
    return [
        Subject(
            row(journal, percentile),
            size,
            batch.figure(partial(_at, percentile)),
            role="bare" if journal == NONE else "ours",
            unit=UNIT,
            of="" if journal == NONE else row(NONE, percentile),
        )
        for percentile in PERCENTILES
    ]


def _at(percentile: int, took_us: Sequence[float]) -> float:
    """A percentile of the sorted latencies."""
    return took_us[min(len(took_us) * percentile // 100, len(took_us) - 1)]


async def _sent(served: Served, count: int, size: int) -> Sequence[float]:
    """The latencies of so many messages in µs, sorted. Raises `Lost`."""
    came: list[tuple[int, msgspec.Raw]] = []
    async with Client(served.dialer) as client:
        arguments = {"count": count, "size": size, "per_second": 1_000}
        async with client.call("pace", arguments) as call:
            async for message in call:
                came.append((time.monotonic_ns(), message.params))
            if (result := await call.result()).get("isError"):
                raise Lost(f"the tool failed: {result}")
    told = [msgspec.json.decode(params, type=_Params).data for _, params in came]
    if [data.n - FIRST for data in told] != list(range(count)):
        raise Lost(f"{count} messages were to come, one by one: {len(told)} have")
    return sorted((at - data.sent_at_ns) / 1_000 for (at, _), data in zip(came, told, strict=True))
