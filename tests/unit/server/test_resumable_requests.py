"""Resumable requests: a resume that is answered with the original response, and its costs.

`test_obligations*.py` test Streams. Rules that both proposals share are not repeated here.
"""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Server
from streams.keys import Keyring
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STATUS_OF_REQUEST,
    STREAMS,
    Steps,
    methods,
    named,
    open_house,
    reason,
    requested,
    said,
    text_of,
)

MAX_S = 600.0
BOTH = STREAMS | REQUESTS


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_max_s=MAX_S)


# Announcements


@pytest.mark.parametrize("request_id", [7, "7"])
async def test_who_knows_resumable_requests_is_told_how_to_come_back(
    server: Server, steps: Steps, request_id: int | str
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(REQUESTS)
        await talker.call(request_id, "step")
        steps.log("a")
        policy = await talker.policy()
        assert policy["requestId"] == request_id
        assert type(policy["requestId"]) is type(request_id)
        assert (policy["minWait"], policy["maxWait"]) == (1, 600)
        assert set(policy) == {"requestId", "resumeToken", "minWait", "maxWait"}
        steps.finish()
        await talker.answer(request_id)
        expected = ["notifications/requests/resumePolicy", "notifications/message", "result"]
        assert methods(talker.seen) == expected


async def test_who_knows_both_is_told_both_with_one_token(server: Server, steps: Steps) -> None:
    async with open_house(server) as house:
        talker = await house.dial(BOTH)
        stream = await talker.begin(1, "step")
        policy = await talker.policy()
        assert policy["resumeToken"] == stream["resumeToken"]
        other = await house.dial(BOTH, "bob")
        await other.ask(2, RESUME_REQUEST, resumeToken=policy["resumeToken"])
        steps.finish()
        await other.answer(2)
        assert methods(other.seen) == [
            "notifications/stream/create",
            "notifications/requests/resumePolicy",
            "result",
        ]


# The answer to a resume


@pytest.mark.parametrize("reply_id", [1, 2, "1"])
async def test_a_resume_is_answered_with_the_original_result_under_its_own_id(
    server: Server, steps: Steps, autojump_clock: MockClock, reply_id: int | str
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        steps.log("a")
        await first.find(lambda m: said([m]))
        await first.leave()
        steps.log("b")
        steps.finish("the result")
        other = await house.dial(REQUESTS, "a stranger with the token")
        await other.ask(reply_id, RESUME_REQUEST, **token)
        answer = await other.answer(reply_id)
        assert text_of(answer) == "the result"
        assert type(answer["id"]) is type(reply_id)
        assert said(other.seen) == ["a", "b"]
        assert [m["id"] for m in other.seen if "id" in m] == [reply_id]


async def test_an_error_is_answered_as_one_under_the_resumes_id(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        _, token = await requested(house)
        await trio.sleep(1)
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        talker = await house.dial(REQUESTS)
        failed = await talker.request(5, RESUME_REQUEST, **token)
        assert (failed["code"], reason(failed)) == (-32603, "interrupted")


async def test_a_cursor_is_heeded_and_what_lies_below_is_let_go(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        steps.log("a", "b", "c")
        await first.find(lambda m: said([m]) == ["c"])
        await first.leave()
        second, third = await house.dial(REQUESTS), await house.dial(REQUESTS)
        await second.ask(2, RESUME_REQUEST, **token, after=2)
        assert said([await second.read()]) == ["c"]
        gone = await third.request(3, RESUME_REQUEST, **token, after=1)
        assert (reason(gone), gone["data"]["earliestSeq"]) == ("messages_gone", 3)
        ahead = await third.request(4, RESUME_REQUEST, **token, after=4)
        assert (reason(ahead), ahead["data"]["lastSeq"]) == ("cursor_ahead", 3)
        steps.finish()
        assert text_of(await second.answer(2)) == "done"


async def test_who_declared_nothing_speaks_the_dialect_of_the_method_it_uses(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        await first.leave()
        plain = await house.dial(PLAIN)
        await plain.ask(2, RESUME_REQUEST, **token)
        await plain.policy()
        steps.finish()
        await plain.answer(2)
        await plain.request(3, "ping")
        assert methods(plain.seen) == ["notifications/requests/resumePolicy", "result", "result"]


async def test_a_questions_answer_is_still_wanted_after_a_resume(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        steps.ask()
        asked = await first.find(lambda m: m.get("method") == "elicitation/create")
        await first.leave()
        second = await house.dial(REQUESTS)
        await second.ask(2, RESUME_REQUEST, **token, after=1)
        assert await second.read() == asked
        assert (await second.request(3, STATUS_OF_REQUEST, requestId=1, **token))["hasInputRequest"]
        await second.say({"id": asked["id"], "result": {}})
        steps.finish()
        assert text_of(await second.answer(2)) == "done"


async def test_with_numbers_the_answer_has_one_too(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        steps.log("a")
        await first.leave()
        second = await house.dial(POSITIONS | REQUESTS)
        await second.ask(2, RESUME_REQUEST, **token)
        steps.finish()
        await second.answer(2)
        headers = [m for m in second.seen if m.get("method") == "notifications/stream/position"]
        heads = [header["params"] for header in headers]
        seqs = [head["seq"] + n for head in heads for n in range(head["count"])]
        assert seqs == [1, 2]
        await second.tell("notifications/stream/ack", streamId=heads[0]["streamId"], seq=2)
        gone = await second.request(3, RESUME_REQUEST, **token)
        assert (gone["code"], reason(gone), gone["data"]["earliestSeq"]) == (
            -32602,
            "messages_gone",
            3,
        )
        status = await second.request(4, STATUS_OF_REQUEST, requestId=1, **token)
        assert (status["status"], status["hasPendingMessage"]) == ("completed", False)


# The attached client


async def test_the_newest_resume_wins_and_the_others_are_told_under_their_ids(
    server: Server, steps: Steps
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        second, third = await house.dial(REQUESTS), await house.dial(STREAMS)
        await second.ask(2, RESUME_REQUEST, **token)
        assert reason((await first.answer(1))["error"]) == "superseded"
        await second.policy()
        (stream,) = house.running.engine._streams.index
        await third.ask(3, "stream/resume", **named(stream.id))
        displaced = await second.answer(2)
        assert (displaced["error"]["code"], reason(displaced["error"])) == (-32602, "superseded")
        await third.announced()
        await second.ask(4, RESUME_REQUEST, **token)
        displaced = await third.answer(3)
        assert displaced["result"] == {"_meta": {"mcp-streams/ended": "superseded"}}


async def test_a_server_that_lets_go_says_so_under_the_resumes_id(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        await first.leave()
        second = await house.dial(REQUESTS)
        await second.ask(2, RESUME_REQUEST, **token)
        await second.policy()
        steps.do(lambda call: call.disconnect())
        assert reason((await second.answer(2))["error"]) == "released"
        assert await second.request(3, "ping") == {}


async def test_an_id_in_flight_is_taken_and_the_original_one_is_not(
    server: Server, autojump_clock: MockClock
) -> None:
    old, new = Steps(server), Steps(server, name="new")
    async with open_house(server) as house:
        first, token = await requested(house)
        await first.leave()
        second = await house.dial(REQUESTS)
        await second.call(1, "new")
        await second.policy()
        assert (await second.request(1, RESUME_REQUEST, **token))["code"] == -32600
        await second.ask(2, RESUME_REQUEST, **token)  # no response has the original id
        await second.policy()
        assert (await second.request(2, "ping"))["code"] == -32600
        new.finish("new")
        assert text_of(await second.answer(1)) == "new"
        assert await second.request(1, "ping") == {}
        old.finish("old")
        assert text_of(await second.answer(2)) == "old"
        assert await second.request(2, "ping") == {}


@pytest.mark.parametrize(("reply_id", "is_stopped"), [(1, True), ("1", False), (2, False)])
async def test_only_the_original_id_stops_the_work(
    server: Server,
    steps: Steps,
    autojump_clock: MockClock,
    reply_id: int | str,
    is_stopped: bool,
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        await first.leave()
        second, third = await house.dial(REQUESTS), await house.dial(REQUESTS)
        await second.ask(reply_id, RESUME_REQUEST, **token)
        await second.policy()
        await second.tell("notifications/cancelled", requestId=reply_id)
        await wait_all_tasks_blocked()
        assert steps.was_cancelled is is_stopped
        if is_stopped:
            assert reason(await third.request(3, RESUME_REQUEST, **token)) == "cancelled"
        else:
            await third.ask(3, RESUME_REQUEST, **token)
            steps.finish("kept")
            assert text_of(await third.answer(3)) == "kept"
        assert [m for m in second.seen if m.get("id") == reply_id] == []


async def test_the_original_id_cancels_a_call_that_was_resumed_under_another(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        first, token = await requested(house)
        await first.leave()
        second = await house.dial(REQUESTS)
        await second.ask(2, RESUME_REQUEST, **token)
        await second.policy()
        await second.tell("notifications/cancelled", requestId=1)
        assert reason((await second.answer(2))["error"]) == "cancelled"
        await steps.is_over.wait()
        assert steps.was_cancelled
