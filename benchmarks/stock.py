"""The official Python SDK's server with the same tools, to compare with: Streamable HTTP and an
event store in memory, under uvicorn, as its documentation has it.

    python -m benchmarks.stock
"""

from collections import defaultdict
from typing import Final

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage

from benchmarks.numbered import FIRST, data, text_for

server: Final = MCPServer("stock", version="1")


@server.tool()
async def fill(count: int, size: int, ctx: Context) -> int:
    """Send `count` numbered messages of `size` bytes each, and return how many it were."""
    text = text_for(size)
    for number in range(FIRST, FIRST + count):
        await ctx.log("info", data(number, text))
    return count


@server.tool()
async def wait(ctx: Context) -> None:
    """Send one message and then nothing, until the call is cancelled."""
    await ctx.log("info", data(FIRST, ""))
    await anyio.sleep_forever()


class MemoryStore(EventStore):
    """Keeps all events, and finds its place at once; the SDK's example has to search."""

    def __init__(self) -> None:
        self._streams: dict[str, list[EventMessage]] = defaultdict(list)

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        events = self._streams[stream_id]
        if message is None:
            return f"{stream_id}_{len(events)}"
        event_id = f"{stream_id}_{len(events) + 1}"
        events.append(EventMessage(message, event_id))
        return event_id

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        stream_id, _, place = last_event_id.rpartition("_")
        for event in self._streams[stream_id][int(place) :]:
            await send_callback(event)
        return stream_id


if __name__ == "__main__":
    app = server.streamable_http_app(event_store=MemoryStore())
    uvicorn.run(app, host="127.0.0.1", port=0, access_log=False, timeout_graceful_shutdown=1)
