"""Servers that evict idle streams at once, and such streams."""

from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from streams import Server
from streams.limits import Limits
from tests.rigs.server import (
    REQUESTS,
    STREAMS,
    House,
    Json,
    Steps,
)

MAX_S = 600


def serving(resident_max: int = 0, **limits: Any) -> tuple[Server, Steps]:
    limited = Limits(resident_max=resident_max, **limits)
    server = Server(
        "tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0, limits=limited
    )
    return server, Steps(server)


def in_memory(house: House) -> list[str]:
    return [stream.id for stream in house.running.engine._streams.index]


def evicted(house: House) -> int:
    return house.running.engine._streams.index.evicted


async def idle(
    house: House, steps: Steps, calls: int = 1, *, principal: str = "alice"
) -> list[Json]:
    """Streams with two messages each whose client has left, oldest first; their announcements."""
    told = []
    for n in range(calls):
        talker = await house.dial(STREAMS | REQUESTS, principal)
        told.append(await talker.begin(n, "step"))
        await talker.leave()
        steps.log(f"of {n}")
        steps.finish(f"done {n}")
        await wait_all_tasks_blocked()
    await trio.sleep(2)
    return told
