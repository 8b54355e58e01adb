"""Evicted streams expire in their time, and make room as all others do."""

from collections.abc import Sequence

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.errors import JournalError
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change, Record
from streams.keys import Keyring
from tests.rigs.evicting import MAX_S, evicted, idle, in_memory, serving
from tests.rigs.server import (
    POSITIONS,
    STREAMS,
    House,
    Json,
    Steps,
    Talker,
    named,
    open_house,
    reason,
    said,
)

# How they end


async def test_an_evicted_stream_is_abandoned_in_its_time_and_forgotten_a_day_later(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(tombstone_s=5_000)
    async with open_house(server) as house:
        first, second = await idle(house, steps, 2)
        talker = await house.dial()
        await trio.sleep(MAX_S - 100)
        assert (await talker.poll(1, second))["status"] == "completed"
        await trio.sleep(110)
        assert reason(await talker.poll(2, first)) == "abandoned"
        assert (await talker.poll(3, second))["status"] == "completed"
        await trio.sleep(MAX_S - 10)
        assert (await talker.poll(4, second))["status"] == "completed"
        await trio.sleep(MAX_S + 10)
        assert reason(await talker.poll(5, second)) == "abandoned"
        await trio.sleep(2)
        assert in_memory(house) == []
        await trio.sleep(5_000)
        assert [reason(await talker.poll(n, s)) for n, s in enumerate((first, second))] == [
            "stream_not_found"
        ] * 2
        assert (await house.journal.totals()).evicted == 0


async def test_a_poll_of_all_keeps_what_it_lists(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        (stream,) = await idle(house, steps)
        talker = await house.dial()
        for n in range(3):
            await trio.sleep(MAX_S - 100)
            assert len((await talker.request(n, "stream/poll/all"))["statuses"]) == 1
        await trio.sleep(MAX_S + 10)
        assert reason(await talker.poll(9, stream)) == "abandoned"


async def test_a_stranger_who_knows_an_id_keeps_nothing(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        (stream,) = await idle(house, steps)
        stranger = await house.dial(STREAMS, "bob")
        for n in range(3):
            await trio.sleep(MAX_S / 2 - 20)
            assert reason(await stranger.poll(n, stream)) == "stream_not_found"
        await trio.sleep(100)
        assert reason(await (await house.dial()).poll(9, stream)) == "abandoned"


async def test_what_is_in_memory_has_a_deadline_of_its_own(autojump_clock: MockClock) -> None:
    server, steps = serving()
    async with open_house(server) as house:
        (stream,) = await idle(house, steps)
        talker = await house.dial(POSITIONS)
        await talker.ask(1, "stream/resume", **named(stream))
        await talker.answer(1)
        other = await house.dial(capacity=100)
        await other.ask(2, "stream/resume", **named(stream))
        await trio.sleep(3 * MAX_S)  # followed, by one who does not read
        assert in_memory(house) == [stream["streamId"]]


async def test_after_a_restart_every_stream_has_its_full_time_again(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving()
    journal, keyring = MemoryJournal(), Keyring.load(None)
    async with open_house(server, journal=journal, keyring=keyring) as house:
        told = await idle(house, steps, 3)
        await trio.sleep(MAX_S - 50)
    async with open_house(server, journal=journal, keyring=keyring) as house:
        assert (in_memory(house), evicted(house)) == ([], 3)
        talker = await house.dial()
        await trio.sleep(MAX_S - 50)
        assert (await talker.poll(1, told[0]))["status"] == "completed"


async def test_a_restart_takes_over_evicted_streams_and_others(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(resident_max=3)
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        told = await idle(house, steps, 8)
        talker = await house.dial()
        assert said(await talker.resume(1, told[0])) == ["of 0"]
        running = await talker.begin(2, "step")
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        talker = await house.dial()
        listed = (await talker.request(1, "stream/poll/all"))["statuses"]
        assert [s["streamId"] for s in listed] == [s["streamId"] for s in [*told, running]]
        for n, stream in enumerate(told):
            assert said(await talker.resume(f"r{n}", stream)) == [f"of {n}"]
        third = await talker.begin(3, "step")
        listed = (await talker.request(4, "stream/poll/all"))["statuses"]
        assert listed[-1]["streamId"] == third["streamId"]  # numbers go on


# Limits


async def test_evicted_streams_count_and_undelivered_ones_are_kept(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(streams_per_principal_max=3)
    async with open_house(server) as house:
        told = await idle(house, steps, 3)
        talker = await house.dial()
        refused = await talker.request(1, "tools/call", name="step")
        assert (reason(refused), refused["data"]["limit"]) == ("too_many_streams", 3)
        other = await house.dial(principal="bob")
        await other.begin(1, "step")
        acking = await house.dial(POSITIONS)
        await acking.ask(2, "stream/resume", **named(told[1]))
        await acking.answer(2)
        await acking.tell("notifications/stream/ack", **named(told[1]), seq=2)
        await acking.begin(3, "step")


class _Counting(MemoryJournal):
    """A journal that counts lookups."""

    counts = 0
    lists = 0

    async def count(self, principal: str) -> int:
        self.counts += 1
        return await super().count(principal)

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        self.lists += 1
        return await super().listed(principal, after=after, limit=limit, only_read=only_read)


async def test_evicted_streams_are_counted_only_where_they_may_be_too_many(
    autojump_clock: MockClock,
) -> None:
    journal = _Counting()
    server, steps = serving(streams_per_principal_max=4)
    async with open_house(server, journal=journal) as house:
        for _ in range(4):
            await idle(house, steps)
        assert (evicted(house), journal.counts) == (4, 0)  # the journal has no more than that
        await idle(house, steps, principal="bob")
        assert journal.counts == 1
        await idle(house, steps, principal="bob")  # few were evicted since that count
        assert (evicted(house), journal.counts) == (6, 1)
        for _ in range(2):
            await idle(house, steps, principal="bob")
        for principal in ("alice", "bob"):
            talker = await house.dial(principal=principal)
            refused = await talker.request(1, "tools/call", name="step")
            assert reason(refused) == "too_many_streams"


async def test_the_oldest_evicted_stream_that_a_plain_client_was_written_makes_room(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(streams_per_principal_max=3)
    async with open_house(server) as house:
        (unread,) = await idle(house, steps)
        read = [await _written(house, steps) for _ in range(2)]
        assert evicted(house) == 3
        talker = await house.dial()
        await talker.poll(1, read[1])  # which brings it into memory, and changes nothing
        fourth = await talker.begin(2, "step")
        gone = [reason(p) if "code" in p else "" for p in await _polls(talker, [unread, *read])]
        assert gone == ["", "stream_not_found", ""]
        await talker.begin(3, "step")
        gone = [reason(p) if "code" in p else "" for p in await _polls(talker, [unread, *read])]
        assert gone == ["", "stream_not_found", "stream_not_found"]
        assert reason(await talker.request(4, "tools/call", name="step")) == "too_many_streams"
        assert (await talker.poll(5, fourth))["status"] == "live"


async def test_one_lookup_finds_the_oldest_ones_for_many_calls(autojump_clock: MockClock) -> None:
    journal = _Counting()
    server, steps = serving(streams_per_principal_max=4)
    async with open_house(server, journal=journal) as house:
        read = [await _written(house, steps) for _ in range(4)]
        talker = await house.dial()
        for n in (1, 2, 3):
            await talker.begin(n, "step")
        assert journal.lists == 1
        assert (evicted(house), (await journal.totals()).evicted) == (1, 1)
        assert await _gone(talker, read) == [True, True, True, False]


async def test_the_oldest_is_found_though_it_was_in_memory_at_the_lookup(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(streams_per_principal_max=4)
    async with open_house(server) as house:
        read = [await _written(house, steps) for _ in range(4)]
        talker = await house.dial()
        await talker.begin(1, "step")
        await talker.poll(2, read[1])  # which brings it into memory for a while
        await trio.sleep(2)
        assert evicted(house) == 3
        await talker.begin(3, "step")
        assert await _gone(talker, read) == [True, True, False, False]


async def _gone(talker: Talker, streams: list[Json]) -> list[bool]:
    return ["code" in poll for poll in await _polls(talker, streams)]


async def _written(house: House, steps: Steps) -> Json:
    """A stream that a plain client was given all of."""
    talker = await house.dial()
    stream = await talker.begin(1, "step")
    steps.finish()
    await talker.find(lambda m: m.get("method") == "notifications/stream/end")
    await talker.leave()
    await trio.sleep(2)
    return stream


async def _polls(talker: Talker, streams: list[Json]) -> list[Json]:
    return [await talker.poll(stream["streamId"], stream) for stream in streams]


async def test_the_servers_limit_counts_evicted_streams_and_forgets_unwanted_ones(
    autojump_clock: MockClock,
) -> None:
    server, steps = serving(streams_max=3)
    async with open_house(server) as house:
        told = await idle(house, steps, 3)
        bob = await house.dial(principal="bob")
        refused = await bob.request(1, "tools/call", name="step")
        assert (reason(refused), refused["data"]["limit"]) == ("too_many_streams", 3)
        acking = await house.dial(POSITIONS)
        for n, stream in enumerate((told[2], told[1])):
            await acking.ask(n, "stream/resume", **named(stream))
            await acking.answer(n)
            await acking.tell("notifications/stream/ack", **named(stream), seq=2)
            await trio.sleep(2)
        assert evicted(house) == 3
        await bob.begin(2, "step")
        polls = await _polls(acking, told)
        assert [reason(p) if "code" in p else "" for p in polls] == ["", "", "stream_not_found"]


class _Held(MemoryJournal):
    """A journal whose commits, and lookups for a load, wait while they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.commits, self.loads = trio.Event(), trio.Event()
        self.release()

    def release(self) -> None:
        self.commits.set()
        self.loads.set()

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await self.commits.wait()
        return await super().commit(changes)

    async def take(self, stream: str) -> Record | None:
        await self.loads.wait()
        return await super().take(stream)


async def test_the_oldest_is_forgotten_though_it_is_being_loaded(
    autojump_clock: MockClock,
) -> None:
    journal = _Held()
    server, steps = serving(streams_per_principal_max=2)
    async with open_house(server, journal=journal) as house:
        read = [await _written(house, steps) for _ in range(2)]
        polling, calling = await house.dial(), await house.dial()
        journal.loads = trio.Event()
        await polling.ask(1, "stream/poll", **named(read[0]))
        await wait_all_tasks_blocked()
        await calling.ask(2, "tools/call", name="step")
        await wait_all_tasks_blocked()
        journal.release()
        await polling.answer(1)
        await calling.announced()
        assert await _gone(calling, read) == [True, False]


async def test_a_stream_is_forgotten_while_a_poll_of_all_waits_for_another(
    autojump_clock: MockClock,
) -> None:
    journal = _Held()
    server, steps = serving(streams_per_principal_max=3)
    async with open_house(server, journal=journal) as house:
        read = [await _written(house, steps) for _ in range(2)]
        polling, calling = await house.dial(), await house.dial()
        journal.commits = trio.Event()
        await polling.ask(1, "tools/call", name="step")
        await wait_all_tasks_blocked()
        await polling.ask(2, "stream/poll/all")
        await wait_all_tasks_blocked()
        await calling.ask(3, "tools/call", name="step")
        await wait_all_tasks_blocked()
        journal.release()
        listed = (await polling.answer(2))["result"]["statuses"]
        assert read[0]["streamId"] not in [each["streamId"] for each in listed]
        assert await _gone(calling, read) == [True, False]
