"""SIGKILL at each step that a server takes with the files of its journal: nothing acknowledged is
lost, nothing comes twice.

A short life has everything in it: the file is made, two calls send, ask, are left, resumed, acked
and end, others end before their records are stored or soon after, tails become segments, the WAL is
copied, the journal is closed. It is lived once for each step, and ends there; then it goes on in
the next server, to which the client comes back by itself.
`CRASH_POINTS=all` tries every step, before it and in the middle of it; else so many.
"""

import os
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, get_args

import pytest
import trio

from streams import Client
from streams.client.call import RunningCall
from streams.errors import CallFailed, CallLost, CannotConnect
from streams.journal.records import Outcome
from streams.journal.sqlite import SQLiteStore
from streams.limits import Durability
from streams.messages import Message, decode
from streams.protocol.ticket import Ticket
from tests.rigs.crashing import PATIENT_S, Lives, built, open_lives
from transports import dial

POINTS = os.environ.get("CRASH_POINTS", "10")
PAUSES_S = (0.0, 0.004, 0.006, 0.02)  # of short calls; records are stored after 5 to 10 ms
AGAIN_S = 0.01  # between attempts to reach a server that is being started


class Account:
    """The messages that one call's client had, and the promises in them."""

    def __init__(self, folder: Path, name: str, *, count: int, pad: int, ask_at: int) -> None:
        self.marks = folder / name
        self.marks.touch()
        self.arguments = {"count": count, "pad": pad, "ask_at": ask_at, "marks": str(self.marks)}
        self.count = count
        self.ask_at = ask_at
        self.numbers: list[int] = []
        self.asked = 0
        self.outcome = ""
        self.ticket: Ticket | None = None

    def take(self, message: Message) -> None:
        if message.method == "notifications/message":
            self.numbers.append(decode(message.params, dict[str, Any])["data"]["n"])

    async def read(self, call: RunningCall, until: int) -> None:
        """Read up to a number; or to the end, and note how that was."""
        try:
            async for message in call:
                self.take(message)
                if len(self.numbers) == until:
                    return
            result = await call.result()
            assert result["content"][0]["text"] == f"worked {self.count}"
            self.outcome = "done"
        except CallLost:
            self.outcome = "lost"
        except CallFailed as failed:
            self.outcome = str((failed.data or {}).get("reason"))
        finally:
            self.ticket = call.ticket

    def check(self, *, has_died: bool) -> None:
        """Nothing lost, nothing twice, whatever became of the call."""
        assert self.numbers == list(range(1, len(self.numbers) + 1))
        assert self.asked == (len(self.numbers) > self.ask_at) or self.outcome == "interrupted"
        assert self.asked <= 1
        confirmed = max(map(int, self.marks.read_text().split()), default=0)
        match self.outcome:
            case "done":
                assert len(self.numbers) == self.count
            case "interrupted":
                assert has_died
                assert len(self.numbers) >= confirmed, "flush() had returned for more"
            case "lost":
                assert has_died
                assert not self.numbers, "who has had a message can come back"
            case other:
                pytest.fail(f"the call ended as {other!r}")


class ShortCalls:
    """Calls that end before their records are stored, in that moment, and soon after.

    A tool without hints is run once, whatever happens, and its client finds the call by its key. A
    tool that only reads may be run for each request; a client that was told nothing may lose it.
    """

    def __init__(self, folder: Path) -> None:
        self._runs = folder / "runs"
        self._runs.touch()
        self._outcomes: dict[str, str] = {}

    async def make(self, client: Client) -> None:
        for tool in ("reading", "brief"):
            for pause_s in PAUSES_S:
                name = f"{tool}-{pause_s}-{len(self._outcomes)}"
                given = {"name": name, "pause_s": pause_s, "runs": str(self._runs)}
                self._outcomes[name] = await self._outcome(client, tool, given)

    async def _outcome(self, client: Client, tool: str, given: dict[str, Any]) -> str:
        try:
            async with client.call(tool, given) as call:
                result = await call.result()
        except CallLost:
            return "lost"
        except CallFailed as failed:
            return str((failed.data or {}).get("reason"))
        assert result["content"][0]["text"] == f"{given['name']} is done"
        return "done"

    def check(self, *, has_died: bool) -> None:
        """Each call is answered, unless the server has died under it, and not run twice."""
        runs = Counter(self._runs.read_text().split())
        for name, outcome in self._outcomes.items():
            fine = {"done"}
            if has_died:
                fine |= {"interrupted"} | ({"lost"} if "reading" in name else set())
            assert outcome in fine, name
            assert outcome != "done" or runs[name] >= 1, name
            assert runs[name] <= (2 if "reading" in name and has_died else 1), name


