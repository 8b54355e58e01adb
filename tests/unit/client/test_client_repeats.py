"""A call whose connection is lost before anything came is sent a second time, and runs once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Call, Server
from streams.client.client import Client
from streams.engine.departure import Departure
from streams.errors import CallFailed, CallLost, CannotConnect, StreamGone
from streams.exchange import ClientChannel
from streams.messages import decode, result
from tests.rigs.clients import at_home, connected, counting, rest_of, said
from tests.rigs.cutting import Cutting
from tests.rigs.scripted_http import Asked, http_server
from tests.rigs.server import open_house
from transports import dial
from transports.memory import MemoryServer

DIALECTS = [("streams", "resumableRequests"), ("streams",), ("resumableRequests",), ()]


@pytest.fixture(params=DIALECTS, ids="+".join)
def dialects(request: pytest.FixtureRequest) -> tuple[str, ...]:
    dialects: tuple[str, ...] = request.param
    return dialects


class Rig:
    """A server that counts the runs of its tools."""

    def __init__(self, **settings: Any) -> None:
        self.server = Server("tested", **({"resume_min_s": 0, "resume_max_s": 600} | settings))
        self.runs = 0
        self.was_cancelled = False
        self.server.tool(self.count)
        self.server.tool(self.hang_up)

    async def count(self, call: Call, n: int = 3, pause_s: float = 0.0) -> str:
        self.runs += 1
        try:
            for number in range(1, n + 1):
                await call.log("info", number)
                await trio.sleep(pause_s)
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        return f"counted {n}"

    async def hang_up(self, call: Call) -> str:
        self.runs += 1
        await call.log("info", 1)
        await call.disconnect()
        await call.log("info", 2)
        return "called back"


@pytest.fixture
def rig() -> Rig:
    return Rig()


@asynccontextmanager
async def cut(
    memory: MemoryServer, cuts: int, *, is_sent: bool = True, **options: Any
) -> AsyncIterator[tuple[Client, Cutting]]:
    """A client whose connection is cut this many times after it has made a call."""
    cutting = Cutting(memory.connect, cuts, is_sent=is_sent)
    with trio.fail_after(10_000):  # of the mock clock: a safety net
        async with Client(cutting, **options) as client:
            yield client, cutting


async def text(call: Any) -> str:
    return str((await call.result())["content"][0]["text"])


@pytest.mark.parametrize("is_sent", [True, False], ids=["heard", "unheard"])
@pytest.mark.parametrize("pause_s", [0, 20])
async def test_a_call_runs_once_however_often_its_connection_goes_first(
    rig: Rig, dialects: tuple[str, ...], autojump_clock: MockClock, is_sent: bool, pause_s: float
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 7, is_sent=is_sent, dialects=dialects) as (client, way),
        client.call("count", {"n": 3, "pause_s": pause_s}) as call,
    ):
        assert await rest_of(call) == [1, 2, 3]
        assert await text(call) == "counted 3"
        assert (way.connections, way.cuts_left) == (8, 0)
    assert rig.runs == 1


async def test_many_calls_at_once_run_once_each(rig: Rig, autojump_clock: MockClock) -> None:
    found = []

    async def follow(client: Client, n: int) -> None:
        async with client.call("count", {"n": n, "pause_s": 1}) as call:
            assert await rest_of(call) == list(range(1, n + 1))
            found.append(await text(call))

    async with (
        at_home(rig.server) as memory,
        cut(memory, 5) as (client, _),
        trio.open_nursery() as nursery,
    ):
        for n in range(1, 20):
            nursery.start_soon(follow, client, n)
    assert sorted(found) == sorted(f"counted {n}" for n in range(1, 20))
    assert rig.runs == 19


async def test_once_it_is_announced_a_call_is_resumed_as_ever(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 2) as (client, way),
        client.call("count", {"n": 5, "pause_s": 10}) as call,
    ):
        assert said(await anext(call)) == 1
        memory.cables[-1].cut()
        assert await rest_of(call) == [2, 3, 4, 5]
        assert way.connections == 4
    assert rig.runs == 1


async def test_a_tool_may_let_go_of_who_has_made_the_call_again(
    rig: Rig, dialects: tuple[str, ...], autojump_clock: MockClock
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 1, dialects=dialects) as (client, _),
        client.call("hang_up") as call,
    ):
        if "streams" in dialects:
            assert await rest_of(call) == [1, 2]
        assert await text(call) == "called back"
    assert rig.runs == 1


async def test_who_comes_back_too_early_waits_as_long_as_the_server_says(
    autojump_clock: MockClock,
) -> None:
    rig = Rig(resume_min_s=30, enforce_min=True)
    async with (
        at_home(rig.server) as memory,
        cut(memory, 1) as (client, way),
        client.call("count", {"pause_s": 5}) as call,
    ):
        began_at = trio.current_time()
        assert await rest_of(call) == [1, 2, 3]
        assert trio.current_time() - began_at >= 30
        assert way.connections == 2
    assert rig.runs == 1


async def test_a_call_can_be_cancelled_before_anything_of_it_has_come(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 2) as (client, _),
        client.call("count", {"pause_s": 100}) as call,
    ):
        await trio.sleep(0.001)
        await call.cancel()
        with pytest.raises(StreamGone) as caught:
            await call.result()
        assert caught.value.reason == "cancelled"
        await trio.sleep(1)
        assert rig.was_cancelled
    assert rig.runs == 1


async def test_a_call_that_was_left_is_not_made_again(rig: Rig, autojump_clock: MockClock) -> None:
    async with at_home(rig.server) as memory, cut(memory, 2, is_sent=False) as (client, way):
        async with client.call("count"):
            pass
        await client.ping()
        await trio.sleep(100)
        assert way.cuts_left == 1
    assert rig.runs == 0


async def test_what_the_server_refuses_is_an_error_as_ever(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 3) as (client, _),
        client.call("nowhere") as call,
    ):
        with pytest.raises(CallFailed, match="Unknown tool 'nowhere'"):
            await call.result()


async def test_what_cannot_be_resumed_is_not_run_twice(autojump_clock: MockClock) -> None:
    rig = Rig(resume_max_s=0)
    async with at_home(rig.server) as memory, cut(memory, 1) as (client, _):
        async with client.call("count", {"pause_s": 100}) as call:
            with pytest.raises(StreamGone) as caught:
                await call.result()
        assert caught.value.reason == "abandoned"
    assert rig.runs == 1


async def test_a_server_that_cannot_know_of_the_call_is_not_given_it(
    rig: Rig, autojump_clock: MockClock
) -> None:
    """It has another memory of keys: that of a process without a journal, or of another process."""
    async with at_home(rig.server) as one, at_home(rig.server) as other:
        servers = [one, other]

        @asynccontextmanager
        async def dial() -> AsyncIterator[ClientChannel]:
            async with servers[0].connect() as channel:
                yield channel

        cutting = Cutting(dial, 1)

        async def move() -> None:
            del servers[0]

        cutting.then = move
        async with Client(cutting) as client:
            async with client.call("count", {"pause_s": 1}) as call:
                with pytest.raises(CallLost):
                    await call.result()
            await trio.sleep(10)
            async with client.call("count") as call:
                assert await rest_of(call) == [1, 2, 3]
    assert rig.runs == 2


async def test_who_finds_no_connection_any_more_says_so(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with at_home(rig.server) as memory:
        cutting = Cutting(memory.connect, 1_000)
        async with Client(cutting, patience_s=5) as client, client.call("count") as call:
            with pytest.raises(CannotConnect):
                await call.result()
    assert rig.runs == 1


async def test_the_same_request_is_sent_again_with_a_key_of_its_own(
    autojump_clock: MockClock,
) -> None:
    server = counting(key_memory="a memory")
    async with server.serving(), Client(Cutting(server.memory.connect, 2)) as client:
        async with client.call("count", {"n": 2}) as call:
            assert await rest_of(call) == ["1", "2"]
        async with client.call("count", {"n": 2}) as call:
            assert await rest_of(call) == ["1", "2"]
    requests = [message for _, message in server.received if message.get("method") == "tools/call"]
    assert requests[0] == requests[1] == requests[2]
    keys = {request["params"]["_meta"]["mcp-streams/idempotencyKey"] for request in requests}
    assert sorted(map(len, keys)) == [43, 43]


async def test_a_server_that_honours_no_keys_is_not_asked_again(autojump_clock: MockClock) -> None:
    server = counting()
    async with connected(server) as client:
        server.memory.cables[-1].cut_after(to_near=1)
        async with client.call("count", {"n": 1}) as call:
            with pytest.raises(CallLost):
                await call.result()
    assert len(server.got("tools/call")) == 1


async def test_without_a_key_a_call_is_sent_once_and_its_loss_is_an_error(
    autojump_clock: MockClock,
) -> None:
    server = counting(key_memory="a memory")
    cutting = Cutting(server.memory.connect, 2)
    async with server.serving(), Client(cutting, idempotency_keys=False) as client:
        async with client.call("count", {"n": 1}) as call:
            with pytest.raises(CallLost, match="may or may not have run"):
                await call.result()
            assert call.ticket is None
        async with client.call("count", {"n": 2}, idempotency_key=True) as call:
            assert await rest_of(call) == ["1", "2"]
    metas = [params["_meta"] for params in server.got("tools/call")]
    assert ["mcp-streams/idempotencyKey" in meta for meta in metas] == [False, True, True]


async def test_one_call_may_go_without_a_key(rig: Rig, autojump_clock: MockClock) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 1) as (client, _),
        client.call("count", {"pause_s": 1}, idempotency_key=False) as call,
    ):
        with pytest.raises(CallLost):
            await call.result()
    assert rig.runs == 1


@pytest.mark.parametrize("settings", [{}, {"idempotency_key": False}])
async def test_a_key_of_the_users_own_is_sent_and_the_call_runs_once(
    rig: Rig, settings: dict[str, bool], autojump_clock: MockClock
) -> None:
    meta = {"mcp-streams/idempotencyKey": "order-7"}
    async with at_home(rig.server) as memory, Client(memory.connect) as client:
        async with client.call("count", meta=meta, **settings):
            pass
        with pytest.raises(CallFailed, match="was used for another call"):
            await client.call_tool("count", {"n": 4}, meta=meta, **settings)
        again = await client.call_tool("count", meta=meta, **settings)
        assert again.text == "counted 3"
    assert rig.runs == 1


async def test_without_a_key_an_announced_call_is_resumed_as_ever(
    rig: Rig, autojump_clock: MockClock
) -> None:
    async with (
        at_home(rig.server) as memory,
        cut(memory, 0, idempotency_keys=False) as (client, way),
        client.call("count", {"n": 5, "pause_s": 10}) as call,
    ):
        assert said(await anext(call)) == 1
        memory.cables[-1].cut()
        assert await rest_of(call) == [2, 3, 4, 5]
        assert way.connections == 2
    assert rig.runs == 1


@pytest.mark.parametrize("is_cut", [False, True], ids=["same connection", "next connection"])
async def test_a_call_that_a_draining_server_refuses_is_sent_again(
    rig: Rig, autojump_clock: MockClock, is_cut: bool
) -> None:
    memory = MemoryServer()
    async with open_house(rig.server) as house, trio.open_nursery() as nursery:
        await nursery.start(memory.serve, house.running.serve)
        engine = house.running.engine
        engine.departure.begin()
        async with Client(memory.connect) as client, client.call("count") as call:
            await trio.sleep(5)
            assert rig.runs == 0
            if is_cut:
                memory.cables[-1].cut()
            engine.departure = Departure()  # the next server
            assert await text(call) == "counted 3"
        assert rig.runs == 1
        nursery.cancel_scope.cancel()


class Forgetful:
    """A plain server over HTTP that refuses calls in its first sessions."""

    def __init__(self, status: str, refuses: int) -> None:
        self.status = status
        self.refuses = refuses
        self.sessions = 0
        self.called = 0

    async def __call__(self, asked: Asked) -> None:
        request = decode(asked.body or b"{}", dict[str, Any])
        match request.get("method"):
            case "initialize":
                self.sessions += 1
                hello = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
                session = f"Mcp-Session-Id: session-{self.sessions}\r\n"
                await asked.respond("200 OK", result(request["id"], hello), extra=session)
            case "tools/call" if self.sessions <= self.refuses:
                self.called += 1
                await asked.respond(self.status)
            case "tools/call":
                self.called += 1
                await asked.respond("200 OK", result(request["id"], {"content": []}))
            case _:
                await asked.respond("405 Not Allowed" if asked.method == "GET" else "202 Accepted")


@pytest.mark.parametrize("status", ["404 Not Found", "401 Unauthorized"])
async def test_a_call_that_is_refused_with_its_session_is_sent_in_the_next(status: str) -> None:
    forgetful = Forgetful(status, refuses=1)
    async with http_server(forgetful) as server, Client(dial(server.url)) as client:
        assert (await client.call_tool("x", idempotency_key=False)).content == []
    assert (forgetful.sessions, forgetful.called) == (2, 2)


async def test_a_call_that_is_refused_with_each_session_is_an_error() -> None:
    forgetful = Forgetful("404 Not Found", refuses=100)
    async with http_server(forgetful) as server, Client(dial(server.url)) as client:
        with pytest.raises(CallFailed, match="has refused the session: HTTP 404"):
            await client.call_tool("x")
    assert forgetful.called == 4
