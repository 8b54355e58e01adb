"""A crowd that resumes at once, each client over a new connection.

Resumes a second, from the first connection to the last result.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Plan, Subject
from benchmarks.reconnect import EVENTS, SOCKETS, STOCK_SERVER, Way
from benchmarks.reconnect import Plan as Crowd
from benchmarks.servers import APP, http_server, listening, websocket_server

OURS: Final = "HTTP SSE"
OURS_WEBSOCKET: Final = "WebSocket mcp-streams.v1"
STOCK: Final = "Python SDK, memory: HTTP SSE"
UNIT: Final = "resumes/s"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """All servers, each with a crowd that has called and been cut off."""
    crowd = Crowd(clients=plan.clients)
    ways = {
        OURS: (EVENTS, http_server(APP, folder / "http.db")),
        OURS_WEBSOCKET: (SOCKETS, websocket_server(APP, folder / "websocket.db")),
    }
    if plan.has_peers:
        ways[STOCK] = (EVENTS, listening(STOCK_SERVER))
    subjects = []
    async with AsyncExitStack() as stack:
        for name, (way, opening) in ways.items():
            served = await stack.enter_async_context(opening)
            absent = await way.gather(served.url, crowd)
            subjects.append(_subject(name, way, absent, crowd))
        yield subjects


def _subject(name: str, way: Way, absent: Sequence[Any], crowd: Crowd) -> Subject:
    is_stock = name == STOCK
    return Subject(
        name,
        crowd.size,
        partial(way.come_back, absent, crowd),
        role="peer" if is_stock else "ours",
        unit=UNIT,
        of="" if is_stock else STOCK,
    )
