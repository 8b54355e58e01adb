"""Server objects of the official SDK, behind our transports, with the SDK's own client."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self

import anyio
import mcp_types as types
import pydantic_core
import pytest
import trio
from mcp import ClientSession
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server as LowLevelServer
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel

from streams import messages
from streams.backends.sdk import SdkBackend, recognised
from streams.client.client import Client as OurClient
from streams.errors import CallFailed, LifespanFailed
from streams.exchange import Caller
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from tests.rigs import ROOT
from tests.rigs.backend_served import Served, backend_served
from tests.rigs.proxy import Proxy
from tests.wire.process import ServerProcess
from transports import dial
from transports.sdk import over

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*as of 2026-07-28.*"),
    # The SDK's HTTP client leaves its generators to the garbage collector.
    pytest.mark.filterwarnings("ignore:Async generator 'http.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator:Warning"),
]

Json = dict[str, Any]


class Name(BaseModel):
    name: str


def make_server(**settings: Any) -> MCPServer:
    server = MCPServer("things", version="3", instructions="Use it.", **settings)

    @server.tool()
    async def echo(text: str, ctx: Context) -> str:
        await ctx.report_progress(1, 2, "half")
        await ctx.info(f"echoing {text}")
        return text

    @server.tool()
    def blocking(text: str) -> str:
        return f"{text} in {threading.current_thread().name != 'MainThread'}"

    @server.tool()
    async def ask(number: int, ctx: Context) -> str:
        answer = await ctx.elicit(f"name of {number}?", Name)
        assert answer.action == "accept"
        return f"{number}: {answer.data.name}"

    @server.tool()
    async def ask_roots(ctx: Context) -> list[str]:
        return [str(each.uri) for each in (await ctx.session.list_roots()).roots]

    @server.tool()
    async def shout(ctx: Context) -> str:
        await ctx.session.send_tool_list_changed()
        await ctx.session.send_resource_updated("things://1")
        return "done"

    @server.tool()
    async def introspect(ctx: Context) -> Json:
        params = ctx.session.client_params
        assert params is not None
        return {
            "client": params.client_info.name,
            "version": ctx.protocol_version,
            "request": ctx.request_id,
            "roots": params.capabilities.roots is not None,
            "meta": dict(ctx.request_context.meta or {}),
            "lifespan": ctx.request_context.lifespan_context,
        }

    @server.tool()
    async def fails() -> str:
        raise ValueError("it is broken")

    @server.tool()
    async def refuses() -> str:
        raise MCPError(-32042, "not now", {"why": "late"})

    @server.tool()
    async def big() -> dict[str, int]:
        return {"number": 2**80}

    @server.tool()
    async def sleeps() -> str:
        await anyio.sleep_forever()
        return "never"

    return server


@asynccontextmanager
async def sdk_client(url: str, **callbacks: Any) -> AsyncIterator[ClientSession]:
    async with (
        streamable_http_client(url) as (read, write),
        ClientSession(read, write, **callbacks) as session,
    ):
        await session.initialize()
        yield session


class Host:
    """Serves one server after another over the same journal."""

    def __init__(self, journal: MemoryJournal, keyring: Keyring) -> None:
        self._journal = journal
        self._keyring = keyring
        self._manager = trio.open_nursery()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.nursery: trio.Nursery

    async def __aenter__(self) -> Self:
        self.nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.nursery.cancel_scope.cancel()
        await self._manager.__aexit__(*error)

    async def start(self, server: Any) -> Served:
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        return await self.nursery.start(self._serve, server)

    async def stop(self) -> None:
        self._scope.cancel()
        await self._ended.wait()

    async def _serve(self, server: Any, *, task_status: trio.TaskStatus[Served]) -> None:
        with self._scope:
            async with backend_served(SdkBackend(server), self._journal, self._keyring) as served:
                task_status.started(served)
                await trio.sleep_forever()
        self._ended.set()


@asynccontextmanager
async def session_of(server: Any, **callbacks: Any) -> AsyncIterator[ClientSession]:
    """A client of this server, over HTTP."""
    async with (
        backend_served(SdkBackend(server)) as served,
        sdk_client(served.http_url, **callbacks) as client,
    ):
        yield client


def text_of(result: Any) -> str:
    return str(result.content[0].text)


# Objects that are served


@pytest.mark.parametrize(
    "server", [MCPServer("x"), LowLevelServer("x")], ids=["MCPServer", "low-level"]
)
def test_the_sdks_objects_are_recognised(server: Any) -> None:
    assert recognised(server)
    SdkBackend(server)


def test_a_subclass_is_recognised() -> None:
    class Mine(MCPServer):
        pass

    assert recognised(Mine("x"))


@pytest.mark.parametrize("other", [object(), "server", 3, make_server])
def test_other_objects_are_not(other: Any) -> None:
    assert not recognised(other)
    with pytest.raises(TypeError, match="is no server: give"):
        SdkBackend(other)


def test_a_server_of_fastmcp_is_told_of_wrap() -> None:
    kind = type("FastMCP", (), {"__module__": "fastmcp.server.server"})
    assert recognised(kind())
    with pytest.raises(TypeError, match=r"mcp-streams wrap -- fastmcp run FILE\.py"):
        SdkBackend(kind())


def test_without_the_sdk_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["mcp"] = sys.modules["mcp_types"] = None
from streams.backends.sdk import SdkBackend, recognised
kind = type("MCPServer", (), {"__module__": "mcp.server.mcpserver.server"})
assert recognised(kind()) and not recognised(object())
try:
    SdkBackend(kind())
except TypeError as error:
    print(error)
from transports.sdk import over
try:
    over("ws://127.0.0.1:9")
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.count("pip install 'mcp-streams[sdk]'") == 2, done.stdout + done.stderr


async def test_the_hello_is_the_sdks() -> None:
    async with (
        backend_served(SdkBackend(make_server())) as served,
        Client(served.http_url, mode="legacy") as client,
    ):
        assert client.server_info.name == "things"
        assert client.server_info.version == "3"
        assert client.instructions == "Use it."
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.completions is None  # it has no handler for them
        assert capabilities.extensions  # ours


async def test_lists_are_those_of_the_bare_server() -> None:
    server = make_server()
    async with Client(server, mode="legacy") as bare:
        listed = await bare.list_tools()
    async with (
        backend_served(SdkBackend(server)) as served,
        Client(served.http_url, mode="legacy") as client,
    ):
        assert await client.list_tools() == listed


# Calls


async def test_progress_and_logs_of_a_call_come_to_it() -> None:
    progress: list[Any] = []
    logs: list[Any] = []

    async def on_progress(*report: Any) -> None:
        progress.append(report)

    async def on_log(params: Any) -> None:
        logs.append(params.data)

    async with session_of(make_server(), logging_callback=on_log) as client:
        result = await client.call_tool("echo", {"text": "hi"}, progress_callback=on_progress)
    assert text_of(result) == "hi"
    assert progress == [(1.0, 2.0, "half")]
    assert logs == ["echoing hi"]


async def test_a_plain_function_runs_in_a_thread() -> None:
    async with session_of(make_server()) as client:
        assert text_of(await client.call_tool("blocking", {"text": "x"})) == "x in True"


async def test_failures_are_told_as_the_sdk_tells_them() -> None:
    server = make_server()
    async with Client(server, mode="legacy") as bare:
        expected = await bare.call_tool("fails")
        with pytest.raises(MCPError) as unknown:
            await bare.call_tool("refuses")
    async with session_of(server) as client:
        assert await client.call_tool("fails") == expected
        with pytest.raises(MCPError) as refused:
            await client.call_tool("refuses")
        assert refused.value.error == unknown.value.error
        with pytest.raises(MCPError, match="Method not found"):
            await client.subscribe_resource("things://1")


async def test_an_error_that_json_cannot_express_ends_its_call_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # xdist cannot send a report with a lone surrogate
    server = MCPServer("x")

    @server.tool()
    async def breaks(how: str) -> str:
        match how:
            case "data":
                raise MCPError(-32042, "no", object())
            case "message":
                raise MCPError(-32042, "no \ud800")
            case "code":
                raise MCPError(2**80, "no")
            case "surrogate":
                return "\ud800"
        raise ValueError("\ud800")

    async with session_of(server) as client:
        for how in ("data", "message", "code"):
            with pytest.raises(MCPError, match=r"no|server failed"):
                await client.call_tool("breaks", {"how": how})
        with pytest.raises(MCPError):
            await client.call_tool("breaks", {"how": "surrogate"})
        assert (await client.call_tool("breaks", {"how": "else"})).is_error


async def test_integers_of_any_size_pass() -> None:
    async with session_of(make_server()) as client:
        result = await client.call_tool("big")
    assert result.structured_content == {"number": 2**80}


async def test_a_tool_sees_its_client_and_its_request() -> None:
    async def roots(_: Any) -> Any:
        return types.ListRootsResult(roots=[])

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[str]:
        yield "of the process"

    server = make_server(lifespan=lifespan)
    info = types.Implementation(name="me", version="1")
    async with (
        backend_served(SdkBackend(server)) as served,
        sdk_client(served.http_url, client_info=info, list_roots_callback=roots) as client,
    ):
        result = await client.call_tool("introspect", meta={"trace": "t"})
    seen = result.structured_content
    assert seen is not None
    assert seen["client"] == "me"
    assert seen["version"] == "2025-11-25"
    assert seen["roots"] is True
    assert seen["lifespan"] == "of the process"
    assert seen["meta"]["trace"] == "t"


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_a_tool_sees_the_caller_that_our_listener_has_authenticated(scheme: str) -> None:
    server = MCPServer("x")

    @server.tool()
    async def caller() -> Json | None:
        token = get_access_token()
        return None if token is None else token.model_dump()

    async def admit(head: Any) -> Caller:
        name = dict(head.headers)["authorization"].removeprefix("Bearer ")
        principal = f"bearer(https://issuer, {name})"
        return Caller(principal, lambda: 60, frozenset({"b", "a"}), {"client_id": "app"})

    async with backend_served(SdkBackend(server), admit=admit) as served:
        url = served.ws_url if scheme == "ws" else served.http_url
        async with OurClient(dial(url, token="ada")) as client:
            seen = (await client.call_tool("caller")).structured_content
    assert seen is not None
    seen = seen["result"]
    assert (seen["client_id"], seen["subject"], seen["scopes"]) == ("app", "ada", ["a", "b"])
    assert seen["claims"] == {"iss": "https://issuer", "client_id": "app"}
    assert seen["token"] == ""


@pytest.mark.parametrize("token", [[], {}, None, "x", 7, 2**70])
async def test_a_client_may_send_progress_of_nothing(token: Any) -> None:
    async with (
        backend_served(SdkBackend(make_server())) as served,
        dial(served.ws_url)() as channel,
    ):
        hello = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "n", "version": "1"},
        }
        await channel.send(messages.request(1, "initialize", hello))
        report = {"progressToken": token, "progress": 1}
        line = pydantic_core.to_json(
            {"jsonrpc": "2.0", "method": "notifications/progress", "params": report}
        )
        await channel.send(line + b"\n")
        await channel.send(messages.request(2, "tools/list", {}))
        found: list[Any] = []
        with trio.fail_after(5):
            while len(found) < 2:
                found += await channel.receive()
        assert b'"tools"' in found[1]


async def test_the_lifespan_is_entered_once_for_all_sessions() -> None:
    entered: list[str] = []

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[str]:
        entered.append("in")
        yield "state"
        entered.append("out")

    async with backend_served(SdkBackend(make_server(lifespan=lifespan))) as served:
        for _ in range(3):
            async with sdk_client(served.http_url) as client:
                await client.list_tools()
        assert entered == ["in"]
    assert entered == ["in", "out"]


async def test_a_lifespan_that_fails_says_so() -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        raise OSError("no database")
        yield

    with pytest.raises(LifespanFailed, match="no database"):
        async with backend_served(SdkBackend(make_server(lifespan=lifespan))):
            pass


# Questions


async def test_questions_of_two_calls_of_one_session_go_each_on_its_own_stream() -> None:
    """1,000 times, answered in the order opposite to that in which they came."""
    pairs = 1_000
    async with backend_served(SdkBackend(make_server())) as served:
        answered = 0

        async def answer(params: Any, call: Any) -> Json:
            nonlocal answered
            answered += 1
            number = params["message"].split()[2].rstrip("?")
            assert call.arguments == {"number": int(number)}, "on the stream of another call"
            if int(number) % 2 == 0:  # the first of the pair waits for the second
                await waiting[int(number) + 1].wait()
            waiting.setdefault(int(number), trio.Event()).set()
            return {"action": "accept", "content": {"name": f"n{number}"}}

        waiting: dict[int, trio.Event] = {}
        answers = {"elicitation/create": answer}
        async with OurClient(dial(served.ws_url), answers=answers) as client:

            async def call(number: int) -> None:
                result = await client.call_tool("ask", {"number": number})
                assert result.content[0]["text"] == f"{number}: n{number}"

            for pair in range(pairs):
                waiting[2 * pair + 1] = trio.Event()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(call, 2 * pair)
                    nursery.start_soon(call, 2 * pair + 1)
        assert answered == 2 * pairs


async def test_a_question_without_a_request_belongs_to_the_call_that_asks() -> None:
    """`list_roots` cannot name its request. This client has no standing stream to be asked on."""
    asked: list[Any] = []

    async def roots(_: Any, call: Any) -> Json:
        asked.append(call.name)
        return {"roots": [{"uri": "file:///here"}]}

    async with (
        backend_served(SdkBackend(make_server())) as served,
        OurClient(dial(served.http_url), answers={"roots/list": roots}) as client,
    ):
        result = await client.call_tool("ask_roots")
    assert result.structured_content == {"result": ["file:///here"]}
    assert asked == ["ask_roots"]


async def test_an_error_of_the_client_is_the_question_s_error() -> None:
    async with session_of(make_server()) as client:  # it has no callback
        with pytest.raises(MCPError, match="Elicitation not supported"):
            await client.call_tool("ask", {"number": 1})


async def test_a_question_has_a_timeout_and_takes_progress() -> None:
    server = MCPServer("x")
    reports: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append(progress)

    @server.tool()
    async def patient(ctx: Context) -> str:
        question = types.ElicitRequest(
            params=types.ElicitRequestFormParams(
                message="?", requested_schema={"type": "object", "properties": {}}
            )
        )
        try:
            await ctx.session.send_request(
                question,
                types.ElicitResult,
                request_read_timeout_seconds=0.3,
                progress_callback=on_progress,
            )
        except MCPError as error:
            return f"{error.code} {error.message}"
        return "answered"

    async with backend_served(SdkBackend(server)) as served:

        async def never(context: Any, params: Any) -> Any:
            await context.session.send_progress_notification(context.meta["progress_token"], 0.5)
            await anyio.sleep_forever()

        async with sdk_client(served.http_url, elicitation_callback=never) as client:
            result = await client.call_tool("patient")
    assert text_of(result) == "-32001 Request 'elicitation/create' timed out"
    assert reports == [0.5]


# Cuts, cancels, ends


async def test_a_call_survives_a_cut_and_its_question_is_asked_again() -> None:
    asked = trio.Event()
    may_answer = trio.Event()

    async def answer(params: Any) -> Json:
        asked.set()
        await may_answer.wait()
        return {"action": "accept", "content": {"name": "late"}}

    async with (
        backend_served(SdkBackend(make_server(), resume_min_s=0)) as served,
        trio.open_nursery() as nursery,
    ):
        proxy = Proxy(served.ws_port)
        await nursery.start(proxy.serve)
        url = f"ws://127.0.0.1:{proxy.port}"
        answers = {"elicitation/create": answer}
        async with OurClient(dial(url), answers=answers) as client:
            async with trio.open_nursery() as calls:
                results: list[Any] = []

                async def call() -> None:
                    results.append(await client.call_tool("ask", {"number": 5}))

                calls.start_soon(call)
                await asked.wait()
                proxy.cut()
                may_answer.set()
            assert results[0].content[0]["text"] == "5: late"
        nursery.cancel_scope.cancel()


async def test_a_call_goes_on_after_its_session() -> None:
    """The connection is lost for good; another client resumes the call by its ticket."""
    server, go_on = MCPServer("x"), trio.Event()

    @server.tool()
    async def long(ctx: Context) -> str:
        await ctx.info("begun")
        await go_on.wait()
        await ctx.info("going on")
        return "done"

    async with backend_served(SdkBackend(server, resume_min_s=0)) as served:
        async with OurClient(dial(served.ws_url)) as first, first.call("long") as call:
            async for _ in call:
                break
            ticket = call.ticket
        go_on.set()
        assert ticket is not None
        async with OurClient(dial(served.http_url)) as second, second.resume(ticket) as call:
            data = [message.params async for message in call]
            assert b"going on" in bytes(data[-1])
            assert (await call.result())["content"][0]["text"] == "done"


async def test_a_cancel_reaches_the_handler() -> None:
    server = MCPServer("x")
    begun, ended = trio.Event(), trio.Event()

    @server.tool()
    async def long() -> str:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            ended.set()
        return ""

    async with session_of(server) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "long")
            await begun.wait()
            group.cancel_scope.cancel()
        with trio.fail_after(5):
            await ended.wait()


async def test_calls_in_flight_are_interrupted_by_the_end_of_the_server() -> None:
    journal, keyring = MemoryJournal(), Keyring.load(None)
    async with Host(journal, keyring) as host:
        first = await host.start(make_server())
        async with OurClient(dial(first.ws_url)) as client, client.call("sleeps") as call:
            while call.ticket is None:
                await trio.sleep(0.01)
            ticket = call.ticket
        await host.stop()
        second = await host.start(make_server())
        async with OurClient(dial(second.ws_url)) as client, client.resume(ticket) as call:
            with pytest.raises(CallFailed, match="server stopped before the call was done"):
                await call.result()


async def test_a_handler_that_breaks_ends_its_call_alone() -> None:
    async def on_list(ctx: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=[])

    async def on_call(ctx: Any, params: Any) -> Any:
        if params.name == "exit":
            raise SystemExit(3)
        if params.name == "group":
            raise ExceptionGroup("many", [ValueError("one"), OSError("two")])
        return types.CallToolResult(content=[types.TextContent(type="text", text="fine")])

    server = LowLevelServer("x", on_list_tools=on_list, on_call_tool=on_call)
    async with session_of(server) as client:
        for name in ("exit", "group"):
            with pytest.raises(MCPError):
                await client.call_tool(name)
        assert text_of(await client.call_tool("fine")) == "fine"


async def test_a_tool_that_needs_asyncio_gets_advice(capsys: Any) -> None:
    server = MCPServer("x")

    @server.tool()
    async def sleepy() -> str:
        await asyncio.sleep(1)
        return ""

    async with session_of(server) as client:
        assert (await client.call_tool("sleepy")).is_error
    assert "mcp-streams wrap -- python FILE.py" in capsys.readouterr().err


# Messages of the session


async def test_changes_reach_the_session_that_they_are_for() -> None:
    heard: list[str] = []

    async def on_message(message: Any) -> None:
        heard.append(type(message).__name__)

    async with (
        backend_served(SdkBackend(make_server())) as served,
        sdk_client(served.http_url, message_handler=on_message) as client,
        sdk_client(served.http_url),
    ):
        await client.call_tool("shout")
        with trio.fail_after(5):
            while len(heard) < 2:
                await trio.sleep(0.01)
    assert heard == ["ToolListChangedNotification", "ResourceUpdatedNotification"]


async def test_the_handler_of_a_notification_may_ask_its_client() -> None:
    """The next message, which is the answer, does not wait for it."""
    found: list[str] = []
    done = trio.Event()

    async def on_roots_changed(ctx: Any, params: Any) -> None:
        found.extend(str(each.uri) for each in (await ctx.session.list_roots()).roots)
        done.set()

    server = LowLevelServer("x", on_roots_list_changed=on_roots_changed)

    async def roots(_: Any) -> Any:
        return types.ListRootsResult(roots=[types.Root(uri="file:///now")])

    async with session_of(server, list_roots_callback=roots) as client:
        await client.send_roots_list_changed()
        with trio.fail_after(5):
            await done.wait()
    assert found == ["file:///now"]


async def test_a_question_of_a_session_that_has_ended_fails() -> None:
    """A task of the server's own may hold a session for longer than its client stays."""
    server = MCPServer("x")
    failures: list[MCPError] = []
    sessions: list[Any] = []

    @server.tool()
    async def remember(ctx: Context) -> str:
        sessions.append(ctx.session)
        return "done"

    async def ask(session: Any) -> None:
        try:
            await session.list_roots()
        except MCPError as error:
            failures.append(error)

    async with backend_served(SdkBackend(server)) as served, trio.open_nursery() as nursery:
        async with OurClient(dial(served.ws_url), answers={"roots/list": never}) as client:
            await client.call_tool("remember")
            nursery.start_soon(ask, sessions[0])
            await trio.sleep(0.1)
            assert not failures
        with trio.fail_after(5):
            while not failures:
                await trio.sleep(0.01)
        await ask(sessions[0])
    assert [each.code for each in failures] == [types.CONNECTION_CLOSED] * 2


