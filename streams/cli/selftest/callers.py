"""The users of a torture run: they call, read, detach, resume from another client, and count."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Final

import trio

from streams.cli.selftest.ledger import Ledger, Story
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, CallLost, CannotConnect, ClientError
from streams.exchange import ClientChannel, Dialer
from streams.protocol.ticket import Ticket

LASTING: Final = "lasting"  # restarted after the death of its server
TOOLS: Final = ("work", LASTING)

# How long a call takes without a failure, and how fast it sends.
CALL_S: Final = (0.05, 5.0)
PER_SECOND: Final = (100, 400)
FLUSH_EVERY: Final = (1, 60)

# How long a user keeps a client before it makes another one.
STAY_S: Final = (0.05, 3.0)
RETRY_S: Final = (0.02, 0.2)


class Caller:
    """A user that makes one call after the other while `is_storming`.

    Only the ticket goes from one client to the next, as text.
    """

    def __init__(self, name: str, dialer: Dialer, ledger: Ledger, dice: Random) -> None:
        self.is_storming = True
        self._name = name
        self._dialer = dialer
        self._ledger = ledger
        self._dice = dice
        self._calls = 0
        self._ticket: str | None = None
        self._failed_at = 0.0  # the last failure of the transport
        self._connected_at = 0.0
        self._sign_at: float | None = None  # the last time that the call showed life

    def note_fault(self) -> None:
        """The server or the network has just been made to fail."""
        self._failed_at = trio.current_time()

    async def go_on(self) -> None:
        """Make calls until the storm is over, and follow the last one to its end."""
        while self.is_storming:
            self._calls += 1
            per_second = self._dice.uniform(*PER_SECOND)
            count = max(1, int(per_second * self._dice.uniform(*CALL_S)))
            story = Story(f"{self._name}-{self._calls}", count, self._dice.choice(TOOLS))
            arguments = {
                "name": story.name,
                "count": count,
                "per_second": per_second,
                "flush_every": self._dice.randint(*FLUSH_EVERY),
                "notes": str(self._ledger.notes),
            }
            self._ticket = None
            self._ledger.begin(story)
            await self._see_through(story, arguments)

    async def _see_through(self, story: Story, arguments: dict[str, object]) -> None:
        while not story.is_over:
            try:
                await self._visit(story, arguments)
            except CannotConnect:  # nothing was sent
                self._sign_at = self._sign_at or trio.current_time()
                await trio.sleep(self._dice.uniform(*RETRY_S))
                continue
            except CallLost:
                pass  # there is no ticket
            except CallFailed as failed:
                if self._ticket is None:  # a server that shuts down begins no call
                    self._ledger.refuse(story)
                    return
                story.is_over = True
                if _reason(failed) == "interrupted" and story.tool != LASTING:
                    self._see_sign()
                else:
                    self._ledger.fail(f"{story.name}: {failed!r}")
            except ClientError as error:
                story.is_over = True
                self._ledger.fail(f"{story.name}: {error!r}")
            if self._ticket is None:
                self._ledger.drop(story)
                return
        self._sign_at = None
        self._ledger.settle(story)

    async def _visit(self, story: Story, arguments: dict[str, object]) -> None:
        """Make a client and read for a while."""
        stay_s = self._dice.uniform(*STAY_S) if self.is_storming else float("inf")
        with trio.CancelScope() as stay:
            async with Client(self._dial, name="torture") as client:
                stay.deadline = trio.current_time() + stay_s
                if self._ticket is None:
                    call = client.call(story.tool, arguments)
                else:
                    call = client.resume(Ticket.parse(self._ticket))
                async with call:
                    await self._read(call, story)
        if stay.cancelled_caught and self._sign_at and self._failed_at < self._sign_at:
            self._sign_at = None  # not a failure: this user was away

    async def _read(self, call: RunningCall, story: Story) -> None:
        try:
            async for message in call:
                story.look(message)
                self._see_sign()
            story.finish(await call.result())
        finally:
            if call.ticket is not None:
                self._ticket = str(call.ticket)

    @asynccontextmanager
    async def _dial(self) -> AsyncIterator[ClientChannel]:
        async with self._dialer() as channel:
            self._connected_at = trio.current_time()
            self._sign_at = self._sign_at or self._connected_at
            yield channel

    def _see_sign(self) -> None:
        now = trio.current_time()
        if self._sign_at is not None and self._connected_at > self._sign_at:
            self._ledger.recovered(now - self._sign_at)
        self._sign_at = now


def _reason(failed: CallFailed) -> object:
    return failed.data.get("reason") if isinstance(failed.data, dict) else None
