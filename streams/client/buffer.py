"""The messages of a call between the connection and the reader: an inbox, and what it hands out.

Batches of lines wait in the `Inbox` as they came. The `Outlet` has one batch in hand. It decodes
that batch only when messages are asked for, and then hands out notifications straight from a list,
without a counter.
"""

import operator
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import msgspec
import trio
from msgspec import UNSET

from streams.messages import (
    BATCH_LINES_MAX,
    Block,
    Incoming,
    Message,
    Run,
    TooLarge,
    look,
    look_at_lines,
    skip_lines,
)

# How much may wait before the connection stops reading. One receive may come on top.
BUFFER_BYTES_MAX: Final = 1024 * 1024
BUFFER_LINES_MAX: Final = 10_000

# How much is kept of a call that its reader has left, for a reader that resumes it over the same
# connection.
LEFT_BYTES_MAX: Final = 256 * 1024
LEFT_LINES_MAX: Final = 2_500


_NO_MESSAGES: Final[Sequence[Message]] = ()


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Lines of one call, at most `BATCH_LINES_MAX`, each ended by a newline.

    `is_plain` means that every line is known to begin as a notification. A line that was too large
    is a batch of its own.
    """

    count: int
    body: bytes
    is_plain: bool = False
    lost: TooLarge | None = None

    @classmethod
    def of(cls, line: Incoming) -> "Batch":
        """A batch of one line, which comes without its newline."""
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
    """Take the next line of a block from `at` on, or up to `most` of them; return where they end.

    Blank lines are left out, so the batch may be empty.
    """
    if 0 < block.count <= most:
        return Batch(block.count, block.data, block.is_plain), block.end
    body, count, is_plain = block.take(at, min(most, BATCH_LINES_MAX))
    end = at + len(body)
    if not is_plain and body.count(b"\n") > count:
        body = b"".join(line + b"\n" for line in body.split(b"\n") if line)
    return Batch(count, body, is_plain), end


class Inbox:
    """A queue of batches. Its methods do not block: the connection asks for room by itself."""

    def __init__(self) -> None:
        self.is_dropped = False  # what is put is thrown away
        self._batches: deque[Batch] = deque()
        self._lines = 0
        self._bytes = 0
        self._changed = trio.Event()
        self._has_room = trio.Event()

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that the connection must stop reading."""
        return self._lines >= BUFFER_LINES_MAX or self._bytes >= BUFFER_BYTES_MAX

    @property
    def is_too_much_to_keep(self) -> bool:
        """Whether more waits than is kept for a call without a reader."""
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
        """The oldest batch. Raises `IndexError` if the inbox is empty."""
        batch = self._batches.popleft()
        self._lines -= batch.count
        self._bytes -= len(batch.body)
        if not self.is_full:
            self.make_room()
        return batch

    def drop(self) -> None:
        """Throw everything away, and all that comes later."""
        self.is_dropped = True
        self._batches.clear()
        self._lines = self._bytes = 0
        self.make_room()

    def stir(self) -> None:
        """Wake the reader, after a message or an error."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for a message or an error."""
        self._changed = trio.Event()
        await self._changed.wait()

    def make_room(self) -> None:
        """Wake the connection that waits for room."""
        self._has_room.set()

    async def room(self) -> None:
        """Wait until something was taken or dropped, or the reader has left."""
        self._has_room = trio.Event()
        await self._has_room.wait()