async def never(_: Any) -> Any:
    await trio.sleep_forever()


async def test_progress_under_a_token_goes_to_the_call_that_has_it() -> None:
    """As authors of low-level servers send it: without naming the request."""
    server = MCPServer("x")

    @server.tool()
    async def work(ctx: Context) -> str:
        token = (ctx.request_context.meta or {}).get("progress_token")
        assert token is not None
        await ctx.session.send_progress_notification(token, 1, 2)
        await ctx.session.send_progress_notification("of another", 1, 2)
        return "done"

    async with (
        backend_served(SdkBackend(server)) as served,
        OurClient(dial(served.http_url)) as client,
        client.call("work") as call,
    ):
        tokens = [messages.decode(each.params, Json)["progressToken"] async for each in call]
    assert tokens == [call.request_id, "of another"]


async def test_a_session_of_before_a_restart_is_known_to_the_sdk() -> None:
    """Its client does not initialize again, and the tools still see who it is."""
    journal, keyring = MemoryJournal(), Keyring.load(None)
    seen: list[str] = []

    async def on_set_level(ctx: Any, params: Any) -> Any:
        seen.append(ctx.session.client_params.client_info.name)
        return types.EmptyResult()

    def make() -> Any:
        return LowLevelServer("x", on_set_logging_level=on_set_level)

    info = types.Implementation(name="lasting", version="1")
    async with Host(journal, keyring) as host:
        first = await host.start(make())
        proxy = Proxy(first.http_port)
        await host.nursery.start(proxy.serve)
        url = f"http://127.0.0.1:{proxy.port}/mcp"
        async with sdk_client(url, client_info=info) as client:
            await client.set_logging_level("info")
            await host.stop()
            second = await host.start(make())
            proxy._upstream_port = second.http_port
            await client.set_logging_level("error")
    assert seen == ["lasting", "lasting"]


