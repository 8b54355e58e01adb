"""A helpdesk with FastMCP: `python with_fastmcp.py 8080`, with `fastmcp` 4.1 or newer."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TextIO, get_args

import anyio
import uvicorn
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.elicitation import AcceptedElicitation
from fastmcp.server.event_store import EventStore
from pydantic import Field

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


@dataclass
class Confirm:
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
async def lifespan(server: FastMCP) -> AsyncIterator[dict[str, Desk]]:
    desk = Desk()
    with desk.printer:
        desk.open("The printer is on fire", Priority.URGENT)
        yield {"desk": desk}


server = FastMCP("helpdesk", lifespan=lifespan)


def desk_of(ctx: Context) -> Desk:
    return ctx.lifespan_context["desk"]


@server.tool
async def open_ticket(
    ctx: Context,
    subject: Annotated[str, Field(min_length=3, description="what is wrong")],
    priority: Priority = Priority.NORMAL,
) -> Ticket:
    """Open a ticket."""
    return desk_of(ctx).open(subject, priority)


@server.tool
async def search(ctx: Context, words: str = "") -> list[Ticket]:
    """Find the tickets whose subject has these words."""
    return [each for each in desk_of(ctx).tickets.values() if words in each.subject]


@server.tool
async def close_ticket(ctx: Context, number: int) -> str:
    """Close a ticket, if a person agrees."""
    ticket = desk_of(ctx).find(number)
    answer = await ctx.elicit(f"Close “{ticket.subject}”?", Confirm)
    if not (isinstance(answer, AcceptedElicitation) and answer.data.sure):
        return "It stays open."
    ticket.is_closed = True
    return f"Closed: {answer.data.reason}"


@server.tool
async def export(ctx: Context, copies: int) -> str:
    """Print all tickets, which takes a while."""
    desk = desk_of(ctx)
    for copy in range(1, copies + 1):
        await anyio.sleep(0.1)
        print(f"copy {copy}: {len(desk.tickets)} tickets", file=desk.printer)
        await ctx.report_progress(copy, total=copies)
    return f"{copies} copies"


@server.resource("ticket://{number}", mime_type="application/json")
async def ticket(number: int, ctx: Context) -> dict[str, Any]:
    """One ticket."""
    return asdict(desk_of(ctx).find(number))


@server.prompt
def reply(subject: str, tone: Tone = "friendly") -> str:
    """Draft a reply."""
    return f"Write a {tone} reply to: {subject}"


@server.completion
def complete(ref, argument, context) -> list[str] | None:
    if argument.name != "tone":
        return None
    return [each for each in get_args(Tone) if each.startswith(argument.value)]


if __name__ == "__main__":
    app = server.http_app(event_store=EventStore(), retry_interval=250)
    uvicorn.run(app, port=int(sys.argv[1]))
