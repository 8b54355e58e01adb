"""Mistakes that a test puts into the code, to check that the simulation finds them.

Each does what a slip in that place would do, and raises nothing itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any, Final

import pytest
import trio
from msgspec.structs import replace

from streams.engine.connection import Delivery
from streams.engine.followed import FollowedStream
from streams.engine.idempotency import KeyedCalls
from streams.engine.leases import Leases
from streams.engine.lifecycle import Event, StreamState
from streams.engine.operations import Operations
from streams.engine.posts import Taker
from streams.engine.stream import Stream
from streams.engine.streams import Streams
from streams.errors import refusal
from streams.journal import records
from streams.journal.memory import MemoryJournal
from streams.journal.records import Ack, Append, Create, Forget, Outcome, Record, Restore
from streams.journal.sqlite.batch import Batch
from streams.journal.sqlite.log import Tail, Tails
from streams.messages import Run
from streams.server.tools import Tool
from tests.rigs.shared_memory import SharedMemoryJournal
from tests.simulation.shared import ReplicaJournal

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: Final[dict[str, Plant]] = {}
SHARED_PLANTS: Final[dict[str, Plant]] = {}  # of replicas
FORGETFUL_PLANTS: Final[dict[str, Plant]] = {}  # of replicas on a store that goes back
HOST_PLANTS: Final[dict[str, Plant]] = {}  # of calls of hosts that give up


def plant(function: Plant) -> Plant:
    """Register one of the mistakes, by the function's name."""
    PLANTS[function.__name__] = function
    return function


def shared_plant(function: Plant) -> Plant:
    """Register a mistake that shows only with several replicas."""
    SHARED_PLANTS[function.__name__] = function
    return function


def forgetful_plant(function: Plant) -> Plant:
    """Register a mistake that shows only where the store goes back."""
    FORGETFUL_PLANTS[function.__name__] = function
    return function


def host_plant(function: Plant) -> Plant:
    """Register a mistake that shows only to hosts that give up."""
    HOST_PLANTS[function.__name__] = function
    return function


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Apply a mistake, where one is named, for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            (PLANTS | SHARED_PLANTS | FORGETFUL_PLANTS | HOST_PLANTS)[name](patch)
        yield


# Numbering


@plant
def a_number_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """A batch after a long one begins a number too high, and the journals accept it."""
    take, appended = StreamState.take, records._appended

    def take_wrongly(state: StreamState, fence: int) -> Append | None:
        is_long = len(state._batch) > 20
        change = take(state, fence)
        if is_long:
            state.last += 1
        return change

    def appended_anywhere(record: Record, change: Append) -> Record:
        if change.run.seq == record.last + 2:
            record = replace(record, last=record.last + 1)
        return appended(record, change)

    patch.setattr(StreamState, "take", take_wrongly)
    patch.setattr(records, "_appended", appended_anywhere)


@plant
def a_number_is_used_again(patch: pytest.MonkeyPatch) -> None:
    """The server that takes a stream over begins with the number that was the last one."""
    init = StreamState.__init__

    def init_wrongly(state: StreamState, record: Record, *args: Any) -> None:
        init(state, record, *args)
        if record.last > 1 and record.fence > 1 and not record.outcome.is_end:
            state.last = state.durable = record.last - 1

    patch.setattr(StreamState, "__init__", init_wrongly)


# The delivered mark


@plant
def one_more_counts_as_delivered(patch: pytest.MonkeyPatch) -> None:
    """The mark is one too high."""
    deliver = StreamState.deliver
    patch.setattr(StreamState, "deliver", lambda state, seq: deliver(state, seq + 1))


@plant
def what_was_written_counts_as_delivered(patch: pytest.MonkeyPatch) -> None:
    """A written message counts as delivered, whether the client has it or not."""
    hand = StreamState.hand

    def hand_wrongly(state: StreamState, run: Run) -> bool:
        return hand(state, run) | state.deliver(run.last)

    patch.setattr(StreamState, "hand", hand_wrongly)


