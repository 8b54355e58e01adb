"""Operators are sent the calls that change, and not more often than four times a second."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Server
from streams.admin.endpoint import AdminEndpoint
from streams.admin.feed import FEEDS_MAX, Feeds
from streams.admin.gate import OwnerGate
from streams.admin.sse import COMMENT, SILENCE_S, UNREAD_S
from streams.errors import Unavailable
from streams.exchange import Headers, Request
from streams.observe.registry import Registry
from tests.rigs.operators import asked_of
from tests.rigs.server import POSITIONS, House, Steps, open_house


@pytest.fixture
def server() -> Server:
    return Server("feed")


@pytest.fixture
async def house(server: Server, steps: Steps) -> AsyncIterator[House]:
    async with open_house(server) as house:
        yield house


class Reader:
    """The responder of a feed: it keeps what is written until the operator leaves."""

    def __init__(self) -> None:
        self.writes: list[tuple[float, bytes]] = []
        self.headers: dict[str, str] = {}
        self.left = trio.Event()

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        assert status == 200
        self.headers = dict(headers)

    async def write(self, *data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.writes.append((trio.current_time(), b"".join(data)))

    async def gone(self) -> None:
        await self.left.wait()

    @property
    def events(self) -> list[tuple[str, Any]]:
        """The names and the data of all events."""
        found = []
        for block in b"".join(data for _, data in self.writes).decode().split("\n\n"):
            if block.startswith("event: "):
                name, _, data = block.removeprefix("event: ").partition("\ndata: ")
                found.append((name, json.loads(data)))
        return found

    @property
    def states(self) -> list[str]:
        """The states of calls, as they were sent."""
        sent = [data["calls"] for name, data in self.events if name == "calls"]
        return [call["state"] for calls in sent for call in calls]


def endpoint_of(house: House, registry: type[Registry] = Registry) -> AdminEndpoint:
    engine = house.running.engine
    feeds = Feeds(registry(house.journal, engine), engine.events)
    return AdminEndpoint(OwnerGate(), feeds.routes)


@asynccontextmanager
async def reading(endpoint: AdminEndpoint, query: str = "") -> AsyncIterator[Reader]:
    reader = Reader()
    request = Request("GET", "/api/events", {}, b"", query=query)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint, request, reader)
        await trio.sleep(0.01)
        yield reader
        reader.left.set()


async def test_the_life_of_a_call_is_sent(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    async with reading(endpoint_of(house)) as reader:
        talker = await house.dial(POSITIONS)
        await talker.begin(1, "step")
        await trio.sleep(1)
        steps.ask()
        await trio.sleep(1)
        await talker.leave()
        steps.fail()
        await trio.sleep(1)
    assert reader.headers["content-type"] == "text/event-stream"
    assert list(dict.fromkeys(reader.states)) == ["running", "asking"]
    counts = [data for name, data in reader.events if name == "counts"]
    assert [each["asking"] for each in counts][-1] == 1
    assert not house.running.engine.events.is_heard, "a feed that is over listens no more"


async def test_the_marks_of_a_watched_call_are_sent(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(POSITIONS)
    stream = await talker.begin(1, "step")
    endpoint = endpoint_of(house)
    query = f"watch={stream['streamId'][:12]}"
    async with reading(endpoint, query) as watching, reading(endpoint) as plain:
        await trio.sleep(1)
        steps.log(*map(str, range(50)))
        await trio.sleep(2)
    numbered = [
        call["numbered"]
        for name, data in watching.events
        if name == "calls"
        for call in data["calls"]
    ]
    assert numbered[0] == 0
    assert numbered[-1] == 50
    assert plain.states == [], "nothing has happened to the call"


async def test_at_most_four_writes_a_second(
    house: House, steps: Steps, autojump_clock: MockClock
) -> None:
    talker = await house.dial(POSITIONS)
    async with reading(endpoint_of(house)) as reader:
        for number in range(40):
            await talker.begin(number, "step")
            await trio.sleep(0.05)
        await trio.sleep(1)
    times = [at for at, _ in reader.writes]
    assert all(later - earlier >= 0.25 for earlier, later in pairwise(times))
    assert len(reader.states) >= 40


async def test_a_quiet_feed_shows_that_it_lives(house: House, autojump_clock: MockClock) -> None:
    async with reading(endpoint_of(house)) as reader:
        await trio.sleep(3 * SILENCE_S)
    assert [data for _, data in reader.writes if data == COMMENT] != []


async def test_a_feed_that_nobody_reads_is_closed(house: House, autojump_clock: MockClock) -> None:
    began = trio.current_time()
    with pytest.raises(ExceptionGroup) as caught:
        await endpoint_of(house)(Request("GET", "/api/events", {}, b""), _Unread())
    assert caught.group_contains(trio.BrokenResourceError, match="nothing was read")
    assert trio.current_time() - began == pytest.approx(UNREAD_S)
    assert not house.running.engine.events.is_heard


async def test_feeds_are_limited(house: House, autojump_clock: MockClock) -> None:
    endpoint = endpoint_of(house)
    async with trio.open_nursery() as nursery:
        readers = [Reader() for _ in range(FEEDS_MAX)]
        for reader in readers:
            request = Request("GET", "/api/events", {}, b"")
            nursery.start_soon(endpoint, request, reader)
        await trio.sleep(0.01)
        assert (await asked_of(endpoint, "/api/events")).status == 503
        for reader in readers:
            reader.left.set()
    assert (await asked_of(endpoint, "/api/events?watch=nowhere")).status == 404
    many = ",".join(map(str, range(60)))
    assert (await asked_of(endpoint, f"/api/events?watch={many}")).status == 400


async def test_feeds_that_look_for_their_calls_are_counted(
    house: House, autojump_clock: MockClock
) -> None:
    endpoint = endpoint_of(house, _Slow)
    answers: list[int] = []

    async def ask() -> None:
        answers.append((await asked_of(endpoint, "/api/events?watch=nowhere")).status)

    async with trio.open_nursery() as nursery:
        for _ in range(FEEDS_MAX + 1):
            nursery.start_soon(ask)
    assert sorted(answers) == [404] * FEEDS_MAX + [503]


async def test_the_head_of_a_feed_is_answered_without_a_feed(
    house: House, autojump_clock: MockClock
) -> None:
    with trio.fail_after(5):
        answered = await asked_of(endpoint_of(house), "/api/events", "HEAD")
    assert (answered.status, answered.headers["content-type"]) == (200, "text/event-stream")
    assert not house.running.engine.events.is_heard


async def test_a_feed_over_a_journal_that_is_away_says_so(house: House) -> None:
    answered = await asked_of(endpoint_of(house, _Away), "/api/events?watch=abc")
    assert answered.status == 503
    assert answered.json["error"]["message"] == "The journal cannot be read: the disk is slow."


class _Unread(Reader):
    """The responder of a client whose buffers are full."""

    async def write(self, *data: bytes) -> None:
        await trio.sleep_forever()


class _Slow(Registry):
    async def find(self, prefix: str) -> str:
        await trio.sleep(1)
        return await super().find(prefix)


class _Away(Registry):
    async def find(self, prefix: str) -> str:
        raise Unavailable("the disk is slow.")
