"""A question to a person, which another process than the caller answers on the next day.

The tool asks with MCP's elicitation and waits. The first process calls, waits for the question,
writes its ticket to a file and ends. The second process joins the call with the ticket, answers the
question and prints the result.

    $ mcp-streams serve approval.py:server --http 127.0.0.1:8080 --journal approval.db &
    $ python approval.py call http://127.0.0.1:8080/mcp
    A question waits.
    $ python approval.py answer http://127.0.0.1:8080/mcp accept
    Pay 1250 cents for A-17?
    paid
    $ python approval.py answer http://127.0.0.1:8080/mcp decline
    Too late (delivered).
"""

import sys
from pathlib import Path
from typing import Any

import trio

from streams import Call, Client, Server, StreamGone, Ticket
from transports import dial

TICKET = Path("approval.ticket")

server = Server("payments", resume_max_s=7 * 24 * 3600)


@server.tool
async def pay(call: Call, invoice: str, cents: int) -> str:
    """Pay an invoice, if a person agrees."""
    await call.log("info", "asking")
    question = {
        "message": f"Pay {cents} cents for {invoice}?",
        "requestedSchema": {"type": "object", "properties": {}},
    }
    answer = await call.request("elicitation/create", question)
    return "paid" if answer["action"] == "accept" else "not paid"


async def begin(url: str) -> str:
    """Call, detach as soon as there is a question, and return the ticket."""
    arguments = {"invoice": "A-17", "cents": 1250}
    async with Client(dial(url)) as client, client.call("pay", arguments) as call:
        async for _ in call:
            break  # with the first message there is a ticket
        assert call.ticket is not None
        while not (await client.poll(call.ticket)).has_request:
            await trio.sleep(call.ticket.min_s)
        return str(call.ticket)


async def answer(url: str, ticket: str, action: str) -> None:
    """Answer the question, and wait for the result."""

    async def decide(question: dict[str, Any]) -> dict[str, Any]:
        print(question["message"])
        return {"action": action, "content": {}}

    async with Client(dial(url), answers={"elicitation/create": decide}) as client:
        try:
            joined = await client.join(Ticket.parse(ticket), timeout_s=60)
        except StreamGone as gone:
            print(f"Too late ({gone.reason}).")
        else:
            print(joined.result["content"][0]["text"] if joined.is_done else "Not yet done.")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["call", url]:
            TICKET.touch(mode=0o600)  # a ticket gives access to its call
            TICKET.write_text(trio.run(begin, url))
            print("A question waits.")
        case ["answer", url, action]:
            trio.run(answer, url, TICKET.read_text(), action)
