"""Acks of a call, and the limits of what waits to be read."""

import itertools
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.client import buffer
from streams.client.client import Client
from streams.errors import CannotConnect, StreamGone
from streams.messages import decode
from tests.rigs.clients import Params, Stepping, connected, counting, held, rest_of, said
from tests.rigs.scripted import Scripted, Stream


async def test_a_message_is_confirmed_when_the_next_is_asked_for(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "b")
        await anext(call)
        await anext(call)
        (stream,) = server.streams.values()
        await trio.sleep(5)
        assert stream.acked < 2
        with trio.move_on_after(0.5):
            await anext(call)
        assert stream.acked < 2
        with trio.move_on_after(0.6):
            await anext(call)
        assert stream.acked == 2


async def test_at_least_every_thousand_messages_are_confirmed() -> None:
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 20_000}) as call:
        await call.result()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.acked == 20_001)
    acks = [0, *(params["seq"] for params in server.got("notifications/stream/ack"))]
    # A pipe of 64 KiB hands over fewer than a thousand messages at a time.
    assert max(later - earlier for earlier, later in itertools.pairwise(acks)) <= 1_000


async def test_large_messages_are_confirmed_every_four_megabytes(autojump_clock: MockClock) -> None:
    server = Scripted()

    async def large(stream: Stream) -> Any:
        for _ in range(120):
            stream.say("x" * 100_000)
        return {"content": []}

    server.tools["large"] = large
    async with connected(server) as client, client.call("large") as call:
        await call.result()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.acked == 121)
    acks = [0, *(params["seq"] for params in server.got("notifications/stream/ack"))]
    between = [later - earlier for earlier, later in itertools.pairwise(acks)]
    assert all(42 <= count <= 53 for count in between[:-1])  # a megabyte may come on top
    assert len(between) == 3


async def test_leaving_confirms_what_was_read() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:
        async with client.call("step") as call:
            step.say("a", "b", "c")
            await anext(call)
            await anext(call)
        (stream,) = server.streams.values()
        await server.until(lambda: stream.acked == 2)


async def test_a_message_whose_processing_failed_is_not_confirmed() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client:

        async def fail_at_the_second() -> None:
            async with client.call("step") as call:
                await anext(call)
                await anext(call)
                raise ZeroDivisionError

        step.say("a", "b", "c")
        with pytest.raises(ZeroDivisionError):
            await fail_at_the_second()
        await client.ping()
        (stream,) = server.streams.values()
        assert stream.acked == 1


async def test_the_final_response_is_confirmed_once_it_was_handed_over() -> None:
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": 2}) as call:
            await rest_of(call)
        await client.ping()
        assert [stream.acked for stream in server.streams.values()] == [2]
        async with client.call("count", {"n": 2}) as call:
            await call.result()
        await client.ping()
        assert [stream.acked for stream in server.streams.values()] == [2, 3]


async def test_what_could_not_be_confirmed_on_a_lost_connection_is_on_the_next() -> None:
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": 5}) as call:
            await anext(call)
            (stream,) = server.streams.values()
            server.cut()
            await server.until(lambda: len(server.connections) == 2)
            await client.ping()
            await call.result()
        await server.until(lambda: stream.acked == 6)


async def test_a_call_that_nobody_reads_holds_up_the_server_and_loses_nothing() -> None:
    n = buffer.BUFFER_LINES_MAX * 4
    server = counting()
    async with connected(server) as client, client.call("count", {"n": n}) as call:
        await wait_all_tasks_blocked()
        position, _ = server.connections[0].following["stream-1"]
        assert position < n / 2
        assert await rest_of(call) == [str(i) for i in range(1, n + 1)]


async def test_leaving_a_call_that_nobody_reads_frees_its_connection() -> None:
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": buffer.BUFFER_LINES_MAX * 4}):
            await wait_all_tasks_blocked()
        await client.ping()


async def test_a_message_that_is_too_large_ends_its_call_and_no_other() -> None:
    server = counting()
    step = Stepping(server)
    server.memory = type(server.memory)(message_bytes_max=20_000)
    async with connected(server) as client, client.call("step") as call:
        step.say("a", "x" * 30_000, "b", None)
        assert said(await anext(call)) == "a"
        with pytest.raises(StreamGone) as caught:
            await anext(call)
        assert caught.value.reason == "too_large"
        async with client.call("count", {"n": 1}) as other:
            assert await rest_of(other) == ["1"]


