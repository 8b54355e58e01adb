"""A client's guarantees over every transport, with a server in a process of its own.

The connection can be cut: over stdio the relay is killed, TCP goes through a proxy. The tests with
misbehaving servers need no processes: tests/unit/client/test_client.py and others.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from streams.client.call import RunningCall
from streams.client.client import Client
from streams.errors import CallFailed, StreamGone, Superseded
from tests.acceptance.calls import carried, marked, number, numbers, open_client, steps, text
from tests.acceptance.conftest import Serve
from tests.acceptance.ways import (
    APP,
    KINDS,
    NARROW,
    Listening,
    Served,
    way_to_port,
)
from tests.rigs.clients import Params
from tests.wire.process import Gate, ServerProcess, gate_in

PAIRS = list(itertools.product(KINDS, KINDS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests, at every kind of address."""
    with ServerProcess(tmp_path_factory.mktemp("server"), app=APP) as process:
        yield Listening(process, APP)


@pytest.fixture(params=PAIRS, ids="-to-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    kinds: tuple[str, str] = request.param
    return kinds


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


# While the connection holds


async def test_every_message_comes_once_and_in_order_and_then_the_result(
    served: Served, kind: str
) -> None:
    async with (
        open_client(served, kind) as (client, _),
        client.call("count", {"n": 2_500}) as call,
    ):
        assert await numbers(call) == list(range(1, 2_501))
        assert await text(call) == "counted 2500"


async def test_the_result_can_be_had_without_reading_the_messages(
    served: Served, kind: str
) -> None:
    async with (
        open_client(served, kind) as (client, _),
        client.call("count", {"n": 20_000}) as call,
    ):
        assert await text(call) == "counted 20000"


async def test_calls_run_side_by_side_and_do_not_mix(served: Served, kind: str) -> None:
    found: dict[int, list[int]] = {}

    async def follow(client: Client, n: int) -> None:
        async with client.call("count", {"n": n}) as call:
            found[n] = await numbers(call)
            assert await text(call) == f"counted {n}"

    async with open_client(served, kind) as (client, _), trio.open_nursery() as nursery:
        for n in range(1, 30):
            nursery.start_soon(follow, client, n)
    assert found == {n: list(range(1, n + 1)) for n in range(1, 30)}


async def test_what_fails_says_so(served: Served, kind: str) -> None:
    async with open_client(served, kind) as (client, _):
        async with client.call("fail") as call:
            assert (await call.result())["isError"] is True
        async with client.call("nowhere") as call:
            with pytest.raises(CallFailed, match="Unknown tool 'nowhere'"):
                await call.result()


async def test_what_the_server_asks_is_answered(served: Served, kind: str) -> None:
    asked: list[Params] = []

    async def answer(params: Params) -> Params:
        asked.append(params)
        return {"action": "decline"}

    answers = {"elicitation/create": answer}
    async with (
        open_client(served, kind, answers=answers) as (client, _),
        client.call("ask") as call,
    ):
        assert await text(call) == '{"action":"decline"}'
    assert [params["message"] for params in asked] == ["Go on?"]


async def test_cancel_stops_the_work_for_everybody(served: Served, kind: str, gate: Gate) -> None:
    async with open_client(served, kind) as (client, _):
        async with steps(client, gate, 3) as call:
            gate.release()
            assert number(await anext(call)) == 1
            await call.cancel()
            await marked(gate, "cancelled")
            with pytest.raises(StreamGone) as caught:
                await call.result()
        assert caught.value.reason == "cancelled"
    async with (
        open_client(served, kind) as (other, _),
        other.resume(carried(call.ticket)) as again,
    ):
        with pytest.raises(StreamGone) as caught:
            await again.result()
    assert caught.value.reason == "cancelled"


async def test_too_many_streams_are_refused_until_one_is_cancelled(
    serve: Serve, kind: str, gate: Gate
) -> None:
    def call(client: Client) -> RunningCall:
        return client.call("count", {"n": 1, "gate": gate.path})

    async with (
        open_client(serve(NARROW), kind) as (client, _),
        call(client) as one,
        call(client) as two,
    ):
        for running in (one, two):
            assert number(await anext(running)) == 1
        async with call(client) as three:
            with pytest.raises(CallFailed) as caught:
                await three.result()
        assert caught.value.data == {"reason": "too_many_streams", "limit": 2}
        await one.cancel()
        async with call(client) as three:
            gate.release(2)
            assert await text(two) == await text(three) == "counted 1"


# When it is cut


async def test_a_cut_connection_loses_nothing(served: Served, kind: str, gate: Gate) -> None:
    async with open_client(served, kind) as (client, way), steps(client, gate, 12) as call:
        for n in range(1, 12, 3):
            gate.release()
            assert number(await anext(call)) == n
            way.cut()
            gate.release(2)
            assert number(await anext(call)) == n + 1
            assert number(await anext(call)) == n + 2
        assert await text(call) == "stepped 12"
        assert 1 < way.connections <= 5  # a cut after the end needs no new one


async def test_cuts_in_the_middle_of_much_lose_nothing_and_repeat_nothing(
    served: Served, kind: str
) -> None:
    found: list[int] = []
    async with (
        open_client(served, kind) as (client, way),
        client.call("count", {"n": 60_000, "pad": 100}) as call,
    ):
        async for message in call:
            found.append(number(message))
            if len(found) % 5_000 == 1:
                way.cut()
        assert await text(call) == "counted 60000"
        assert way.connections > 2
    assert found == list(range(1, 60_001))


@pytest.mark.parametrize("kind", ["ws", "http"])
@pytest.mark.parametrize("seed", range(2))
async def test_cuts_at_any_byte_lose_nothing_and_repeat_nothing(
    served: Served, kind: str, seed: int
) -> None:
    dice = random.Random(seed)

    async def cut_now_and_then() -> None:
        for _ in range(15):
            await way.cut_after(dice.randrange(600_000))

    async with (
        way_to_port(served, kind) as way,
        Client(way) as client,
        client.call("count", {"n": 40_000, "pad": 100}) as call,
    ):
        first = number(await anext(call))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut_now_and_then)
            found = await numbers(call)
        assert await text(call) == "counted 40000"
    assert [first, *found] == list(range(1, 40_001))
    assert way.connections > 10


