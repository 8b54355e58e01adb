"""The users of a run with replicas: each makes one call after the other, and reads it to its end.

A user's client reconnects by itself. Now and then another client resumes the call by its ticket.
"""

from random import Random
from typing import Any, Final

import msgspec
import trio

from streams.cli.selftest.callers import ENDED, LASTING
from streams.cli.selftest.ledger import Story
from streams.cli.selftest.replicas.books import Account, Books
from streams.client.client import Client
from streams.errors import CallFailed, CallLost, CannotConnect, ClientError, StreamGone
from streams.exchange import Dialer
from streams.protocol.ticket import Ticket

CALL_S: Final = (5.0, 30.0)
PER_SECOND: Final = 3.0  # messages of one call
# A restarted tool repeats, silently and at its pace, what it did since its last checkpoint. That is
# no silence of the servers, so it is kept short.
FLUSH_EVERY: Final = (1, 2)
NOT_RESTARTED_ONE_IN: Final = 10  # a call that ends with its replica

STAY_S: Final = (5.0, 40.0)  # how long a user keeps a client
RETRY_S: Final = (0.02, 0.2)
PATIENCE_S: Final = 60.0
SHUTTING_DOWN: Final = "The server is shutting down"


class User:
    """Makes calls while `is_calling`."""

    def __init__(
        self,
        name: str,
        dialer: Dialer,
        books: Books,
        dice: Random,
        call_s: tuple[float, float],
    ) -> None:
        """A call takes `call_s`, from and to, without a fault."""
        self.is_calling = True
        self._call_s = call_s
        self._name = name
        self._dialer = dialer
        self._books = books
        self._dice = dice
        self._calls = 0
        self._ticket: Ticket | None = None

    async def run(self) -> None:
        """Call, until `is_calling` is False and the last call is over."""
        await trio.sleep(self._dice.uniform(0, 1))  # not all at once
        while self.is_calling:
            self._calls += 1
            count = int(PER_SECOND * self._dice.uniform(*self._call_s))
            is_lasting = self._dice.randrange(NOT_RESTARTED_ONE_IN) > 0
            tool = LASTING if is_lasting else "work"
            story = Story(f"{self._name}-{self._calls}", count, tool)
            self._ticket = None
            await self._see_through(self._books.begin(story))

    async def _see_through(self, account: Account) -> None:
        story = account.story
        while account in self._books.open:
            try:
                await self._visit(account)
            except CannotConnect:
                await trio.sleep(self._dice.uniform(*RETRY_S))
                continue
            except CallLost:
                pass  # there is no ticket
            except StreamGone as gone:
                self._begin_again(account, gone)
            except CallFailed as failed:
                if self._reason(failed) in ENDED and story.tool != LASTING:
                    self._books.interrupt(account)
                elif self._ticket is None and self._is_refused(failed):
                    self._books.refuse(account)
                    await trio.sleep(self._dice.uniform(*RETRY_S))
                else:
                    self._fail(account, failed)
            except ClientError as error:
                self._fail(account, error)
            if self._ticket is None and account in self._books.open:
                self._books.drop(account)

    def _begin_again(self, account: Account, gone: StreamGone) -> None:
        """After a gap that the server tells of, go on with the first message that is left."""
        is_gap = gone.reason == "messages_gone" and gone.earliest is not None
        if is_gap and self._ticket is not None:
            assert gone.earliest is not None
            self._books.tell_gap(account)
            self._ticket = msgspec.structs.replace(self._ticket, after=gone.earliest - 1)
        else:
            self._fail(account, gone)

    def _fail(self, account: Account, error: ClientError) -> None:
        data = f" {error.data}" if isinstance(error, CallFailed) else ""
        self._books.fail(
            f"{self._books.row.fault}: {account.story.name} ({account.story.tool}): {error!r}{data}"
        )
        self._books.drop(account)

    async def _visit(self, account: Account) -> None:
        """Make a client, and read for a while."""
        story = account.story
        stay_s = self._dice.uniform(*STAY_S) if self.is_calling else float("inf")
        with trio.move_on_after(stay_s):
            async with Client(self._dialer, name="torture", patience_s=PATIENCE_S) as client:
                if self._ticket is None:
                    call = client.call(story.tool, self._arguments(story))
                else:
                    call = client.resume(self._ticket)
                try:
                    async with call:
                        async for message in call:
                            self._books.look(account, message)
                        self._books.finish(account, await call.result())
                finally:
                    self._ticket = call.ticket or self._ticket

    def _arguments(self, story: Story) -> dict[str, Any]:
        return {
            "name": story.name,
            "count": story.count,
            "per_second": PER_SECOND,
            "flush_every": self._dice.randint(*FLUSH_EVERY),
            "notes": str(self._books.notes),
        }

    def _is_refused(self, failed: CallFailed) -> bool:
        """Whether the call has not begun: the server shuts down, or the store is away."""
        return SHUTTING_DOWN in str(failed) or self._reason(failed) == "unavailable"

    @staticmethod
    def _reason(failed: CallFailed) -> object:
        return failed.data.get("reason") if isinstance(failed.data, dict) else None
