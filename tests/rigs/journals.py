"""Streams, lines and sessions for the tests of journals, and how these look at one."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.memory import MemoryJournal
from streams.journal.records import Append, Change, Outcome, Record, Restart
from streams.journal.sessions import Grant, SessionRecord
from streams.journal.sqlite import open_sqlite_journal
from streams.messages import RequestId, Run
from tests.rigs.shared_memory import SharedStore

PLENTY = 1024 * 1024
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


async def applied(journal: Journal, *changes: Change) -> None:
    assert list(await journal.commit(changes)) == [None] * len(changes)


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
