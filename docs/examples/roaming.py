"""One call, begun on a laptop over WebSocket and finished on a phone over HTTP.

The ticket contains the position up to which the laptop has read. The phone resumes with it and gets
the messages that follow: none is lost between the two, and none comes twice.

    $ mcp-streams serve roaming.py:server --ws 127.0.0.1:8765 --http 127.0.0.1:8080 &
    $ python roaming.py laptop ws://127.0.0.1:8765
    1
    …
    10
    $ python roaming.py phone http://127.0.0.1:8080/mcp $(cat roaming.ticket)
    11
    …
    20
    20 lines printed.
"""

import json
import sys
from pathlib import Path

import trio

from streams import Call, Client, Message, Server, Ticket
from transports import dial

LINES = 20
TICKET = Path("roaming.ticket")

server = Server("press")


@server.tool
async def print_lines(call: Call, lines: int) -> str:
    """Print lines, and report each in a log message."""
    for line in range(1, lines + 1):
        await trio.sleep(0.05)  # the work
        await call.log("info", line)
    return f"{lines} lines printed."


def show(message: Message) -> int:
    """Print the line that a message reports."""
    line: int = json.loads(bytes(message.params))["data"]
    print(line)
    return line


async def laptop(url: str) -> str:
    """Read half of the call's messages, then disconnect; returns the ticket."""
    async with Client(dial(url)) as client, client.call("print_lines", {"lines": LINES}) as call:
        async for message in call:
            if show(message) == LINES // 2:
                break
        return str(call.ticket)


async def phone(url: str, ticket: str) -> None:
    """Read the rest of the same call, from the position of the ticket."""
    async with Client(dial(url)) as client, client.resume(Ticket.parse(ticket)) as call:
        async for message in call:
            show(message)
        result = await call.result()
        print(result["content"][0]["text"])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["laptop", url]:
            TICKET.touch(mode=0o600)  # a ticket gives access to its call
            TICKET.write_text(trio.run(laptop, url))
        case ["phone", url, ticket]:
            trio.run(phone, url, ticket)
