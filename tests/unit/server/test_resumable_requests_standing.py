"""Resumable requests: refusals, and the status of a request."""

import pytest
import trio
from trio.testing import MockClock

from streams import Server
from streams.keys import Keyring
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STATUS_OF_REQUEST,
    Json,
    Steps,
    open_house,
    reason,
    requested,
    said,
)

MAX_S = 600.0


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_max_s=MAX_S)


# Refusals


async def test_who_has_no_right_token_learns_nothing(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await requested(house)
        (stream,) = house.running.engine._streams.index
        wrong = [
            token["resumeToken"][:-1] + "!",
            "",
            stream.id,
            Keyring.load(None).token(stream.id),
        ]
        answers = [await talker.request(9, RESUME_REQUEST, resumeToken=each) for each in wrong]
        ask = {"requestId": 1}
        answers += [await talker.request(9, STATUS_OF_REQUEST, resumeToken=w, **ask) for w in wrong]
        for request_id in ("1", 2, ""):
            answers.append(
                await talker.request(9, STATUS_OF_REQUEST, requestId=request_id, **token)
            )
        answers.append(await talker.request(9, "stream/poll", streamId="none"))
        assert {repr(answer) for answer in answers} == {repr(answers[0])}
        assert reason(answers[0]) == "stream_not_found"


async def test_a_tombstone_says_how_it_ended_to_who_has_the_token(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await requested(house)
        other = await house.dial(REQUESTS, "bob")
        await talker.leave()
        await trio.sleep(MAX_S + 5)
        assert reason(await other.request(1, RESUME_REQUEST, **token)) == "abandoned"
        assert (
            reason(await other.request(2, STATUS_OF_REQUEST, requestId=1, **token)) == "abandoned"
        )
        assert (
            reason(await other.request(3, STATUS_OF_REQUEST, requestId=2, **token))
            == "stream_not_found"
        )


async def test_what_was_never_announced_cannot_be_resumed_by_its_token(
    server: Server, steps: Steps
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        plain = await house.dial(PLAIN)
        await plain.call(1, "step")
        await plain.request(2, "ping")
        (stream,) = house.running.engine._streams.index
        refused = await plain.request(3, RESUME_REQUEST, resumeToken=keyring.token(stream.id))
        assert reason(refused) == "stream_not_found"


async def test_a_token_that_an_older_key_made_leads_to_its_stream(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    old, new = b"1" * 32, b"2" * 32
    async with open_house(server, keyring=Keyring([old])) as house:
        _, token = await requested(house)
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=Keyring([new, old])) as house:
        talker = await house.dial(REQUESTS)
        assert reason(await talker.request(2, RESUME_REQUEST, **token)) == "interrupted"


# Status


async def test_a_status_tells_how_a_request_stands(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await requested(house, POSITIONS | REQUESTS)
        other = await house.dial(PLAIN, "bob")

        async def status(**more: object) -> Json:
            return await other.request(9, STATUS_OF_REQUEST, requestId=1, **token, **more)

        expected = {
            "requestId": 1,
            "status": "processing",
            "hasPendingMessage": False,
            "hasInputRequest": False,
        }
        assert await status() == expected
        steps.log("a")
        await talker.find(lambda m: said([m]))
        assert await status() == expected | {"hasPendingMessage": True}
        assert await status(after=1) == expected
        steps.fail()
        await talker.answer(1)
        assert await status() == expected | {"status": "completed", "hasPendingMessage": True}


async def test_only_a_json_rpc_error_is_a_failure(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        _, token = await requested(house)
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    for _ in range(2):  # the failure is stored, and known after a restart
        async with open_house(server, journal=crashed, keyring=keyring) as house:
            talker = await house.dial(PLAIN)
            status = await talker.request(1, STATUS_OF_REQUEST, requestId=1, **token)
            assert (status["status"], status["hasPendingMessage"]) == ("failed", True)


async def test_who_asks_for_a_status_does_not_abandon(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await requested(house)
        await talker.leave()
        other = await house.dial(PLAIN)
        for number in range(4):
            await trio.sleep(MAX_S - 10)
            await other.request(number, STATUS_OF_REQUEST, requestId=1, **token)
        assert not steps.was_cancelled
