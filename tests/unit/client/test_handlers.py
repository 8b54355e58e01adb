"""Handlers of the client: each knows the call that asks, and harms nothing else."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from streams import Call, Client, HttpEndpoint, RunningCall, Server
from streams.client import notifications
from streams.client.answers import takes_call
from streams.messages import Message
from tests.rigs.clients import Params, connected, counting
from tests.rigs.scripted import Scripted, Stream
from tests.rigs.server import open_house
from transports import dial, http, websocket

ELICIT = "elicitation/create"
LOG = "notifications/message"


def asking() -> Server:
    server = Server("asking", resume_min_s=0)

    @server.tool
    async def ask(call: Call, what: str) -> Any:
        """Ask the user."""
        await call.log("info", f"about {what}")
        await call.progress(1, total=2, message=what)
        return await call.request(ELICIT, {"message": what, "requestedSchema": {}})

    return server


@asynccontextmanager
async def reached(server: Server, way: str) -> AsyncIterator[Any]:
    """The server, or a dialer of it."""
    if way in ("memory", "cut"):
        yield server
        return
    async with open_house(server) as house, trio.open_nursery() as nursery:
        if way == "ws":
            port = await nursery.start(websocket.serve, house.running.serve, "127.0.0.1", 0)
            yield dial(f"ws://127.0.0.1:{port}")
        else:
            endpoint = HttpEndpoint(house.running, "/mcp")
            port = await nursery.start(http.serve, endpoint, "127.0.0.1", 0)
            yield dial(f"http://127.0.0.1:{port}")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["memory", "cut", "ws", "http"])
async def test_a_handler_knows_which_of_several_calls_asks(way: str) -> None:
    asked: dict[str, RunningCall] = {}

    async def agree(params: Params, call: RunningCall | None) -> Params:
        assert call is not None
        asked[params["message"]] = call
        if way == "cut":
            client.cut()
        return {"action": "accept", "content": {"to": call.arguments["what"], "by": call.name}}

    async with (
        reached(asking(), way) as server,
        Client(server, answers={ELICIT: agree}) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask(what: str) -> None:
            async with client.call("ask", {"what": what}) as call:
                result = await call.result(dict[str, Any])
                assert result["content"] == {"to": what, "by": "ask"}
                assert asked[what] is call

        for what in ("a", "b", "c"):
            nursery.start_soon(ask, what)


async def test_a_call_that_is_resumed_is_known_to_the_handler() -> None:
    calls: list[RunningCall | None] = []

    async def agree(params: Params, call: RunningCall | None) -> Params:
        calls.append(call)
        return {"action": "decline"}

    async with open_house(asking()) as house:
        async with Client(house.running) as client, client.call("ask", {"what": "a"}) as call:
            async for _ in call:
                break
            ticket = call.ticket
        assert ticket is not None
        async with (
            Client(house.running, answers={ELICIT: agree}) as other,
            other.resume(ticket) as resumed,
        ):
            assert (await resumed.result(dict[str, Any]))["action"] == "decline"
    assert calls == [resumed]
    assert (resumed.name, resumed.arguments) == ("", {}), "only the ticket is known"


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_server_that_numbers_nothing_asks_for_the_only_call(calls: int) -> None:
    """Of several calls, the one that asks is unknown."""
    server = Scripted(is_numbering=False)
    heard: list[RunningCall | None] = []

    async def ask(stream: Stream) -> Params:
        return {"content": [], "answer": await stream.ask("roots/list", {})}

    server.tools["ask"] = ask

    async def roots(params: Params, call: RunningCall | None) -> Params:
        heard.append(call)
        return {"roots": []}

    async def run(call: RunningCall) -> None:
        async with call:
            await call.result()

    async with (
        connected(server, answers={"roots/list": roots}) as client,
        trio.open_nursery() as nursery,
    ):
        running = [client.call("ask") for _ in range(calls)]
        for call in running:
            nursery.start_soon(run, call)
    assert heard == (running if calls == 1 else [None, None])


class Handler:
    async def method(self, params: Params) -> None: ...
    async def with_call(self, params: Params, call: RunningCall | None) -> None: ...
    async def __call__(self, params: Params, call: RunningCall | None) -> None: ...


async def one(params: Params) -> None: ...
async def two(params: Params, call: RunningCall | None) -> None: ...
async def default(params: Params, log: bool = False) -> None: ...
async def named(params: Params, call: RunningCall | None = None) -> None: ...
async def any_number(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "takes"),
    [
        (one, False),
        (two, True),
        (default, False),
        (named, True),
        (any_number, False),
        (lambda params: None, False),
        (Handler().method, False),
        (Handler().with_call, True),
        (Handler(), True),
        (print, False),
    ],
)
def test_a_second_parameter_asks_for_the_call(handler: Callable[..., Any], takes: bool) -> None:
    assert takes_call(handler) is takes


# Notifications


async def test_a_notification_of_a_method_goes_to_its_handler() -> None:
    server = counting()
    levels: list[Any] = []
    changes: list[tuple[Params, RunningCall | None]] = []
    all_of_them: list[str] = []

    async def slowly(params: Params) -> None:
        await trio.lowlevel.checkpoint()
        levels.append(params["data"])

    async with connected(
        server, on_notification=lambda message: all_of_them.append(str(message.method))
    ) as client:
        client.on_notification(LOG, slowly)
        client.on_notification(
            "notifications/tools/list_changed", lambda params, call: changes.append((params, call))
        )
        for number in range(5):
            server.notify(LOG, {"level": "info", "data": number})
        server.notify("notifications/tools/list_changed", {})
        server.notify("notifications/other", {})
        await client.ping()
        while len(changes) < 1:
            await trio.lowlevel.checkpoint()
    assert levels == [0, 1, 2, 3, 4]
    assert changes == [({}, None)]
    assert all_of_them == [*[LOG] * 5, "notifications/tools/list_changed", "notifications/other"]


async def test_a_handler_that_fails_harms_nothing() -> None:
    server = counting()
    heard: list[int] = []

    def fail(params: Params) -> None:
        heard.append(params["data"])
        raise ValueError(params)

    async with connected(server) as client:
        client.on_notification(LOG, fail)
        server.notify(LOG, {"data": 1})
        server.notify(LOG, {})
        server.notify(LOG, {"data": 2})
        await client.ping()
        while len(heard) < 2:
            await trio.lowlevel.checkpoint()
        assert await client.tools()
    assert heard == [1, 2]


async def test_the_handler_of_all_notifications_may_be_async_and_fail() -> None:
    server = counting()
    heard: list[str] = []

    async def slowly(message: Message) -> None:
        await trio.lowlevel.checkpoint()
        heard.append(str(message.method))
        raise ValueError("later")

    def fail(message: Message) -> None:
        heard.append(str(message.method))
        raise ValueError("at once")

    for handler in (slowly, fail):
        async with connected(server, on_notification=handler) as client:
            server.notify("notifications/other", {})
            server.notify(LOG, {"data": 1})
            await client.ping()
            while len(heard) < 2:
                await trio.lowlevel.checkpoint()
            assert await client.tools()
        assert heard == ["notifications/other", LOG]
        heard.clear()


async def test_a_handler_may_ask_the_server() -> None:
    server = counting()
    tools: list[str] = []
    async with connected(server) as client:

        async def list_again(params: Params) -> None:
            tools.extend(tool.name for tool in await client.tools())

        client.on_notification("notifications/tools/list_changed", list_again)
        server.notify("notifications/tools/list_changed", {})
        while not tools:
            await client.ping()
    assert tools == ["count"]


async def test_what_waits_for_a_handler_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "WAITING_MAX", 10)
    server = counting()
    heard: list[int] = []
    may_go = trio.Event()

    async def wait(params: Params) -> None:
        heard.append(params["data"])
        await may_go.wait()

    async with connected(server) as client:
        client.on_notification(LOG, wait)
        server.notify(LOG, {"data": 0})
        while not heard:
            await client.ping()
        for number in range(1, 100):
            server.notify(LOG, {"data": number})
        await client.ping()
        may_go.set()
        while len(heard) < 11:
            await trio.lowlevel.checkpoint()
        server.notify(LOG, {"data": 100})
        while len(heard) < 12:
            await client.ping()
    assert heard == [*range(11), 100]


async def test_call_tool_passes_what_the_call_sends_to_the_handlers() -> None:
    logs: list[tuple[Any, str]] = []
    progress: list[tuple[Any, ...]] = []

    async def agree(params: Params) -> Params:
        return {"action": "accept"}

    def note(params: Params, call: RunningCall | None) -> None:
        assert call is not None
        logs.append((params["data"], call.name))

    async with Client(asking(), answers={ELICIT: agree}) as client:
        client.on_notification(LOG, note)
        result = await client.call_tool(
            "ask", {"what": "x"}, on_progress=lambda *now: progress.append(now)
        )
        assert result.structured_content == {"action": "accept"}
        assert (progress, logs) == ([(1.0, 2.0, "x")], [("about x", "ask")])

        async def later(now: float, total: float | None, message: str | None) -> None:
            await trio.lowlevel.checkpoint()
            progress.append((now, total, message))

        heard: list[Params] = []
        client.on_notification("notifications/progress", heard.append)
        await client.call_tool("ask", {"what": "y"}, on_progress=later)
        await client.call_tool("ask", {"what": "z"})
        assert progress[1:] == [(1.0, 2.0, "y")]
        assert [params["message"] for params in heard] == ["z"]
        assert [data for data, _ in logs] == ["about x", "about y", "about z"]


async def test_meta_of_a_call_reaches_the_server() -> None:
    server = counting()
    async with connected(server) as client:
        await client.call_tool("count", {"n": 1}, meta={"trace": "t", "progressToken": "mine"})
    (params,) = server.got("tools/call")
    assert params["_meta"]["trace"] == "t"
    assert params["_meta"]["progressToken"] != "mine", "the client tells its calls apart by it"
