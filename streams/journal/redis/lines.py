"""Reads the lines of streams, as much as one write of a connection takes.

The store is asked for a number of stored runs, not of bytes: a function that stops at a number of
bytes takes twenty times as long. So the usual length of a stream's runs is remembered.

The lines that this replica has written not long ago are in memory, too: the store is not asked for
them.

A client that is far behind is read ahead for: the store collects the next runs while the last ones
are written to that client. One answer has the runs of several writes, up to a mebibyte.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from streams.journal.newest import NewestRuns
from streams.journal.redis import codec
from streams.journal.redis.link import Asked, Link
from streams.journal.runs import joined, keep_freed_memory
from streams.limits import MIB
from streams.messages import Run

READS_MAX: Final = 2  # round trips of one read
FIRST_RUNS: Final = 2  # of a stream whose usual length is unknown: it may have one, and no more
# Stored runs of one answer. They may be longer than is usual, 252 KiB each: that bounds what is
# read in vain, and for how long the store does nothing else.
RUNS_AT_ONCE: Final = 256
RUNS_AT_FIRST: Final = 64  # before the runs that are next have been seen
USUAL_MAX: Final = 10_000  # streams whose usual length of runs is remembered
LAST_ID: Final = b"18446744073709551615-18446744073709551615"  # XRANGE takes no id behind it
AHEAD_MAX: Final = 8  # streams that are read ahead at the same time
AHEAD_BYTES: Final = MIB  # of one of them in an answer; as much again may be in memory
AHEAD_S: Final = 1.0  # after which a client is known to be slow, or gone


class _Ahead(msgspec.Struct):
    """Stored runs that were read ahead of a client, and a request for those behind them."""

    after: int = 0  # the line that all of it follows
    at: float = 0.0  # in trio's time
    entries: list[Any] = []
    asked: Asked | None = None
    runs: int = 0  # that were asked for
    size: int = 0  # to ask for next, in bytes; it doubles as long as the client reads in time
    has_more: bool = False  # whether the store may have more behind `entries`

    async def fetch(self) -> None:
        """Wait for the answer, once the entries are used up. It may have failed, or be empty."""
        if not self.entries and self.asked is not None:
            asked, self.asked = self.asked, None
            self.entries = await asked.answer() or []
            self.has_more = len(self.entries) >= self.runs


class Lines:
    """The lines of all streams of a journal."""

    def __init__(self, link: Link, prefix: str, newest: NewestRuns) -> None:
        """`prefix` is that of the journal's keys, with its braces and its colon. `newest` has what
        this replica has written last."""
        self._link = link
        self._newest = newest
        self._prefix = prefix
        self._usual: dict[str, int] = {}  # bytes of a stored run
        self._ahead: dict[str, _Ahead] = {}
        keep_freed_memory()

    async def read(self, stream: str, after: int, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`. It passes over lines that were lost, and stops before them.

        Entries of other programs are ignored. The next commit of lines removes those at the end.
        """
        if newest := self._newest.after(stream, after):
            await trio.lowlevel.checkpoint()
            return joined(newest, after, bytes_max)
        ahead = self._take_ahead(stream, after)
        await ahead.fetch()
        if ahead.entries:
            self._remember(stream, ahead.entries)
        else:
            ahead = await self._asked(stream, after, bytes_max)
        runs: list[Run] = []
        size = 0
        for entry_id, fields in ahead.entries:
            last, count = map(int, entry_id.split(b"-"))
            if fields[0] == codec.LOST:
                if runs:
                    break
                after = max(after, last)
            elif fields[0] == codec.LINES and count and fields[1].endswith(b"\n"):
                if runs and size >= bytes_max:
                    break
                runs.append(Run(last + 1 - count, count, fields[1]))
                size += len(fields[1])
            else:
                complaints, part = self._link.servers.complaints, f"entry {entry_id.decode()}"
                complaints.ignored(f"{self._prefix}l:{stream}", "it is no run of lines", part)
        found = joined(runs, after, bytes_max)
        if found:
            self._keep_ahead(stream, found[-1].last, ahead)
        return found

    def expect(self, stream: str, after: int, bytes_max: int) -> None:
        """See `Journal.expect`."""
        if not self._newest.after(stream, after):
            self._keep_ahead(stream, after, _Ahead(size=bytes_max, has_more=True))

    async def _asked(self, stream: str, after: int, bytes_max: int) -> _Ahead:
        """The stored runs after a line, about as many as fit."""
        found: list[Any] = []
        has_more = True
        size, usual = 0, self._usual.get(stream, 0)
        for _ in range(READS_MAX):
            known = RUNS_AT_ONCE if found else RUNS_AT_FIRST
            most = _runs_of(bytes_max - size, usual, known)
            first = b"(" + found[-1][0] if found else b"%d-0" % (after + 1)
            [some] = await self._link.read([self._xrange(stream, first, most)])
            some = some or []  # None for a key of another type
            found += some
            has_more = len(some) == most and found[-1][0] != LAST_ID
            if found:
                usual = self._remember(stream, found)
                size = usual * len(found)
            if not has_more or size + usual > bytes_max:
                break
        return _Ahead(entries=found, size=bytes_max, has_more=has_more)

    def _xrange(self, stream: str, first: bytes, most: int) -> Sequence[Any]:
        return (b"XRANGE", f"{self._prefix}l:{stream}", first, b"+", b"COUNT", most)

    def _remember(self, stream: str, entries: Sequence[Any]) -> int:
        """Remember the usual length of a stream's runs, and return it."""
        self._usual.pop(stream, None)
        usual = max(1, sum(len(fields[1]) for _, fields in entries) // len(entries))
        self._usual[stream] = usual
        if len(self._usual) > USUAL_MAX:
            del self._usual[next(iter(self._usual))]
        return usual

    def _take_ahead(self, stream: str, after: int) -> _Ahead:
        """The runs that were read ahead for a reader at this line.

        They may lack what was committed since: a reader that finds too little reads again.
        """
        ahead = self._ahead.pop(stream, None)
        if ahead is None or ahead.after != after or ahead.at <= trio.current_time() - AHEAD_S:
            return _Ahead()
        return ahead

    def _keep_ahead(self, stream: str, after: int, ahead: _Ahead) -> None:
        """Keep what follows a line, and ask for more without waiting for it."""
        now = trio.current_time()
        self._ahead = {each: kept for each, kept in self._ahead.items() if kept.at > now - AHEAD_S}
        if len(self._ahead) >= AHEAD_MAX:
            return
        last = after
        if ahead.entries:
            last = max(after, _last_of(ahead.entries[-1]))
            ahead.entries = [each for each in ahead.entries if _last_of(each) > after]
        if ahead.asked is None and ahead.has_more:
            ahead.runs = _runs_of(ahead.size, self._usual.get(stream, 0), RUNS_AT_ONCE)
            ahead.size = min(2 * ahead.size, AHEAD_BYTES)
            ahead.asked = self._link.ask(*self._xrange(stream, b"%d-0" % (last + 1), ahead.runs))
        if ahead.entries or ahead.asked is not None:
            ahead.after, ahead.at = after, now
            self._ahead[stream] = ahead


def _last_of(entry: Any) -> int:
    """The seq of the last line of an entry."""
    return int(entry[0].partition(b"-")[0])


def _runs_of(size: int, usual: int, at_most: int) -> int:
    """How many runs have this size; `usual` is that of one, or 0 if it is unknown."""
    return min(max(1, size // usual), at_most) if usual else FIRST_RUNS
