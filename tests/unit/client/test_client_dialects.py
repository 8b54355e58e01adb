"""The dialect that a client uses, and servers that know resumable requests and no numbers."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import messages
from streams.client.client import Client
from streams.errors import CallFailed, Refusal, StreamGone, Superseded, refusal
from streams.messages import Message, notification
from streams.protocol.extension import EXTENSION
from streams.protocol.ticket import Ticket
from tests.rigs.clients import Asking, Stepping, connected, counting, rest_of, said
from tests.rigs.scripted import CREATE, POLICY, Scripted, Stream

REQUESTS = "resumableRequests"


def with_requests(**options: Any) -> Scripted:
    """A server that knows resumable requests and not our extension."""
    return Scripted(is_numbering=False, announces=(POLICY,), **options)


# Words of the client, and its reading of the server's words


@pytest.mark.parametrize(
    ("dialects", "declared", "has_positions"),
    [
        (("streams", REQUESTS), {"streams", REQUESTS}, True),
        (("streams",), {"streams"}, True),
        ((REQUESTS,), {REQUESTS}, False),
        ((), set(), False),
    ],
)
async def test_the_client_declares_what_it_was_told_to_speak(
    dialects: tuple[str, ...], declared: set[str], has_positions: bool
) -> None:
    server = counting()
    async with connected(server, dialects=dialects) as client:
        await client.ping()
    (hello,) = server.got("initialize")
    capabilities = hello["capabilities"]
    assert capabilities.keys() == {"experimental"} | declared
    settings = {"dialects": list(dialects), "positions": has_positions, "replayResponse": True}
    assert capabilities["experimental"] == {EXTENSION: settings}


def test_a_dialect_that_nobody_knows_is_a_mistake() -> None:
    for unknown in ("esperanto", "resumeTokens"):  # which needs no capability
        with pytest.raises(
            ValueError, match=f"unknown {unknown}; known are streams, resumableRequests"
        ):
            Client(Scripted().memory.connect, dialects=("streams", unknown))


@pytest.mark.parametrize("announces", [(CREATE, POLICY), (POLICY, CREATE)])
async def test_of_two_announcements_the_best_counts_whichever_comes_first(
    announces: tuple[str, ...], autojump_clock: MockClock
) -> None:
    server = Scripted(announces=announces)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        assert said(await anext(call)) == "a"
        assert call.ticket is not None
        assert (call.ticket.dialect, call.ticket.stream) == ("streams", "stream-1")
        server.cut()
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        await call.result()
    assert [params["after"] for params in server.got("stream/resume")] == [1]
    assert server.got("requests/resume") == []


@pytest.mark.parametrize("announces", [(CREATE,), (POLICY,), (CREATE, POLICY)])
async def test_an_announcement_of_another_stream_for_the_same_request_is_ignored(
    announces: tuple[str, ...],
) -> None:
    server = Scripted(announces=announces)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        before = call.ticket
        foreign = {"requestId": call.request_id, "resumeToken": "another"}
        for method in (CREATE, POLICY):
            params = {"stream": {"streamId": "another"} | foreign} if method == CREATE else foreign
            server.connections[0].reply(notification(method, params))
        await client.ping()
        assert call.ticket == before
        step.say("b", None)
        assert await rest_of(call) == ["b"]


async def test_numbers_that_were_not_asked_for_are_not_waited_for() -> None:
    """The server can number messages, and does so only for a client that asks."""
    server = Scripted(announces=(POLICY,))
    step = Stepping(server)
    async with (
        connected(server, dialects=(REQUESTS,)) as client,
        client.call("step") as call,
    ):
        step.say("a", "b", None)
        assert await rest_of(call) == ["a", "b"]


@pytest.mark.parametrize("method", [CREATE, POLICY])
async def test_an_announcement_that_names_no_request_is_that_of_the_only_call(
    method: str, autojump_clock: MockClock
) -> None:
    server = Scripted(is_numbering=False, announces=())
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        await server.until(lambda: server.streams)
        (stream,) = server.streams.values()
        told = {"resumeToken": stream.token}
        named = {"stream": told | {"streamId": stream.id}} if method == CREATE else told
        server.connections[0].reply(notification(method, named))
        await client.ping()
        assert call.ticket is not None
        assert call.ticket.request_id == stream.request_id
        server.cut()
        step.say("a", None)
        assert await rest_of(call) == ["a"]
        await call.result()


async def test_an_announcement_that_comes_again_without_its_token_takes_none_away() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        await client.ping()
        before = call.ticket
        assert before is not None
        again = {"stream": {"streamId": before.stream, "resumeInterval": {"min": 3}}}
        server.connections[0].reply(notification(CREATE, again))
        await client.ping()
        assert call.ticket is not None
        assert (call.ticket.token, call.ticket.min_s) == (before.token, 3)
        step.say(None)
        assert await rest_of(call) == []


# Calls that are resumed by their resume token


async def test_a_request_is_resumed_under_its_own_id(autojump_clock: MockClock) -> None:
    server = with_requests(min_s=4)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        assert said(await anext(call)) == "a"
        (stream,) = server.streams.values()
        ticket = Ticket("", stream.token, stream.request_id, None, 4, 3600, REQUESTS)
        assert call.ticket == ticket
        for n in range(1, 4):
            stream.acked = len(stream.entries)  # the server knows it in some other way
            before = trio.current_time()
            server.cut()
            step.say(f"b{n}")
            assert said(await anext(call)) == f"b{n}"
            assert before + 4 <= trio.current_time() < before + 5
        step.say("c", None)
        assert await rest_of(call) == ["c"]
        assert (await call.result())["done"]
        assert call.ticket == ticket
    asked = [m for _, m in server.received if m.get("method") == "requests/resume"]
    assert [m["id"] for m in asked] == [stream.request_id] * 3
    assert [m["params"] for m in asked] == [{"resumeToken": stream.token}] * 3
    assert not server.got("notifications/cancelled")


async def test_without_numbers_a_message_may_come_twice_but_none_is_missed(
    autojump_clock: MockClock,
) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "b")
        assert said(await anext(call)) == "a"
        server.cut()
        step.say("c", None)
        assert await rest_of(call) in (["b", "a", "b", "c"], ["a", "b", "c"])


async def test_a_question_that_comes_twice_is_asked_once(autojump_clock: MockClock) -> None:
    server = with_requests()
    asking = Asking(server)
    answers = {"elicitation/create": asking.handler}
    async with connected(server, answers=answers) as client, client.call("ask") as call:
        await anext(call)
        await wait_all_tasks_blocked()
        assert asking.asked == 1
        server.cut()
        await server.until(lambda: server.got("requests/resume"))
        await wait_all_tasks_blocked()
        asking.may_answer.set()
        result = await call.result()
    assert result["answer"]["result"]["action"] == "accept"
    assert asking.asked == 1


async def test_an_error_of_the_tool_is_the_answer_to_the_resume_as_well(
    autojump_clock: MockClock,
) -> None:
    server = with_requests()
    may_fail = trio.Event()

    async def fail(stream: Stream) -> Any:
        await may_fail.wait()
        stream.say("before")
        raise Refusal(-32000, "Out of order.", {"why": "rust"})

    server.tools["fail"] = fail
    async with connected(server) as client, client.call("fail") as call:
        await client.ping()
        server.cut()
        may_fail.set()
        assert await rest_of(call) == ["before"]
        with pytest.raises(CallFailed, match="Out of order") as caught:
            await call.result()
    assert (caught.value.code, caught.value.data) == (-32000, {"why": "rust"})


@pytest.mark.parametrize("reason", ["stream_not_found", "abandoned", "cancelled", "messages_gone"])
async def test_a_request_that_is_gone_is_said_to_be(reason: str, autojump_clock: MockClock) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.resume_refusals = [refusal(reason)]
        server.cut()
        with pytest.raises(StreamGone) as caught:
            await anext(call)
        await client.ping()
    assert caught.value.reason == reason
    assert len(server.got("requests/resume")) == 1


async def test_a_server_of_another_make_says_why_in_its_own_words(
    autojump_clock: MockClock,
) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.resume_refusals = [Refusal(-32602, "Unknown token.")]
        server.cut()
        with pytest.raises(CallFailed, match="Unknown token") as caught:
            await call.result()
    assert (caught.value.code, caught.value.data) == (-32602, None)


@pytest.mark.parametrize(("reason", "pause_s"), [("released", 3), ("too_early", 3)])
async def test_what_is_let_go_is_resumed_again_when_that_is_wanted(
    reason: str, pause_s: float, autojump_clock: MockClock
) -> None:
    server = with_requests(min_s=3)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.streams["stream-1"].acked = 1
        server.resume_refusals = [refusal(reason)]
        server.cut()
        started = trio.current_time()
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert started + 3 + pause_s <= trio.current_time() < started + 4 + pause_s


async def test_who_is_superseded_does_not_come_back(autojump_clock: MockClock) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        assert call.ticket is not None
        async with (
            Client(server.memory.connect) as other,
            other.resume(call.ticket) as resumed,
        ):
            assert said(await anext(resumed)) == "a"
            with pytest.raises(Superseded):
                await anext(call)
            async with client.resume(call.ticket) as back:  # unless it is told to
                with pytest.raises(Superseded):
                    await anext(resumed)
                step.say("b", None)
                assert await rest_of(back) == ["a", "b"]
    assert len(server.got("requests/resume")) == 2


# Leaving and cancelling


async def test_leaving_a_resumed_request_does_not_end_the_work(autojump_clock: MockClock) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a")
            await anext(call)
            server.cut()
            await server.until(lambda: server.got("requests/resume"))
            await wait_all_tasks_blocked()
        await client.ping()
        (stream,) = server.streams.values()
        assert server.got("notifications/cancelled") == []
        assert not stream.is_cancelled
        assert call.ticket is not None
        async with client.resume(call.ticket) as again:
            step.say("b", None)
            assert (await again.result())["done"]
    assert len(server.got("requests/resume")) == 1  # it still came


async def test_what_was_left_and_then_taken_by_another_can_be_resumed(
    autojump_clock: MockClock,
) -> None:
    for server in (with_requests(), Scripted()):
        step = Stepping(server)
        async with connected(server) as client:
            for is_resumed in (False, True):
                async with client.call("step") as call:
                    step.say("a")
                    await anext(call)
                    if is_resumed:
                        server.cut()
                        await wait_all_tasks_blocked()
                        await client.ping()
                assert call.ticket is not None
                async with (
                    Client(server.memory.connect) as other,
                    other.resume(call.ticket),
                ):
                    await other.ping()
                await client.ping()
                async with client.resume(call.ticket) as again:
                    step.say("b", None)
                    assert (await again.result())["done"]


async def test_what_was_left_and_then_let_go_by_the_server_can_be_resumed(
    autojump_clock: MockClock,
) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            await client.ping()
            server.cut()
            await client.ping()
            await wait_all_tasks_blocked()
        server.connections[-1].following.clear()
        server.connections[-1].reply(messages.error(call.request_id, refusal("released")))
        await trio.sleep(5)
        assert call.ticket is not None
        async with client.resume(call.ticket) as again:
            step.say("a", None)
            assert await rest_of(again) == ["a"]
            assert (await again.result())["done"]
    assert len(server.got("requests/resume")) == 2


async def test_cancelling_a_resumed_request_stops_the_work(autojump_clock: MockClock) -> None:
    server = with_requests()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.cut()
        await server.until(lambda: server.got("requests/resume"))
        await call.cancel()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.is_cancelled)
        with pytest.raises(StreamGone) as caught:
            await call.result()
    assert caught.value.reason == "cancelled"
    assert server.got("notifications/cancelled") == [{"requestId": stream.request_id}]


async def test_what_a_left_request_still_says_is_not_another_ones() -> None:
    server = with_requests()
    left, kept = Stepping(server, "left"), Stepping(server, "kept")
    heard: list[Message] = []
    async with connected(server, on_notification=heard.append) as client:
        async with client.call("left"):
            await client.ping()
        async with client.call("kept") as call:
            await client.ping()
            left.say("whose?")
            await wait_all_tasks_blocked()
            kept.say(None)
            assert await rest_of(call) == []
    assert [said(message) for message in heard] == ["whose?"]
