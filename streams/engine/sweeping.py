"""Streams at rest that nobody came for in time are given up.

They cost no memory, so nothing waits for them in it: the journal has them in the order in which
they are due. That was written when they went to rest, and since deadlines only move on, what is due
now may turn out to be due later: its client may have asked for it, or the server have been started
again. So it is looked at, and either put back further down or given up.
"""

import math
from collections.abc import Callable
from typing import Final

import trio

from streams.engine.cache import Resting
from streams.engine.committer import Committer
from streams.engine.index import Registry
from streams.engine.retry import patiently
from streams.engine.stream import Stream
from streams.journal.contract import Journal, Record, Rest

SWEPT_AT_ONCE: Final = 500  # then others have their turn
PAUSE_S: Final = 0.05


class Sweeper:
    """Gives up what is due among the streams at rest; `run` it in a task of its own."""

    def __init__(
        self,
        journal: Journal,
        streams: Registry,
        resting: Resting,
        committer: Committer,
        *,
        on_due: Callable[[Stream], None],
    ) -> None:
        self._journal = journal
        self._streams = streams
        self._resting = resting
        self._committer = committer
        self._on_due = on_due
        self._next_at = math.inf  # wall time
        self._is_earlier = trio.Event()

    def note(self, rest: Rest) -> None:
        """A stream was put to rest."""
        if rest.due_at < self._next_at:
            self._is_earlier.set()

    async def run(self) -> None:
        """Give up what is due, for ever."""
        while True:
            self._is_earlier = trio.Event()
            if await self._look():
                await trio.sleep(PAUSE_S)
            else:
                with trio.move_on_at(self._next_at - self._resting.wall_ahead_s):
                    await self._is_earlier.wait()

    async def _look(self) -> bool:
        """Look at those that are due first; whether any were due."""
        self._next_at = math.inf
        records = await patiently(lambda: self._journal.due(limit=SWEPT_AT_ONCE))
        is_any_due = False
        for record in records:
            assert record.due_at is not None
            if record.due_at - self._resting.wall_ahead_s > trio.current_time():
                self._next_at = record.due_at
                break
            await self._look_at(record)
            is_any_due = True
        if is_any_due:
            await self._committer.settled()  # else the same ones would come up again
        return is_any_due

    async def _look_at(self, record: Record) -> None:
        if self._resting.is_gone(record.stream):
            return
        stream = self._streams.get(record.stream)
        if stream is not None:
            self._resting.keep(stream)  # in memory it has a deadline of its own
            return
        state = self._resting.stand(record)
        assert state.deadline is not None
        if state.deadline > trio.current_time():
            self._resting.move(record, state)
            return
        stream = await patiently(lambda: self._resting.find(record.stream))
        if stream is not None and stream.record.due_at == record.due_at:
            self._on_due(stream)
