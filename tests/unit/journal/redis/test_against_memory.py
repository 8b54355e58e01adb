"""The journal in a store against the one in memory, through anything that may happen."""

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, Final, cast

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change, Evict, Outcome, Record
from streams.journal.redis import open_redis_journal
from streams.journal.sessions import SessionChange
from tests.rigs.journals import PLENTY, Restarting, applied, as_one, lines
from tests.unit.journal.test_contract_machine import (
    NAMES,
    STEPS,
    STREAMS,
    VISITS,
    SQLiteAgainstMemory,
    Step,
    name_of,
)

_prefixes: Final = count()
EVENTS: Final = ("nothing", "nothing", "nothing", "claim", "reconnect", "repeat")
COMMITS: Final = st.lists(st.tuples(STEPS, VISITS, st.sampled_from(EVENTS)), max_size=8)


class Expected:
    """The records as an engine's memory has them; makes changes that fit, more often than not."""

    def __init__(self) -> None:
        self.expected: dict[str, Record] = {}

    def change(self, *step: Any) -> Change:
        return SQLiteAgainstMemory.change(cast(SQLiteAgainstMemory, self), *step)

    def append(self, *what: Any) -> Change:
        return SQLiteAgainstMemory.append(cast(SQLiteAgainstMemory, self), *what)


async def _named(journal: Journal, name: bytes) -> str | None:
    return await journal.named(name)


async def _evicted(journal: Journal, *, only_read: bool) -> list[Record]:
    """The streams that are listed. A shared journal lists those that are not evicted, too."""
    listed = await journal.listed("os(0)", after=0, limit=PLENTY, only_read=only_read)
    return [each for each in listed if each.due_at is not None]


async def compare(stored: Journal, memory: Journal, expected: Expected) -> None:
    """Everything that both can be asked has the same answer."""
    asked: list[Callable[[Journal], Awaitable[Any]]] = [
        lambda journal: journal.sessions(),
        lambda journal: journal.count("os(0)"),
        partial(_evicted, only_read=False),
        partial(_evicted, only_read=True),
        *(lambda journal, s=s: journal.find(s) for s in STREAMS),
        *(lambda journal, s=s: journal.grants(s) for s in STREAMS),
        *(partial(_named, name=name_of(s, n)) for s in STREAMS for n in NAMES),
    ]
    for ask in asked:
        found, known = await ask(stored), await ask(memory)
        assert found == known
    totals, known_totals = await stored.totals(), await memory.totals()
    assert totals == known_totals
    for only_unwanted in (False, True):
        due = await stored.due(limit=2, only_unwanted=only_unwanted)
        known_due = await memory.due(limit=2, only_unwanted=only_unwanted)
        assert [r.due_at for r in due] == [r.due_at for r in known_due]
    for stream, record in expected.expected.items():
        body, after = b"", record.trimmed
        while (read := as_one(await stored.read(stream, after, bytes_max=PLENTY))) is not None:
            body, after = body + read.body, read.last
        assert body == lines(record.trimmed + 1, record.last).body


async def rests(stored: Journal, memory: Journal, claimed: Record) -> bool:
    """Whether the store has left a stream without an owner, since it has ended. Then the journal in
    memory is told to evict it, too.
    """
    found = await stored.find(claimed.stream)
    if found is None or found.due_at is None:
        return False
    assert found.outcome is not Outcome.LIVE
    await applied(memory, Evict(claimed.stream, claimed.fence, found.due_at, found.is_read))
    return True


async def run(url: str, commits: list[tuple[list[Step], list[SessionChange], str]]) -> None:
    memory, expected = MemoryJournal(), Expected()
    async with open_redis_journal(url, prefix=f"machine-{next(_prefixes)}") as journal:
        stored = Restarting(journal)
        for steps, visits, event in commits:
            changes = [*(expected.change(*step) for step in steps), *visits]
            answers = await stored.commit(changes)
            assert list(map(repr, answers)) == list(map(repr, await memory.commit(changes)))
            match event:
                case "claim":
                    claimed = await stored.claim()
                    known = [
                        each
                        for each in await memory.claim()
                        if not await rests(cast(Journal, stored), memory, each)
                    ]
                    assert claimed == known
                    expected.expected = dict(memory._records)
                case "reconnect":
                    journal._writer.link.drop()
                    journal._reader.drop()
                case "repeat":  # the answer of the last commit was lost
                    journal._writer._is_in_doubt = True
                    journal._writer._doubtful.update(STREAMS)
                    await stored.commit(changes)
                    await memory.commit(changes)
                    expected.expected = dict(memory._records)
            await compare(cast(Journal, stored), memory, expected)


def test_both_journals_answer_the_same(store_url: Callable[[str], str]) -> None:
    url = store_url("redis")

    @settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
    @given(commits=COMMITS)
    def check(commits: list[tuple[list[Step], list[SessionChange], str]]) -> None:
        trio.run(run, url, commits)

    check()
