"""An asyncio program with `streams.aio`, over real processes: cuts and kills lose nothing."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from streams.aio import Client, RunningCall
from streams.aio.guest import Guest
from streams.cli.selftest.rigs import ListeningRig, Rig, StdioRig
from streams.messages import Message, decode
from tests.rigs import ROOT

APP = f"{ROOT / 'tests' / 'rigs' / 'aio_server.py'}:server"
ROWS = 400
WITHIN_S = 100


@contextlib.asynccontextmanager
async def started(transport: str, place: Path) -> AsyncIterator[tuple[Guest, Rig]]:
    guest = await Guest.enter()
    journal = place / "calls.db"
    rig: Rig = (
        StdioRig(APP, journal)
        if transport == "stdio"
        else ListeningRig(transport, APP, journal, guest.nursery)
    )
    try:
        await guest.run(rig.start)
        yield guest, rig
    finally:
        await guest.run(rig.stop)
        await guest.leave()


@pytest.mark.parametrize("transport", ["stdio", "ws", "http"])
def test_cuts_and_kills_lose_nothing_and_show_nothing_twice(transport: str, tmp_path: Path) -> None:
    seen: Counter[int] = Counter()

    def look(message: Message) -> None:
        seen[decode(message.params, dict[str, Any])["progress"]] += 1

    async def watch(call: RunningCall, until: int) -> None:
        async for message in call:
            look(message)
            if seen.total() >= until:
                break

    async def main() -> None:
        async with started(transport, tmp_path) as (guest, rig):
            async with Client(rig.dialer) as client, client.call("count", {"rows": ROWS}) as call:
                for part in (0.1, 0.2, 0.3):
                    await watch(call, int(part * ROWS))
                    rig.cut()
                await watch(call, int(0.4 * ROWS))
                await guest.run(rig.kill)  # during the work: the tool is restarted
                await guest.run(rig.start)
                await watch(call, int(0.6 * ROWS))
                ticket = call.ticket
            assert ticket is not None
            async with Client(rig.dialer) as client:
                while (await client.poll(ticket)).status == "live":
                    await asyncio.sleep(0.05)
            await guest.run(rig.kill)  # when it is done, and not all of it is delivered
            await guest.run(rig.start)
            async with Client(rig.dialer) as client, client.resume(ticket) as again:
                await watch(again, ROWS + 1)
                result = await again.result()
        assert result["content"][0]["text"] == f"{ROWS} rows"

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))
    assert sorted(seen) == list(range(1, ROWS + 1)), "lost"
    assert seen.total() == ROWS, "twice"
    trio.run(trio.lowlevel.checkpoint)  # the thread is free again
