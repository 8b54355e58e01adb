"""A helpdesk with the official SDK: `python with_sdk.py 8080`, with `mcp` 2.3 or newer."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TextIO, get_args

import anyio
from mcp.server import MCPServer
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context, Elicit, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import Completion, JSONRPCMessage
from pydantic import BaseModel, Field

Tone = Literal["friendly", "formal"]


class Priority(StrEnum):
    LOW = "low"
    NORMAL = "normal"
    URGENT = "urgent"


@dataclass
class Ticket:
    number: int
    subject: str
    priority: Priority
    is_closed: bool = False


class Confirm(BaseModel):
    sure: bool
    reason: str = ""


@dataclass
class Desk:
    printer: TextIO = field(default_factory=partial(open, "printer.txt", "a", buffering=1))
    tickets: dict[int, Ticket] = field(default_factory=dict)

    def open(self, subject: str, priority: Priority) -> Ticket:
        ticket = Ticket(len(self.tickets) + 1, subject, priority)
        self.tickets[ticket.number] = ticket
        return ticket

    def find(self, number: int) -> Ticket:
        if number not in self.tickets:
            raise ToolError(f"There is no ticket {number}.")
        return self.tickets[number]


@asynccontextmanager
async def lifespan(server: MCPServer) -> AsyncIterator[Desk]:
    desk = Desk()
    with desk.printer:
        desk.open("The printer is on fire", Priority.URGENT)
        yield desk


server = MCPServer("helpdesk", lifespan=lifespan)
DeskContext = Context[Desk]


def desk_of(ctx: DeskContext) -> Desk:
    return ctx.request_context.lifespan_context


@server.tool()
async def open_ticket(
    ctx: DeskContext,
    subject: Annotated[str, Field(min_length=3, description="what is wrong")],
    priority: Priority = Priority.NORMAL,
) -> Ticket:
    """Open a ticket."""
    return desk_of(ctx).open(subject, priority)


@server.tool()
async def search(ctx: DeskContext, words: str = "") -> list[Ticket]:
    """Find the tickets whose subject has these words."""
    return [each for each in desk_of(ctx).tickets.values() if words in each.subject]


async def agreement(ctx: DeskContext, number: int) -> Elicit[Confirm]:
    return Elicit(f"Close “{desk_of(ctx).find(number).subject}”?", Confirm)


@server.tool()
async def close_ticket(
    ctx: DeskContext,
    number: int,
    answer: Annotated[ElicitationResult[Confirm], Resolve(agreement)],
) -> str:
    """Close a ticket, if a person agrees."""
    if not (isinstance(answer, AcceptedElicitation) and answer.data.sure):
        return "It stays open."
    desk_of(ctx).find(number).is_closed = True
    return f"Closed: {answer.data.reason}"


@server.tool()
async def export(ctx: DeskContext, copies: int) -> str:
    """Print all tickets, which takes a while."""
    desk = desk_of(ctx)
    for copy in range(1, copies + 1):
        await anyio.sleep(0.1)
        print(f"copy {copy}: {len(desk.tickets)} tickets", file=desk.printer)
        await ctx.report_progress(copy, total=copies)
    return f"{copies} copies"


@server.resource("ticket://{number}", mime_type="application/json")
async def ticket(number: int, ctx: DeskContext) -> dict[str, Any]:
    """One ticket."""
    return asdict(desk_of(ctx).find(number))


@server.prompt()
def reply(subject: str, tone: Tone = "friendly") -> str:
    """Draft a reply."""
    return f"Write a {tone} reply to: {subject}"


@server.completion()
async def complete(ref, argument, context) -> Completion | None:
    if argument.name != "tone":
        return None
    return Completion(values=[each for each in get_args(Tone) if each.startswith(argument.value)])


class MemoryStore(EventStore):
    """All events since the start, for clients that come back with `Last-Event-ID`."""

    def __init__(self) -> None:
        self.events: list[tuple[str, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events) - 1)

    async def replay_events_after(self, last_event_id: str, send: EventCallback) -> str | None:
        last = int(last_event_id)
        if last >= len(self.events):
            return None
        stream_id = self.events[last][0]
        for number, (stream, message) in enumerate(self.events[last + 1 :], last + 1):
            if stream == stream_id and message is not None:
                await send(EventMessage(message, str(number)))
        return stream_id


if __name__ == "__main__":
    store = MemoryStore()
    server.run("streamable-http", port=int(sys.argv[1]), event_store=store, retry_interval=250)