@plant
def a_late_pong_counts(patch: pytest.MonkeyPatch) -> None:
    """A pong on an older connection moves the mark, whatever the newest reader has."""

    def prove_any(stream: Stream, delivery_number: int, seq: int) -> None:
        stream.state.position = None
        stream.acknowledge(seq)

    patch.setattr(Stream, "prove", prove_any)


# Records


@plant
def a_call_is_announced_before_its_record_is_durable(patch: pytest.MonkeyPatch) -> None:
    """The client is told how to resume as soon as the record is given to the journal."""
    patch.setattr(Delivery, "may_open", property(lambda delivery: not delivery.stream.is_deferred))


@plant
def a_call_with_a_key_runs_before_its_record_is_durable(patch: pytest.MonkeyPatch) -> None:
    """The tool starts at once, and a retry after a crash runs it twice."""
    recorded = Stream.recorded

    async def recorded_but_for_keys(stream: Stream) -> None:
        if stream.mark is None:
            await recorded(stream)

    patch.setattr(Stream, "recorded", recorded_but_for_keys)


@plant
def a_call_with_a_key_is_deferred(patch: pytest.MonkeyPatch) -> None:
    """Every tool counts as one that may run twice."""
    patch.setattr(Tool, "is_repeatable", True)


@plant
def a_plain_reply_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """The record of a short call is stored after its plain reply: a retry finds it unfinished."""
    forget = Stream.forget

    def forget_and_store(stream: Stream) -> Forget | None:
        if stream.is_deferred and stream.state.is_ended:
            stream.is_deferred = False
            stream._committer.add(Create(stream.record))
            return None
        return forget(stream)

    patch.setattr(Stream, "forget", forget_and_store)


@plant
def a_call_is_answered_plainly_while_its_record_is_stored(patch: pytest.MonkeyPatch) -> None:
    """The result overtakes the commit of the record, which stays."""
    end = Stream._end

    def end_wrongly(stream: Stream, line: bytes, event: Event, *, is_error: bool) -> None:
        stream.is_deferred |= not stream.is_recorded and stream.mark is None
        end(stream, line, event, is_error=is_error)

    patch.setattr(Stream, "_end", end_wrongly)


@plant
def a_plain_reply_leaves_its_stream_in_memory(patch: pytest.MonkeyPatch) -> None:
    """The stream of a short call is never removed."""
    settled = Streams._settled

    def settle_wrongly(streams: Streams, stream: Stream) -> None:
        if not (stream.is_deferred and stream.state.is_ended):
            settled(streams, stream)

    patch.setattr(Streams, "_settled", settle_wrongly)


@plant
def a_message_is_sent_before_its_record(patch: pytest.MonkeyPatch) -> None:
    """A message goes out at once, although the record is kept back."""
    send = Stream.send

    async def send_at_once(stream: Stream, line: bytes, **how: Any) -> None:
        if stream.is_deferred and isinstance(stream.delivery, Delivery):
            stream.delivery.connection.reply(line)
        await send(stream, line, **how)

    patch.setattr(Stream, "send", send_at_once)


# Trimming


@plant
def a_run_too_many_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    """One run too many is deleted; the record does not say so."""
    store, drop, delete = MemoryJournal._store, Tail._drop, Batch._delete

    def store_too_little(journal: MemoryJournal, change: Any, record: Record) -> None:
        store(journal, change, record)
        if isinstance(change, Ack):
            del journal._runs[change.stream][:1]

    def delete_too_much(batch: Batch) -> None:
        delete(batch)
        batch._connection.executemany(
            "DELETE FROM runs WHERE stream = ? AND last <= "
            "(SELECT min(last) FROM runs WHERE stream = ?)",
            [(tail.id, tail.id) for tail in batch._trimmed],
        )

    patch.setattr(MemoryJournal, "_store", store_too_little)
    patch.setattr(Tail, "_drop", lambda tail, acked: drop(tail, acked + 1))
    patch.setattr(Batch, "_delete", delete_too_much)


