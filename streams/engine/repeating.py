"""What a tool that is run again sends once more, held against what it has sent already.

Behind its last checkpoint a tool repeats what it did before its server died, and its messages of
then are in the journal: each is swallowed when it comes again. What is not the same ends the call,
for numbers that a client has seen cannot mean anything else.

Progress and log messages may have been dropped the first time, where the client read too slowly or
did not want them: one that is not the next in the journal is dropped once more.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import trio

from streams import messages
from streams.engine.lifecycle import Question
from streams.engine.retry import patiently
from streams.errors import Missing, Refusal, refusal
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.messages import Kind, RequestId


class Repetition:
    """The lines of a stream behind `position`, up to `last`, which are expected once more."""

    def __init__(self, journal: Journal, stream: str, position: int, last: int) -> None:
        self.position = position  # of the line that came again last
        self.has_dropped = False  # something since then
        self._journal = journal
        self._stream = stream
        self._last = last
        self._lines: deque[bytes] = deque()
        self._turn = trio.Lock()  # a tool may have several tasks that send

    @property
    def is_over(self) -> bool:
        """Whether all lines have come again."""
        return self.position == self._last

    async def swallow(self, line: bytes, *, is_droppable: bool = False) -> bool:
        """Whether this line needs no sending, for it was sent or dropped the first time.

        Raises `Refusal` where another one was sent in its place.
        """
        async with self._turn:
            if self.is_over:
                return False
            if await self._next() == line:
                self._take()
            elif is_droppable:
                self.has_dropped = True
            else:
                raise diverged("it sends another message than before")
            return True

    async def asked(self, method: str, params: Any) -> RequestId | None:
        """The id of this request when it was sent; None where it was not.

        Raises `Refusal` where another message was sent in its place.
        """
        async with self._turn:
            if self.is_over:
                return None
            line = await self._next()
            request_id = _request_id(line)
            if request_id is None or messages.request(request_id, method, params) != line:
                raise diverged(f"it asks for {method[:100]}, and did not at this point")
            self._take()
            return request_id

    async def questions(self) -> dict[RequestId, Question]:
        """The requests among the lines, before any has come again."""
        found: dict[RequestId, Question] = {}
        seq = self.position
        while seq < self._last:
            for line in await self._lines_after(seq):
                seq += 1
                request_id = _request_id(line)
                if request_id is not None:
                    found[request_id] = Question(seq, line)
        return found

    async def _next(self) -> bytes:
        if not self._lines:
            self._lines.extend(await self._lines_after(self.position))
        return self._lines[0]

    async def _lines_after(self, seq: int) -> Sequence[bytes]:
        runs = await patiently(
            lambda: self._journal.read(self._stream, seq, bytes_max=STORED_BYTES_MAX)
        )
        if not runs:
            raise Missing(seq + 1, self._last)
        return [line for run in runs for line in run.lines][: self._last - seq]

    def _take(self) -> None:
        self._lines.popleft()
        self.position += 1
        self.has_dropped = False


def _request_id(line: bytes) -> RequestId | None:
    """The id of a request; None for any other message."""
    message = messages.parse(line)
    if message.kind is not Kind.REQUEST:
        return None
    assert isinstance(message.id, int | str)
    return message.id


def diverged(why: str) -> Refusal:
    """How a call ends whose tool, run again, has not done the same as before."""
    return refusal("interrupted").saying(
        f"The server stopped, and the tool, run again, did not repeat itself ({why}): "
        "make the call again if that is safe."
    )
