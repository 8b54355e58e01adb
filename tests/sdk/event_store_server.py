"""A server of the official Python SDK (or FastMCP) with an event store. Prints its port.

`--fastmcp` uses FastMCP's own classes, where they are installed. Every stream's events are kept in
memory, so that a client may continue any of them by `Last-Event-ID`.
"""

import asyncio
import socket
import sys
from typing import Any, Final

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.types import JSONRPCMessage

RETRY_MS: Final = 100
HAS_FASTMCP: Final = "--fastmcp" in sys.argv


class Memory(EventStore):
    """All events; an event's id gives its index."""

    def __init__(self) -> None:
        self._events: list[tuple[str, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        self._events.append((stream_id, message))
        return str(len(self._events) - 1)

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        last = int(last_event_id)
        stream = self._events[last][0]
        for place, (of, message) in enumerate(list(self._events)):
            if place > last and of == stream and message is not None:
                await send_callback(EventMessage(message, str(place)))
        return stream


async def count(rows: int, pause_s: float, ctx: Any) -> str:
    """Report each row, and return how many there were."""
    for row in range(1, rows + 1):
        await ctx.report_progress(row, rows)
        await asyncio.sleep(pause_s)
    return f"{rows} rows"


def application() -> Any:
    """The server, as an ASGI application."""
    if HAS_FASTMCP:
        from fastmcp import Context, FastMCP  # type: ignore[import-not-found] # noqa: PLC0415

        count.__annotations__["ctx"] = Context
        fast = FastMCP("kept")
        fast.tool(count)
        return fast.http_app(event_store=Memory(), retry_interval=RETRY_MS)
    from mcp.server.mcpserver import Context, MCPServer  # noqa: PLC0415

    count.__annotations__["ctx"] = Context
    server = MCPServer("kept")
    server.tool()(count)
    return server.streamable_http_app(event_store=Memory(), retry_interval=RETRY_MS)


async def main() -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(application(), log_level="warning")).serve([listener])


asyncio.run(main())
