"""How long a message is on its way at 1,000 a second: from the tool that sends it to the client
that has it in hand. Both read the same clock, CLOCK_MONOTONIC of one machine.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness import Plan, Subject
from benchmarks.numbered import FIRST, Lost
from benchmarks.servers import APP, Served, websocket_server
from streams import Client
from streams.options import Durability

NONE, PROCESS, POWER = "no journal", "durability=process", "durability=power"
# By the part of the messages that are faster, in percent.
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
            for subject in _subjects(name, _Paced(served, plan.paced, size))
        ]


class _Paced:
    """One server, and how long its messages have taken when it was last asked."""

    def __init__(self, served: Served, count: int, size: int) -> None:
        self.size = size
        self._served = served
        self._count = count
        self._took_us: list[float] = []

    async def measure(self, percentile: int) -> float:
        """The latency that so many percent of the messages have at most, in µs.

        The lowest percentile has them sent; the others are of the same messages. Raises `Lost`.
        """
        if percentile == PERCENTILES[0]:
            self._took_us = sorted(await self._sent())
        return self._took_us[min(len(self._took_us) * percentile // 100, len(self._took_us) - 1)]

    async def _sent(self) -> list[float]:
        came: list[tuple[int, msgspec.Raw]] = []
        async with Client(self._served.dialer) as client:
            arguments = {"count": self._count, "size": self.size, "per_second": 1_000}
            async with client.call("pace", arguments) as call:
                async for message in call:
                    came.append((time.monotonic_ns(), message.params))
                if (result := await call.result()).get("isError"):
                    raise Lost(f"the tool failed: {result}")
        return self._checked(came)

    def _checked(self, came: Sequence[tuple[int, msgspec.Raw]]) -> list[float]:
        told = [msgspec.json.decode(params, type=_Params).data for _, params in came]
        if [data.n - FIRST for data in told] != list(range(self._count)):
            raise Lost(f"{self._count} messages were to come, one by one: {len(told)} have")
        return [(at - data.sent_at_ns) / 1_000 for (at, _), data in zip(came, told, strict=True)]


def _subjects(journal: str, paced: _Paced) -> list[Subject]:
    return [
        Subject(
            row(journal, percentile),
            paced.size,
            partial(paced.measure, percentile),
            role="bare" if journal == NONE else "ours",
            unit=UNIT,
            of="" if journal == NONE else row(NONE, percentile),
        )
        for percentile in PERCENTILES
    ]
