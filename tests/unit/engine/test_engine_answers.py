"""Requests of the server to clients, and whose answer counts."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from streams.engine.stream import READERS_MAX
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    RESIDENT_MAX,
    STREAMS,
    Json,
    Steps,
    Talker,
    methods,
    named,
    open_house,
    reason,
    said,
    with_token,
)


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server("tested", limits=Limits(resident_max=request.param))


async def give(talker: Talker, asked: Json, *answers: str) -> None:
    await talker.say(*({"id": asked["id"], "result": {"says": answer}} for answer in answers))


async def test_the_first_answer_counts(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.ask()
        asked = await talker.question()
        await give(talker, asked, "first", "second")
        await wait_all_tasks_blocked()
        await give(talker, asked, "third")
        steps.finish()
        await talker.answer(1)
    assert steps.answers == [{"says": "first"}]


async def test_an_answer_to_nothing_is_dropped(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        await talker.say({"id": "never asked", "result": {}}, {"id": 7, "result": {}})
        steps.ask()
        asked = await talker.question()
        await give(talker, asked, "late")
        steps.finish()
        await talker.answer(1)
        await give(talker, asked, "too late")
        assert await talker.request(2, "ping") == {}
    assert steps.answers == [{"says": "late"}]


async def test_an_error_is_an_answer(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.ask()
        asked = await talker.question()
        await talker.say({"id": asked["id"], "error": {"code": -32601, "message": "no forms here"}})
        answer = await talker.answer(1)
    assert answer["result"]["isError"]
    assert "no forms here" in answer["result"]["content"][0]["text"]


async def test_a_strangers_answer_is_dropped(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        owner, stranger = await house.dial(), await house.dial(principal="mallory")
        await owner.begin(1, "step")
        steps.ask()
        asked = await owner.question()
        await give(stranger, asked, "forged")
        assert await stranger.request(2, "ping") == {}
        await give(owner, asked, "true")
        steps.finish()
        await owner.answer(1)
    assert steps.answers == [{"says": "true"}]


async def test_another_connection_of_the_owner_may_answer(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        await first.begin(1, "step")
        steps.ask()
        await give(second, await first.question(), "from elsewhere")
        steps.finish()
        await first.answer(1)
    assert steps.answers == [{"says": "from elsewhere"}]


async def test_who_was_asked_by_token_may_answer(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        owner, bearer = await house.dial(), await house.dial(principal="bob")
        stream = await owner.begin(1, "step")
        await owner.leave()
        steps.ask()
        await bearer.ask(2, "stream/resume", **named(stream), **with_token(stream))
        await give(bearer, await bearer.question(), "by token")
        steps.finish()
        await bearer.answer(2)
    assert steps.answers == [{"says": "by token"}]


@pytest.mark.parametrize("capabilities", [STREAMS, POSITIONS])
async def test_a_question_without_answer_is_asked_again_whatever_the_cursor(
    server: Server, steps: Steps, autojump_clock: MockClock, capabilities: Json
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(capabilities), await house.dial(capabilities)
        stream = await first.begin(1, "step")
        steps.log("before")
        steps.ask()
        asked = await first.question()
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream), after=2)
        assert await second.read() == asked  # without a number: it has one
        assert (await second.poll(3, stream, after=2))["hasRequest"]
        await give(second, asked, "after a reconnect")
        await wait_all_tasks_blocked()
        assert not (await second.poll(4, stream, after=2))["hasRequest"]
        steps.finish()
        await second.answer(2)
    assert steps.answers == [{"says": "after a reconnect"}]
    assert methods(second.seen).count("elicitation/create") == 1


async def test_a_plain_clients_answer_shows_that_it_has_all_before_it(
    server: Server, steps: Steps
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("before")
        steps.ask()
        await give(talker, await talker.question(), "yes")
        await wait_all_tasks_blocked()
        assert not (await talker.poll(2, stream))["pendingMessages"]


async def test_a_confirming_clients_answer_confirms_nothing(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        steps.ask()
        await give(talker, await talker.question(), "yes")
        await wait_all_tasks_blocked()
        assert (await talker.poll(2, stream))["pendingMessages"]


# Limits


def crowded(**limits: int) -> Server:
    return Server("tested", limits=Limits(**limits))


async def test_a_principal_has_so_many_streams() -> None:
    server = crowded(streams_per_principal_max=3)
    Steps(server)
    async with open_house(server) as house:
        talker, other = await house.dial(), await house.dial(principal="bob")
        for n in range(3):
            await talker.begin(n, "step")
        refused = await talker.request(3, "tools/call", name="step")
        assert (refused["code"], reason(refused)) == (-32602, "too_many_streams")
        assert refused["data"]["limit"] == 3
        await other.begin(1, "step")  # the others are not concerned


async def test_a_cancelled_stream_makes_room(autojump_clock: MockClock) -> None:
    server = crowded(streams_per_principal_max=1)
    Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        await talker.tell("notifications/cancelled", requestId=1)
        await talker.begin(2, "step")


async def test_a_delivered_stream_makes_room() -> None:
    server = crowded(streams_per_principal_max=1)
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        assert "code" in await talker.request(2, "tools/call", name="step")
        await talker.tell("notifications/stream/ack", **named(stream), seq=1)
        await talker.begin(3, "step")
        assert (await talker.poll(4, stream))["status"] == "completed"  # remembered


async def test_the_oldest_stream_that_a_plain_client_was_written_makes_room() -> None:
    server = crowded(streams_per_principal_max=2)
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        streams = []
        for n in range(2):
            streams.append(await talker.begin(n, "step"))
            steps.finish()
            await talker.find(lambda m: m.get("method") == "notifications/stream/end")
        await wait_all_tasks_blocked()
        await talker.begin(2, "step")
        assert reason(await talker.poll(3, streams[0])) == "stream_not_found"
        assert (await talker.poll(4, streams[1]))["status"] == "completed"


async def test_what_was_forgotten_for_room_may_still_be_confirmed(
    autojump_clock: MockClock,
) -> None:
    server = crowded(streams_per_principal_max=1)
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        for n in range(3):
            await talker.begin(n, "step")
            steps.finish()
            await talker.find(lambda m: m.get("method") == "notifications/stream/end")
            await trio.sleep(2)
        await trio.sleep(130)  # by now it is believed of all of them
        assert await talker.request(9, "ping") == {}
        await trio.sleep(5)
        assert await talker.request(10, "ping") == {}


async def test_the_server_has_so_many_streams() -> None:
    server = crowded(streams_max=2)
    steps = Steps(server)
    async with open_house(server) as house:
        alice, bob, carol = [await house.dial(POSITIONS, name) for name in ("a", "b", "c")]
        stream = await alice.begin(1, "step")
        steps.finish()
        await alice.answer(1)
        await bob.begin(1, "step")
        refused = await carol.request(1, "tools/call", name="step")
        assert (reason(refused), refused["data"]["limit"]) == ("too_many_streams", 2)
        await alice.tell("notifications/stream/ack", **named(stream), seq=1)
        await wait_all_tasks_blocked()
        await carol.begin(2, "step")
        assert reason(await alice.poll(3, stream)) == "stream_not_found"


# Ids that are taken


async def test_an_id_in_flight_is_taken(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        refused = await talker.request(1, "ping")
        assert refused["code"] == -32600
        assert await talker.request("1", "ping") == {}  # "1" is not 1
        steps.finish()
        await talker.find(lambda m: m.get("method") == "notifications/stream/end")
        assert await talker.request(1, "ping") == {}


async def test_a_stream_whose_id_is_taken_cannot_be_resumed(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        await second.begin(1, "step")
        assert reason(await second.request(2, "stream/resume", **named(stream))) == "id_in_use"
        third = await house.dial()
        await third.ask(2, "stream/resume", **named(stream))
        await third.announced()
        assert (await third.request(1, "ping"))["code"] == -32600  # its response is to come


async def test_with_positions_the_original_id_is_free(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(POSITIONS), await house.dial(POSITIONS)
        stream = await first.begin(1, "step")
        await first.leave()
        await second.ask(2, "stream/resume", **named(stream))
        await second.announced()
        assert await second.request(1, "ping") == {}
        assert (await second.request(2, "ping"))["code"] == -32600


async def test_a_plain_client_is_asked_too(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.ask()
        steps.log("thanks")
        steps.finish()
        await give(talker, await talker.question(), "plain")
        await talker.answer(1)
    assert steps.answers == [{"says": "plain"}]
    assert said(talker.seen) == ["thanks"]


async def test_a_question_remembers_the_newest_of_its_clients(autojump_clock: MockClock) -> None:
    server = Server("tested", resume_min_s=0)
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.ask()
        await talker.question()
        for number in range(READERS_MAX + 10):
            await talker.leave()
            talker = await house.dial()
            await talker.ask(number, "stream/resume", **named(stream))
            asked = await talker.question()
        [answer] = house.running.engine._streams.answers.values()
        assert len(answer.readers) == READERS_MAX
        await give(talker, asked, "newest")
        await wait_all_tasks_blocked()
        assert steps.answers == [{"says": "newest"}]
