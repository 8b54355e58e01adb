"""The memory of a connection that is attached and idle: ours beside the official Python SDK's
server.

Each client has a session of its own and a running call that has sent one message and sends no more.
The cost is the slope of the server's resident memory between two numbers of clients.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from benchmarks.events import Response, Session
from benchmarks.reconnect import STOCK_SERVER
from benchmarks.servers import Served, http_server, listening, websocket_server
from benchmarks.sockets import Socket

OURS_HTTP: Final = "mcp-streams, HTTP"
OURS_WEBSOCKET: Final = "mcp-streams, WebSocket"
STOCK: Final = "official Python SDK, HTTP"

OPENED_AT_ONCE: Final = 20
SETTLE_S: Final = 2.0  # until memory that only the start needs is freed

Closing = Response | Socket


class Plan(msgspec.Struct, frozen=True):
    """The two numbers of connections between which the slope is taken."""

    fewer: int = 500
    more: int = 1_500


QUICK: Final = Plan(fewer=10, more=60)


class Kind(NamedTuple):
    """A server of an app and a journal, and how one client attaches to it."""

    serve: Callable[[str, Path], AbstractAsyncContextManager[Served]]
    attach: Callable[[str], Awaitable[Closing]]


async def slope(kind: Kind, plan: Plan, app: str, journal: Path) -> float:
    """Bytes of resident memory for each further connection."""
    with ExitStack() as attached:
        async with kind.serve(app, journal) as served:
            await _attach(kind, served.url, plan.fewer, attached)
            before = resident_bytes(served.pid)
            await _attach(kind, served.url, plan.more - plan.fewer, attached)
            after = resident_bytes(served.pid)
            attached.close()
    return (after - before) / (plan.more - plan.fewer)


async def _attach(kind: Kind, url: str, count: int, attached: ExitStack) -> None:
    limiter = trio.CapacityLimiter(OPENED_AT_ONCE)

    async def attach() -> None:
        async with limiter:
            attached.enter_context(await kind.attach(url))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(attach)
    await trio.sleep(SETTLE_S)


async def _attach_by_http(url: str) -> Response:
    session = await Session.opened(url, {})
    return await session.wait()


async def _attach_by_websocket(url: str) -> Socket:
    socket = Socket(url)
    await socket.open()
    await socket.wait()
    return socket


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


KINDS: Final = {
    OURS_HTTP: Kind(http_server, _attach_by_http),
    OURS_WEBSOCKET: Kind(websocket_server, _attach_by_websocket),
    STOCK: Kind(lambda _app, _journal: listening(STOCK_SERVER), _attach_by_http),
}
