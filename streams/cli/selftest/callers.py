"""The users of a torture run: they call, read, detach, resume from another client, and count."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import trio

from streams.cli.selftest.ledger import SHORT, Ledger, Story
from streams.cli.selftest.torture_child import LAST_WORDS
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, CallLost, CannotConnect, ClientError
from streams.exchange import ClientChannel, Dialer
from streams.protocol.ticket import Ticket

LASTING: Final = "lasting"  # restarted after the death of its server
# The reasons of a call that its server took along; a wrapped command may die while it starts.
ENDED: Final = ("interrupted", "start_failed")
TOOLS: Final = ("work", LASTING)

# How long a call takes without a failure, and how fast it sends.
CALL_S: Final = (0.05, 5.0)
PER_SECOND: Final = (100, 400)
FLUSH_EVERY: Final = (1, 60)

# Short calls: most have no messages. They end at once, or about when a server stores their records.
SHORT_ONE_IN: Final = 2  # then one follows the other while the user stays
SHORT_COUNTS: Final = (0, 0, 0, 1, 2)
SHORT_PER_SECOND: Final = (0.0, 100.0, 200.0, 500.0)

# How long a user keeps a client before it makes another one.
STAY_S: Final = (0.05, 3.0)
RETRY_S: Final = (0.02, 0.2)


class Caller:
    """A user that makes one call after the other while `is_storming`.

    Only the ticket goes from one client to the next, as text.
    """

    def __init__(
        self, name: str, dialer: Dialer, ledger: Ledger, dice: Random, *, begins_short: bool
    ) -> None:
        """`begins_short`: its first call is a short one. The dice decide about the others."""
        self.is_storming = True
        self._name = name
        self._dialer = dialer
        self._ledger = ledger
        self._dice = dice
        self._begins_short = begins_short
        self._calls = 0
        self._story: Story
        self._arguments: dict[str, object] = {}
        self._ticket: str | None = None
        self._failed_at = 0.0  # the last failure of the transport
        self._connected_at = 0.0
        self._sign_at: float | None = None  # the last time that the call showed life

    def note_fault(self) -> None:
        """The server or the network has just been made to fail."""
        self._failed_at = trio.current_time()

    async def go_on(self) -> None:
        """Make calls until the storm is over, and follow the last one to its end."""
        is_short = self._begins_short
        while self.is_storming:
            self._begin_short() if is_short else self._begin_long()
            await self._see_through()
            is_short = self._dice.randrange(SHORT_ONE_IN) == 0

    def _begin_long(self) -> None:
        per_second = self._dice.uniform(*PER_SECOND)
        count = max(1, int(per_second * self._dice.uniform(*CALL_S)))
        flush_every = self._dice.randint(*FLUSH_EVERY)
        self._begin(self._dice.choice(TOOLS), count, per_second, flush_every=flush_every)

    def _begin_short(self) -> None:
        count, per_second = self._dice.choice(SHORT_COUNTS), self._dice.choice(SHORT_PER_SECOND)
        self._begin(self._dice.choice(SHORT), count, per_second)

    def _begin(self, tool: str, count: int, per_second: float, **more: object) -> None:
        self._calls += 1
        self._story = Story(f"{self._name}-{self._calls}", count, tool)
        self._arguments = {
            "name": self._story.name,
            "count": count,
            "per_second": per_second,
            "notes": str(self._ledger.notes),
            **more,
        }
        self._ticket = None
        self._ledger.begin(self._story)

    async def _see_through(self) -> None:
        while not self._story.is_over:
            try:
                await self._visit()
            except CannotConnect:  # nothing was sent
                self._sign_at = self._sign_at or trio.current_time()
                await trio.sleep(self._dice.uniform(*RETRY_S))
                continue
            except CallLost:
                pass  # there is no ticket
            except CallFailed as failed:
                if self._ticket is None:  # a server that shuts down begins no call
                    self._ledger.refuse(self._story)
                    return
                self._story.is_over = True
                if _reason(failed) in ENDED and self._story.tool != LASTING:
                    self._see_sign()
                    self._check_last_words(failed.data)
                else:
                    self._ledger.fail(f"{self._story.name} ({self._story.tool}): {failed!r}")
            except ClientError as error:
                self._story.is_over = True
                self._ledger.fail(f"{self._story.name}: {error!r}")
            if self._ticket is None and not self._story.is_over:
                self._ledger.drop(self._story)
                return
        self._sign_at = None
        self._ledger.settle(self._story)

    def _check_last_words(self, data: Any) -> None:
        """A call whose child has ended is told how, with the end of its standard error."""
        if "signal" not in data and "exitCode" not in data:
            return  # the server itself was killed
        self._ledger.figures.last_words += 1
        if LAST_WORDS not in data.get("stderrTail", ""):
            self._ledger.fail(f"{self._story.name}: the child's last words are missing: {data}")

    async def _visit(self) -> None:
        """Make a client and read for a while. One short call follows the other meanwhile."""
        stay_s = self._dice.uniform(*STAY_S) if self.is_storming else float("inf")
        with trio.CancelScope() as stay:
            async with Client(self._dial, name="torture") as client:
                stay.deadline = trio.current_time() + stay_s
                while True:
                    if self._ticket is None:
                        call = client.call(self._story.tool, self._arguments)
                    else:
                        call = client.resume(Ticket.parse(self._ticket))
                    async with call:
                        await self._read(call, self._story)
                    if self._story.tool not in SHORT or not self.is_storming:
                        break
                    self._ledger.settle(self._story)
                    self._begin_short()
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