async def test_what_is_no_message_ends_its_call_and_the_ticket_leads_on() -> None:
    async def babble(stream: Stream) -> Any:
        stream.say("a")
        stream.send(b"babble\n")
        stream.say("b")
        return {"content": []}

    server = Scripted()
    server.tools["babble"] = babble
    async with connected(server) as client, client.call("babble") as call:
        assert said(await anext(call)) == "a"
        with pytest.raises(StreamGone, match="Message 2") as caught:
            await anext(call)
        assert caught.value.reason == "unreadable"
        with pytest.raises(StreamGone):
            await call.result()
        assert call.ticket is not None
        assert call.ticket.after == 2
        async with (
            Client(server.memory.connect) as other,
            other.resume(call.ticket) as rest,
        ):
            assert await rest_of(rest) == ["b"]


async def test_requests_and_notifications_keep_their_order() -> None:
    asked: list[Any] = []

    async def answer(params: Params) -> Params:
        asked.append(params["n"])
        return {}

    async def mix(stream: Stream) -> Any:
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(stream.ask, "roots/list", {"n": n})
                await wait_all_tasks_blocked()
                stream.say(str(n))
        return {"content": []}

    server = Scripted()
    server.tools["mix"] = mix
    answers = {"roots/list": answer}
    async with connected(server, answers=answers) as client, client.call("mix") as call:
        await wait_all_tasks_blocked()  # so that all come in one batch
        found = [decode(message.params, dict[str, Any]) async for message in call]
        assert await call.result() == {"content": []}
    assert [params.get("n", params.get("data")) for params in found] == [
        value for n in range(20) for value in (n, str(n))
    ]
    assert sorted(asked) == list(range(20))


async def test_a_call_outside_of_its_block_is_an_error_and_no_endless_wait() -> None:
    server = counting()
    async with connected(server) as client:
        call = client.call("count", {"n": 1})
        for act in (call.result, call.cancel, lambda: anext(call), lambda: anext(call.runs())):
            with pytest.raises(RuntimeError, match="use it within `async with`"):
                await act()
        async with call:
            pass
        for act in (call.result, call.cancel):
            with pytest.raises(RuntimeError, match="this call was left: resume its ticket to"):
                await act()
        with pytest.raises(RuntimeError, match="entered once"):
            await call.__aenter__()
    assert len(server.got("tools/call")) == 1


async def test_a_second_reader_is_an_error_and_takes_nothing_from_the_first() -> None:
    server = Scripted()
    step = Stepping(server)
    found: list[Any] = []
    async with connected(server) as client, client.call("step") as call:
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                found.extend(await rest_of(call))

            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            for act in (call.result, lambda: anext(call), lambda: anext(call.runs())):
                with pytest.raises(RuntimeError, match="another task reads this call"):
                    await act()
            step.say("a", "b", None)
        assert await call.result() == {"content": [], "done": True}
    assert found == ["a", "b"]


async def test_a_call_of_which_a_message_cannot_be_read_is_not_taken_for_cancelled() -> None:
    async def babble(stream: Stream) -> Any:
        stream.send(b"babble\n")
        await trio.sleep_forever()

    server = Scripted()
    server.tools["babble"] = babble
    async with connected(server) as client, client.call("babble") as call:
        for act in (call.result, call.cancel):
            with pytest.raises(StreamGone, match="Message 1 of the stream is no JSON-RPC message"):
                await act()


async def test_a_cancel_that_the_server_has_not_confirmed_is_not_done_the_second_time() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.is_deaf = True
        with trio.move_on_after(0.1) as waiting:
            await call.cancel()
        assert waiting.cancelled_caught
        server.is_deaf = False
        for act in (call.cancel, call.result):
            with pytest.raises(StreamGone, match="has not confirmed that: resume its ticket"):
                await act()


async def test_a_call_that_failed_and_may_still_run_is_not_taken_for_cancelled(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, server.memory.connect)
            call = await client.call("step").__aenter__()
            step.say("a")
            await anext(call)
        for act in (call.result, call.cancel):
            with pytest.raises(CannotConnect, match="No connection for 300 s"):
                await act()
        nursery.cancel_scope.cancel()
