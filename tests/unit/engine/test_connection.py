"""How much a connection writes at once: a run, or several to a peer that takes them at once."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Call, Server
from streams.engine.connection import KERNEL_BYTES, RUNS_BYTES, RUNS_BYTES_MAX
from tests.rigs.server import Talker, greeted, open_house

COUNT = 4_000
LINE_BYTES = 4_000  # so it is several times what a write may have
HEADERS_BYTES = 1_000
SLOW = 20  # so many writes are out when one has taken long


def flooding() -> Server:
    server = Server("flooding")

    @server.tool
    async def flood(call: Call) -> None:
        for _ in range(COUNT):
            await call.log("info", "x" * LINE_BYTES)

    return server


async def written(write_s: float, slow_s: float) -> list[int]:
    """The bytes of each write of a resume. Each takes `write_s`, one `slow_s`."""
    sizes: list[int] = []
    async with open_house(flooding()) as house:
        first = await house.dial()
        stream = await first.begin(1, "flood")
        await first.leave()
        cable = house.cable(capacity=1 << 24)
        talker, send = await greeted(Talker(cable.near, cable)), cable.far.send
        while (await talker.poll(2, stream))["status"] != "completed":
            await trio.sleep(1)

        async def timed_send(*lines: bytes) -> None:
            sizes.append(sum(map(len, lines)))
            await trio.sleep(slow_s if len(sizes) == SLOW else write_s)
            await send(*lines)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cable.far, "send", timed_send)
            came: list[dict[str, Any]] = await talker.resume(3, stream)
        logged = [message for message in came if message.get("method") == "notifications/message"]
        assert len(logged) == COUNT
    return sizes


async def test_a_peer_that_reads_at_once_is_given_more_until_it_does_not(
    autojump_clock: MockClock,
) -> None:
    sizes = await written(0.01, 10.0)
    first = KERNEL_BYTES // RUNS_BYTES
    assert max(sizes[:first]) <= RUNS_BYTES + HEADERS_BYTES
    assert RUNS_BYTES_MAX - RUNS_BYTES < max(sizes) <= RUNS_BYTES_MAX + HEADERS_BYTES
    assert sizes[SLOW] <= RUNS_BYTES + HEADERS_BYTES


async def test_a_peer_that_is_slow_is_given_one_run_at_a_time(autojump_clock: MockClock) -> None:
    assert max(await written(1.0, 1.0)) <= RUNS_BYTES + HEADERS_BYTES
