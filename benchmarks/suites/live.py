"""While the tool sends: messages a second, from the calls to the last result.

One server has a journal that is on the disk before any message goes out, one has none.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from benchmarks.harness import Plan, Subject
from benchmarks.numbered import Lost, check_messages
from benchmarks.servers import APP, Served, websocket_server
from streams import Client


def journaled(streams: str) -> str:
    """The name of the row with a journal."""
    return f"{streams}: journal, durable"


def bare(streams: str) -> str:
    """The name of the row without one."""
    return f"{streams}: no journal"


ONE, MANY = "1 stream", "100 streams at once"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """Two servers, with and without a journal."""
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(websocket_server(APP, folder / "journal.db"))
        light = await stack.enter_async_context(websocket_server(APP, None))
        subjects = []
        for size, count in plan.counts.items():
            for name, streams in ((ONE, 1), (MANY, plan.streams)):
                each = max(count // streams, 1)
                with_it = partial(followed, kept, streams, each, size)
                without = partial(followed, light, streams, each, size)
                subjects += [
                    Subject(journaled(name), size, with_it, of=bare(name)),
                    Subject(bare(name), size, without, role="bare"),
                ]
        yield subjects


async def followed(served: Served, streams: int, count: int, size: int) -> float:
    """Messages a second of so many calls of one client, all at once. Raises `Lost`."""
    came: list[list[bytes]] = [[] for _ in range(streams)]
    async with Client(served.dialer) as client:

        async def follow(messages: list[bytes]) -> None:
            async with client.call("fill", {"count": count, "size": size}) as call:
                async for message in call:
                    messages.append(bytes(message.params))
                if (result := await call.result()).get("isError"):
                    raise Lost(f"the tool failed: {result}")

        began_at = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for messages in came:
                nursery.start_soon(follow, messages)
        took_s = time.perf_counter() - began_at
    total = sum(
        check_messages((b'{"params":%b}' % params for params in messages), 0, count)
        for messages in came
    )
    return total / took_s