# Restoring


@plant
def the_mark_is_restored_too_high(patch: pytest.MonkeyPatch) -> None:
    """The mark is one too high, as if the client had confirmed one message more."""
    restore = Streams._take_over

    def restore_wrongly(streams: Streams, record: Record) -> None:
        restore(streams, replace(record, acked=min(record.acked + 1, record.last)))

    patch.setattr(Streams, "_take_over", restore_wrongly)


@plant
def the_last_of_the_log_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    """The last record of the log is skipped."""
    recover = Tails.recover

    def recover_too_little(tails: Tails, rows: Iterable[tuple[int, bytes]], load: Any) -> None:
        recover(tails, list(rows)[:-1], load)

    patch.setattr(Tails, "recover", recover_too_little)


# Newest wins


@plant
def the_displaced_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """The displaced reader is not told, and keeps the messages that are on their way."""
    patch.setattr(Delivery, "give_way", lambda delivery, by: None)


@plant
def the_displaced_is_left_waiting(patch: pytest.MonkeyPatch) -> None:
    """The displaced delivery ends without a word."""
    patch.setattr(Delivery, "give_way", lambda delivery, by: delivery.drop())


@plant
def the_displaced_is_told_to_come_back(patch: pytest.MonkeyPatch) -> None:
    """The displaced reader is told `released`, as if the server had let go of the stream."""
    patch.setattr(Delivery, "give_way", lambda delivery, by: delivery.end("released"))


@plant
def the_displaced_is_told_that_it_has_all(patch: pytest.MonkeyPatch) -> None:
    """The displaced reader is told `completed`, as if the stream were over."""
    patch.setattr(Delivery, "give_way", lambda delivery, by: delivery.end("completed"))


@plant
def the_displaced_goes_on(patch: pytest.MonkeyPatch) -> None:
    """The older connection still gets new messages, as the newer one does."""
    older: dict[str, list[Delivery]] = {}
    committed = Stream.committed

    def remember(delivery: Delivery, by: Taker) -> None:
        older.setdefault(delivery.stream.id, []).append(delivery)

    def wake_all(stream: Stream, seq: int) -> None:
        committed(stream, seq)
        for delivery in older.get(stream.id, ()):
            delivery.wake()

    patch.setattr(Delivery, "give_way", remember)
    patch.setattr(Stream, "committed", wake_all)


@plant
def the_older_wins(patch: pytest.MonkeyPatch) -> None:
    """A new reader is refused while another one is attached."""

    def displace_none(_self: Operations, stream: Stream, *_: Any) -> None:
        if stream.delivery is not None:
            raise refusal("superseded")

    patch.setattr(Operations, "_displace", displace_none)


# Replicas, which `simulate(seed, is_shared=True)` finds


@shared_plant
def a_fence_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Any replica may change a stream, whatever it knows of its owner."""
    owned, restored = records._owned, records._restored

    def owned_by_any(record: Record | None, change: Any) -> Record:
        return owned(record, change if record is None else replace(change, fence=record.fence))

    def restored_by_any(record: Record | None, change: Restore) -> Record:
        return restored(record, change if record is None else replace(change, fence=record.fence))

    patch.setattr(records, "_owned", owned_by_any)
    patch.setattr(records, "_restored", restored_by_any)
    patch.setattr(SharedMemoryJournal, "_may", lambda journal, record: True)


@shared_plant
def a_lease_is_not_renewed_under_load(patch: pytest.MonkeyPatch) -> None:
    """A replica with calls that run does not come to renew its lease."""
    renew = ReplicaJournal.renew

    async def renew_when_idle(journal: ReplicaJournal) -> Mapping[str, int] | None:
        while journal.has_calls:
            await trio.sleep(journal.lease_s)
        return await renew(journal)

    patch.setattr(ReplicaJournal, "renew", renew_when_idle)


@shared_plant
def a_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A replica that learns of the end of a stream does not wake the client that follows it."""
    follow = FollowedStream.follow

    def follow_asleep(stream: FollowedStream, record: Record) -> None:
        if record.outcome is Outcome.LIVE:
            follow(stream, record)
            return
        delivery, stream.delivery = stream.delivery, None
        follow(stream, record)
        stream.delivery = delivery

    patch.setattr(FollowedStream, "follow", follow_asleep)


