"""Reading a call in runs: the same messages, the same promises, and the bytes as they came."""

import itertools
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, CallLost, Refusal, StreamGone
from streams.messages import Run, decode, look, notification, request
from tests.rigs.clients import Params, Stepping, connected, count, counting, rest_of, said
from tests.rigs.scripted import Scripted, Stream


async def runs_of(call: RunningCall) -> list[Run]:
    return [run async for run in call.runs()]


def assert_whole(runs: list[Run], entries: list[bytes], after: int = 0) -> None:
    """All entries above `after`, once and in order, numbered, as they were sent."""
    for run in runs:
        assert run.seq == after + 1
        assert run.body == b"".join(entries[after : run.last])
        after = run.last
    assert after == len(entries)


async def test_runs_are_the_messages_as_they_were_sent() -> None:
    server = counting()
    server.run_lines_max = 170
    async with connected(server) as client, client.call("count", {"n": 2_500}) as call:
        runs = await runs_of(call)
        assert (await call.result())["counted"] == 2_500
        assert_whole(runs, server.streams["stream-1"].entries[:-1])
        assert len(runs) < 100
        assert await runs_of(call) == []


@pytest.mark.parametrize("spare", [1, 7_000, 40_000, 90_000])
async def test_a_cut_loses_no_run_and_repeats_none(spare: int) -> None:
    server = counting()
    server.run_lines_max = 170
    async with connected(server) as client, client.call("count", {"n": 5_000}) as call:
        runs = call.runs()
        found = [await anext(runs)]
        for _ in range(3):
            server.memory.cables[-1].cut_after(to_near=spare)
            connections = len(server.connections)
            while len(server.connections) == connections and not call.is_complete:
                found.append(await anext(runs))
        found += await runs_of(call)
        assert (await call.result())["counted"] == 5_000
        assert_whole(found, server.streams["stream-1"].entries[:-1])


async def test_a_request_is_the_last_of_its_run_and_reaches_its_handler() -> None:
    asked: list[Any] = []

    async def answer(params: Params) -> Params:
        asked.append(params["n"])
        return {}

    async def mix(stream: Stream) -> Any:
        for n in range(5):  # in one piece
            stream.say("before")
            stream.open_requests[f"ask-{n}"] = len(stream.entries) + 1
            stream.send(request(f"ask-{n}", "roots/list", {"n": n}))
            stream.say("after")
        await server.until(lambda: len(stream.answers) == 5)
        return {"content": []}

    server = Scripted()
    server.tools["mix"] = mix
    answers = {"roots/list": answer}
    async with connected(server, answers=answers) as client, client.call("mix") as call:
        runs = call.runs()
        found = [await anext(runs)]
        await wait_all_tasks_blocked()
        assert asked == [0]  # the others were not handed out
        found += [run async for run in runs]
        assert await call.result() == {"content": []}
        assert [run.count for run in found] == [2, 3, 3, 3, 3, 1]
        assert_whole(found, server.streams["stream-1"].entries[:-1])
    assert sorted(asked) == list(range(5))


async def test_a_call_that_was_left_is_resumed_behind_the_last_run() -> None:
    server = counting()
    async with connected(server) as client:
        async with client.call("count", {"n": 3_000}) as call:
            first = await anext(call.runs())
            ticket = call.ticket
        assert ticket is not None
        assert ticket.after == first.last
        async with Client(server.memory.connect) as other, other.resume(ticket) as call:
            rest = await runs_of(call)
            await call.result()
        assert_whole([first, *rest], server.streams["stream-1"].entries[:-1])


async def test_messages_and_runs_take_turns() -> None:
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 1_000}) as call:
        texts: list[str] = []
        while len(texts) < 990:
            texts += [said(await anext(call)) for _ in range(3)]
            assert call.ticket is not None
            assert call.ticket.after == len(texts)
            run = await anext(call.runs())
            assert run.seq == len(texts) + 1
            texts += [decode(look(line).params, Params)["data"] for line in run.body.splitlines()]
            assert call.ticket.after == len(texts)
        texts += await rest_of(call)
        assert texts == [str(n) for n in range(1, 1_001)]