class Outlet:
    """Hands out one batch at a time, as messages or as runs, and counts them."""

    def __init__(self, after: int) -> None:
        self.messages: Iterator[Message] = iter(_NO_MESSAGES)  # notifications that are ready
        self._end = after  # the seq of the last of them
        self._before = after  # the seq up to which an earlier outlet has handed out
        self._batch: Batch | None = None
        self._start = after  # the seq ahead of the batch
        self._found: Sequence[Message] | None = None  # the decoded batch
        self.bad: Incoming | None = None  # the line behind `_found`, which is no message
        self._in_hand = 1  # messages in the piece that was handed out last

    @property
    def taken(self) -> int:
        """The seq up to which messages were handed out."""
        # An iterator over a list knows how much is left, so that the fast path needs no counter.
        return self._end - operator.length_hint(self.messages)

    @property
    def done(self) -> int:
        """The seq up to which the reader is done with messages, before it asks for the next one."""
        return max(self.taken - self._in_hand, self._before)

    @property
    def is_empty(self) -> bool:
        """Whether all of the batch was handed out, so that another may come."""
        return self._batch is None or self.taken - self._start >= self._batch.count

    def put(self, batch: Batch) -> None:
        """Hand out `batch` next."""
        self._start = self._end
        self._batch = batch
        self._found = self.bad = None

    def start_at(self, after: int) -> None:
        """Throw away what was not handed out, and go on behind the seq `after`."""
        self.drop()
        self._start = self._end = after

    def drop(self) -> None:
        """Throw away what was not handed out."""
        self._end = self.taken
        self.messages = iter(_NO_MESSAGES)
        self._batch = self._found = self.bad = None

    def step(self) -> None:
        """Count the message or line that `line_up` stopped at as handed out."""
        self._end += 1

    def line_up(self) -> Message | None:
        """Make the next notifications ready, if there are any.

        Otherwise return the next message, which is a request or the final response, or None if the
        next line is `bad`.
        """
        self._in_hand = 1
        at = self.taken - self._start
        found = self._look()
        end = _first_special(found, at)
        if at == end:
            return found[at] if at < len(found) else None
        self.messages = iter(found[at:end] if end - at < len(found) else found)
        self._end = self._start + end
        return None

    def run(self) -> tuple[Run | None, Message | None]:
        """The next lines as they came, and the request that they end with, if any.

        Without a run, returns the final response, or None if the next line is `bad`.
        """
        assert self._batch is not None
        at = self.taken - self._start
        self.messages, self._end = iter(_NO_MESSAGES), self._start + at
        end, special = self._batch.count, None
        if not self._batch.is_plain:
            found = self._look()
            end = _first_special(found, at)
            special = found[end] if end < len(found) else None
            if special is not None and special.method is not UNSET:
                end += 1  # a request ends its run
            elif end == at:
                return None, special
            else:
                special = None  # it begins the next run
        part = self._batch.until(end).after(at)
        self._in_hand = part.count
        self._end += part.count
        return Run(self._end + 1 - part.count, part.count, part.body), special

    def _look(self) -> Sequence[Message]:
        assert self._batch is not None
        if self._found is None:
            self._found, self.bad = look_at(self._batch)
        return self._found


def _first_special(found: Sequence[Message], at: int) -> int:
    """The index of the first request or response from `at` on, or the length of `found`."""
    if [message.id for message in found].count(UNSET) == len(found):
        return len(found)
    rest = range(at, len(found))
    return next((place for place in rest if found[place].id is not UNSET), len(found))


class Runs:
    """The messages of a call in runs; see `RunningCall.runs`."""

    def __init__(self, next_run: Callable[[], Awaitable[Run]]) -> None:
        self._next_run = next_run

    def __aiter__(self) -> "Runs":
        return self

    def __anext__(self) -> Awaitable[Run]:
        return self._next_run()


# `look` raises these for a line that is no message, or is a `TooLarge`.
_UNREADABLE: Final = (ValueError, TypeError, RecursionError)


def look_at(batch: Batch) -> tuple[Sequence[Message], Incoming | None]:
    """The messages up to the first line that is no message, and that line."""
    try:
        found = look_at_lines(batch.body)
        if len(found) == batch.count:
            return found, None
    except _UNREADABLE:
        pass  # the loop below finds the line
    found = []
    for line in batch.lines:
        message = try_look(line)
        if message is None:
            return found, line
        found.append(message)
    return found, None


def try_look(line: Incoming) -> Message | None:
    """The message in a line, or None: the reader of the call gets the error."""
    try:
        return look(line)
    except _UNREADABLE:
        return None
