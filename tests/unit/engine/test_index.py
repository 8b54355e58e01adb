"""Which streams there are, and which go first where room is needed."""

from typing import Any

import pytest

from streams.engine.committer import Committer
from streams.engine.events import Events
from streams.engine.index import Elsewhere, Registry
from streams.engine.stream import Stream
from streams.errors import Refusal
from streams.journal.memory import MemoryJournal
from streams.journal.records import Outcome, Record
from streams.keys import Keyring
from streams.limits import Limits


def limits(**more: int) -> Limits:
    return Limits(**more)


class Streams:
    """A registry, and streams for it."""

    def __init__(self, **more: int) -> None:
        self.limits = limits(**more)
        self.keyring = Keyring([b"2" * 32, b"1" * 32])
        self.registry = Registry(self.limits, self.keyring)

    def add(self, principal: str = "alice", **more: Any) -> Stream:
        number = self.registry.next_number()
        known: dict[str, Any] = {"is_announced": True}
        record = Record(
            stream=f"s{number}",
            principal=principal,
            origin=b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}',
            min_s=0,
            max_s=1,
            created_at=0,
            fence=1,
            number=number,
            **(known | more),
        )
        stream = Stream(
            record,
            self.limits,
            Committer(MemoryJournal()),
            self.keyring,
            answers={},
            on_stored=lambda _: None,
            on_settled=lambda _: None,
            events=Events(),
        )
        self.registry.add(stream)
        self.registry.name(stream)
        return stream

    def written(self, principal: str = "alice", **more: Any) -> Stream:
        """One that has ended and was written, to a client that confirms nothing."""
        known = {"outcome": Outcome.COMPLETED, "last": 3, "acked": 1}
        stream = self.add(principal, **(known | more))
        stream.state.handed = 3
        return stream


def test_streams_are_found_by_their_id() -> None:
    streams = Streams()
    one, two = streams.add(), streams.add()
    assert streams.registry.get(one.id) is one
    assert streams.registry.get("none") is None
    assert list(streams.registry) == [one, two]
    streams.registry.remove(one)
    streams.registry.remove(one)
    assert list(streams.registry) == [two]


def test_streams_are_found_by_what_their_tokens_are_named() -> None:
    streams = Streams()
    one, two, hidden = streams.add(), streams.add(), streams.add(is_announced=False)
    for stream in (one, two):
        names = streams.keyring.names(stream.id)
        assert len(names) == 2  # one for each key
        assert [streams.registry.named(name) for name in names] == [stream, stream]
    assert all(streams.registry.named(name) is None for name in streams.keyring.names(hidden.id))
    assert streams.registry.named(b"") is None
    streams.registry.retire(one)
    streams.registry.remove(two)
    streams.registry.remove(hidden)
    assert all(streams.registry.named(name) is one for name in streams.keyring.names(one.id))
    assert all(streams.registry.named(name) is None for name in streams.keyring.names(two.id))


def test_a_page_has_what_is_wanted_of_one_principal_in_the_order_of_creation() -> None:
    streams = Streams()
    mine = [streams.add() for _ in range(5)]
    streams.add("bob")
    streams.add(is_announced=False)
    streams.registry.retire(mine[1])
    assert streams.registry.page("alice", 0, 2) == ([mine[0], mine[2]], True)
    assert streams.registry.page("alice", mine[2].number, 2) == ([mine[3], mine[4]], False)
    assert streams.registry.page("carol", 0, 2) == ([], False)


def test_a_loaded_stream_has_its_old_place() -> None:
    streams = Streams()
    mine = [streams.add() for _ in range(5)]
    for stream in (mine[3], mine[1]):
        streams.registry.evict(stream)
    assert streams.registry.evicted == 2
    assert streams.registry.wanted("alice") == [mine[0], mine[2], mine[4]]
    for stream in (mine[1], mine[3]):
        streams.registry.add(stream)
    assert streams.registry.wanted("alice") == mine
    assert streams.registry.page("alice", mine[0].number, 2) == ([mine[1], mine[2]], True)


