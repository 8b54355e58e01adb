"""Clients at several replicas move the marks of a stream, and displaced ones do not."""

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.journal.contract import News
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import (
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STATUS_OF_REQUEST,
    STREAMS,
    Json,
    Talker,
    named,
    reason,
    requested,
    said,
)

MAX_S = 600.0
TEXTS = [f"text {n}" for n in range(20)]


def make() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=MAX_S, announce_after_s=0)


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with open_replicas(make) as replicas:
        yield replicas


async def begun(replica: Replica, *texts: str) -> Json:
    """A call that runs at this replica, without a client."""
    client = await replica.dial(POSITIONS)
    stream = await client.begin(1, "step")
    await client.leave()
    replica.steps.log(*texts)
    await wait_all_tasks_blocked()
    return stream


async def resumed(replica: Replica, stream: Json, texts: int = len(TEXTS)) -> Talker:
    """A client that has resumed the call from its begin, and has read so many texts."""
    client = await replica.dial(POSITIONS)
    await client.ask(2, "stream/resume", **named(stream), after=0)
    await client.find(lambda _: len(said(client.seen)) == texts)
    return client


# Proofs of displaced clients

PLACES = [(0, 1, 0), (0, 1, 2), (0, 0, 1), (0, 1, 1)]


@pytest.mark.parametrize(("owner", "older", "newer"), PLACES)
async def test_an_ack_of_a_displaced_client_moves_nothing(
    replicas: Replicas, autojump_clock: MockClock, owner: int, older: int, newer: int
) -> None:
    """WIRE, section 4: what a superseded connection could still prove moves nothing."""
    places = [await replicas.start() for _ in range(3)]
    stream = await begun(places[owner], *TEXTS)
    first = await resumed(places[older], stream)
    second = await resumed(places[newer], stream)
    await first.answer(2)  # `superseded`
    await first.tell("notifications/stream/ack", streamId=stream["streamId"], seq=10)
    await wait_all_tasks_blocked()
    await second.leave()
    for place in places:
        third = await resumed(place, stream)
        assert said(third.seen) == TEXTS
        await third.leave()


async def test_an_ack_that_its_owner_hears_of_late_moves_nothing(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    """The replica of the displaced client has not heard yet that it was displaced."""
    owner, other = await replicas.two()
    stream = await begun(owner, *TEXTS)
    first = await resumed(other, stream)
    await wait_all_tasks_blocked()
    news = other.reached.inner.news
    is_deaf, hear = True, trio.Event()

    async def late() -> News:
        if is_deaf:
            await hear.wait()
        return await news()

    other.reached.inner.news = late  # type: ignore[method-assign]
    other.reached.mend()
    await wait_all_tasks_blocked()
    second = await resumed(owner, stream)
    await first.tell("notifications/stream/ack", streamId=stream["streamId"], seq=10)
    await wait_all_tasks_blocked()
    hear.set()
    await first.answer(2)
    await second.leave()
    for place in other, owner:
        third = await resumed(place, stream)
        assert said(third.seen) == TEXTS
        await third.leave()


@pytest.mark.parametrize(("owner", "older", "newer"), PLACES)
async def test_an_answer_of_a_displaced_client_counts_as_an_answer_alone(
    replicas: Replicas, autojump_clock: MockClock, owner: int, older: int, newer: int
) -> None:
    places = [await replicas.start() for _ in range(3)]
    client, policy = await requested(places[owner])
    await client.leave()
    places[owner].steps.log(*TEXTS)
    places[owner].steps.ask()
    await wait_all_tasks_blocked()

    async def taken_over(place: Replica) -> tuple[Talker, Json]:
        talker = await place.dial(REQUESTS)
        await talker.ask(3, RESUME_REQUEST, **policy)
        return talker, await talker.find(lambda m: m.get("method") == "elicitation/create")

    first, question = await taken_over(places[older])
    second, _ = await taken_over(places[newer])
    assert reason((await first.answer(3))["error"]) == "superseded"
    second.cable.cut()
    await wait_all_tasks_blocked()
    await first.say({"id": question["id"], "result": {"action": "accept", "content": {}}})
    await wait_all_tasks_blocked()
    third = await places[(newer + 1) % 3].dial(REQUESTS)
    await third.ask(3, RESUME_REQUEST, **policy)
    await wait_all_tasks_blocked()
    await third.find(lambda _: said(third.seen)[-1:] == TEXTS[-1:])
    assert said(third.seen) == TEXTS


async def test_an_ack_of_the_newest_client_counts_at_any_replica(
    replicas: Replicas, autojump_clock: MockClock
) -> None:
    owner, other = await replicas.two()
    stream = await begun(owner, *TEXTS)
    client = await resumed(other, stream)
    await client.tell("notifications/stream/ack", streamId=stream["streamId"], seq=10)
    await wait_all_tasks_blocked()
    await client.leave()
    again = await owner.dial(POSITIONS)
    refused = await again.request(2, "stream/resume", **named(stream), after=0)
    assert (reason(refused), refused["data"]["earliestSeq"]) == ("messages_gone", 11)


# The clock of `max`


@pytest.mark.parametrize("method", ["stream/poll", "stream/poll/all", STATUS_OF_REQUEST])
async def test_a_client_that_polls_elsewhere_keeps_its_call(
    replicas: Replicas, autojump_clock: MockClock, method: str
) -> None:
    """WIRE, section 2: poll, poll/all and getStatus reset `max`, at any replica."""
    owner, other = await replicas.two()
    client = await owner.dial(STREAMS | REQUESTS)
    stream = await client.begin(1, "step")
    await client.leave()
    params = {
        "stream/poll": named(stream),
        "stream/poll/all": {},
        STATUS_OF_REQUEST: {"requestId": 1, "resumeToken": stream["resumeToken"]},
    }[method]
    poller = await other.dial(STREAMS | REQUESTS)
    for request_id in range(3):
        await trio.sleep(MAX_S * 0.7)
        await poller.request(request_id, method, **params)
    assert not owner.steps.was_cancelled
    await trio.sleep(MAX_S * 0.9)
    assert not owner.steps.was_cancelled
    await trio.sleep(MAX_S * 0.2)
    assert owner.steps.was_cancelled
