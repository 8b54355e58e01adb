"""Connections that cannot be made, and what the client does until they can."""

import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.client.client import Client
from streams.errors import INTERNAL_ERROR, CallLost, CannotConnect, Refusal, refusal
from tests.rigs.clients import Stepping, connected, counting, held, rest_of, said
from tests.rigs.scripted import Scripted
from transports import dial


async def test_a_server_that_is_away_is_tried_less_and_less_often(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    Stepping(server)
    tries: list[float] = []

    @asynccontextmanager
    async def dial() -> AsyncIterator[Any]:
        tries.append(trio.current_time())
        async with server.memory.connect() as channel:
            yield channel

    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, dial)
        with pytest.raises(CannotConnect, match="no server runs"):
            await client.ping()
        nursery.cancel_scope.cancel()
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries[1:])]
    assert 290 < tries[-1] - tries[0] < 310
    assert 10 < len(pauses) < 100
    assert max(pauses) <= 30
    assert max(pauses[:3]) <= 2


async def test_a_server_that_is_away_is_tried_often_while_a_call_waits(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    tries: list[float] = []

    @asynccontextmanager
    async def dial() -> AsyncIterator[Any]:
        tries.append(trio.current_time())
        async with server.memory.connect() as channel:
            yield channel

    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, dial)
            step.say("a")
            call = await client.call("step").__aenter__()
            await anext(call)
        await trio.sleep(100)
        pauses = [later - earlier for earlier, later in itertools.pairwise(tries[1:])]
        assert sum(pauses) > 95
        assert max(pauses) <= 2
        nursery.cancel_scope.cancel()


async def test_a_call_that_begins_during_an_outage_is_waited_for_no_longer(
    autojump_clock: MockClock,
) -> None:
    server = counting()
    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, server.memory.connect)
        for _ in range(20):  # nothing waits: attempts are up to 30 s apart
            await trio.sleep(11)
            begun_at = trio.current_time()
            async with server.serving(), client.call("count", {"n": 1}) as call:
                await call.result()
            assert trio.current_time() - begun_at <= 2
        nursery.cancel_scope.cancel()


async def test_the_first_connection_may_wait_for_a_server_that_is_starting(
    autojump_clock: MockClock,
) -> None:
    server = counting()
    async with trio.open_nursery() as nursery:

        async def use() -> None:
            async with Client(server.memory.connect, connect_s=5) as client:
                await client.ping()
            nursery.cancel_scope.cancel()

        nursery.start_soon(use)
        await trio.sleep(4.5)
        async with server.serving():
            await trio.sleep(1)
            raise AssertionError("it is here by now")


async def test_the_first_connection_waits_no_longer_than_it_was_told(
    autojump_clock: MockClock,
) -> None:
    begun_at = trio.current_time()
    with pytest.raises(CannotConnect, match="no server runs"):
        async with Client(Scripted().memory.connect, connect_s=5):
            pass
    assert 5 <= trio.current_time() - begun_at < 5.5


async def test_what_will_be_the_same_the_next_time_is_not_tried_again() -> None:
    server = Scripted()
    server.protocol_version = "1999-12-31"
    async with server.serving():
        with pytest.raises(CannotConnect, match="1999-12-31"):
            async with Client(server.memory.connect, connect_s=1000):
                pass
    assert len(server.connections) == 1


async def test_who_is_not_let_in_any_more_does_not_try_again(autojump_clock: MockClock) -> None:
    server = Scripted()
    Stepping(server)
    tries: list[float] = []
    is_revoked = False

    @asynccontextmanager
    async def dial() -> AsyncIterator[Any]:
        tries.append(trio.current_time())
        if is_revoked:
            raise PermissionError("HTTP 401: Who are you?")
        async with server.memory.connect() as channel:
            yield channel

    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, dial)
            is_revoked = True
        with pytest.raises(CannotConnect, match=r"Who are you\? \(dial with a token"):
            await client.ping()
        assert len(tries) == 2
        nursery.cancel_scope.cancel()


