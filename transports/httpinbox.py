"""What the responses of an HTTP channel have brought and nobody has received yet: bounded."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from streams.blocks import Block
from streams.messages import TooLarge

# What waits to be received before bodies are not read on. Each of them may hold a read more.
INBOX_BYTES_MAX: Final = 1024 * 1024


class Inbox:
    """What has come and waits to be received."""

    def __init__(self) -> None:
        self.ended: str | None = None  # why no more comes
        self._batches: deque[tuple[Sequence[Block | TooLarge], int]] = deque()
        self._bytes = 0
        self._has_come = trio.Event()
        self._has_room = trio.Event()
        self._turn = trio.StrictFIFOLock()  # who waits for room, before the others who have more

    async def put(self, blocks: Sequence[Block | TooLarge], size: int) -> None:
        """Hand over blocks in one piece, when there is room; once it is over, to nobody."""
        async with self._turn:
            while self._bytes >= INBOX_BYTES_MAX and self.ended is None:
                self._has_room = trio.Event()
                await self._has_room.wait()
            self.add(blocks, size)

    def add(self, blocks: Sequence[Block | TooLarge], size: int) -> None:
        """Hand over blocks, room or not: for few and small ones."""
        if self.ended is None:
            self._add(blocks, size)

    def end(self, why: str, last: Sequence[Block | TooLarge]) -> None:
        """Nothing comes after `last`."""
        if self.ended is None:
            self.ended = why
            if last:
                self._add(last, 0)
            self._has_come.set()
            self._has_room.set()

    def drop(self) -> None:
        """Nobody receives any more."""
        self._batches.clear()

    async def take(self) -> Sequence[Block | TooLarge]:
        """The next lines. Raises `trio.EndOfChannel`."""
        await trio.lowlevel.checkpoint()
        while not self._batches:
            if self.ended is not None:
                raise trio.EndOfChannel(self.ended)
            self._has_come = trio.Event()
            await self._has_come.wait()
        blocks, size = self._batches.popleft()
        self._bytes -= size
        self._has_room.set()
        return blocks

    def _add(self, blocks: Sequence[Block | TooLarge], size: int) -> None:
        self._batches.append((blocks, size))
        self._bytes += size
        self._has_come.set()
