"""Every sentence of the Streams proposal that obliges or allows something, tested on the server.

Each test quotes its sentence.
"""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server
from streams.limits import Limits
from tests.rigs.server import (
    RESIDENT_MAX,
    Steps,
    methods,
    named,
    open_house,
    reason,
    said,
    text_of,
)

MIN_S, MAX_S = 5.0, 3600.0


@pytest.fixture(params=RESIDENT_MAX)
def server(request: pytest.FixtureRequest) -> Server:
    return Server(
        "tested", resume_min_s=MIN_S, resume_max_s=MAX_S, limits=Limits(resident_max=request.param)
    )


# Introduction


async def test_no_progress_is_lost_across_a_reconnect(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Ability for clients and servers to disconnect and reconnect without losing progress" """
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        steps.log("a", "b")
        await first.find(lambda m: said([m]) == ["b"])
        await first.leave()
        steps.log("c")
        steps.finish()
        heard = await (await house.dial()).resume(2, stream)
    assert said(first.seen + heard)[-1] == "c"
    assert set(said(first.seen + heard)) == {"a", "b", "c"}
    assert text_of(next(m for m in heard if m.get("id") == 1)) == "done"


# Lifecycle and creation


async def test_creation_is_announced_with_a_unique_id(server: Server, steps: Steps) -> None:
    """ "The server creates a stream and sends a `notifications/stream/create` notification with a
    unique stream ID"
    """
    async with open_house(server) as house:
        talker = await house.dial()
        ids = {(await talker.begin(n, "step"))["streamId"] for n in range(20)}
    assert len(ids) == 20


async def test_the_announcement_has_the_resume_interval(server: Server, steps: Steps) -> None:
    """ "the server can create a stream by sending a `notifications/stream/create` notification with
    a unique stream ID and resume interval parameters."
    """
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.call(1, "step")
        created = await talker.read()
    assert created["method"] == "notifications/stream/create"
    stream = created["params"]["stream"]
    assert stream["resumeInterval"] == {"min": 5, "max": 3600}
    assert isinstance(stream["streamId"], str)
    assert stream["requestId"] == 1


async def test_messages_are_exchanged_both_ways_while_live(server: Server, steps: Steps) -> None:
    """ "Live: Messages are exchanged on the stream." """
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.log("to the client")
        steps.ask()
        asked = await talker.find(lambda m: m.get("method") == "elicitation/create")
        await talker.say({"id": asked["id"], "result": {"action": "accept"}})
        steps.finish()
        await talker.answer(1)
    assert said(talker.seen) == ["to the client"]
    assert steps.answers == [{"action": "accept"}]


async def test_completion_is_announced(server: Server, steps: Steps) -> None:
    """ "Completion: Server sends a `notifications/stream/end` notification when the stream is
    complete"
    """
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.finish()
        end = await talker.find(lambda m: m.get("method") == "notifications/stream/end")
    assert end["params"] == named(stream)
    assert methods(talker.seen)[-2:] == ["result", "notifications/stream/end"]


async def test_a_live_stream_can_be_resumed(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "A client may use the `stream/resume` request to receive messages from a live stream" """
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        second = await house.dial()
        await second.ask(2, "stream/resume", **named(stream))
        steps.log("live")
        await second.find(lambda m: said([m]) == ["live"])


async def test_a_stream_can_be_polled(server: Server, steps: Steps) -> None:
    """ "and `stream/poll` to poll a stream's state." """
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        assert await talker.poll(2, stream) == {
            "streamId": stream["streamId"],
            "status": "live",
            "pendingMessages": False,
            "hasRequest": False,
            "hasError": False,
        }


async def test_all_available_streams_can_be_polled(server: Server, steps: Steps) -> None:
    """ "A client may also use `stream/poll/all` to poll all available streams." """
    async with open_house(server) as house:
        talker = await house.dial()
        ids = [(await talker.begin(n, "step"))["streamId"] for n in range(250)]
        found: list[str] = []
        cursor: dict[str, Any] = {}
        for page in range(1000, 1003):
            polled = await talker.request(page, "stream/poll/all", **cursor)
            found += [status["streamId"] for status in polled["statuses"]]
            cursor = {"cursor": polled.get("nextCursor")}
    assert found == ids
    assert cursor == {"cursor": None}


async def test_a_client_that_waits_min_is_served_at_once(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "`min`: Minimum seconds a client should wait before resuming the stream (prevents excessive
    reconnections)": enforced where the server is told so.
    """
    server.enforce_min = True
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        second = await house.dial()
        await first.leave()
        early = await second.request(2, "stream/resume", **named(stream))
        assert (reason(early), early["data"]["retryAfter"]) == (
            "too_early",
            4,
        )  # it was detached 1 s ago
        await trio.sleep(early["data"]["retryAfter"])
        steps.finish()
        assert "result" in (await second.resume(3, stream))[-1]


async def test_a_client_that_comes_before_min_is_served_unless_told_otherwise(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Minimum seconds a client should wait before resuming": a client's "should", no more."""
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.finish()
        assert "result" in (await (await house.dial()).resume(2, stream))[-1]


async def test_within_max_the_stream_is_there(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Maximum seconds a client may wait before the server considers the stream abandoned" """
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        second = await house.dial()
        await first.leave()
        await trio.sleep(MAX_S - 2)
        steps.finish("in time")
        heard = await second.resume(2, stream)
    assert text_of(next(m for m in heard if m.get("id") == 1)) == "in time"


# Disconnection and resumption


async def test_the_client_may_disconnect_at_any_time(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Either the client or server may disconnect at any time." (the client)"""
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("a", "b", "c")
        await wait_all_tasks_blocked()
        talker.cable.cut_after(to_near=40)  # in the middle of a message
        assert said(await talker.end()) == []
        steps.finish()
        heard = await (await house.dial()).resume(2, stream)
    assert said(heard) == ["a", "b", "c"]


async def test_the_server_may_disconnect_at_any_time(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "Either the client or server may disconnect at any time." (the server)"""

    async def disconnect(call: Call) -> None:
        assert await call.disconnect()

    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("before")
        steps.do(disconnect)
        assert said(await talker.end()) == ["before"]
        steps.log("after")
        steps.finish()
        heard = await (await house.dial()).resume(2, stream)
    assert said(heard)[-1] == "after"


async def test_a_resume_needs_the_stream_id(server: Server, steps: Steps) -> None:
    """ "the client can resume the stream by sending a `stream/resume` request with the […] ID" """
    async with open_house(server) as house:
        talker = await house.dial()
        refused = await talker.request(1, "stream/resume")
    assert refused["code"] == -32602
    assert "streamId" in refused["message"]


async def test_a_resume_sends_all_unsent_messages(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "the server should: Send all unsent messages for the stream to the client" """
    texts = [str(n) for n in range(3_000)]
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log(*texts)
        steps.finish()
        heard = await (await house.dial()).resume(2, stream)
    assert said(heard) == texts


async def test_a_resume_of_an_ended_stream_says_so_last(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "If the stream has ended, send a `notifications/stream/end` notification after sending all
    other unsent messages"
    """
    async with open_house(server) as house:
        first = await house.dial()
        stream = await first.begin(1, "step")
        await first.leave()
        steps.log("unsent")
        steps.finish()
        heard = await (await house.dial()).resume(2, stream)
    assert methods(heard) == [
        "notifications/stream/create",
        "notifications/message",
        "result",
        "notifications/stream/end",
        "result",
    ]
    assert heard[-1] == {
        "jsonrpc": "2.0",
        "id": 2,
        "result": {"_meta": {"mcp-streams/ended": "completed"}},
    }


@pytest.mark.parametrize("method", ["stream/resume", "stream/poll"])
async def test_an_invalid_id_is_an_error(server: Server, method: str) -> None:
    """ "If the stream ID is invalid (e.g., abandoned), respond with an error" """
    async with open_house(server) as house:
        talker = await house.dial()
        refused = await talker.request(1, method, streamId="no such stream")
    assert (refused["code"], reason(refused)) == (-32602, "stream_not_found")


async def test_what_was_sent_and_may_be_lost_is_kept_for_two_minutes(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """ "servers may maintain a buffer of recently sent messages (a two minute window aligns with
    common TCP idle timeout configurations), and use a scheme to correlate message IDs"
    """
    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "step")
        steps.log("sent")
        await talker.find(lambda m: said([m]) == ["sent"])
        await trio.sleep(110)
        await talker.request(2, "ping")
        assert (await talker.poll(3, stream))["pendingMessages"]
        await trio.sleep(30)
        await talker.request(4, "ping")
        assert not (await talker.poll(5, stream))["pendingMessages"]
