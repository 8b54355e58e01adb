"""Connections that are cut before the answer to a call has come, over any transport."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from streams.exchange import ClientChannel, Dialer
from streams.messages import Block, TooLarge

Then = Callable[[], Awaitable[object]]


class Cutting:
    """A `Dialer` whose connections are cut after a call was sent, `cuts` times.

    The client gets no answer to that call. Where `is_sent` is false the server does not get the
    call either. `then` is awaited before the cut.
    """

    def __init__(self, dialer: Dialer, cuts: int, *, is_sent: bool = True) -> None:
        self.connections = 0
        self.cuts_left = cuts
        self.is_sent = is_sent
        self.then: Then = trio.lowlevel.checkpoint
        self._dialer = dialer

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[ClientChannel]:
        async with self._dialer() as channel:
            self.connections += 1
            yield _Cut(self, channel)


class _Cut:
    def __init__(self, cutting: Cutting, channel: ClientChannel) -> None:
        self._cutting = cutting
        self._channel = channel
        self._scope = trio.CancelScope()  # of the task that receives
        self._is_over = trio.Event()
        self._is_deaf = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, *lines: bytes) -> None:
        cutting = self._cutting
        if not (cutting.cuts_left and b'"tools/call"' in b"".join(lines)):
            await self._channel.send(*lines)
            return
        cutting.cuts_left -= 1
        self._is_deaf = True
        if cutting.is_sent:
            await self._channel.send(*lines)
        await cutting.then()
        self._is_over.set()
        raise trio.BrokenResourceError("cut")

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        blocks = await self._channel.receive_blocks()
        if self._is_deaf:
            await self._is_over.wait()
            raise trio.EndOfChannel("cut")
        return blocks
