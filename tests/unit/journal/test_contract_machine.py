"""The journal in a file against the one in memory, through anything that may happen."""

import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from streams.errors import JournalError
from streams.journal.memory import MemoryJournal
from streams.journal.records import (
    Ack,
    Answered,
    Append,
    Change,
    Checkpoint,
    Close,
    Create,
    Evict,
    Forget,
    Outcome,
    Record,
    Restart,
    Restarted,
    apply,
)
from streams.journal.sessions import DropGrant, DropSession, SaveGrant, SaveSession, SessionChange
from streams.journal.sqlite import SQLiteStore
from streams.journal.sqlite.log import Budget
from tests.rigs.journals import PLENTY, append, as_one, grant, lines, record, session

_T = TypeVar("_T")
STREAMS = ("a", "b", "c")
SESSIONS = ("k", "l")
DELIVERIES = ("d", "e")
NAMES = (1, 2, 5, 3000)  # of which each stream has its own
Step = tuple[str, str, int, int, bool]
KINDS = (
    *("create", "append", "append", "append", "ack", "close", "forget", "rest", "rest"),
    *("checkpoint", "answered", "restarted"),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(STREAMS),
        st.sampled_from([0, 0, 0, -1, 1]),  # how far the numbers are off
        st.sampled_from([1, 2, 5, 3000]),  # how many lines
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
VISITS = st.lists(
    st.one_of(
        st.builds(session, st.sampled_from(SESSIONS), st.floats(0, 9)).map(SaveSession),
        st.sampled_from(SESSIONS).map(DropSession),
        st.builds(
            grant,
            st.sampled_from(SESSIONS),
            st.sampled_from(DELIVERIES),
            st.sampled_from(STREAMS),
            st.sampled_from([1, "1"]),
            takes_over=st.booleans(),
            start=st.integers(0, 9),
        ).map(SaveGrant),
        st.builds(DropGrant, st.sampled_from(SESSIONS), st.sampled_from(DELIVERIES)),
    ),
    max_size=4,
)


# From all that fits in memory to nothing that does.
BUDGETS = [
    Budget(),
    Budget(log_bytes=4000, segment_bytes=300, direct_bytes=2000, streams_max=2),
    Budget(log_bytes=300, segment_bytes=10_000, direct_bytes=100_000, wal_bytes=100_000),
    Budget(log_bytes=0, streams_max=0, wal_bytes=0),
]


def name_of(stream: str, number: int) -> bytes:
    return f"{stream}{number:015}".encode()


def run(call: Callable[..., Awaitable[_T]], *args: Any, **options: Any) -> _T:
    async def main() -> _T:
        return await call(*args, **options)

    return trio.run(main)


class SQLiteAgainstMemory(RuleBasedStateMachine):
    """Both are given the same changes; the file's process may die after any commit."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.generation = 0
        self.memory = MemoryJournal()
        self.expected: dict[str, Record] = {}

    @initialize(budget=st.sampled_from(BUDGETS))
    def open(self, budget: Budget) -> None:
        self.budget = budget
        path = self.directory / f"journal-{self.generation}"
        self.store = SQLiteStore(path, durability="process", budget=budget)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(steps=STEPS, visits=VISITS, data=st.data())
    def commit(self, steps: list[Step], visits: list[SessionChange], data: st.DataObject) -> None:
        changes: list[Change] = [self.change(*step) for step in steps]
        for visit in visits:
            changes.insert(data.draw(st.integers(0, len(changes))), visit)
        from_memory = run(self.memory.commit, changes)
        from_file = self.store.commit(changes)
        assert list(map(repr, from_file)) == list(map(repr, from_memory))

    def change(self, kind: str, stream: str, off: int, count: int, is_odd: bool) -> Change:
        """A change that fits, more often than not; `expected` goes along as an engine's would."""
        known = self.expected.get(stream) or record(stream)
        fence = known.fence + (off == 1 and is_odd)
        changes: dict[str, Change] = {
            "create": Create(
                record(
                    stream,
                    pages=() if is_odd else None,
                    restart=Restart() if off == 0 and not is_odd else None,
                )
            ),
            "checkpoint": Checkpoint(stream, fence, max(0, known.last + off), b"%d" % count),
            "answered": Answered(stream, fence, max(1, known.last + off), b"%d\n" % count),
            "restarted": Restarted(stream, fence, count, known.last),
            "append": self.append(known, fence, off, count, is_odd),
            "ack": Ack(stream, fence, known.acked + count + off),
            "close": Close(stream, fence, Outcome.CANCELLED, 6.0),
            "forget": Forget(stream, fence),
            "rest": Evict(stream, fence, float(count), is_odd, (name_of(stream, count),)),
        }
        with contextlib.suppress(JournalError):
            after = apply(self.expected.get(stream), changes[kind])
            self.expected.pop(stream, None)
            if after is not None:
                self.expected[stream] = after
        return changes[kind]

    def append(self, known: Record, fence: int, off: int, count: int, is_odd: bool) -> Append:
        first, last = max(1, known.last + 1 + off), known.last + max(1, count + off)
        more: dict[str, Any] = {}
        if is_odd and count == 2:
            more = {
                "outcome": Outcome.FAILED if known.last % 2 else Outcome.COMPLETED,
                "ended_at": 5.0,
            }
        if known.pages is not None:
            more["pages"] = (first, last) if count == 5 else ()
        return append(first, last, stream=known.stream, fence=fence, **more)

    @rule()
    def claim(self) -> None:
        records = self.store.claim()
        assert list(records) == list(run(self.memory.claim))
        self.expected = {
            stream: replace(r, fence=r.fence + 1) for stream, r in self.expected.items()
        }
        resident = {stream: r for stream, r in self.expected.items() if r.due_at is None}
        assert {r.stream: r for r in records} == resident

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open(self.budget)

    @rule(budget=st.sampled_from(BUDGETS))
    def crash(self, budget: Budget) -> None:
        """A killed process leaves the file and its WAL as they are."""
        old, self.generation = self.generation, self.generation + 1
        for suffix in ("", "-wal"):
            there = self.directory / f"journal-{old}{suffix}"
            shutil.copy(there, self.directory / f"journal-{self.generation}{suffix}")
        self.store.close()
        self.open(budget)

    @rule(
        stream=st.sampled_from(STREAMS), skip=st.integers(0, 4000), bytes_max=st.integers(1, 9999)
    )
    def read(self, stream: str, skip: int, bytes_max: int) -> None:
        """Where stored runs begin is each journal's own business."""
        known = self.expected.get(stream)
        after = known.trimmed + skip if known else skip
        read = as_one(self.store.read(stream, after, bytes_max=bytes_max))
        from_memory = run(self.memory.read, stream, after, bytes_max=bytes_max)
        assert (read is None) == (not from_memory)
        if read is not None:
            assert read == lines(after + 1, read.last)
            assert read.last <= self.expected[stream].last
            assert len(read.body) <= bytes_max or read.count == 1

    @invariant()
    def both_know_the_same_sessions_and_no_grant_of_what_is_gone(self) -> None:
        sessions, grants = self.store.sessions()
        assert (sessions, grants) == run(self.memory.sessions)
        assert {g.session for g in grants} <= {s.key for s in sessions}
        assert {g.stream for g in grants} <= self.expected.keys()

    @invariant()
    def both_find_the_same(self) -> None:
        tables, memory = self.store.lookups, self.memory
        assert tables.totals() == run(memory.totals)
        for only_unwanted in (False, True):
            due = run(memory.due, limit=2, only_unwanted=only_unwanted)
            assert [r.due_at for r in tables.due(limit=2, only_unwanted=only_unwanted)] == [
                r.due_at for r in due
            ]
        for only_read in (False, True):
            asked: dict[str, Any] = {"after": 0, "limit": 2, "only_read": only_read}
            found = run(memory.listed, "os(0)", **asked)
            assert tables.listed("os(0)", **asked) == found
        assert tables.count("os(0)") == run(memory.count, "os(0)")
        for stream in STREAMS:
            assert tables.find(stream) == run(memory.find, stream) == self.expected.get(stream)
            assert tables.grants(stream) == run(memory.grants, stream)
            names = [name_of(stream, number) for number in NAMES]
            known = [tables.named(name) for name in names]
            assert known == [run(memory.named, name) for name in names]
            assert set(known) <= {stream, None}

    @invariant()
    def all_that_is_kept_is_there(self) -> None:
        for stream, known in self.expected.items():
            body, after = b"", known.trimmed
            while (read := as_one(self.store.read(stream, after, bytes_max=PLENTY))) is not None:
                body, after = body + read.body, read.last
            assert body == lines(known.trimmed + 1, known.last).body


TestSQLiteAgainstMemory = SQLiteAgainstMemory.TestCase
TestSQLiteAgainstMemory.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[*HealthCheck]
)