async def test_calls_side_by_side_all_come_back(served: Served, kind: str, gate: Gate) -> None:
    found: list[list[int]] = []

    async def follow(call: RunningCall) -> None:
        found.append(await numbers(call))
        assert await text(call) == "counted 3"

    async with open_client(served, kind) as (client, way), trio.open_nursery() as nursery:
        calls = [client.call("count", {"n": 3, "gate": gate.path}) for _ in range(5)]
        async with calls[0], calls[1], calls[2], calls[3], calls[4]:
            for call in calls:
                assert number(await anext(call)) == 1
            way.cut()
            gate.release(5)
            async with trio.open_nursery() as following:
                for call in calls:
                    following.start_soon(follow, call)
        nursery.cancel_scope.cancel()
    assert found == [[2, 3]] * 5


async def test_an_answer_survives_a_cut_and_is_asked_for_once(
    served: Served, kind: str, gate: Gate
) -> None:
    asked = 0
    is_asked, may_answer = trio.Event(), trio.Event()

    async def answer(params: Params) -> Params:
        nonlocal asked
        asked += 1
        is_asked.set()
        await may_answer.wait()
        return {"action": "accept"}

    answers = {"elicitation/create": answer}
    async with open_client(served, kind, answers=answers) as (client, way):
        async with (
            client.call("ask", {"gate": gate.path}) as call,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(call.result)  # then the question counts as taken
            await is_asked.wait()
            way.cut()
            await client.ping()  # over the next connection
            may_answer.set()
            await marked(gate, "answered")
            gate.release()
        assert await text(call) == '{"action":"accept"}'
    assert asked == 1


async def test_cancel_waits_until_it_can_be_said(served: Served, kind: str, gate: Gate) -> None:
    async with open_client(served, kind) as (client, way), steps(client, gate, 3) as call:
        gate.release()
        assert number(await anext(call)) == 1
        way.cut()
        await call.cancel()
        await marked(gate, "cancelled")


async def test_a_stream_that_nobody_came_back_for_is_gone(
    served: Served, kind: str, gate: Gate
) -> None:
    async with (
        open_client(served, kind) as (client, _),
        client.call("brief", {"gate": gate.path}) as call,
    ):
        assert number(await anext(call)) == 1
    await marked(gate, "cancelled")
    async with (
        open_client(served, kind) as (client, _),
        client.resume(carried(call.ticket)) as again,
    ):
        with pytest.raises(StreamGone) as caught:
            await again.result()
    assert caught.value.reason == "abandoned"


# Elsewhere


async def test_a_ticket_leads_another_client_on_from_where_it_stands(
    served: Served, pair: tuple[str, str], gate: Gate
) -> None:
    async with open_client(served, pair[0]) as (client, _), steps(client, gate, 5) as call:
        gate.release(3)
        assert [number(await anext(call)) for _ in range(2)] == [1, 2]
    async with (
        open_client(served, pair[1]) as (other, _),
        other.resume(carried(call.ticket)) as resumed,
    ):
        gate.release(2)
        assert await numbers(resumed) == [3, 4, 5]
        assert await text(resumed) == "stepped 5"


async def test_who_is_superseded_does_not_come_back(
    served: Served, pair: tuple[str, str], gate: Gate
) -> None:
    async with open_client(served, pair[0]) as (client, _), steps(client, gate, 3) as call:
        gate.release()
        assert number(await anext(call)) == 1
        async with (
            open_client(served, pair[1]) as (other, way),
            other.resume(carried(call.ticket)) as resumed,
        ):
            with pytest.raises(Superseded):
                await anext(call)
            gate.release()
            assert number(await anext(resumed)) == 2
            way.cut()  # by then the first client could have taken the stream back
            gate.release()
            assert await numbers(resumed) == [3]
            assert await text(resumed) == "stepped 3"


# When the server dies


async def test_a_call_is_followed_over_the_death_of_its_server(
    serve: Serve, kind: str, gate: Gate
) -> None:
    served = serve(APP)
    async with open_client(served, kind) as (client, _):
        async with client.call("count", {"n": 3, "gate": gate.path}) as call:
            assert number(await anext(call)) == 1
            await marked(gate, "sent")
            await trio.to_thread.run_sync(served.restart)
            assert await numbers(call) == [2, 3]
            with pytest.raises(CallFailed) as caught:
                await call.result()
        assert caught.value.data == {"reason": "interrupted"}
        async with client.call("count", {"n": 1}) as call:
            assert await text(call) == "counted 1"


async def test_what_was_not_read_is_there_after_the_death_of_the_server(
    serve: Serve, kind: str
) -> None:
    served = serve(APP)
    async with open_client(served, kind) as (client, _):
        async with client.call("count", {"n": 3}) as call:
            assert number(await anext(call)) == 1
        ticket = carried(call.ticket)
        while (await client.poll(ticket)).status != "completed":
            pass
        await trio.to_thread.run_sync(served.restart)
    async with open_client(served, kind) as (other, _), other.resume(ticket) as resumed:
        assert await numbers(resumed) == [2, 3]
        assert await text(resumed) == "counted 3"
