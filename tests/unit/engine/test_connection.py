"""How much a connection writes at once: a run, or several to a peer that takes them at once."""

import gc
import weakref
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from streams import Call, Server
from streams.engine.connection import (
    CAUSED_BYTES_MAX,
    KERNEL_BYTES,
    RUNS_BYTES,
    RUNS_BYTES_MAX,
    YOUNG_S,
)
from tests.rigs.server import POSITIONS, House, Steps, Talker, greeted, named, open_house, said
from tests.rigs.troubled import Troubled

COUNT = 4_000
LINE_BYTES = 4_000  # so it is several times what a write may have
HEADERS_BYTES = 1_000
SLOW = 20  # so many writes are out when one has taken long


def flooding() -> Server:
    server = Server("flooding")

    @server.tool
    async def flood(call: Call) -> None:
        for _ in range(COUNT):
            await call.log("info", "x" * LINE_BYTES)

    return server


async def written(write_s: float, slow_s: float) -> list[int]:
    """The bytes of each write of a resume. Each takes `write_s`, one `slow_s`."""
    sizes: list[int] = []
    async with open_house(flooding()) as house:
        first = await house.dial()
        stream = await first.begin(1, "flood")
        await first.leave()
        cable = house.cable(capacity=1 << 24)
        talker, send = await greeted(Talker(cable.near, cable)), cable.far.send
        while (await talker.poll(2, stream))["status"] != "completed":
            await trio.sleep(1)

        async def timed_send(*lines: bytes) -> None:
            sizes.append(sum(map(len, lines)))
            await trio.sleep(slow_s if len(sizes) == SLOW else write_s)
            await send(*lines)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cable.far, "send", timed_send)
            came: list[dict[str, Any]] = await talker.resume(3, stream)
        logged = [message for message in came if message.get("method") == "notifications/message"]
        assert len(logged) == COUNT
    return sizes


async def test_a_peer_that_reads_at_once_is_given_more_until_it_does_not(
    autojump_clock: MockClock,
) -> None:
    sizes = await written(0.01, 10.0)
    first = KERNEL_BYTES // RUNS_BYTES
    assert max(sizes[:first]) <= RUNS_BYTES + HEADERS_BYTES
    assert RUNS_BYTES_MAX - RUNS_BYTES < max(sizes) <= RUNS_BYTES_MAX + HEADERS_BYTES
    assert sizes[SLOW] <= RUNS_BYTES + HEADERS_BYTES


async def test_a_peer_that_is_slow_is_given_one_run_at_a_time(autojump_clock: MockClock) -> None:
    assert max(await written(1.0, 1.0)) <= RUNS_BYTES + HEADERS_BYTES


def started(house: House) -> list[str]:
    """The tasks of the only connection, besides its reader."""
    (connection,) = house.running.engine._connections
    assert connection._nursery is not None
    return sorted(task.name.partition("Connection.")[2] for task in connection._nursery.child_tasks)


async def test_a_client_that_only_resumes_needs_no_task_for_that(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")
    steps = Steps(server)
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        steps.log("a", "b")
        steps.finish()
        await first.answer(1)
        assert len(started(house)) == 2  # one to send messages, and one for receipts
        await first.leave()
        second = await house.dial(POSITIONS)
        assert said(await second.resume(2, stream, after=0)) == ["a", "b"]
        assert started(house) == []
        await trio.sleep(2 * YOUNG_S)
        assert len(started(house)) == 1  # watches whether the peer lives


async def test_messages_are_heard_while_the_peer_takes_nothing_of_what_it_has_resumed(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")
    steps = Steps(server)
    has_begun = trio.Event()

    @server.tool
    async def begin() -> None:
        has_begun.set()

    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        steps.log("x" * CAUSED_BYTES_MAX)
        await first.find(lambda message: message.get("method") == "notifications/message")
        await first.leave()
        second = await house.dial(capacity=10_000)
        await second.ask(2, "stream/resume", **named(stream))
        await second.call(3, "begin")
        await has_begun.wait()


async def wait_for_ever(*_: object) -> None:
    await trio.sleep_forever()


async def test_a_stream_is_announced_while_the_next_message_is_handled(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, journal = Server("tested"), Troubled()
    Steps(server)
    async with open_house(server, journal=journal) as house:
        talker = await house.dial()
        journal.hold()
        await talker.call(1, "step")
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(house.running.engine.operations, "find", wait_for_ever)
        await talker.ask(2, "stream/poll", **named("of no importance"))
        await trio.testing.wait_all_tasks_blocked()
        assert started(house) == []
        journal.let_go()
        await talker.announced()


async def test_a_connection_that_has_ended_is_no_work_for_the_garbage_collector(
    autojump_clock: MockClock,
) -> None:
    async with open_house(flooding()) as house:
        talker = await house.dial()
        await house.dial()  # the engine looks after the newest connection for longer
        first, _ = map(weakref.ref, house.running.engine.connections)
        gc.disable()
        try:
            await talker.channel.aclose()
            await trio.sleep(2 * YOUNG_S)
            assert first() is None
        finally:
            gc.enable()
