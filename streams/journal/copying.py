"""Copies everything of one journal into another, which is empty, and compares both afterwards.

No process may use either meanwhile. A stream is created in the target as it was before the first of
its lines that are kept; then the lines are appended, and what the client has is confirmed. So a
target is written by the same changes as ever, and no backend has code for copies. Records are the
same afterwards, apart from the leases: `fence` and `owner`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
import trio
from msgspec.structs import replace

from streams.errors import Full, JournalUnusable, Unavailable
from streams.journal.contract import Journal
from streams.journal.records import Ack, Append, Change, Create, Evict, Outcome, Record, Restore
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.webhooks import SaveWebhook, Webhook
from streams.messages import Run

STREAMS_AT_ONCE: Final = 32  # records that are in memory: a request may have 4 MiB
READ_BYTES: Final = 1024 * 1024  # of lines that are in memory
COMMIT_BYTES: Final = 1024 * 1024  # a larger commit is hardly faster
COMMIT_CHANGES: Final = 500
WEBHOOKS_MAX: Final = 1_000_000  # more than any queue has: they are copied all
# How often a commit is repeated while the journal cannot be written, and the pause: a failover of a
# store takes some seconds.
REPEATS_MAX: Final = 30
REPEAT_S: Final = 1.0

Named = tuple[Record, Sequence[bytes]]
Progress = Callable[[int, int], None]  # given what is done, and the total
NamesOf = Callable[[Record], Sequence[bytes]]


class Whole(Journal, Protocol):
    """A journal that can be read as a whole."""

    async def streams(self, after: int, limit: int) -> Sequence[Named]:
        """The records of streams with numbers above `after`, in that order, with their names.

        In a journal with one owner only evicted streams have names.
        """


class Copied(msgspec.Struct):
    """The size of a copy, as it was counted by the comparison of both journals."""

    streams: int = 0
    messages: int = 0
    bytes: int = 0  # of messages
    sessions: int = 0
    grants: int = 0


async def copy_journal(
    source: Whole,
    target: Whole,
    on_progress: Progress,
    names_of: NamesOf = lambda record: (),
) -> Copied:
    """Copy all of `source` into `target`, and compare them.

    `names_of` returns the names of a stream that is not evicted, of which `source` has no names.
    Raises `JournalUnusable` if the target is not empty or differs afterwards, and any error of
    either journal.
    """
    if await _has_anything(target):
        raise JournalUnusable("the target is not empty")
    writer = _Writer(target)
    sessions, grants = await source.sessions()
    for session in sessions:
        await writer.add(SaveSession(session), len(session.capabilities))
    walk = Walk(source, lambda done, total: on_progress(done, 2 * total))
    while found := await walk.next():
        record, names = found
        if not target.replica and _settled(record).lost is not None:
            raise JournalUnusable(
                f"stream {record.number} lacks messages that its store has lost, and only a store "
                "can tell its client so: wait until the call is forgotten, or copy to a store"
            )
        await _copy_stream(source, writer, record, names or names_of(record))
    for grant in grants:  # behind all streams, in the order in which they were saved
        await writer.add(SaveGrant(grant))
    for webhook in await source.webhooks(limit=WEBHOOKS_MAX):
        await writer.add(SaveWebhook(webhook), len(webhook.body))
    await writer.flush()
    return await _compare(source, target, lambda done, total: on_progress(total + done, 2 * total))


async def _has_anything(journal: Whole) -> bool:
    sessions, _ = await journal.sessions()
    return bool(sessions or await journal.streams(0, 1))


class Walk:
    """Goes through all streams of a journal.

    Numbers may be dense or far apart: `on_progress` is given the part that lies behind.
    """

    def __init__(self, journal: Whole, on_progress: Progress = lambda done, total: None) -> None:
        self._journal = journal
        self._on_progress = on_progress
        self._page: deque[Named] = deque()
        self._after = self._first = self._last = 0

    async def next(self) -> Named | None:
        """The next stream; None behind the last one."""
        if not self._page:
            self._page.extend(await self._journal.streams(self._after, STREAMS_AT_ONCE))
        if not self._page:
            return None
        found = self._page.popleft()
        number = found[0].number
        if not self._after:
            self._first, self._last = number, (await self._journal.totals()).last_number
        self._last = max(self._last, number)  # streams may begin meanwhile
        self._after = number
        self._on_progress(number - self._first, self._last - self._first + 1)
        return found


class _Writer:
    """Gathers changes into commits of a limited size."""

    def __init__(self, target: Journal) -> None:
        self._target = target
        self._changes: list[Change] = []
        self._bytes = 0

    async def add(self, change: Change, size: int = 0) -> None:
        self._changes.append(change)
        self._bytes += size
        if self._bytes >= COMMIT_BYTES or len(self._changes) >= COMMIT_CHANGES:
            await self.flush()

    async def flush(self) -> None:
        """Commit what was gathered. Raises the errors of `Journal.commit`."""
        changes, self._changes, self._bytes = self._changes, [], 0
        for repeats_left in reversed(range(REPEATS_MAX)):
            try:
                errors = await self._target.commit(changes) if changes else ()
            except Full:
                raise
            except Unavailable:
                if not repeats_left:
                    raise
                await trio.sleep(REPEAT_S)
            else:
                break
        if wrong := next(filter(None, errors), None):
            raise JournalUnusable(f"the target has refused a change: {wrong}")


async def _copy_stream(
    source: Whole, writer: _Writer, record: Record, names: Sequence[bytes]
) -> None:
    """Copy one stream. The changes lead from its first kept line to the record as it is."""
    stream, fence = record.stream, record.fence
    begun = _begun(record)
    is_evicted = record.due_at is not None
    await writer.add(Create(begun, () if is_evicted else tuple(names)), len(record.origin))
    for start, last in kept(record):
        after = start
        if after > begun.trimmed:  # a gap, of lines that the source's store has lost
            await writer.add(Restore(fence, replace(begun, last=after)))
        while after < last:
            for run in await read_kept(source, stream, after, last):
                await writer.add(_append(record, run), len(run.body))
                after = run.last
    if record.acked > begun.acked:
        await writer.add(Ack(stream, fence, record.acked))
    if record.due_at is not None:
        await writer.add(Evict(stream, fence, record.due_at, record.is_read, tuple(names)))
        for grant in await source.grants(stream):
            await writer.add(SaveGrant(grant))


def _begun(record: Record) -> Record:
    """The record before the first of the lines that are kept was appended."""
    first = record.trimmed
    given = replace(record, owner="", due_at=None, is_read=False, lost=_settled(record).lost)
    if first == record.last:
        return given
    return replace(
        given,
        outcome=Outcome.LIVE,
        last=first,
        acked=first,
        last_request=0,
        last_error=0,
        ended_at=0.0,
        pages=None if record.pages is None else (),
        lost=given.lost if given.lost is not None and given.lost[0] <= first else None,
    )


def _append(record: Record, run: Run) -> Append:
    is_last = run.last == record.last
    return Append(
        record.stream,
        record.fence,
        run,
        last_request=record.last_request,
        last_error=record.last_error,
        outcome=record.outcome if is_last else Outcome.LIVE,
        ended_at=record.ended_at if is_last else 0.0,
        pages=record.pages or () if is_last else (),
    )


def kept(record: Record) -> Iterator[tuple[int, int]]:
    """The lines that are kept: pairs of the seq before the first, and the last."""
    after, last, lost = record.trimmed, record.last, record.lost
    if lost is not None and after < lost[1]:
        if after + 1 < lost[0]:
            yield after, lost[0] - 1
        after = lost[1]
    if after < last or after > record.trimmed:
        yield after, last


async def read_kept(journal: Journal, stream: str, after: int, last: int) -> Sequence[Run]:
    """The first lines behind `after`, up to `last`. Raises `JournalUnusable` if any is missing."""
    found = await journal.read(stream, after, bytes_max=READ_BYTES)
    runs = [run.until(last) for run in found if run.seq <= last]
    if not runs:
        raise JournalUnusable(f"lines {after + 1} to {last} of a stream are missing")
    for run in runs:
        if run.body.count(b"\n") != run.count:
            raise JournalUnusable(f"lines {run.seq} to {run.last} of a stream are damaged")
    return runs


# The comparison


async def _compare(source: Whole, target: Whole, on_progress: Progress) -> Copied:
    """Count what both have. Raises `JournalUnusable` at the first difference."""
    found = Copied()
    walk = Walk(source, on_progress)
    while each := await walk.next():
        record, names = each
        copied = await target.find(record.stream)
        if copied is None or _settled(copied) != _settled(record):
            raise _differs(record, "its record differs")
        is_named = target.replica or record.due_at is not None
        for name in names if is_named else ():
            if await source.named(name) != await target.named(name):
                raise _differs(record, "another name leads to it")
        grants = await source.grants(record.stream)
        if list(grants) != list(await target.grants(record.stream)):
            raise _differs(record, "its grants differ")
        found.streams += 1
        found.grants += len(grants)
        await _compare_lines(source, target, record, found)
    count, walk = 0, Walk(target)
    while await walk.next():
        count += 1
    if count != found.streams:
        raise JournalUnusable(f"the copy has {count} streams, and the source {found.streams}")
    sessions, resident = await source.sessions()
    if (list(sessions), list(resident)) != tuple(map(list, await target.sessions())):
        raise JournalUnusable("the copy has other sessions than the source")
    found.sessions = len(sessions)
    waiting = list(await source.webhooks(limit=WEBHOOKS_MAX))
    if _in_order(waiting) != _in_order(await target.webhooks(limit=WEBHOOKS_MAX)):
        raise JournalUnusable("the copy has other webhooks than the source")
    return found


def _in_order(webhooks: Sequence[Webhook]) -> list[Webhook]:
    """Those that are due at the same time may come in any order."""
    return sorted(webhooks, key=lambda each: each.id)


async def _compare_lines(source: Whole, target: Whole, record: Record, found: Copied) -> None:
    for after, last in kept(record):
        digest, size = await _digest(source, record.stream, after, last)
        if await _digest(target, record.stream, after, last) != (digest, size):
            raise _differs(record, f"a line between {after + 1} and {last} differs")
        found.messages += last - after
        found.bytes += size


async def _digest(journal: Whole, stream: str, after: int, last: int) -> tuple[bytes, int]:
    """A digest of these lines, and their size."""
    digest, size = hashlib.sha256(), 0
    while after < last:
        for run in await read_kept(journal, stream, after, last):
            digest.update(run.body)
            size += len(run.body)
            after = run.last
    return digest.digest(), size


def _settled(record: Record) -> Record:
    """The record without its lease, and without a gap that its client has left behind."""
    is_passed = record.lost is not None and record.trimmed >= record.lost[1]
    return replace(record, owner="", fence=0, lost=None if is_passed else record.lost)


def _differs(record: Record, how: str) -> JournalUnusable:
    return JournalUnusable(f"stream {record.number} of the copy is not as in the source: {how}")
