"""What has come for a call and waits to be read: batches of lines, and how they are looked at."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from streams.messages import Incoming, Message, look

# What may wait before the connection is held up. One receive may come on top.
BUFFER_BYTES_MAX: Final = 1024 * 1024
BUFFER_LINES_MAX: Final = 10_000

# What is kept of a call that was left, for whoever comes back to it over the same connection.
LEFT_BYTES_MAX: Final = 256 * 1024
LEFT_LINES_MAX: Final = 2_500

# Batches are cut to this: it is what is looked at in one go, and after as many messages other tasks
# may run.
BATCH_LINES_MAX: Final = 200


class Inbox:
    """Batches in order. Who puts is asked to wait for room; nothing is thrown away but all."""

    def __init__(self) -> None:
        self.is_dropped = False  # nothing is kept any more
        self._batches: deque[tuple[Sequence[Incoming], int]] = deque()
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

    def put(self, lines: Sequence[Incoming]) -> None:
        """Keep lines until they are taken."""
        if self.is_dropped:
            return
        for start in range(0, len(lines), BATCH_LINES_MAX):
            batch = lines[start : start + BATCH_LINES_MAX]
            size = _size(batch)
            self._batches.append((batch, size))
            self._bytes += size
        self._lines += len(lines)
        self.stir()

    def take(self) -> tuple[Sequence[Incoming], int]:
        """The oldest batch and its bytes. Raises `IndexError` when there is none."""
        batch, size = self._batches.popleft()
        self._lines -= len(batch)
        self._bytes -= size
        if not self.is_full:
            self.make_room()
        return batch, size

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


def _size(lines: Sequence[Incoming]) -> int:
    try:
        return sum(map(len, lines))  # type: ignore[arg-type]  # nearly always true, and fast
    except TypeError:  # a TooLarge is among them
        return sum(len(line) for line in lines if isinstance(line, bytes))


# What `look` raises for what is no message, a `TooLarge` among them.
_UNREADABLE: Final = (ValueError, TypeError, RecursionError)


def look_at(lines: Sequence[Incoming]) -> tuple[list[Message], Incoming | None]:
    """The messages up to the first line that is none, and that line."""
    try:
        return list(map(look, lines)), None
    except _UNREADABLE:
        found: list[Message] = []
        for line in lines:
            message = try_look(line)
            if message is None:
                return found, line
            found.append(message)
        raise


def try_look(line: Incoming) -> Message | None:
    """The message in a line, or None where there is none: whoever reads it is told."""
    try:
        return look(line)
    except _UNREADABLE:
        return None