async def test_a_connection_s_cleanup_runs_when_its_last_call_has_ended() -> None:
    closed = trio.Event()
    server = MCPServer("x")
    begun, go_on = trio.Event(), trio.Event()

    @server.tool()
    async def long(ctx: Context) -> str:
        ctx.session._connection.exit_stack.callback(closed.set)
        begun.set()
        await go_on.wait()
        return "done"

    async with backend_served(SdkBackend(server)) as served:
        async with OurClient(dial(served.ws_url)) as client, client.call("long") as call:
            await begun.wait()
            while call.ticket is None:
                await trio.sleep(0.01)
        await trio.sleep(0.2)
        assert not closed.is_set()
        go_on.set()
        with trio.fail_after(5):
            await closed.wait()


# In a process of its own

APP: Final = f"{ROOT / 'tests' / 'sdk' / 'objects_server.py'}:server"


async def test_a_kill_of_the_server_ends_its_calls_and_not_the_session(tmp_path: Path) -> None:
    """The program goes on: its call is told to be interrupted, and the next one runs."""
    with ServerProcess(tmp_path, app=APP) as server:
        begun = trio.Event()

        async def on_progress(*_: Any) -> None:
            if not begun.is_set():
                begun.set()
                await trio.to_thread.run_sync(server.restart)

        async with Client(over(server.url, connect_s=20)) as client:
            with pytest.raises(MCPError) as interrupted:
                await client.call_tool("counts", {"rows": 0}, progress_callback=on_progress)
            assert interrupted.value.error.data["reason"] == "interrupted"
            assert text_of(await client.call_tool("counts", {"rows": 3})) == "3 rows"


async def test_a_thread_that_nothing_can_stop_does_not_delay_the_end(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=APP) as server:
        codes: list[int] = []

        async def on_progress(*_: Any) -> None:
            codes.append(await trio.to_thread.run_sync(server.stop))

        async with Client(over(server.url, connect_s=20)) as client:
            with pytest.raises(MCPError, match="server stopped before the call was done"):
                await client.call_tool("blocks", progress_callback=on_progress)
    assert codes == [0]


async def test_the_watchdog_names_a_tool_that_holds_up_the_event_loop(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, app=APP, options=("--watchdog", "0.2")) as server:
        async with Client(over(server.url, connect_s=20)) as client:
            await client.call_tool("holds", {"seconds": 1})
        await trio.to_thread.run_sync(server.hear, "a handler blocks all connections")
        said = next(line for line in server.log if "blocks all connections" in line)
    assert "tool=holds" in said
    assert "objects_server.py" in said
