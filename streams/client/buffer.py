"""What has come for a call and waits to be read: batches of lines, and how they are looked at."""

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

# What may wait before the connection is held up. One receive may come on top.
BUFFER_BYTES_MAX: Final = 1024 * 1024
BUFFER_LINES_MAX: Final = 10_000

# What is kept of a call that was left, for whoever comes back to it over the same connection.
LEFT_BYTES_MAX: Final = 256 * 1024
LEFT_LINES_MAX: Final = 2_500


_NO_MESSAGES: Final[Sequence[Message]] = ()


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


class Outlet:
    """Hands out what is in a batch, either way, and knows the numbers."""

    def __init__(self, after: int) -> None:
        self.messages: Iterator[Message] = iter(_NO_MESSAGES)  # notifications to be handed out
        self._end = after  # the number of the last of them
        self._before = after  # what was taken before this object was made
        self._batch: Batch | None = None
        self._start = after  # the number of what came before the batch
        self._found: Sequence[Message] | None = None  # the batch, looked at
        self.bad: Incoming | None = None  # what follows that and is no message
        self._in_hand = 1  # how many messages were handed out in one piece

    @property
    def taken(self) -> int:
        """Everything up to here was handed out."""
        # An iterator over a list knows how much is left: nobody has to count.
        return self._end - operator.length_hint(self.messages)

    @property
    def done(self) -> int:
        """Everything up to here is done with, though the caller has not asked for more."""
        return max(self.taken - self._in_hand, self._before)

    @property
    def is_empty(self) -> bool:
        """Whether the batch was handed out, so that another may come."""
        return self._batch is None or self.taken - self._start >= self._batch.count

    def put(self, batch: Batch) -> None:
        """Have `batch` handed out next."""
        self._start = self._end
        self._batch = batch
        self._found = self.bad = None

    def start_at(self, after: int) -> None:
        """What comes next has the number behind `after`."""
        self.drop()
        self._start = self._end = after

    def drop(self) -> None:
        """Throw away what was not handed out."""
        self._end = self.taken
        self.messages = iter(_NO_MESSAGES)
        self._batch = self._found = self.bad = None

    def step(self) -> None:
        """What `line_up` came upon counts as handed out."""
        self._end += 1

    def line_up(self) -> Message | None:
        """Make ready the notifications that come next, if any do.

        Else returns what comes instead: a request or the final response, or None for what is
        `bad`.
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
        """What comes next as it came, and the request that it ends with, if it does.

        Without a run, the final response, or None for what is `bad`.
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
                end += 1  # a request is the last of a run
            elif end == at:
                return None, special
            else:
                special = None  # is next
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
    """Where the first request or response from `at` on stands; behind all where there is none."""
    if [message.id for message in found].count(UNSET) == len(found):
        return len(found)
    rest = range(at, len(found))
    return next((place for place in rest if found[place].id is not UNSET), len(found))


class Runs:
    """The messages of a call as they came; see `RunningCall.runs`."""

    def __init__(self, next_run: Callable[[], Awaitable[Run]]) -> None:
        self._next_run = next_run

    def __aiter__(self) -> "Runs":
        return self

    def __anext__(self) -> Awaitable[Run]:
        return self._next_run()


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