async def test_a_run_is_confirmed_when_the_next_is_asked_for(autojump_clock: MockClock) -> None:
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 3}) as call:
        runs = call.runs()
        assert (await anext(runs)).count == 3
        (stream,) = server.streams.values()
        await trio.sleep(5)
        assert stream.acked == 0
        assert await anext(runs, None) is None
        await trio.sleep(2)
        assert stream.acked == 3


async def test_a_run_whose_processing_failed_is_not_confirmed() -> None:
    server = counting()
    async with connected(server) as client:

        async def fail_at_the_second() -> None:
            async with client.call("count", {"n": 1_000}) as call:
                runs = call.runs()
                first.append(await anext(runs))
                await anext(runs)
                raise ZeroDivisionError

        first: list[Run] = []
        with pytest.raises(ZeroDivisionError):
            await fail_at_the_second()
        await client.ping()
        assert [stream.acked for stream in server.streams.values()] == [first[0].last]


async def test_at_least_every_thousand_messages_are_confirmed_in_runs_too() -> None:
    server = counting()
    async with connected(server) as client, client.call("count", {"n": 20_000}) as call:
        await runs_of(call)
        await call.result()
        (stream,) = server.streams.values()
        await server.until(lambda: stream.acked == 20_001)
    acks = [0, *(params["seq"] for params in server.got("notifications/stream/ack"))]
    assert max(later - earlier for earlier, later in itertools.pairwise(acks)) <= 1_000


async def test_waiting_for_a_run_can_be_cancelled_and_loses_nothing() -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        runs = call.runs()
        found = []
        for text in "abc":
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(runs)
            assert scope.cancelled_caught
            step.say(text)
            found.append(await anext(runs))
        step.say(None)
        assert await runs_of(call) == []
        assert_whole(found, server.streams["stream-1"].entries[:-1])


async def test_a_failed_call_raises_what_the_server_said_behind_its_runs() -> None:
    async def fail(stream: Stream) -> Any:
        stream.say("before")
        raise Refusal(-32000, "Out of order.", {"why": "rust"})

    server = Scripted()
    server.tools["fail"] = fail
    async with connected(server) as client, client.call("fail") as call:
        assert [run.count for run in await runs_of(call)] == [1]
        with pytest.raises(CallFailed, match="Out of order"):
            await call.result()


async def test_what_is_no_message_ends_the_runs_before_it() -> None:
    async def babble(stream: Stream) -> Any:
        stream.say("a")
        stream.send(b"babble\n")
        stream.say("b")
        return {"content": []}

    server = Scripted()
    server.tools["babble"] = babble
    async with connected(server) as client, client.call("babble") as call:
        await wait_all_tasks_blocked()
        runs = call.runs()
        assert (await anext(runs)).count == 1
        with pytest.raises(StreamGone, match="Message 2") as caught:
            await anext(runs)
        assert caught.value.reason == "unreadable"
        assert call.ticket is not None
        assert call.ticket.after == 2


async def test_blank_lines_in_a_run_are_no_messages() -> None:
    async def spread(stream: Stream) -> Any:
        for text in "abc":
            note = notification("notifications/message", {"level": "info", "data": text})
            stream.send(b"\n" + note + b"\n")
        return {"content": []}

    server = Scripted()
    server.tools["spread"] = spread
    async with connected(server) as client:
        async with client.call("spread") as call:
            assert await rest_of(call) == ["a", "b", "c"]
        async with client.call("spread") as call:
            runs = await runs_of(call)
            await call.result()
        assert sum(run.count for run in runs) == 3
        assert b"\n\n" not in b"".join(run.body for run in runs)


async def test_a_plain_server_is_read_in_runs_until_it_is_lost() -> None:
    async def wait(stream: Stream) -> Any:
        stream.say("1")
        stream.say("2")
        await trio.sleep_forever()

    server = Scripted(is_numbering=False)
    server.tools |= {"count": count, "wait": wait}
    async with connected(server) as client:
        async with client.call("count", {"n": 10}) as call:
            runs = await runs_of(call)
            assert_whole(runs, server.streams["stream-1"].entries[:-1])
            assert (await call.result())["counted"] == 10
        async with client.call("wait") as call:
            rest = call.runs()
            assert [(await anext(rest)).seq for _ in range(2)] == [1, 2]
            server.cut()
            with pytest.raises(CallLost):
                await anext(rest)
