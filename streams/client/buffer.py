"""What has come for a call and waits to be read: batches of lines, and how they are looked at."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from streams.messages import (
    BATCH_LINES_MAX,
    Block,
    Incoming,
    Message,
    TooLarge,
    look,
    look_at_lines,
    skip_lines,
)

# What may wait before the connection is held up. One receive may come on top.
BUFFER_BYTES_MAX: Final = 1024 * 1024
BUFFER_LINES_MAX: Final = 10_000

# What is kept of a call that was left, for whoever comes back to it over the same connection.
LEFT_BYTES_MAX: Final = 256 * 1024
LEFT_LINES_MAX: Final = 2_500


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Some lines of one call, at most `BATCH_LINES_MAX`, each ended by a newline.

    `is_plain` where they are known to begin as notifications. One that was too large stands alone.
    """

    count: int
    body: bytes
    is_plain: bool = False
    lost: TooLarge | None = None

    @classmethod
    def of(cls, line: Incoming) -> "Batch":
        """One line, which comes without its newline."""
        if isinstance(line, TooLarge):
            return cls(1, b"", lost=line)
        return cls(1, line + b"\n")

    def until(self, count: int) -> "Batch":
        """The first `count` lines."""
        if count == self.count:
            return self
        return Batch(count, self.body[: skip_lines(self.body, 0, count)], self.is_plain)

    def after(self, count: int) -> "Batch":
        """All but the first `count` lines."""
        if count == 0:
            return self
        body = self.body[skip_lines(self.body, 0, count) :]
        return Batch(self.count - count, body, self.is_plain)

    @property
    def lines(self) -> list[Incoming]:
        """The lines, without their newlines."""
        if self.lost is not None:
            return [self.lost]
        return list(self.body.removesuffix(b"\n").split(b"\n"))

    @property
    def last(self) -> Incoming:
        """The last line, without its newline."""
        return self.lost or self.body[self.body.rfind(b"\n", 0, -1) + 1 : -1]


def cut(block: Block, at: int, most: int) -> tuple[Batch, int]:
    """The next line of a block from `at` on, or up to `most` of them, and where they end.

    Blank lines are left out, which may leave nothing.
    """
    end, count, is_plain = block.measure(at, min(most, BATCH_LINES_MAX))
    body = block.data[at:end]
    if not is_plain and body.count(b"\n") > count:
        body = b"".join(line + b"\n" for line in body.split(b"\n") if line)
    return Batch(count, body, is_plain), end


class Inbox:
    """Batches in order. Who puts is asked to wait for room; nothing is thrown away but all."""

    def __init__(self) -> None:
        self.is_dropped = False  # nothing is kept any more
        self._batches: deque[Batch] = deque()
        self._lines = 0
        self._bytes = 0
        self._changed = trio.Event()
        self._has_room = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that more should not come."""
        return self._lines >= BUFFER_LINES_MAX or self._bytes >= BUFFER_BYTES_MAX

    @property
    def is_too_much_to_keep(self) -> bool:
        """Whether more waits than is kept for nobody in particular."""
        return self._lines > LEFT_LINES_MAX or self._bytes > LEFT_BYTES_MAX

    def put(self, batch: Batch) -> None:
        """Keep lines until they are taken."""
        if self.is_dropped:
            return
        self._batches.append(batch)
        self._bytes += len(batch.body)
        self._lines += batch.count
        self.stir()

    def take(self) -> Batch:
        """The oldest batch. Raises `IndexError` when there is none."""
        batch = self._batches.popleft()
        self._lines -= batch.count
        self._bytes -= len(batch.body)
        if not self.is_full:
            self.make_room()
        return batch

    def drop(self) -> None:
        """Throw everything away, and whatever comes."""
        self.is_dropped = True
        self._batches.clear()
        self._lines = self._bytes = 0
        self.make_room()

    def stir(self) -> None:
        """Wake who reads: there is something to see."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until there is something to see."""
        self._changed = trio.Event()
        await self._changed.wait()

    def make_room(self) -> None:
        """Wake who waits for room."""
        self._has_room.set()

    async def room(self) -> None:
        """Wait until something was taken or dropped, or nobody minds any more."""
        self._has_room = trio.Event()
        await self._has_room.wait()


# What `look` raises for what is no message, a `TooLarge` among them.
_UNREADABLE: Final = (ValueError, TypeError, RecursionError)


def look_at(batch: Batch) -> tuple[Sequence[Message], Incoming | None]:
    """The messages up to the first line that is none, and that line."""
    try:
        found = look_at_lines(batch.body)
        if len(found) == batch.count:
            return found, None
    except _UNREADABLE:
        pass  # the loop below finds out where
    found = []
    for line in batch.lines:
        message = try_look(line)
        if message is None:
            return found, line
        found.append(message)
    return found, None


def try_look(line: Incoming) -> Message | None:
    """The message in a line, or None where there is none: whoever reads it is told."""
    try:
        return look(line)
    except _UNREADABLE:
        return None
