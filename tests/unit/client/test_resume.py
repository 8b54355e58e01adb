"""Calls whose connection is lost."""

import random
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.client import wire
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.client.reconnect import BACKOFF_FIRST_S, RELEASED_FIRST_S
from streams.errors import (
    CallLost,
    StreamGone,
    Superseded,
    refusal,
)
from tests.rigs.clients import Stepping, connected, counting, rest_of, said
from tests.rigs.scripted import Scripted


async def test_a_cut_connection_loses_nothing(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        for n in range(20):
            step.say(f"{n}a", f"{n}b")
            assert said(await anext(call)) == f"{n}a"
            server.cut()
            step.say(f"{n}c")
            assert said(await anext(call)) == f"{n}b"
            assert said(await anext(call)) == f"{n}c"
        step.say(None)
        assert (await call.result())["done"]
    assert len(server.connections) == 21


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 60))
def test_random_cuts_and_splits_lose_nothing_and_repeat_nothing(
    seed: int, n: int, run_lines_max: int
) -> None:
    dice = random.Random(seed)
    server = counting()
    server.run_lines_max = run_lines_max

    async def cut_now_and_then(call: RunningCall) -> None:
        for _ in range(dice.randrange(12)):
            await trio.sleep(dice.uniform(0, 3))
            if call.ticket and server.memory.cables:
                after = dice.randrange(-500, 4000)
                if after < 1:
                    server.cut()
                else:
                    server.memory.cables[-1].cut_after(to_near=after)

    async def main() -> list[Any]:
        found: list[Any] = []
        async with connected(server) as client, trio.open_nursery() as nursery:
            async with client.call("count", {"n": n}) as call:
                nursery.start_soon(cut_now_and_then, call)
                async for message in call:
                    found.append(said(message))
                    if dice.random() < 0.1:
                        await trio.sleep(dice.uniform(0, 0.5))
                assert (await call.result())["counted"] == n
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert found == [str(i) for i in range(1, n + 1)]


