"""What the responses of an HTTP channel have brought and nobody has received yet: bounded."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from streams.messages import Block, RequestId, TooLarge

# What waits to be received before bodies are not read on. Each of them may hold a read more.
INBOX_BYTES_MAX: Final = 1024 * 1024

# How far a response has come: its request, and the id of its last event; empty for none.
Mark = tuple[RequestId, bytes]


class Inbox:
    """What has come and waits to be received."""

    def __init__(self) -> None:
        self.ended: str | None = None  # why no more comes
        self.event_ids: dict[RequestId, bytes] = {}  # of the last events that are done with
        self._batches: deque[tuple[Sequence[Block | TooLarge], int, Mark | None]] = deque()
        self._mark: Mark | None = None  # of what was received last
        self._bytes = 0
        self._has_come = trio.Event()
        self._has_room = trio.Event()
        self._turn = trio.StrictFIFOLock()  # who waits for room, before the others who have more

    async def put(
        self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None
    ) -> None:
        """Hand over blocks in one piece, when there is room; once it is over, to nobody."""
        async with self._turn:
            while self._bytes >= INBOX_BYTES_MAX and self.ended is None:
                self._has_room = trio.Event()
                await self._has_room.wait()
            self.add(blocks, size, mark)

    def add(self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None) -> None:
        """Hand over blocks, room or not: for few and small ones."""
        if self.ended is None:
            self._add(blocks, size, mark)

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
        """The next lines; those before them are done with. Raises `trio.EndOfChannel`."""
        self._note()
        await trio.lowlevel.checkpoint()
        while not self._batches:
            if self.ended is not None:
                raise trio.EndOfChannel(self.ended)
            self._has_come = trio.Event()
            await self._has_come.wait()
        blocks, size, self._mark = self._batches.popleft()
        self._bytes -= size
        self._has_room.set()
        return blocks

    def _note(self) -> None:
        if self._mark is not None:
            request_id, event_id = self._mark
            self._mark = None
            if event_id:
                self.event_ids[request_id] = event_id
            else:
                self.event_ids.pop(request_id, None)

    def _add(self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None) -> None:
        self._batches.append((blocks, size, mark))
        self._bytes += size
        self._has_come.set()
