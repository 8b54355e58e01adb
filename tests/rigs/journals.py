"""Streams, lines and sessions for the tests of journals, and how these look at one."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import trio

from streams.errors import Unavailable
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.memory import MemoryJournal
from streams.journal.records import Append, Change, Evict, Outcome, Record, Restart
from streams.journal.redis import open_redis_journal
from streams.journal.redis.journal import RedisJournal
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite import open_sqlite_journal
from streams.messages import RequestId, Run
from tests.rigs.shared_memory import SharedStore

PLENTY = 1024 * 1024
PATIENCE_S = 60.0  # it only limits how long a failing test takes

_T = TypeVar("_T")
_prefixes = count()  # of journals in one store
SHORT_LEASE_S = 0.2  # tests wait for a replica that is gone

OpenJournal = Callable[[str], AbstractAsyncContextManager[Journal]]
OpenReplica = Callable[[], AbstractAsyncContextManager[Journal]]
Stored = tuple[list[SessionRecord], list[Grant]]


def record(
    stream: str = "s",
    fence: int = 1,
    pages: tuple[int, ...] | None = None,
    number: int = 0,
    restart: Restart | None = None,
) -> Record:
    """A record. Unless `number` is given, streams are numbered in alphabetical order."""
    return Record(
        stream=stream,
        principal="os(0)",
        origin=b'{"jsonrpc":"2.0","id":"1","method":"tools/call"}',
        min_s=1.5,
        max_s=3600.0,
        created_at=1_750_000_000.25,
        fence=fence,
        is_announced=True,
        pages=pages,
        number=number or int.from_bytes(stream.encode().ljust(7)[:7]),
        restart=restart,
    )


def lines(first: int, last: int) -> Run:
    body = b"".join(b'{"line":%d}\n' % n for n in range(first, last + 1))
    return Run(first, last + 1 - first, body)


def append(first: int, last: int, *, stream: str = "s", fence: int = 1, **more: Any) -> Append:
    given = {"last_request": 0, "last_error": 0} | more
    return Append(stream, fence, lines(first, last), **given)


def last_append(
    first: int, last: int, *, outcome: Outcome = Outcome.COMPLETED, at: float = 5.0, **more: Any
) -> Append:
    """Append lines with the final response among them."""
    return append(first, last, outcome=outcome, ended_at=at, **more)


def session(key: str = "k", seen_at: float = 1_750_000_000.25) -> SessionRecord:
    return SessionRecord(
        key=key,
        principal=f"session({key})",
        revision="2025-11-25",
        capabilities=b'{"streams":{}}',
        level="warning",
        seen_at=seen_at,
    )


def grant(
    session: str = "k",
    delivery: str = "d",
    stream: str = "s",
    reply_id: RequestId = 1,
    **more: Any,
) -> Grant:
    return Grant(session, delivery, stream, reply_id, **more)


def memory_journals() -> OpenJournal:
    """Journals in memory. A closed one can be opened again in this process."""
    journals: dict[str, MemoryJournal] = {}

    @asynccontextmanager
    async def open_memory_journal(name: str) -> AsyncIterator[Journal]:
        journal = journals.setdefault(name, MemoryJournal())
        yield journal
        await journal.aclose()

    return open_memory_journal


def journals(kind: str, folder: Path) -> OpenJournal:
    """Journals of a kind, in memory or in files of this folder."""
    if kind == "memory":
        return memory_journals()
    return lambda name: open_sqlite_journal(folder / name, durability="process")


def shared_journals(kind: str) -> OpenReplica:
    """Replicas of one shared journal of a kind."""
    assert kind == "memory"
    store = SharedStore(lease_s=SHORT_LEASE_S)

    @asynccontextmanager
    async def open_replica() -> AsyncIterator[Journal]:
        journal = store.open()
        yield journal
        await journal.aclose()

    return open_replica


def replicas_of(url: str) -> OpenReplica:
    """Replicas of one new journal in a store."""
    prefix = f"test-{next(_prefixes)}"
    return lambda: open_redis_journal(url, lease_s=SHORT_LEASE_S, prefix=prefix)


class Restarting:
    """A shared journal, for tests of one owner: `claim` does what a restart does.

    This replica releases all its streams, and claims all that have no owner. It takes the evicted
    ones, and evicts them again. Records say nothing of their owner, as in a journal that has no
    others.
    """

    def __init__(self, journal: RedisJournal) -> None:
        self._journal = journal
        self.rested: list[Record] = []  # streams that the last claim has left without an owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def claim(self) -> Sequence[Record]:
        owned = await self._journal.owned(after=0, limit=99)
        resident = {record.stream for record in owned if record.due_at is None}
        await self._journal.release()
        records: list[Record] = []
        self.rested = []
        while piece := await self._journal.claim():
            records += piece
        for record in await self._journal.due(limit=99):
            taken = await self._journal.take(record.stream)
            assert taken is not None
            assert taken.due_at is not None
            again = Evict(taken.stream, taken.fence, taken.due_at, taken.is_read)
            await applied(self._journal, again)
            if taken.stream in resident:
                self.rested.append(msgspec.structs.replace(_without_owner(taken), due_at=None))
        return sorted(map(_without_owner, records), key=lambda record: record.number)

    async def find(self, stream: str) -> Record | None:
        record = await self._journal.find(stream)
        return record and _without_owner(record)


def _without_owner(record: Record) -> Record:
    return msgspec.structs.replace(record, owner="")


def lone_journals(url: str) -> OpenJournal:
    """Journals in a store, each used by one process at a time."""
    base = f"test-{next(_prefixes)}"

    @asynccontextmanager
    async def open_lone_journal(name: str) -> AsyncIterator[Journal]:
        async with open_redis_journal(url, prefix=f"{base}-{name}") as journal:
            yield cast(Journal, Restarting(journal))

    return open_lone_journal


async def taken_over(journal: Journal) -> list[Record]:
    """The streams in memory after a restart, also those that have ended, which a shared journal
    leaves without an owner until their clients come.
    """
    claimed = [*await journal.claim(), *getattr(journal, "rested", ())]
    return sorted(claimed, key=lambda record: record.number)


async def applied(journal: Journal, *changes: Change) -> None:
    assert list(await journal.commit(changes)) == [None] * len(changes)


async def until_done(work: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat what is unavailable, as the engine does."""
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                return await work()
            except Unavailable:
                await trio.sleep(0.02)


async def stored(journal: Journal) -> Stored:
    sessions, grants = await journal.sessions()
    return list(sessions), list(grants)


def as_one(runs: Sequence[Run]) -> Run | None:
    """Consecutive runs as one run; None for an empty list."""
    if not runs:
        return None
    for run, follower in pairwise(runs):
        assert follower.seq == run.last + 1
    count = runs[-1].last + 1 - runs[0].seq
    return Run(runs[0].seq, count, b"".join(run.body for run in runs))


async def read_all(journal: Journal, after: int = 0, bytes_max: int = PLENTY) -> bytes:
    """All runs after `after`; each is checked on the way."""
    bodies = []
    while runs := await journal.read("s", after, bytes_max=bytes_max):
        assert sum(len(run.body) for run in runs) <= bytes_max or runs[0].count == 1
        for run in runs:
            assert run.seq == after + 1
            assert run.count == run.body.count(b"\n") > 0
            assert run.body.endswith(b"\n")
            assert len(run.body) <= STORED_BYTES_MAX or run.count == 1
            bodies.append(run.body)
            after = run.last
    return b"".join(bodies)
