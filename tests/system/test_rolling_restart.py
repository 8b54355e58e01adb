"""Rolling restarts under load: no call is lost, and no client sees an error.

Two processes follow one another on one journal, behind the documented balancers. `ROLLS=50` makes
the run longer.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from streams.cli.selftest.ledger import Story
from streams.cli.selftest.torture import APP
from streams.cli.selftest.torture_server import noted_runs
from streams.client.client import Client
from streams.exchange import Dialer
from tests.rigs import ROOT
from tests.rigs.command import run
from tests.rigs.rolls import Rolling, balancer
from tests.system.test_systemd import command_line
from tests.wire.process import ServerProcess
from transports import dial

ROLLS = int(os.environ.get("ROLLS", "3"))
GRACE_S = 60  # a bound for a machine that is busy: a drain ends with the last call
PATIENCE_S = 60.0 + 30 * ROLLS
STOCK = ROOT / "tests" / "sdk" / "rolling_python.py"
STOCK_END_S = 30.0

pytestmark = pytest.mark.timeout(PATIENCE_S + 60, func_only=True)


class Load:
    """Clients that call without a pause, and count what they see."""

    def __init__(self, notes: Path) -> None:
        self.is_calling = True
        self.notes = notes
        self.ended: list[Story] = []
        self.moves = 0  # calls that began before a restart and ended after it
        self.rolls = 0
        notes.mkdir()

    async def call(self, name: str, dialer: Dialer, tool: str, count: int, pace: float) -> None:
        """One user, who makes one call after the other and reads each to its end."""
        number = 0
        async with Client(dialer, patience_s=PATIENCE_S) as client:
            while self.is_calling:
                number += 1
                story, begun = Story(f"{name}-{number}", count, tool), self.rolls
                async with client.call(tool, self.arguments(story, pace)) as call:
                    async for message in call:
                        story.look(message)
                    story.finish(await call.result())
                self.ended.append(story)
                self.moves += self.rolls > begun

    def arguments(self, story: Story, pace: float) -> dict[str, Any]:
        given = {"name": story.name, "count": story.count, "notes": str(self.notes)}
        paced = {"per_second": pace}
        return given | paced | ({"flush_every": 2} if story.tool in ("lasting", "work") else {})

    def check(self) -> None:
        """Each call came to its end with all of its messages, once and in order."""
        for story in self.ended:
            seen = (len(story.seen), story.twice, story.misordered, story.damaged)
            assert story.is_finished, story.name
            assert seen == (story.count, 0, 0, 0), story.name
        runs = noted_runs(self.notes)
        again = {each.name for each in self.ended if each.tool != "lasting" and runs[each.name] > 1}
        assert not again, "these tools ran twice"


@asynccontextmanager
async def stock_client(url: str, tool: str, notes: Path) -> AsyncIterator[dict[str, Any]]:
    """The official SDK's client calls meanwhile; what it has seen is there after the block."""
    command = [sys.executable, str(STOCK), url, tool, str(notes), f"stock-{tool}"]
    seen: dict[str, Any] = {}
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield seen
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.aclose()
        with trio.fail_after(STOCK_END_S):
            printed = b"".join([chunk async for chunk in process.stdout])
        seen |= json.loads(printed)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
async def test_rolling_restarts_lose_no_call_and_no_client_sees_an_error(
    name: str, tmp_path: Path
) -> None:
    rolling = Rolling(tmp_path, APP, "--grace", str(GRACE_S), "--limit", "restarts_max=1000000")
    load = Load(tmp_path / "notes")
    with trio.fail_after(PATIENCE_S), balancer(name, rolling.places, tmp_path) as port:
        urls = {"http": f"http://127.0.0.1:{port}/mcp", "ws": f"ws://127.0.0.1:{port}/ws"}
        try:
            await rolling.start()
            async with (
                stock_client(urls["http"], "short", load.notes) as short,
                stock_client(urls["http"], "lasting", load.notes) as lasting,
                trio.open_nursery() as nursery,
            ):
                for scheme, url in urls.items():
                    for user, (tool, count, pace) in enumerate(
                        [("lasting", 30, 10.0), ("short", 3, 50.0), ("work", 8, 20.0)] * 2
                    ):
                        user_name = f"{scheme}-{user}"
                        nursery.start_soon(load.call, user_name, dial(url), tool, count, pace)
                for _ in range(ROLLS):
                    before = len(load.ended)
                    while len(load.ended) < before + 20:  # between two restarts, calls begin
                        await trio.sleep(0.05)
                    log = await rolling.roll()
                    load.rolls += 1
                    assert "interrupted" not in log, log
                    assert "Traceback" not in log, log
                load.is_calling = False
        finally:
            with trio.CancelScope(shield=True):
                await rolling.stop()
    load.check()
    assert load.moves >= ROLLS
    assert (short["errors"], lasting["errors"]) == ([], [])
    print(f"{ROLLS} restarts: {len(load.ended)} calls, {load.moves} across a restart, and")
    print(f"{short['calls']} + {lasting['calls']} of the official SDK")


