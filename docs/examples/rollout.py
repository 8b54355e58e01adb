"""A rollout that takes days, watched by a client that connects now and then.

The tool is an async generator that yields a status whenever something has changed. It runs ahead of
the client by up to a hundred statuses (`pages_ahead`), which wait. A client that connects gets the
new statuses and a page token for the next visit. `expected_s` tells how long the rollout may take,
and `resume_max_s` how long it waits for a client.

    $ mcp-streams serve rollout.py:server --ws 127.0.0.1:8765 --journal rollout.db &
    $ python rollout.py ws://127.0.0.1:8765
    May take 3 days.
    shop: 1 of 8 replicas are ready.
    …
    shop: 8 of 8 replicas are ready.
    Seen to the end.
"""

import sys
from collections.abc import AsyncIterator

import trio

from streams import Client, Server
from transports import dial

DAY_S = 24 * 3600.0
LOOK_S = 1.0  # waiting statuses come at once

server = Server("cluster")


@server.tool(
    pages=True,
    pages_ahead=100,
    page_wait_s=60.0,
    expected_s=3 * DAY_S,
    resume_max_s=2 * DAY_S,
)
async def roll_out(service: str, replicas: int, each_takes_s: float) -> AsyncIterator[str]:
    """Bring a service up to date, one replica after the other."""
    for ready in range(1, replicas + 1):
        await trio.sleep(each_takes_s)  # here one would ask the cluster
        yield f"{service}: {ready} of {replicas} replicas are ready."


async def look_in(
    client: Client, arguments: dict[str, object], token: str | None
) -> tuple[list[str], str | None]:
    """Return the statuses since the page token was given, and the next page token.

    Without a token this begins the rollout and waits for its first status. After the last status
    there is no next token.
    """
    statuses: list[str] = []
    pages = client.pages("roll_out", arguments, token=token)
    with trio.CancelScope() as look:
        if token is not None:
            look.deadline = trio.current_time() + LOOK_S
        async for page in pages:
            statuses.append(page["content"][0]["text"])
            look.deadline = min(look.deadline, trio.current_time() + LOOK_S)
    return statuses, pages.token


async def main(url: str) -> None:
    """Visit every few seconds, each time with a new client."""
    arguments = {"service": "shop", "replicas": 8, "each_takes_s": 0.5}
    async with Client(dial(url)) as client:
        (tool,) = await client.list_tools()
        days = tool.meta["mcp-streams/expectedSeconds"] / DAY_S
        print(f"May take {days:g} days.")
    token: str | None = None
    while True:
        async with Client(dial(url)) as client:
            statuses, token = await look_in(client, arguments, token)
        for status in statuses:
            print(status)
        if token is None:
            break
        await trio.sleep(1)  # an hour, a night, a weekend
    print("Seen to the end.")


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
