"""The answers of a journal that is not shared to the questions of replicas: there are no others."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf

import trio

from streams.journal.contract import News
from streams.journal.records import Record
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.webhooks import Webhook


class Alone:
    """The part of `streams.journal.contract.Journal` that is for replicas, of one without any.

    The engine calls nothing of this but `take` and `turn`.
    """

    replica = ""
    lease_s = inf

    @property
    def sizes(self) -> Mapping[str, int]:
        """See `Journal.sizes`."""
        return {}

    async def find(self, stream: str) -> Record | None:
        """See `Lookups.find`."""
        raise NotImplementedError

    async def sessions(self) -> tuple[Sequence[SessionRecord], Sequence[Grant]]:
        """See `Journal.sessions`."""
        raise NotImplementedError

    def expect(self, stream: str, after: int, *, bytes_max: int) -> None:
        """See `Journal.expect`."""

    async def session(self, key: str) -> SessionRecord | None:
        """See `Journal.session`."""
        records, _ = await self.sessions()
        return next((record for record in records if record.key == key), None)

    async def count_sessions(self, principal: str | None = None) -> int:
        """See `Journal.count_sessions`."""
        records, _ = await self.sessions()
        return sum(principal in (None, record.principal) for record in records)

    async def webhooks(self, *, limit: int) -> Sequence[Webhook]:
        """See `Journal.webhooks`."""
        raise NotImplementedError

    async def take_webhooks(self, now: float, until: float, *, limit: int) -> Sequence[Webhook]:
        """See `Journal.take_webhooks`. The process that takes them is the only one."""
        return [each for each in await self.webhooks(limit=limit) if each.due_at <= now]

    async def take(self, stream: str) -> Record | None:
        """See `Journal.take`."""
        return await self.find(stream)

    async def owned(self, *, after: int, limit: int) -> Sequence[Record]:
        """See `Journal.owned`."""
        await trio.lowlevel.checkpoint()
        return ()

    async def follow(self, stream: str) -> Record | None:
        """See `Journal.follow`."""
        return await self.find(stream)

    async def unfollow(self, stream: str) -> None:
        """See `Journal.unfollow`."""
        await trio.lowlevel.checkpoint()

    async def renew(self) -> Mapping[str, int] | None:
        """See `Journal.renew`."""
        await trio.lowlevel.checkpoint()
        return {}

    async def running(self, replicas: Sequence[str]) -> Mapping[str, int]:
        """See `Journal.running`."""
        await trio.lowlevel.checkpoint()
        return {}

    async def release(self) -> None:
        """See `Journal.release`."""
        await trio.lowlevel.checkpoint()

    async def post(self, stream: str, *bodies: bytes, is_kept: bool = True) -> bool:
        """See `Journal.post`."""
        await trio.lowlevel.checkpoint()
        return False

    async def send(self, replica: str, stream: str, *bodies: bytes, is_kept: bool = True) -> None:
        """See `Journal.send`."""
        await trio.lowlevel.checkpoint()

    async def news(self) -> News:
        """See `Journal.news`: there never are any."""
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        """See `Journal.turn`."""
        yield