async def test_a_service_that_is_restarted_at_its_sockets_loses_no_call(tmp_path: Path) -> None:
    """As `systemctl restart` does it: one process after the other, at sockets that stay."""
    load = Load(tmp_path / "notes")
    with (
        socket.create_server(("127.0.0.1", 0), backlog=100) as listening,
        trio.fail_after(PATIENCE_S),
    ):
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        words = ("serve", APP, "--http=127.0.0.1:0", f"--journal={tmp_path / 'journal.db'}")
        command = command_line(
            [listening], *words, f"--grace={GRACE_S}", "--limit=restarts_max=1000000"
        )

        async def served() -> trio.Process:
            return await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, pass_fds=[listening.fileno()]
            )

        process = await served()
        try:
            async with (
                stock_client(url, "short", load.notes) as stock,
                trio.open_nursery() as nursery,
            ):
                for tool, count, pace in (("lasting", 20, 10.0), ("short", 3, 50.0)):
                    nursery.start_soon(load.call, tool, dial(url), tool, count, pace)
                for _ in range(ROLLS):
                    before = len(load.ended)
                    while len(load.ended) < before + 5:
                        await trio.sleep(0.05)
                    process.send_signal(signal.SIGTERM)
                    assert await process.wait() == 0
                    process = await served()
                    load.rolls += 1
                load.is_calling = False
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
    load.check()
    assert load.moves
    assert not stock["errors"]


async def test_a_second_sigterm_ends_a_drain_at_once(tmp_path: Path) -> None:
    load = Load(tmp_path / "notes")
    story = Story("slow", 100_000, "work")
    rolling = Rolling(tmp_path, APP, "--grace", "3600")
    try:
        with trio.fail_after(PATIENCE_S):
            process = await rolling.start()
            url = f"http://127.0.0.1:{rolling.places[0].http}/mcp"
            async with Client(dial(url)) as client:
                call = client.call("work", load.arguments(story, 5.0))
                async with call:
                    await call.__anext__()
                    process.send_signal(signal.SIGTERM)
                    await rolling.says(0, "draining")
                    await call.__anext__()  # it goes on meanwhile
                    process.send_signal(signal.SIGTERM)
                    assert await process.wait() == 0
    finally:
        await rolling.stop()
    assert "shutting down" in rolling.log(0).read_text()


async def test_a_process_that_waits_serves_after_the_owner_was_killed(tmp_path: Path) -> None:
    rolling = Rolling(tmp_path, APP, "--grace", "5")
    try:
        with trio.fail_after(PATIENCE_S):
            await rolling.start()
            assert "Traceback" not in await rolling.roll(signal.SIGKILL)
            url = f"http://127.0.0.1:{rolling.places[1].http}/mcp"
            async with Client(dial(url)) as client:
                assert await client.list_tools()
    finally:
        await rolling.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_without_a_grace_the_next_process_listens_before_the_owner_leaves(
    number: signal.Signals, tmp_path: Path
) -> None:
    rolling = Rolling(tmp_path, APP)
    try:
        with trio.fail_after(PATIENCE_S):
            await rolling.start()
            log = await rolling.roll(number)
    finally:
        await rolling.stop()
    assert re.search("handing over to the next process.*is_listening=True", log)


async def test_a_process_takes_over_the_address_of_the_one_before(tmp_path: Path) -> None:
    rolling = Rolling(tmp_path, APP, "--grace", "5")
    rolling.places[1] = rolling.places[0]._replace(admin=rolling.places[1].admin)
    url = f"ws://127.0.0.1:{rolling.places[0].ws}"
    load = Load(tmp_path / "notes")
    try:
        with trio.fail_after(PATIENCE_S):
            await rolling.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.call, "one", dial(url), "lasting", 20, 10.0)
                await rolling.roll()
                load.is_calling = False
    finally:
        await rolling.stop()
    load.check()


def test_a_process_waits_for_a_journal_no_longer_than_it_was_told(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        done = run("serve", APP, "--http=127.0.0.1:0", f"--journal={server.journal}", "--standby=1")
        assert done.returncode == 2
        assert f"is still owned by another process (pid {server.pid}) after 1 s" in done.stderr
