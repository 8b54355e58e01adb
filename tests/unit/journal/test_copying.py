"""A copy of a journal has all of it, and a difference is found."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streams.errors import JournalUnusable, Unavailable
from streams.journal import copying
from streams.journal.copying import copy_journal
from streams.journal.memory import MemoryJournal
from streams.journal.records import (
    Ack,
    Answered,
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
)
from streams.journal.runs import joined
from streams.journal.sessions import SaveGrant, SaveSession
from streams.journal.sqlite import open_sqlite_journal
from streams.journal.webhooks import SaveWebhook, Webhook
from streams.messages import Run
from tests.rigs.journals import append, applied, grant, last_append, lines, record, session

NAME = b"n" * 16


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[Any]:
    async with open_sqlite_journal(tmp_path / "copy.db", durability="process") as journal:
        yield journal


def strange() -> Sequence[Change]:
    """Streams in every state that a journal keeps."""
    restart = Restart(caller=b"ada")
    return [
        Create(record("live", number=1)),
        append(1, 5, stream="live", last_request=4),
        Ack("live", 1, 2),
        Create(record("empty", number=2)),
        Create(record("ended", number=3)),
        append(1, 3, stream="ended"),
        last_append(4, 4, stream="ended", last_error=4),
        Ack("ended", 1, 1),
        Create(record("drained", number=4)),
        last_append(1, 2, stream="drained"),
        Ack("drained", 1, 2),
        Evict("drained", 1, 99.5, is_read=True, names=(NAME, b"m" * 16)),
        Create(record("lost", number=5)),
        append(1, 7, stream="lost"),
        Close("lost", 1, Outcome.ABANDONED, 12.5),
        Evict("lost", 1, 100.5),
        Create(record("restarts", number=6, restart=restart)),
        append(1, 9, stream="restarts"),
        Checkpoint("restarts", 1, 4, b'{"at":4}'),
        Answered("restarts", 1, 6, b'{"id":1}'),
        Restarted("restarts", 1, 2, 9),
        Ack("restarts", 1, 8),
        Create(record("pages", number=7, pages=())),
        append(1, 3, stream="pages", pages=(1, 3)),
        append(4, 6, stream="pages", pages=(5,)),
        Ack("pages", 1, 2),
        Create(record("forgotten", number=8)),
        Forget("forgotten", 1),
        Create(record("kept", number=2**40)),
        append(1, 2, stream="kept"),
        last_append(3, 3, stream="kept"),
        Evict("kept", 1, 50.0, names=(b"o" * 16,)),
        SaveSession(session("b")),
        SaveSession(session("a")),
        SaveGrant(grant("b", "late", "kept", "1")),
        SaveGrant(grant("a", "one", "live", 1, takes_over=True, start=2)),
        SaveGrant(grant("b", "two", "ended", 2**70)),
        SaveGrant(grant("b", "three", "live", "x")),
        SaveWebhook(Webhook("msg_1", "kept", "https://example.com/", b"{}", 9.5, 2)),
    ]


async def test_a_copy_has_streams_in_every_state(file: Any) -> None:
    source, back = MemoryJournal(), MemoryJournal()
    await applied(source, *strange())
    copied = await copy_journal(source, file, quiet)
    assert (copied.streams, copied.sessions, copied.grants) == (9 - 1, 2, 4)
    assert copied.messages == 3 + 3 + 5 + 4 + 3
    assert await file.named(NAME) == "drained"
    assert await copy_journal(file, back, quiet) == copied, "and of the copy another one"
    assert await back.sessions() == await source.sessions()
    assert len(await back.webhooks(limit=9)) == 1


async def test_streams_go_on_in_a_copy(file: Any) -> None:
    source = MemoryJournal()
    await applied(source, *strange())
    await copy_journal(source, file, quiet)
    claimed = {each.stream: each for each in await file.claim()}
    fence = claimed["live"].fence
    assert fence > 1, "the former owner is fenced"
    await applied(file, append(6, 7, stream="live", fence=fence))
    [run] = await file.read("live", 2, bytes_max=10_000)
    assert run == lines(3, 7)
    assert claimed["restarts"].restart is not None
    assert claimed["restarts"].restart.answers == {6: b'{"id":1}'}


async def test_a_stream_that_is_not_evicted_gets_the_names_that_are_made_for_it() -> None:
    source, target = MemoryJournal(), MemoryJournal()
    await applied(source, Create(record("s", number=1)), append(1, 1))
    created: list[Create] = []
    commit = target.commit

    async def noting(changes: Sequence[Change]) -> Any:
        created.extend(change for change in changes if isinstance(change, Create))
        return await commit(changes)

    target.commit = noting  # type: ignore[method-assign]
    await copy_journal(source, target, quiet, lambda _: [NAME])
    assert [change.names for change in created] == [(NAME,)]


async def test_a_target_that_is_not_empty_is_refused() -> None:
    source, with_stream, with_session = MemoryJournal(), MemoryJournal(), MemoryJournal()
    await applied(with_stream, Create(record("s", number=1)))
    await applied(with_session, SaveSession(session()))
    for target in (with_stream, with_session):
        with pytest.raises(JournalUnusable, match="not empty"):
            await copy_journal(source, target, quiet)


async def test_a_busy_target_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REPEAT_S", 0.0)
    source, target = MemoryJournal(), MemoryJournal()
    await applied(source, *strange())
    commit, calls = target.commit, 0

    async def busy(changes: Sequence[Change]) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise Unavailable("busy")
        return await commit(changes)

    target.commit = busy  # type: ignore[method-assign]
    assert (await copy_journal(source, target, quiet)).streams == 8


class Damaging(MemoryJournal):
    """A journal that keeps something else than it was given."""

    def __init__(self, changed: type[Change], **to: Any) -> None:
        super().__init__()
        self._changed, self._to = changed, to

    async def commit(self, changes: Sequence[Change]) -> Any:
        return await super().commit(
            [
                replace(change, **self._to) if isinstance(change, self._changed) else change
                for change in changes
            ]
        )


@pytest.mark.parametrize(
    ("changed", "to"),
    [
        (Evict, {"due_at": 1.0}),
        (Evict, {"names": ()}),
        (Ack, {"acked": 0}),
        (SaveSession, {"record": session("other")}),
        (SaveGrant, {"grant": grant("b", "other", "live", 1)}),
        (SaveWebhook, {"webhook": Webhook("msg_2", "kept", "https://example.com/", b"{}", 9.5)}),
    ],
)
async def test_a_difference_is_found(changed: type[Change], to: dict[str, Any]) -> None:
    source = MemoryJournal()
    await applied(source, *strange())
    with pytest.raises(
        JournalUnusable, match=r"not as in the source|other sessions|other webhooks"
    ):
        await copy_journal(source, Damaging(changed, **to), quiet)


async def test_another_byte_of_a_line_is_found() -> None:
    source, target = MemoryJournal(), MemoryJournal()
    await applied(source, *strange())
    commit = target.commit

    async def flipping(changes: Sequence[Change]) -> Any:
        flipped = [
            replace(
                each, run=replace(each.run, body=each.run.body.replace(b'"line":2', b'"line":7'))
            )
            if isinstance(each, copying.Append)
            else each
            for each in changes
        ]
        return await commit(flipped)

    target.commit = flipping  # type: ignore[method-assign]
    with pytest.raises(JournalUnusable, match="a line between"):
        await copy_journal(source, target, quiet)


async def test_a_stream_that_came_meanwhile_is_found() -> None:
    source, target = MemoryJournal(), MemoryJournal()
    await applied(source, *strange())

    def intruding(done: int, total: int) -> None:
        target._records.setdefault("new", record("new", number=2**41))

    with pytest.raises(JournalUnusable, match="9 streams, and the source 8"):
        await copy_journal(source, target, intruding)


async def test_a_file_cannot_have_a_gap_that_a_client_was_not_told_of(file: Any) -> None:
    source = MemoryJournal()
    await applied(source, Create(record("s", number=1)), append(1, 4))
    source._records["s"] = replace(source._records["s"], lost=(2, 3))
    with pytest.raises(JournalUnusable, match="only a store can tell"):
        await copy_journal(source, file, quiet)
    await applied(source, Ack("s", 1, 3))
    copied = await copy_journal(source, MemoryJournal(), quiet)
    assert copied.messages == 1, "a gap that lies behind is no gap"


class Shared(MemoryJournal):
    """A journal in memory that says that it is shared, and that reads up to a gap."""

    replica = "r"

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        lost = self._records[stream].lost
        kept = self._runs.get(stream, [])
        if lost is not None and after < lost[0]:
            kept = [run.until(lost[0] - 1) for run in kept if run.seq < lost[0]]
        return joined((run for run in kept if run.last > after), after, bytes_max)


@pytest.mark.parametrize("lost", [(1, 2), (3, 4), (5, 6), (2, 6), (1, 6)])
@pytest.mark.parametrize("acked", [0, 1, 3, 4])
async def test_a_store_keeps_the_gap_of_another(lost: tuple[int, int], acked: int) -> None:
    source, target = Shared(), Shared()
    await applied(source, Create(record("s", number=1)), append(1, 6), Ack("s", 1, acked))
    gapped: Record = replace(source._records["s"], lost=lost)
    source._records["s"] = gapped
    copied = await copy_journal(source, target, quiet)
    kept = set(range(acked + 1, 7)) - set(range(lost[0], lost[1] + 1))
    assert copied.messages == len(kept)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from("leEacr")
        ),
        max_size=9,
        unique_by=lambda each: each[0],
    )
)
@settings(max_examples=60, deadline=None)
async def test_any_journal_is_copied_whole(plan: list[tuple[int, int, int, str]]) -> None:
    source, target = MemoryJournal(), MemoryJournal()
    for number, last, acked, how in plan:
        name = f"s{number}"
        restart = Restart() if how == "r" else None
        changes: list[Change] = [Create(record(name, number=number, restart=restart))]
        if last:
            changes.append(append(1, last, stream=name))
        if how == "r":
            changes.append(Checkpoint(name, 1, last // 2, b"1"))
        if how in "eE":
            changes.append(last_append(last + 1, last + 1, stream=name))
        changes.append(Ack(name, 1, acked))
        if how in "ac":
            outcome = Outcome.ABANDONED if how == "a" else Outcome.CANCELLED
            changes.append(Close(name, 1, outcome, 7.0))
        if how in "Eac":
            changes.append(Evict(name, 1, float(number), names=(bytes([number]) * 16,)))
        await applied(source, *changes)
    assert (await copy_journal(source, target, quiet)).streams == len(plan)