async def test_a_gap_is_not_passed_over(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.skips_on = {0}
        step.say("b", "c", None)
        assert await rest_of(call) == ["b", "c"]
    assert len(server.connections) == 2


async def test_a_server_that_keeps_leaving_a_gap_has_lost_messages(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.skips_on = {0, 1, 2, 3}
        step.say("b", "c", None)
        with pytest.raises(StreamGone, match="message 2 was expected") as caught:
            await call.result()
    assert caught.value.reason == "messages_gone"


async def test_what_overlaps_is_dropped(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "b", "c")
        await anext(call)
        step.say("d")
        await wait_all_tasks_blocked()
        server.cut()  # a to d have come, only a was read: b to e come now
        await server.until(lambda: server.got("stream/resume"))
        step.say("e", None)
        assert await rest_of(call) == ["b", "c", "d", "e"]
    assert server.got("stream/resume")[0]["after"] in (0, 1)


async def test_a_stream_is_not_resumed_before_it_may_be(autojump_clock: MockClock) -> None:
    server = Scripted(min_s=7)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        cut_at = trio.current_time()
        server.cut()
        await client.ping()
        assert trio.current_time() < cut_at + 7  # other calls do not wait
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert server.got("stream/resume")[0]["after"] == 1
        assert cut_at + 7 <= trio.current_time() < cut_at + 8


async def test_it_is_not_resumed_too_soon_the_second_time_either(
    autojump_clock: MockClock,
) -> None:
    server = Scripted(min_s=7)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        for _ in range(3):
            cut_at = trio.current_time()
            server.cut()
            step.say("b")
            assert said(await anext(call)) == "b"
            assert cut_at + 7 <= trio.current_time() < cut_at + 8


@pytest.mark.parametrize("asked_s", [301, 1e18])
async def test_a_server_can_ask_for_a_pause_of_five_minutes_at_most(
    asked_s: float, autojump_clock: MockClock
) -> None:
    server = Scripted(min_s=asked_s)
    step = Stepping(server)
    with capture_logs() as logs:
        async with connected(server) as client, client.call("step") as call:
            for _ in range(2):
                step.say("a")
                assert said(await anext(call)) == "a"
                cut_at = trio.current_time()
                server.cut()
                step.say("b")
                assert said(await anext(call)) == "b"
                assert cut_at + 300 <= trio.current_time() < cut_at + 301
            step.say(None)
            await call.result()
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert (warning["asked_s"], warning["given_s"]) == (asked_s, 300)


async def test_a_refusal_can_ask_for_a_pause_of_five_minutes_at_most(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with (
        connected(server, patience_s=float("inf")) as client,
        client.call("step") as call,
    ):
        step.say("a")
        await anext(call)
        server.resume_refusals = [refusal("too_early", retryAfter=1e18)]
        server.cut()
        cut_at = trio.current_time()
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert cut_at + 300 <= trio.current_time() < cut_at + 301


# How a resume can end


async def test_a_stream_that_is_gone_is_said_to_be(autojump_clock: MockClock) -> None:
    for reason in ["stream_not_found", "abandoned", "cancelled", "messages_gone", "cursor_ahead"]:
        server = Scripted()
        step = Stepping(server)
        async with connected(server) as client, client.call("step") as call:
            step.say("a")
            await anext(call)
            server.resume_refusals = [refusal(reason)]
            server.cut()
            with pytest.raises(StreamGone) as caught:
                await call.result()
        assert caught.value.reason == reason


async def test_who_is_superseded_does_not_come_back(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        assert call.ticket is not None
        async with (
            Client(server.memory.connect) as other,
            other.resume(call.ticket) as resumed,
        ):
            with pytest.raises(Superseded):
                await anext(call)
            async with client.resume(call.ticket) as back:  # unless it is told to
                with pytest.raises(Superseded):
                    await anext(resumed)
                step.say("b", None)
                assert await rest_of(back) == ["b"]
    assert len(server.got("stream/resume")) == 2


@pytest.mark.parametrize("refused", ["too_early", "id_in_use", "unavailable"])
async def test_what_cannot_be_resumed_yet_is_resumed_later(
    refused: str, autojump_clock: MockClock
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.resume_refusals = [refusal(refused, retryAfter=11), refusal(refused)]
        server.cut()
        started = trio.current_time()
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert started + 12 <= trio.current_time() < started + 13
    assert len(server.got("stream/resume")) == 3


async def test_a_stream_that_was_released_is_resumed_again(autojump_clock: MockClock) -> None:
    server = Scripted(min_s=4)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.resume_endings = ["released"]
        server.cut()
        started = trio.current_time()
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert trio.current_time() >= started + 8


async def test_a_stream_that_was_released_is_resumed_soon(autojump_clock: MockClock) -> None:
    """Another replica of the server may have it already. If none has, the pauses grow."""
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.resume_endings = ["released"]
        server.cut()
        started = trio.current_time()
        step.say("b")
        assert said(await anext(call)) == "b"
        assert trio.current_time() - started < BACKOFF_FIRST_S + RELEASED_FIRST_S + 0.05
        server.resume_endings = ["released"] * 40
        server.cut()
        started = trio.current_time()
        step.say("c", None)
        assert await rest_of(call) == ["c"]
        assert trio.current_time() - started > 5


async def test_a_stream_that_was_delivered_already_says_so() -> None:
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": 1}) as call:
            await call.result()
        assert call.ticket is not None
        async with client.resume(call.ticket) as again:
            with pytest.raises(StreamGone) as caught:
                await again.result()
    assert caught.value.reason == "delivered"


# Cancelling


async def test_cancel_stops_the_work() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        await call.cancel()
        with pytest.raises(StreamGone) as caught:
            await call.result()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.is_cancelled)
        assert server.got("notifications/cancelled") == [{"requestId": stream.request_id}]
    assert caught.value.reason == "cancelled"


async def test_cancel_waits_until_it_can_be_said(autojump_clock: MockClock) -> None:
    server = Scripted(min_s=3)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.cut()
        await call.cancel()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.is_cancelled)
        with pytest.raises(StreamGone):
            await call.result()


async def test_cancel_ends_when_the_next_server_does_not_know_the_call(
    autojump_clock: MockClock,
) -> None:
    server = counting(key_memory="one")
    server.silent.add("tools/call")
    async with connected(server) as client, client.call("count", {"n": 1}) as call:
        await server.until(lambda: server.got("tools/call"))
        server.key_memory = "another"
        server.cut()
        await call.cancel()
        with pytest.raises(CallLost):
            await call.result()


async def test_a_call_that_is_complete_is_not_cancelled() -> None:
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 1}) as call:
        await rest_of(call)
        await call.cancel()
        assert (await call.result())["counted"] == 1
    assert server.got("notifications/cancelled") == []


async def test_leaving_a_resumed_call_only_detaches(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a")
            await anext(call)
            server.cut()
            step.say("b")
            await anext(call)
        await client.ping()
        (stream,) = server.streams.values()
        (resume_id,) = (m["id"] for _, m in server.received if m.get("method") == "stream/resume")
        assert server.got("notifications/cancelled") == [{"requestId": resume_id}]
        assert not stream.is_cancelled
        assert stream.acked == 2


async def test_what_was_here_and_left_unread_is_all_there_for_who_comes_back(
    autojump_clock: MockClock,
) -> None:
    """They are read over another connection, as the one that brought them is gone."""
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": 900}) as call:
            first = [said(await anext(call)) for _ in range(35)]
            await trio.sleep(5)
            assert call.is_complete
            server.cut()
            await trio.sleep(5)
            await client.ping()
        await client.ping()
        assert call.ticket is not None
        assert server.got("stream/resume") == []  # its messages would have no reader
        async with client.resume(call.ticket) as again:
            assert first + await rest_of(again) == [str(n) for n in range(1, 901)]


async def test_who_comes_in_the_middle_of_a_run_is_not_given_its_end(
    autojump_clock: MockClock,
) -> None:
    """Another resume asked for that run, over the same connection: its end is not for this call.
    Nor is the `notifications/stream/end` behind it.
    """
    server = counting()
    server.run_lines_max = 10_000
    async with connected(server) as client:
        async with client.call("count", {"n": 900}) as call:
            first = [said(await anext(call)) for _ in range(35)]
            await trio.sleep(5)
            server.cut()
            await trio.sleep(5)
            await client.ping()
        ticket = call.ticket
        assert ticket is not None
        connection = client._reconnector.connection
        assert connection is not None
        server.runs_may_end = trio.Event()
        connection.post(wire.resume(ticket, "another", ticket.after))
        await wait_all_tasks_blocked()
        assert connection._run_left  # the run has begun, and waits for its second half
        async with client.resume(ticket) as again:
            await wait_all_tasks_blocked()
            assert len(server.got("stream/resume")) == 2
            assert connection._run_left
            server.runs_may_end.set()
            assert first + await rest_of(again) == [str(n) for n in range(1, 901)]
        assert client._reconnector.connection is connection  # no gap was seen
