"""The memory of a connection that is attached and idle."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks import memory
from benchmarks.harness import Plan, Subject
from benchmarks.memory import OURS_HTTP, OURS_WEBSOCKET, STOCK, Kind
from benchmarks.servers import APP

UNIT: Final = "B"
NAMES: Final = {
    OURS_HTTP: "attached over HTTP",
    OURS_WEBSOCKET: "attached over WebSocket",
    STOCK: "Python SDK: attached over HTTP",
}


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """Nothing is prepared: each round starts its servers anew."""
    numbers = count(1)
    connections = memory.QUICK if plan.is_quick else memory.Plan()

    async def slope(kind: Kind) -> float:
        return await memory.slope(kind, connections, APP, folder / f"{next(numbers)}.db")

    yield [
        Subject(
            NAMES[kind],
            0,
            partial(slope, memory.KINDS[kind]),
            role="peer" if kind == STOCK else "ours",
            unit=UNIT,
            of="" if kind == STOCK else NAMES[STOCK],
        )
        for kind in (OURS_HTTP, OURS_WEBSOCKET, STOCK)
        if plan.has_peers or kind != STOCK
    ]
