"""What a call's reader is given next, and how far that is: messages, or whole runs of them.

One batch at a time is in hand. It stays as it came until messages are asked for; what is nothing
but notifications is then handed out straight from a list, without a counter.
"""

import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from msgspec import UNSET

from streams.client.buffer import Batch, look_at
from streams.messages import Incoming, Message, Run

_NOTHING: Final[Sequence[Message]] = ()


class Outlet:
    """Hands out what is in a batch, either way, and knows the numbers."""

    def __init__(self, after: int) -> None:
        self.messages: Iterator[Message] = iter(_NOTHING)  # notifications to be handed out
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
        self.messages = iter(_NOTHING)
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
        self.messages, self._end = iter(_NOTHING), self._start + at
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