class Scenario:
    """One journal, from its making to its closing, and a kill on the way."""

    def __init__(self, lives: Lives, folder: Path, durability: Durability) -> None:
        self._lives = lives
        self._journal = folder / "journal.db"
        self._durability: Durability = durability
        self._is_over = False
        self._starting = trio.Lock()
        self._deaths = 0
        self.accounts = [
            Account(folder, "logged", count=20, pad=40, ask_at=9),
            Account(folder, "direct", count=6, pad=2_500, ask_at=4),
        ]
        self.short = ShortCalls(folder)

    async def run(self, at: int = 0, *, is_half: bool = False) -> int:
        """Live it; how many steps the first server took."""
        if not await self._lives.begin(self._journal, self._durability, at, is_half=is_half):
            self._deaths += 1
            assert await self._lives.begin(self._journal, self._durability)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_alive)
            with trio.fail_after(PATIENT_S):
                for first in (True, False):
                    async with self._client() as client, trio.open_nursery() as calls:
                        calls.start_soon(self.short.make, client)
                        for account in self.accounts:
                            calls.start_soon(self._work, client, account, first)
            async with self._starting:  # before it listens, it would not end in good order
                self._is_over = True
                self._lives.terminate()
        self._check()
        return self._lives.steps.taken

    async def _keep_alive(self) -> None:
        while True:
            code = await self._lives.end()
            self._deaths += code != 0
            async with self._starting:
                if self._is_over:
                    return
                assert await self._lives.begin(self._journal, self._durability)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        answers = {"elicitation/create": self._answer}
        async with AsyncExitStack() as entered:
            while True:
                client = Client(dial(self._lives.url), answers=answers)
                try:
                    await entered.enter_async_context(client)
                    break
                except CannotConnect:
                    await trio.sleep(AGAIN_S)
            yield client

    async def _answer(self, params: dict[str, Any]) -> dict[str, Any]:
        for account in self.accounts:
            account.asked += params["message"] == str(account.marks)
        return {"action": "accept", "content": {}}

    async def _work(self, client: Client, account: Account, is_first: bool) -> None:
        """Call and leave half-way, or come back for the rest."""
        if is_first:
            async with client.call("work", account.arguments) as call:
                await account.read(call, account.count // 2 + 1)
        elif not account.outcome:
            assert account.ticket is not None
            async with client.resume(account.ticket) as call:
                await account.read(call, account.count + 1)

    def _check(self) -> None:
        for account in self.accounts:
            account.check(has_died=self._deaths > 0)
        self.short.check(has_died=self._deaths > 0)
        with closing(sqlite3.connect(self._journal)) as file:
            assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with closing(SQLiteStore(self._journal)) as store:
            for account in self.accounts:
                if account.ticket is not None:
                    self._check_stored(store, account)

    def _check_stored(self, store: SQLiteStore, account: Account) -> None:
        """All that a client was told of, and has not confirmed, is there."""
        assert account.ticket is not None
        record = store.lookups.find(account.ticket.stream)
        assert record is not None
        expected = Outcome.COMPLETED if account.outcome == "done" else Outcome.FAILED
        assert record.outcome is expected
        after = record.acked
        assert after <= record.last
        for run in store.read(account.ticket.stream, after, bytes_max=1 << 20):
            assert run.seq == after + 1
            after = run.last
        assert after == record.last


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("shim"))


def points_of(steps: int) -> list[tuple[int, bool]]:
    """Which steps to die at, and whether in their middle."""
    every = [(at, is_half) for at in range(1, steps + 1) for is_half in (False, True)]
    if POINTS == "all":
        return every
    return sorted(random.Random(steps).sample(every, int(POINTS)))


@pytest.mark.timeout(7200 if POINTS == "all" else 300)
@pytest.mark.parametrize("durability", get_args(Durability))
async def test_nothing_acknowledged_is_lost_whatever_step_is_the_last(
    library: Path, tmp_path: Path, durability: Durability
) -> None:
    async def live(lives: Lives, at: int, *, is_half: bool) -> int:
        folder = tmp_path / f"{at}{'-half' * is_half}"
        folder.mkdir()
        try:
            return await Scenario(lives, folder, durability).run(at, is_half=is_half)
        except BaseException:
            print(f"step {at}, in its middle: {is_half}", *lives.said, sep="\n")
            raise

    async with open_lives(library, tmp_path) as lives:
        steps = await live(lives, 0, is_half=False)
        assert steps > 100, "the scenario has everything in it"
        for at, is_half in points_of(steps):
            await live(lives, at, is_half=is_half)
