"""The Streams proposal from Polling on: every sentence that obliges or allows something."""

from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server
from streams.engine.lifecycle import StreamState
from streams.keys import Keyring
from tests.rigs.journals import as_one
from tests.rigs.server import (
    PLAIN,
    RESIDENT_MAX,
    STREAMS,
    House,
    Steps,
    methods,
    named,
    open_house,
    reason,
    said,
    text_of,
    with_token,
)

MIN_S, MAX_S = 5.0, 3600.0


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server(
        "tested", resume_min_s=MIN_S, resume_max_s=MAX_S, limits=Limits(resident_max=request.param)
    )


# Polling


async def test_a_poll_receives_no_messages(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Clients can check a stream's status without receiving all unsent messages by sending a
    `stream/poll` request"
    """
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log("unsent")
        second = await house.dial()
        assert (await second.poll(2, stream))["pendingMessages"]
        assert methods(second.seen) == ["result"]


async def test_a_poll_tells_live_from_completed(server: Server, steps: Steps) -> None:
    """ "`status`: The stream state (`"live"` or `"completed"`)" """
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        assert (await talker.poll(2, stream))["status"] == "live"
        steps.finish()
        await talker.answer(1)
        assert (await talker.poll(3, stream))["status"] == "completed"


async def test_a_poll_tells_of_unsent_messages(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "`pendingMessages`: Whether there are unsent messages" """
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        assert not (await second.poll(2, stream))["pendingMessages"]
        steps.log("unsent")
        await wait_all_tasks_blocked()
        assert (await second.poll(3, stream))["pendingMessages"]
        assert not (await second.poll(4, stream, after=1))["pendingMessages"]


async def test_a_poll_tells_of_a_request_for_the_client(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "`hasRequest`: Whether any pending messages include a server-to-client request" """
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log("no request")
        await wait_all_tasks_blocked()
        assert not (await second.poll(2, stream))["hasRequest"]
        steps.ask()
        await wait_all_tasks_blocked()
        assert (await second.poll(3, stream))["hasRequest"]


async def test_a_poll_tells_of_an_error_result(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "`hasError`: Whether any pending messages include an error result" """
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        assert not (await second.poll(2, stream))["hasError"]
        steps.fail()
        await wait_all_tasks_blocked()
        status = await second.poll(3, stream)
        assert (status["status"], status["hasError"]) == ("completed", True)
        await second.resume(4, stream)
        assert not (await second.poll(5, stream, after=1))["hasError"]


# Abandonment


async def test_after_max_the_stream_is_abandoned_and_its_resources_reclaimed(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "If a client fails to resume or poll a stream within the `resumeInterval.max` period, the
    server may consider the stream abandoned and reclaim resources."
    """
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("kept")
        await talker.find(lambda m: said([m]))
        await talker.leave()
        with trio.fail_after(MAX_S + 1):
            await steps.is_over.wait()
        assert steps.was_cancelled
        await trio.sleep(1)
        kept = as_one(await house.journal.read(stream["streamId"], 0, bytes_max=1_000))
    assert kept is None


@pytest.mark.parametrize("method", ["stream/resume", "stream/poll"])
async def test_an_abandoned_stream_answers_with_an_error(
    server: Server, steps: Steps, autojump_clock: MockClock, method: str
) -> None:
    """ "The next time a client attempts to resume or poll the stream, the server may respond with
    an error."
    """
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        await trio.sleep(MAX_S)
        refused = await second.request(2, method, **named(stream))
    assert (refused["code"], reason(refused)) == (-32602, "abandoned")


@pytest.mark.parametrize("how", ["stream/poll", "stream/poll/all"])
async def test_who_polls_does_not_abandon(
    server: Server, steps: Steps, autojump_clock: MockClock, how: str
) -> None:
    """ "If a client fails to resume **or poll** a stream within […] `resumeInterval.max`" """
    async with open_house(server) as house:
        first, second = await house.dial(), await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        params = named(stream) if how == "stream/poll" else {}
        for number in range(2, 6):
            await trio.sleep(MAX_S - 10)
            assert "code" not in await second.request(number, how, **params)
        assert not steps.was_cancelled
        await trio.sleep(MAX_S + 10)
        assert steps.was_cancelled


# Using streams with tool calls


async def test_the_stream_is_created_immediately(server: Server, steps: Steps) -> None:
    """ "The server creates a stream immediately after receiving the tool call": the tool has not
    said a word.
    """
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        assert methods([await talker.read()]) == ["notifications/stream/create"]


async def test_progress_and_other_messages_go_over_the_stream(server: Server, steps: Steps) -> None:
    """ "The server can send progress updates and other messages on the stream" """

    async def progress(call: Call) -> None:
        await call.progress(1, total=2, message="half")

    async with open_house(server) as house:
        talker = await house.dial()
        await talker.call(1, "step", token="p")
        steps.do(progress)
        steps.log("other")
        steps.finish()
        await talker.find(lambda m: m.get("method") == "notifications/stream/end")
    assert methods(talker.seen) == [
        "notifications/stream/create",
        "notifications/progress",
        "notifications/message",
        "result",
        "notifications/stream/end",
    ]
    assert talker.seen[1]["params"] == {
        "progressToken": "p",
        "progress": 1,
        "total": 2,
        "message": "half",
    }


async def test_the_result_is_sent_on_completion(server: Server, steps: Steps) -> None:
    """ "When the tool completes, the server sends the result" """
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.finish("the result")
        assert text_of(await talker.answer(1)) == "the result"


async def test_the_stream_ends_with_a_notification(server: Server, steps: Steps) -> None:
    """ "The server ends the stream with a `notifications/stream/end` notification" """
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.finish()
        await talker.answer(1)
        assert methods([await talker.read()]) == ["notifications/stream/end"]


# Security considerations


async def test_stream_ids_cannot_be_guessed_and_are_not_logged(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Stream IDs should be treated as sensitive information as they can be used to retrieve
    message history"
    """
    with structlog.testing.capture_logs() as logs:
        async with open_house(server) as house:
            talker = await house.dial()
            stream = await talker.begin(1, "step")
            await talker.tell("notifications/stream/ack", **named(stream), seq=9)
            await talker.request(2, "stream/resume", streamId=stream["streamId"], resumeToken="no")
            await talker.leave()
            await trio.sleep(MAX_S)
    assert len(stream["streamId"]) == len(stream["resumeToken"]) == 43  # 256 bits, url-safe
    assert logs
    assert stream["streamId"] not in str(logs)
    assert stream["resumeToken"] not in str(logs)


async def ask_as(house: House, principal: str, method: str, **params: Any) -> dict[str, Any]:
    talker = await house.dial(STREAMS, principal)
    return await talker.request(2, method, **params)


@pytest.mark.parametrize("method", ["stream/resume", "stream/poll"])
async def test_only_the_owner_or_a_token_opens_a_stream(
    server: Server, steps: Steps, autojump_clock: MockClock, method: str
) -> None:
    """ "Servers should validate that clients have appropriate permissions to resume streams" """
    async with open_house(server) as house:
        first = await house.dial(principal="alice")
        stream = await first.begin(1, "step")
        steps.finish()
        await first.leave()
        stranger = await ask_as(house, "mallory", method, **named(stream))
        guesser = await ask_as(house, "mallory", method, **named(stream), resumeToken="guess")
        nothing = await ask_as(house, "mallory", method, streamId="nothing")
        mistaken = await ask_as(house, "alice", method, **named(stream), resumeToken="guess")
        assert stranger == guesser == nothing == mistaken  # the error is that of an unknown stream
        assert reason(stranger) == "stream_not_found"
        assert (await ask_as(house, "mallory", "stream/poll/all"))["statuses"] == []
        bearer = await ask_as(house, "bob", method, **named(stream), **with_token(stream))
        assert "code" not in bearer


@pytest.mark.parametrize("limits", [Limits(unsent_entries_max=10), Limits(unsent_bytes_max=1_000)])
async def test_what_a_disconnected_stream_may_retain_is_limited(
    autojump_clock: MockClock, limits: Limits
) -> None:
    """ "Servers should limit the number of unsent messages a disconnected stream may retain in
    order to prevent denial of service attacks"
    """
    server = Server("tested", limits=limits)
    steps = Steps(server)
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log(*map(str, range(100)))
        steps.finish()
        await wait_all_tasks_blocked()
        state = state_of(house, stream)
        assert 5 < state.last <= 10  # the tool waits
        heard = await (await house.dial()).resume(2, stream)
    assert said(heard) == [
        str(n) for n in range(100)
    ]  # then it continues, and no message is missing


def state_of(house: House, stream: dict[str, Any]) -> StreamState:
    (found,) = [s for s in house.running.engine._streams.index if s.id == stream["streamId"]]
    return found.state


async def test_who_did_not_opt_in_sees_none_of_this(server: Server, steps: Steps) -> None:
    """ "the server **can** create a stream by sending a `notifications/stream/create`": not to a
    client that would not know what it is.
    """
    async with open_house(server, keyring=Keyring.load(None)) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        steps.log("plain")
        steps.finish()
        await talker.answer(1)
        await talker.request(2, "ping")
    assert methods(talker.seen) == ["notifications/message", "result", "result"]
