"""A helpdesk with mcp-streams.

`mcp-streams serve with_streams.py:server --http 127.0.0.1:8080 --journal helpdesk.db`
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TextIO

import trio
from msgspec import Meta

from streams import AcceptedElicitation, Call, Server, ToolError

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
async def lifespan(server: Server) -> AsyncIterator[Desk]:
    desk = Desk()
    with desk.printer:
        desk.open("The printer is on fire", Priority.URGENT)
        yield desk


server = Server("helpdesk", lifespan=lifespan)


@server.tool
async def open_ticket(
    call: Call,
    subject: Annotated[str, Meta(min_length=3, description="what is wrong")],
    priority: Priority = Priority.NORMAL,
) -> Ticket:
    """Open a ticket."""
    desk: Desk = call.state
    return desk.open(subject, priority)


@server.tool
async def search(call: Call, words: str = "") -> list[Ticket]:
    """Find the tickets whose subject has these words."""
    desk: Desk = call.state
    return [each for each in desk.tickets.values() if words in each.subject]


@server.tool
async def close_ticket(call: Call, number: int) -> str:
    """Close a ticket, if a person agrees."""
    desk: Desk = call.state
    ticket = desk.find(number)
    answer = await call.elicit(f"Close “{ticket.subject}”?", Confirm)
    if not (isinstance(answer, AcceptedElicitation) and answer.data.sure):
        return "It stays open."
    ticket.is_closed = True
    return f"Closed: {answer.data.reason}"


@server.tool(restart=True)
async def export(call: Call, copies: int) -> str:
    """Print all tickets, which takes a while."""
    desk: Desk = call.state
    for copy in range((call.restored or 0) + 1, copies + 1):
        await trio.sleep(0.1)
        print(f"copy {copy}: {len(desk.tickets)} tickets", file=desk.printer)
        await call.progress(copy, total=copies)
        await call.checkpoint(copy)
    return f"{copies} copies"


@server.resource("ticket://{number}", mime_type="application/json")
async def ticket(call: Call, number: int) -> dict[str, Any]:
    """One ticket."""
    desk: Desk = call.state
    return asdict(desk.find(number))


@server.prompt
def reply(subject: str, tone: Tone = "friendly") -> str:
    """Draft a reply."""
    return f"Write a {tone} reply to: {subject}"
