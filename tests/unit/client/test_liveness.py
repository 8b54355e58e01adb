"""Silent servers: which connections are given up, and which are not."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams.client.call import RunningCall
from streams.client.client import Client
from tests.rigs.clients import Stepping, connected, rest_of, said
from tests.rigs.scripted import CREATE, POLICY, Scripted


def foreign(*announces: str) -> Scripted:
    """A server that knows a dialect, or none, and does not number its messages."""
    return Scripted(is_numbering=False, announces=announces)


def fall_silent(server: Scripted) -> None:
    """Make the newest connection half open: it stays, and passes nothing on."""
    server.is_deaf = True
    server.connections[-1].following.clear()


async def begun(server: Scripted, step: Stepping, call: RunningCall) -> None:
    step.say("a")
    assert said(await anext(call)) == "a"
    server.streams["stream-1"].acked = 1  # it counts what it has sent as delivered


@pytest.mark.parametrize("announcement", [CREATE, POLICY])
async def test_a_call_is_resumed_when_nothing_comes(
    announcement: str, autojump_clock: MockClock
) -> None:
    server = foreign(announcement)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        await begun(server, step, call)
        silent_at = trio.current_time()
        fall_silent(server)
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        assert 20 <= trio.current_time() - silent_at < 25
    assert len(server.connections) == 2
    assert len(server.got("ping")) == 1


async def test_a_call_that_cannot_be_resumed_is_waited_for(autojump_clock: MockClock) -> None:
    server = foreign()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        server.is_deaf = True
        await trio.sleep(1_000)
        step.say("late", None)
        assert await rest_of(call) == ["late"]
    assert len(server.connections) == 1
    assert len(server.got("ping")) == 1, "a busy server is not asked over and over"


async def test_one_call_that_cannot_be_resumed_holds_the_connection(
    autojump_clock: MockClock,
) -> None:
    server = foreign(CREATE)
    first, second = Stepping(server, "first"), Stepping(server, "second")
    async with connected(server) as client, client.call("first") as one:
        await begun(server, first, one)
        server.announces = ()
        async with client.call("second") as two:
            await server.until(lambda: len(server.streams) == 2)
            server.is_deaf = True
            await trio.sleep(100)
            assert len(server.connections) == 1
            second.say(None)
            await two.result()
            await trio.sleep(100)
            assert len(server.connections) > 1
            server.is_deaf = False
            first.say(None)
            await one.result()


async def test_a_server_that_answers_pings_may_be_quiet(autojump_clock: MockClock) -> None:
    server = foreign(CREATE)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        await begun(server, step, call)
        await trio.sleep(1_000)
        step.say("b", None)
        assert await rest_of(call) == ["b"]
    assert len(server.connections) == 1
    assert server.got("ping")


async def test_an_idle_client_says_nothing(autojump_clock: MockClock) -> None:
    server = foreign(CREATE)
    step = Stepping(server)
    async with connected(server) as client:
        for _ in range(2):
            async with client.call("step") as call:
                step.say(None)
                await call.result()
            await trio.sleep(1_000)
        await client.list_tools()
    assert len(server.connections) == 1
    assert not server.got("ping")


async def test_a_server_that_stays_silent_is_connected_to_less_and_less_often(
    autojump_clock: MockClock,
) -> None:
    server = foreign(CREATE)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        await begun(server, step, call)
        server.is_deaf = True
        await trio.sleep(1_000)
        assert 4 <= len(server.connections) <= 8
        server.is_deaf = False
        step.say("b", None)
        assert await rest_of(call) == ["b"]


async def test_a_request_that_takes_long_is_answered_at_last(autojump_clock: MockClock) -> None:
    """It is repeated to a server that is busy with it, and has longer each time."""
    server = foreign()
    answered = server._asked  # the server of this test is a slow one

    def slow(connection: Any, message: Any, method: str, params: Any) -> None:
        if method == "tools/list":
            delay.start_soon(later, connection, message, method, params)
        else:
            answered(connection, message, method, params)

    async def later(*asked: Any) -> None:
        await trio.sleep(100)
        answered(*asked)

    async with trio.open_nursery() as delay:
        server._asked = slow  # type: ignore[method-assign]
        server.is_deaf = True
        async with connected(server) as client:
            assert await client.list_tools() == []
        delay.cancel_scope.cancel()
    assert 2 < len(server.connections) < 6


async def test_the_time_is_the_users(autojump_clock: MockClock) -> None:
    server = foreign(CREATE)
    step = Stepping(server)
    async with connected(server, silence_s=600) as client, client.call("step") as call:
        await begun(server, step, call)
        silent_at = trio.current_time()
        fall_silent(server)
        step.say(None)
        await call.result()
        assert 600 <= trio.current_time() - silent_at < 605


async def test_a_call_that_is_not_read_is_not_taken_for_silence(autojump_clock: MockClock) -> None:
    server = foreign(CREATE)
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        for number in range(30):
            step.say(f"{number}" + "x" * 60_000)
        await trio.sleep(1_000)
        assert len(server.connections) == 1
        step.say(None)
        assert len(await rest_of(call)) == 30


def test_the_default_is_what_the_page_says() -> None:
    assert Client.__init__.__kwdefaults__ is not None
    assert Client.__init__.__kwdefaults__["silence_s"] == 20