def test_those_elsewhere_count_once() -> None:
    streams = Streams(streams_per_principal_max=3)
    here = [streams.add(), streams.written()]
    assert not streams.registry.is_principal_full("alice", Elsewhere())
    assert streams.registry.is_principal_full("alice", Elsewhere(wanted=1))
    here[0].was_evicted = True  # so the journal counts it as well
    assert not streams.registry.is_principal_full("alice", Elsewhere(wanted=1))
    assert streams.registry.is_principal_full("alice", Elsewhere(wanted=2))


def test_what_was_written_first_goes_first_wherever_it_is() -> None:
    streams = Streams(streams_per_principal_max=2)
    older, here, newer = streams.written(), streams.written(), streams.written()
    for evicted in (older, newer):
        streams.registry.evict(evicted)
    room = streams.registry.make_room
    assert room("alice", Elsewhere(wanted=2, read=older.record)) == [older.record]
    assert room("alice", Elsewhere(wanted=1, read=newer.record)) == [here]


def test_what_is_left_over_elsewhere_goes_before_what_is_here() -> None:
    streams = Streams(streams_max=2)
    evicted, here = streams.add("bob"), streams.add("bob")
    streams.registry.retire(here)
    streams.registry.evict(evicted)
    assert streams.registry.make_room("alice", Elsewhere(unwanted=evicted.record)) == [
        evicted.record
    ]
    assert streams.registry.make_room("alice", Elsewhere()) == [here]


def test_what_has_room_costs_nobody() -> None:
    streams = Streams(streams_per_principal_max=2, streams_max=3)
    streams.add()
    assert streams.registry.make_room("alice") == []


def test_a_principals_running_streams_are_never_forgotten() -> None:
    streams = Streams(streams_per_principal_max=2)
    streams.add()
    streams.add()
    with pytest.raises(Refusal, match="Too many streams") as refused:
        streams.registry.make_room("alice")
    assert refused.value.data == {"reason": "too_many_streams", "limit": 2}
    assert streams.registry.make_room("bob") == []


def test_what_was_fully_written_goes_first_the_oldest_before_others() -> None:
    streams = Streams(streams_per_principal_max=3)
    streams.add()
    oldest, _ = streams.written(), streams.written()
    assert streams.registry.make_room("alice") == [oldest]


def test_what_a_confirming_client_has_not_confirmed_is_kept() -> None:
    streams = Streams(streams_per_principal_max=1)
    streams.written().state.client_confirms = True
    with pytest.raises(Refusal):
        streams.registry.make_room("alice")


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED])
def test_pages_that_were_all_written_make_room_although_nothing_can_confirm_the_last(
    outcome: Outcome,
) -> None:
    streams = Streams(streams_per_principal_max=1)
    stream = streams.written(pages=(2,), outcome=outcome)
    stream.state.client_confirms = True  # it always is, of a stream with pages
    assert streams.registry.make_room("alice") == [stream]


def test_pages_that_were_not_all_written_are_kept() -> None:
    streams = Streams(streams_per_principal_max=1)
    streams.written(pages=(2,)).state.handed = 2
    with pytest.raises(Refusal):
        streams.registry.make_room("alice")


def test_retired_streams_count_for_nobody_and_go_first_in_that_order() -> None:
    streams = Streams(streams_per_principal_max=2, streams_max=3)
    first, second, third = streams.add(), streams.add("bob"), streams.add("carol")
    with pytest.raises(Refusal) as refused:
        streams.registry.make_room("alice")
    assert refused.value.data == {"reason": "too_many_streams", "limit": 3}
    streams.registry.retire(second)
    streams.registry.retire(first)
    streams.registry.retire(second)  # twice is as good as once
    assert streams.registry.make_room("carol") == [second]
    streams.registry.remove(second)
    assert streams.registry.make_room("carol") == []
    assert third in list(streams.registry)
