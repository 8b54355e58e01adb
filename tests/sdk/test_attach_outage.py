"""An outage behind `mcp-streams attach`, with an official client in the host; mcp-remote beside it.

`OUTAGE_S=300` makes it one of five minutes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from streams.cli.selftest.cables import Cables
from tests.sdk.stock import HERE, Journey, Node
from tests.sdk.test_wrapped_servers import end_owner
from tests.wire.process import CLI, ServerProcess

OUTAGE_S: Final = float(os.environ.get("OUTAGE_S", "10"))
BACK_S: Final = 3.0  # from the end of the outage to the result
STEPS: Final = 4
START_S: Final = 60.0

pytestmark = pytest.mark.timeout(OUTAGE_S + 150, func_only=True)


class Host:
    """A host process, and what it has told: words with their times."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.told: list[tuple[str, float]] = []
        self._changed = trio.Event()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, at = line.decode().split()
                self.told.append((word, float(at)))
            self._changed.set()
            self._changed = trio.Event()

    async def hear(self, word: str) -> float:
        """The time of the first such word."""
        while not (found := [at for said, at in self.told if said == word]):
            await self._changed.wait()
        return found[0]


@asynccontextmanager
async def hosted(node: Node, journey: Journey, command: Sequence[str]) -> AsyncIterator[Host]:
    given = {"gates": str(journey.gates), "steps": journey.steps}
    process = await trio.lowlevel.open_process(
        [sys.executable, str(HERE / "outage_host.py"), json.dumps(given), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=node.environment(),
    )
    async with trio.open_nursery() as nursery:
        host = Host(process)
        nursery.start_soon(host.listen)
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
            nursery.cancel_scope.cancel()


async def test_a_result_comes_within_seconds_of_the_network(node: Node, tmp_path: Path) -> None:
    journeys = {name: Journey(tmp_path / name, STEPS) for name in ("attach", "mcp-remote")}
    for journey in journeys.values():
        journey.gates.mkdir()
        journey.open(1)
    remote = str(node.modules / "mcp-remote" / "dist" / "proxy.js")
    journal = tmp_path / "attach.db"
    cables = Cables()
    with ServerProcess(tmp_path, app=f"{HERE / 'cut_server.py'}:server") as server:
        async with trio.open_nursery() as nursery:
            await nursery.start(cables.serve)
            cables.lead_to(server.http_port)
            url = f"http://127.0.0.1:{cables.port}/mcp"
            attach = [*CLI, "attach", url, "--journal", str(journal)]
            other = [str(node.path), remote, url, "--allow-http", "--transport", "http-only"]
            try:
                async with (
                    hosted(node, journeys["attach"], attach) as ours,
                    hosted(node, journeys["mcp-remote"], other) as theirs,
                ):
                    with trio.fail_after(START_S):
                        await ours.hear("progress")
                        await theirs.hear("progress")
                    cables.lead_to(None)
                    cables.cut()
                    for journey in journeys.values():
                        journey.open(STEPS)  # both calls end during the outage
                    await trio.sleep(OUTAGE_S)
                    back_at = time.monotonic()
                    cables.lead_to(server.http_port)
                    with trio.move_on_after(2 * BACK_S):
                        await ours.hear("result")
                    with trio.move_on_after(2 * BACK_S):
                        await theirs.hear("result")
            finally:
                end_owner(journal)
            nursery.cancel_scope.cancel()
    for name, host in (("attach", ours), ("mcp-remote", theirs)):
        results = [at - back_at for said, at in host.told if said == "result"]
        came = f"the result {results[0]:.1f} s after it" if results else "no result"
        print(f"an outage of {OUTAGE_S:g} s, {name}: {came}")
    assert [said for said, _ in ours.told].count("result") == 1, ours.told
    assert await ours.hear("result") - back_at <= BACK_S
