"""Reads the lines of streams, as much as one write of a connection takes.

The store is asked for a number of stored runs, not of bytes: a function that stops at a number of
bytes takes twenty times as long. So the usual length of a stream's runs is remembered.

The lines that this replica has written not long ago are in memory, too: the store is not asked for
them.

A client that is far behind is read ahead for: the store collects the next runs while the last ones
are written to that client.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from streams.journal.newest import NewestRuns
from streams.journal.redis import codec
from streams.journal.redis.link import Asked, Link
from streams.journal.runs import joined, keep_freed_memory
from streams.messages import Run

READS_MAX: Final = 2  # round trips of one read
FIRST_RUNS: Final = 2  # of a stream whose usual length is unknown: it may have one, and no more
# Stored runs of one answer. They may be longer than is usual, 252 KiB each: that bounds what is
# read in vain, and for how long the store does nothing else.
RUNS_AT_ONCE: Final = 256
RUNS_AT_FIRST: Final = 64  # before the runs that are next have been seen
USUAL_MAX: Final = 10_000  # streams whose usual length of runs is remembered
LAST_ID: Final = b"18446744073709551615-18446744073709551615"  # XRANGE takes no id behind it
AHEAD_MAX: Final = 8  # streams that are read ahead at the same time; about 256 KiB each
AHEAD_S: Final = 1.0  # after which a client is known to be slow, or gone


class _Ahead(msgspec.Struct, frozen=True):
    """Runs that the store was asked for, and the line that they follow. `at` is trio's time."""

    after: int
    at: float
    asked: Asked


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
        entries, has_more = await self._entries(stream, after, bytes_max)
        runs: list[Run] = []
        for entry_id, fields in entries:
            last, count = map(int, entry_id.split(b"-"))
            if fields[0] == codec.LOST:
                if runs:
                    break
                after = max(after, last)
            elif fields[0] == codec.LINES and count and fields[1].endswith(b"\n"):
                runs.append(Run(last + 1 - count, count, fields[1]))
            else:
                complaints, part = self._link.servers.complaints, f"entry {entry_id.decode()}"
                complaints.ignored(f"{self._prefix}l:{stream}", "it is no run of lines", part)
        found = joined(runs, after, bytes_max)
        if found and has_more:
            self._read_ahead(stream, found[-1].last, bytes_max)
        return found

    def expect(self, stream: str, after: int, bytes_max: int) -> None:
        """See `Journal.expect`."""
        if not self._newest.after(stream, after):
            self._read_ahead(stream, after, bytes_max)

    async def _entries(self, stream: str, after: int, bytes_max: int) -> tuple[list[Any], bool]:
        """The stored runs after a line, about as many as fit, and whether there may be more.

        A run that does not fit is read twice.
        """
        ahead = await self._take_ahead(stream, after)
        if ahead:
            self._remember(stream, ahead)
            return ahead, True
        found: list[Any] = []
        size, usual = 0, self._usual.get(stream, 0)
        for _ in range(READS_MAX):
            known = RUNS_AT_ONCE if found else RUNS_AT_FIRST
            most = _runs_of(bytes_max - size, usual, known)
            first = b"(" + found[-1][0] if found else b"%d-0" % (after + 1)
            [some] = await self._link.read([self._xrange(stream, first, most)])
            some = some or []  # None for a key of another type
            found += some
            if not found:
                return found, False
            usual = self._remember(stream, found)
            size = usual * len(found)
            if len(some) < most or found[-1][0] == LAST_ID:
                return found, False
            if size + usual > bytes_max:
                break
        return found, True

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

    def _read_ahead(self, stream: str, after: int, bytes_max: int) -> None:
        """Ask for the runs after a line, without waiting for them."""
        now = trio.current_time()
        self._ahead = {
            each: ahead for each, ahead in self._ahead.items() if ahead.at > now - AHEAD_S
        }
        if len(self._ahead) >= AHEAD_MAX:
            return
        most = _runs_of(bytes_max, self._usual.get(stream, 0), RUNS_AT_ONCE)
        asked = self._link.ask(*self._xrange(stream, b"%d-0" % (after + 1), most))
        if asked is not None:
            self._ahead[stream] = _Ahead(after, now, asked)

    async def _take_ahead(self, stream: str, after: int) -> list[Any]:
        """The runs that were read ahead; empty if they were not, or if that has failed.

        They may lack what was committed since: a reader that finds too little reads again.
        """
        ahead = self._ahead.pop(stream, None)
        if ahead is None or ahead.after != after or ahead.at <= trio.current_time() - AHEAD_S:
            return []
        found: list[Any] | None = await ahead.asked.answer()
        return found or []


def _runs_of(size: int, usual: int, at_most: int) -> int:
    """How many runs have this size; `usual` is that of one, or 0 if it is unknown."""
    return min(max(1, size // usual), at_most) if usual else FIRST_RUNS
