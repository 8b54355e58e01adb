"""A server of the official Python SDK (or FastMCP) with an event store. Prints its port.

`--fastmcp` uses FastMCP's own classes, where they are installed. Every stream's events are kept in
memory, so that a client may continue any of them by `Last-Event-ID`. With `--forgetful` it has no
event store. `--port=N` serves at that port.
"""

import asyncio
import os
import socket
import sys
from typing import Any, Final

import uvicorn
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.types import JSONRPCMessage, ToolAnnotations
from pydantic import BaseModel

RETRY_MS: Final = 100
HAS_FASTMCP: Final = "--fastmcp" in sys.argv
PORTS: Final = [int(word[len("--port=") :]) for word in sys.argv if word.startswith("--port=")]


class Choice(BaseModel):
    """The answer of a user."""

    name: str


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


async def count(rows: int, pause_s: float, ctx: Any, until: str = "", effects: str = "") -> str:
    """Report each row, wait for the file `until`, and return how many rows there were."""
    if effects:
        os.write(os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT), b"run\n")
    for row in range(1, rows + 1):
        await ctx.report_progress(row, rows)
        await asyncio.sleep(pause_s)
    while until and not os.path.exists(until):
        await asyncio.sleep(0.02)
    return f"{rows} rows"


async def choose(ctx: Any) -> str:
    """Ask the user, and return the answer."""
    chosen = await ctx.elicit("Which?", schema=Choice)
    return f"{chosen.action} {chosen.data.name}"


def application() -> Any:
    """The server, as an ASGI application."""
    if HAS_FASTMCP:
        from fastmcp import Context, FastMCP  # type: ignore[import-not-found] # noqa: PLC0415

        count.__annotations__["ctx"] = Context
        fast = FastMCP("kept")
        fast.tool(count)
        return fast.http_app(event_store=Memory(), retry_interval=RETRY_MS)
    from mcp.server.mcpserver import Context, MCPServer  # noqa: PLC0415

    count.__annotations__["ctx"] = choose.__annotations__["ctx"] = Context
    server = MCPServer("kept")
    server.tool()(count)
    server.tool(name="look", annotations=ToolAnnotations(read_only_hint=True))(count)
    server.tool()(choose)
    if "--forgetful" in sys.argv:
        return server.streamable_http_app()
    return server.streamable_http_app(event_store=Memory(), retry_interval=RETRY_MS)


async def main() -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", PORTS[0] if PORTS else 0))
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(application(), log_level="warning")).serve([listener])


asyncio.run(main())
