"""One message a WebSocket text frame, as the subprotocol `mcp` has it.

It is compared with a loop of trio-websocket's `send_message`: that server keeps nothing.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import rawclient
from benchmarks.harness import Plan, Subject
from benchmarks.servers import APP, Served, websocket_server
from benchmarks.suites.peers import Place, peer_subjects
from benchmarks.suites.resume import in_hand, raw_row, resumed_in_hand, resumed_raw
from transports import websocket
from transports.websocket.frames import MCP

TRANSPORT: Final = "WebSocket mcp"
PLAIN: Final = "send_message loop"
PLAIN_RAW, PLAIN_IN_HAND = f"{PLAIN}: raw client", f"{PLAIN}: trio-websocket"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """Our server and theirs."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(websocket_server(APP, folder / "journal.db"))
        standard = Served(partial(websocket.connect, served.url, subprotocols=[MCP]))
        subjects = []
        for size, count in plan.counts.items():
            raw = partial(resumed_raw, _read, served, count, size)
            subjects.append(Subject(raw_row(TRANSPORT), size, raw, of=PLAIN_RAW))
            client = partial(resumed_in_hand, standard, count, size)
            subjects.append(Subject(in_hand(TRANSPORT), size, client, of=PLAIN_IN_HAND))
        place = Place("plain_websocket")
        yield [*subjects, *await peer_subjects(stack, PLAIN, place, plan, folder)]


def _read(served: Served, count: int, size: int) -> rawclient.Resumed:
    return rawclient.websocket_messages(served.url, count, size)