@shared_plant
def an_outage_of_the_store_counts_as_death(patch: pytest.MonkeyPatch) -> None:
    """A replica takes over the streams of the others after it could not use the store itself."""
    look_at = Leases._look_at

    def look_without_doubt(
        leases: Leases, counts: Mapping[str, int], senders: frozenset[str]
    ) -> None:
        leases._renewed_at = trio.current_time()
        look_at(leases, counts, senders)

    patch.setattr(Leases, "_look_at", look_without_doubt)


@shared_plant
def an_heir_takes_over_at_once(patch: pytest.MonkeyPatch) -> None:
    """The lease counts from the last look at a replica, and one look finds it dead."""
    look_at = Leases._look_at

    def look_once(leases: Leases, counts: Mapping[str, int], senders: frozenset[str]) -> None:
        for replica, (count, _) in leases._seen.items():
            leases._seen[replica] = count, -inf
        look_at(leases, counts, senders)

    patch.setattr(Leases, "_look_at", look_once)


# Replicas on a store that goes back


@forgetful_plant
def a_number_is_reused_after_a_failover(patch: pytest.MonkeyPatch) -> None:
    """An owner goes on behind the last message that the store has, and so does an heir."""
    restoration = Stream.restoration

    def forget_as_the_store(stream: Stream) -> Restore:
        journal: Any = stream._committer._journal
        kept, state = journal.inner._store.records.get(stream.id), stream.state
        if kept is not None and kept.last < state.durable == state.last:
            state.last = state.durable = kept.last
            state.handed = min(state.handed, kept.last)
            state.delivered = min(state.delivered, kept.last)
        return restoration(stream)

    patch.setattr(Stream, "restoration", forget_as_the_store)
    patch.setattr("tests.rigs.shared_memory._skipped", lambda record: record)


@forgetful_plant
def a_gap_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """Messages behind a gap are sent as if nothing was missing."""
    patch.setattr("streams.engine.connection._tell_gap", lambda delivery, earliest: None)


# Hosts that give up, which `simulate_hosts(seed)` finds


@host_plant
def a_key_is_free_before_its_call_is_stored(patch: pytest.MonkeyPatch) -> None:
    """A replica that looks a key up does not wait for the call that another one has begun."""
    patch.setattr(KeyedCalls, "_unrecorded", lambda calls, name: None)
    patch.setattr(SharedMemoryJournal, "_has_turn", lambda journal, name: True)


@host_plant
def a_call_that_runs_once_joins_none(patch: pytest.MonkeyPatch) -> None:
    """A call that has ended does not answer the same call, but runs again."""
    patch.setattr("streams.server.patience.ONCE_S", 0.0)


@host_plant
def a_restarted_call_is_compared_with_its_progress_tokens(patch: pytest.MonkeyPatch) -> None:
    """The next client of a call has another progress token, under which its tool does not repeat
    itself.
    """
    patch.setattr("streams.engine.rerun._is_same_progress", lambda expected, line: False)


@host_plant
def an_interim_answer_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A client is answered once more after its interim answer."""
    answer = Delivery.answer

    def answer_twice(delivery: Delivery, line: bytes) -> None:
        answer(delivery, line)
        delivery.connection.reply(line)

    patch.setattr(Delivery, "answer", answer_twice)


@host_plant
def an_interim_answer_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A client that is to have an interim answer waits for ever."""
    patch.setattr(Delivery, "answer", lambda delivery, line: delivery.drop())