async def test_patience_ends_in_every_running_call(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with trio.open_nursery() as nursery:
        async with server.serving():
            client = await held(nursery, server.memory.connect)
            call = client.call("step")
            await call.__aenter__()
            step.say("a", "b")
            await anext(call)
            await wait_all_tasks_blocked()
        assert said(await anext(call)) == "b"  # what is here can still be read
        with pytest.raises(CannotConnect):
            await call.result()
        await call.__aexit__(None, None, None)
        async with server.serving():  # a new request begins new attempts
            await client.ping()
            nursery.cancel_scope.cancel()


async def test_nobody_answering_at_first_is_said_at_once() -> None:
    with pytest.raises(CannotConnect, match="no server runs"):
        async with Client(Scripted().memory.connect):
            pass


async def test_a_command_that_ends_at_once_is_said_to_have_ended() -> None:
    with pytest.raises(CannotConnect, match="ended with exit code 7: see its standard error"):
        async with Client(dial(f"stdio:{sys.executable} -c 'exit(7)'")):
            pass


async def test_a_call_that_is_lost_says_how_its_server_has_ended(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        "import json\n"
        "hello = {'protocolVersion': '2025-11-25', 'capabilities': {}}\n"
        "asked = json.loads(input())\n"
        "print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': hello}), flush=True)\n"
        "input(), input(), exit(7)\n"
    )
    async with Client(dial(f"stdio:{sys.executable} {server}")) as client:
        with pytest.raises(
            CallLost, match=r"has ended with exit code 7: .*may or may not have run"
        ):
            await client.call_tool("x")


async def test_what_is_no_http_is_said_to_be_none() -> None:
    async def speak(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"SSH-2.0-OpenSSH\r\n")

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, host="127.0.0.1")
        (listener,) = await nursery.start(serve, speak, 0)
        port = listener.socket.getsockname()[1]
        with pytest.raises(CannotConnect, match="the server violated HTTP"):
            async with Client(dial(f"http://127.0.0.1:{port}/mcp")):
                pass
        nursery.cancel_scope.cancel()


async def test_a_command_that_may_not_be_run_needs_no_bearer_token(tmp_path: Path) -> None:
    with pytest.raises(CannotConnect, match="Permission denied") as caught:
        async with Client(dial(f"stdio:{tmp_path}")):
            pass
    assert "token" not in str(caught.value)


async def test_a_server_that_says_nothing_is_no_connection(autojump_clock: MockClock) -> None:
    server = Scripted()
    server.received.clear()

    async def mute(_: Any) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(server.memory.serve, mute)
        with pytest.raises(CannotConnect, match="no answer within 3 s"):
            async with Client(server.memory.connect, connect_timeout_s=3):
                pass
        nursery.cancel_scope.cancel()


async def test_a_server_of_another_time_is_no_connection() -> None:
    server = Scripted()
    server.protocol_version = "1999-12-31"
    async with server.serving():
        with pytest.raises(CannotConnect, match="1999-12-31"):
            async with Client(server.memory.connect):
                pass


async def test_requests_that_may_be_repeated_are(autojump_clock: MockClock) -> None:
    server = counting()
    async with connected(server) as client:
        server.cut()
        await client.set_level("debug")
        server.cut()
        assert [tool.name for tool in await client.list_tools()] == ["count"]
        server.cut()
        assert await client.poll_all() == []
    assert {params["level"] for params in server.got("logging/setLevel")} == {"debug"}
    assert len(server.got("logging/setLevel")) == 3  # also on every later connection


async def test_a_silent_connection_is_given_up(autojump_clock: MockClock) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        server.is_deaf = True
        server.connections[0].following.clear()  # the network forgets the connection
        step.say("b", None)
        assert await rest_of(call) == ["b"]
        server.is_deaf = False
    assert len(server.connections) == 2


@contextmanager
def refusing(server: Scripted, refused: Refusal) -> Iterator[list[float]]:
    """Refuse `initialize` in a block; yields when it is tried."""
    greeted, tries = server._asked, list[float]()

    def asked(connection: Any, message: Any, method: str, params: Any) -> None:
        if method == "initialize":
            tries.append(trio.current_time())
            raise refused
        greeted(connection, message, method, params)

    server._asked = asked  # type: ignore[method-assign]
    try:
        yield tries
    finally:
        server._asked = greeted  # type: ignore[method-assign]


async def test_a_server_that_refuses_to_be_greeted_again_is_given_up_after_the_patience(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server, patience_s=100) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        with refusing(server, Refusal(INTERNAL_ERROR, "HTTP 502")) as tries:
            server.cut()
            with pytest.raises(CannotConnect, match="HTTP 502"):
                await anext(call)
    assert 99 < tries[-1] - tries[0] + 5 < 110
    assert len(tries) < 200  # at most 2 a second while a call waits


async def test_a_server_that_says_when_to_come_again_is_tried_then(
    autojump_clock: MockClock,
) -> None:
    server = Scripted()
    step = Stepping(server)
    async with connected(server) as client, client.call("step") as call:
        step.say("a")
        await anext(call)
        with refusing(server, refusal("unavailable", retryAfter=0.25)) as tries:
            server.cut()
            await trio.sleep(100)
        pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
        assert max(pauses) < 0.4
        step.say("b")
        await anext(call)
