"""The official SDK's client over `transports.sdk.over`: unchanged programs that survive cuts."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
import trio
from mcp import ClientSession
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server as LowLevelServer
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import BaseModel

from streams.aio.guest import Guest
from streams.aio.over import Over
from streams.backends.sdk import SdkBackend
from streams.cli.selftest.rigs import ListeningRig, Rig, StdioRig
from tests.rigs import ROOT
from tests.rigs.backend_served import Served, backend_served
from tests.rigs.proxy import Proxy
from transports.sdk import over

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*as of 2026-07-28.*"),
    # The SDK's HTTP client leaves its generators to the garbage collector.
    pytest.mark.filterwarnings("ignore:Async generator 'http.*:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <async_generator:Warning"),
]

COUNTING = f"{ROOT / 'tests' / 'rigs' / 'aio_server.py'}:server"
FIXTURE = ROOT / "tests" / "sdk" / "conformance_sdk_server.py"
ROWS = 300
WITHIN_S = 100


class Name(BaseModel):
    name: str


def make_server() -> MCPServer:
    server = MCPServer("things")

    @server.tool()
    async def ask(ctx: Context) -> str:
        await ctx.info("asking")
        answer = await ctx.elicit("name?", Name)
        return f"{answer.action} {answer.data.name if answer.action == 'accept' else ''}"

    @server.tool()
    async def flood(rows: int, ctx: Context) -> dict[str, int]:
        for row in range(rows):
            await ctx.info(row)
        return {"rows": rows, "big": 2**80}

    @server.tool()
    async def change(ctx: Context) -> str:
        await ctx.session.send_tool_list_changed()
        await ctx.session.send_resource_updated("things://1")
        return "changed"

    @server.tool()
    async def refuses() -> str:
        raise MCPError(-32042, "not now", {"why": "late"})

    return server


def text_of(result: Any) -> str:
    return str(result.content[0].text)


@asynccontextmanager
async def proxied(served: Served, scheme: str = "ws") -> AsyncIterator[tuple[Proxy, str]]:
    async with trio.open_nursery() as nursery:
        proxy = Proxy(served.ws_port if scheme == "ws" else served.http_port)
        await nursery.start(proxy.serve)
        path = "/mcp" if scheme == "http" else ""
        yield proxy, f"{scheme}://127.0.0.1:{proxy.port}{path}"
        nursery.cancel_scope.cancel()


# Cuts and kills, of a server in a process of its own

InTrio = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


async def count_through_failures(rig: Rig, in_trio: InTrio, loop: str) -> None:
    """The program of a user of the SDK, whose connection fails meanwhile."""
    seen: list[float] = []
    failures: dict[int, Callable[[], Awaitable[Any]]] = {}

    async def cut() -> None:
        rig.cut()

    async def restart() -> None:
        await rig.kill()
        await rig.start()

    failures = {30: cut, 60: cut, 120: restart, 180: cut}

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)
        if (fail := failures.pop(int(progress), None)) is not None:
            await in_trio(fail)

    over_rig = Over(rig.dialer, connect_s=20, patience_s=60)
    async with Client(over_rig) as client:  # type: ignore[arg-type]
        result = await client.call_tool("count", {"rows": ROWS}, progress_callback=on_progress)
        assert text_of(result) == f"{ROWS} rows"
    assert sorted(seen) == list(range(1, ROWS + 1))
    assert not failures


def make_rig(transport: str, folder: Path, nursery: trio.Nursery) -> Rig:
    journal = folder / "calls.db"
    if transport == "stdio":
        return StdioRig(COUNTING, journal)
    return ListeningRig(transport, COUNTING, journal, nursery)


@pytest.mark.parametrize("transport", ["stdio", "ws", "http"])
def test_cuts_and_kills_lose_nothing_under_asyncio(transport: str, tmp_path: Path) -> None:
    async def main() -> None:
        guest = await Guest.enter()
        rig = make_rig(transport, tmp_path, guest.nursery)
        try:
            await guest.run(rig.start)
            await count_through_failures(rig, guest.run, "asyncio")
        finally:
            await guest.run(rig.stop)
            await guest.leave()

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))


@pytest.mark.parametrize("transport", ["stdio", "ws", "http"])
async def test_cuts_and_kills_lose_nothing_under_trio(transport: str, tmp_path: Path) -> None:
    async def here(function: Callable[[], Awaitable[Any]]) -> Any:
        return await function()

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            rig = make_rig(transport, tmp_path, nursery)
            try:
                await rig.start()
                await count_through_failures(rig, here, "trio")
            finally:
                await rig.stop()
            nursery.cancel_scope.cancel()


# Questions, changes, cancels


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_a_question_survives_a_cut_and_is_asked_once(scheme: str) -> None:
    asked, go_on = trio.Event(), trio.Event()
    questions: list[str] = []

    async def answer(context: Any, params: Any) -> Any:
        questions.append(params.message)
        asked.set()
        await go_on.wait()
        return types.ElicitResult(action="accept", content={"name": "Ada"})

    backend = SdkBackend(make_server(), resume_min_s=0)
    async with (
        backend_served(backend) as served,
        proxied(served, scheme) as (proxy, url),
        Client(over(url), elicitation_callback=answer) as client,
    ):
        results: list[Any] = []

        async def call() -> None:
            results.append(await client.call_tool("ask"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await asked.wait()
            proxy.cut()
            await trio.sleep(0.1)
            go_on.set()
    assert text_of(results[0]) == "accept Ada"
    assert questions == ["name?"]


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_random_cuts_lose_nothing_and_repeat_nothing(scheme: str) -> None:
    """100 calls, five at once: each reports ten steps and asks one question."""
    chance = random.Random(scheme)
    runs: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    server = MCPServer("x")

    @server.tool()
    async def work(number: int, ctx: Context) -> str:
        runs[number] += 1
        for step in range(10):
            await ctx.report_progress(step)
            await anyio.sleep(chance.random() * 0.01)
        answer = await ctx.elicit(f"{number}", Name)
        return answer.data.name if answer.action == "accept" else ""

    async def answer(context: Any, params: Any) -> Any:
        asked[int(params.message)] += 1
        await trio.sleep(chance.random() * 0.02)
        return types.ElicitResult(action="accept", content={"name": f"n{params.message}"})

    backend = SdkBackend(server, resume_min_s=0)
    async with (
        backend_served(backend) as served,
        proxied(served, scheme) as (proxy, url),
        Client(over(url), elicitation_callback=answer) as client,
        trio.open_nursery() as nursery,
    ):

        async def cut_often() -> None:
            while True:
                await trio.sleep(chance.random() * 0.2)
                proxy.cut()

        async def call(number: int) -> None:
            steps: list[float] = []

            async def on_progress(progress: float, *_: Any) -> None:
                steps.append(progress)

            result = await client.call_tool(
                "work", {"number": number}, progress_callback=on_progress
            )
            assert text_of(result) == f"n{number}"
            assert sorted(steps) == list(range(10))

        nursery.start_soon(cut_often)
        for first in range(0, 100, 5):
            async with trio.open_nursery() as calls:
                for number in range(first, first + 5):
                    calls.start_soon(call, number)
        nursery.cancel_scope.cancel()
    assert runs == asked == Counter(range(100))


async def test_messages_come_once_in_order_and_unchanged() -> None:
    rows = 3_000
    logs: list[int] = []

    async def on_log(params: Any) -> None:
        logs.append(params.data)

    backend = SdkBackend(make_server(), resume_min_s=0)
    async with (
        backend_served(backend) as served,
        proxied(served) as (proxy, url),
        Client(over(url), logging_callback=on_log) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(proxy.cut_after, 50_000)
        result = await client.call_tool("flood", {"rows": rows})
    assert sorted(logs) == list(range(rows))
    assert result.structured_content == {"rows": rows, "big": 2**80}


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_changes_of_the_session_arrive(scheme: str) -> None:
    heard: list[str] = []

    async def on_message(message: Any) -> None:
        heard.append(type(message).__name__)

    async with (
        backend_served(SdkBackend(make_server())) as served,
        proxied(served, scheme) as at,
        Client(over(at[1]), message_handler=on_message) as client,
    ):
        await trio.sleep(0.3 if scheme == "http" else 0)  # its standing stream opens
        assert text_of(await client.call_tool("change")) == "changed"
        with trio.fail_after(5):
            while len(heard) < 2:
                await trio.sleep(0.01)
    assert heard == ["ToolListChangedNotification", "ResourceUpdatedNotification"]


async def test_a_subscription_is_told_to_the_server_again_after_a_cut() -> None:
    subscribed: list[str] = []
    heard: list[str] = []

    async def on_subscribe(ctx: Any, params: Any) -> Any:
        subscribed.append(str(params.uri))
        return types.EmptyResult()

    async def on_message(message: Any) -> None:
        heard.append(type(message).__name__)

    server = LowLevelServer("x", on_subscribe_resource=on_subscribe)
    async with (
        backend_served(SdkBackend(server)) as served,
        proxied(served) as (proxy, url),
        Client(over(url), message_handler=on_message) as client,
    ):
        await client.session.subscribe_resource("things://1")
        proxy.cut()
        with trio.fail_after(10):
            while len(subscribed) < 2 or not heard:
                await trio.sleep(0.01)
    assert subscribed == ["things://1"] * 2
    assert heard == ["ResourceUpdatedNotification"]  # it may have been updated meanwhile


async def test_a_cancelled_call_is_cancelled_on_the_server() -> None:
    server = MCPServer("x")
    begun, ended = trio.Event(), trio.Event()

    @server.tool()
    async def long() -> str:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return ""

    async with (
        backend_served(SdkBackend(server)) as served,
        Client(over(served.ws_url)) as client,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "long")
            await begun.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await ended.wait()
        assert (await client.list_tools()).tools[0].name == "long"


async def test_a_timeout_of_the_program_ends_its_call_alone() -> None:
    server = MCPServer("x")

    @server.tool()
    async def long() -> str:
        await anyio.sleep_forever()
        return ""

    async with (
        backend_served(SdkBackend(server)) as served,
        Client(over(served.ws_url)) as client,
    ):
        with pytest.raises(MCPError, match="timed out"):
            await client.call_tool("long", read_timeout_seconds=0.2)
        assert (await client.list_tools()).tools[0].name == "long"


# The same as over the SDK's own transport


async def test_a_program_sees_what_it_sees_over_the_sdk_s_own_transport() -> None:
    async def transcript(transport: Any, mode: str) -> list[Any]:
        seen: list[Any] = []

        async def on_log(params: Any) -> None:
            seen.append(params)

        async def on_progress(*report: Any) -> None:
            seen.append(report)

        async def roots(context: Any) -> Any:
            return types.ListRootsResult(roots=[])

        async def sample(context: Any, params: Any) -> Any:
            return types.CreateMessageResult(
                role="assistant",
                model="m",
                content=types.TextContent(type="text", text="sampled"),
            )

        async def elicit(context: Any, params: Any) -> Any:
            seen.append(params)
            return types.ElicitResult(action="accept", content={})

        async with Client(
            transport,
            mode=mode,
            logging_callback=on_log,
            list_roots_callback=roots,
            sampling_callback=sample,
            elicitation_callback=elicit,
        ) as client:
            seen += [client.server_info, client.instructions, client.protocol_version]
            seen += [await client.list_tools(), await client.list_prompts()]
            seen += [await client.list_resources(), await client.list_resource_templates()]
            for name in ("test_tool_with_progress", "test_tool_with_logging"):
                seen.append(await client.call_tool(name, progress_callback=on_progress))
            for name in ("test_image_content", "test_error_handling", "unknown"):
                seen.append(await client.call_tool(name))
            seen.append(await client.call_tool("test_sampling", {"prompt": "p"}))
            seen.append(await client.call_tool("test_elicitation_sep1330_enums"))
            seen.append(await client.read_resource("test://template/7/data"))
            seen.append(await client.get_prompt("test_simple_prompt"))
            with pytest.raises(MCPError) as error:
                await client.read_resource("test://nothing")
            seen.append(error.value.error)
        return seen

    from tests.sdk.conformance_sdk_server import server  # noqa: PLC0415

    async with backend_served(SdkBackend(server)) as served:
        bare = await transcript(server, "legacy")
        for transport in (over(served.ws_url), over(served.http_url)):
            assert await transcript(transport, "auto") == bare
        assert await transcript(streamable_http_client(served.http_url), "legacy") == bare


async def test_a_client_session_takes_it_too() -> None:
    async with (
        backend_served(SdkBackend(make_server())) as served,
        over(served.ws_url) as (read, write),
        ClientSession(read, write) as session,
    ):
        assert (await session.initialize()).server_info.name == "things"
        with pytest.raises(MCPError) as refused:
            await session.call_tool("refuses")
        assert refused.value.error == types.ErrorData(
            code=-32042, message="not now", data={"why": "late"}
        )


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_after_its_end_the_streams_are_closed(loop: str) -> None:
    async def main() -> None:
        async with over("ws://127.0.0.1:9") as (read, write):
            pass
        with pytest.raises(anyio.ClosedResourceError):
            await write.send(SessionMessage(types.JSONRPCNotification(jsonrpc="2.0", method="x")))
        assert [each async for each in read] == []

    anyio.run(main, backend=loop)


# Servers that are not ours, and servers that are not there


def test_another_server_is_reached_as_by_a_plain_transport() -> None:
    async def main() -> None:
        url = f"stdio:{sys.executable} {FIXTURE}"
        reports: list[float] = []

        async def on_progress(progress: float, *_: Any) -> None:
            reports.append(progress)

        async with Client(over(url)) as client:
            result = await client.call_tool(
                "test_tool_with_progress", progress_callback=on_progress
            )
            assert text_of(result) == "Tool with progress executed successfully"
        assert reports == [0, 50, 100]

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))


async def test_a_call_that_another_server_has_lost_ends_in_an_error() -> None:
    """Nothing tells whether it has run, so it is not sent again."""
    script = "import sys\nfor line in sys.stdin:\n" + _FORGETFUL
    async with Client(over(f"stdio:{sys.executable} -c '{script}'")) as client:
        with pytest.raises(MCPError) as lost:
            await client.call_tool("any")
        assert lost.value.code == types.CONNECTION_CLOSED
        assert "may or may not have run" in lost.value.message
        assert (await client.list_tools()).tools == []  # over another connection


async def test_answers_that_do_not_fit_harm_nothing_else() -> None:
    script = "import sys\nfor line in sys.stdin:\n" + _UNFIT
    async with Client(over(f"stdio:{sys.executable} -c '{script}'")) as client:
        with trio.fail_after(20):
            for name in ("result", "error"):
                with pytest.raises(MCPError, match="cannot be read"):
                    await client.call_tool(name)
            assert (await client.list_tools()).tools == []


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_text_that_is_no_utf_8_is_mended(loop: str) -> None:
    """In answers, notifications, questions and errors; what is too long for it fails alone."""
    logs: list[Any] = []
    asked: list[str] = []

    async def on_log(params: Any) -> None:
        logs.append(params.data)

    async def on_question(_: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        return types.ElicitResult(action="decline")

    async def main() -> None:
        script = "import sys\nfor line in sys.stdin:\n" + _NO_UTF_8
        url = f"stdio:{sys.executable} -c '{script}'"
        how: Any = {"logging_callback": on_log, "elicitation_callback": on_question}
        with anyio.fail_after(60):
            async with Client(over(url), **how) as client:
                for _ in range(2):
                    assert text_of(await client.call_tool("result")) == "a\ufffdb"
                    with pytest.raises(MCPError, match="a\ufffdb"):
                        await client.call_tool("error")
                    with pytest.raises(MCPError, match="cannot be read"):
                        await client.call_tool("long")
                assert (await client.list_tools()).tools == []
                while len(asked) < 6:
                    await anyio.sleep(0.01)
        assert logs[0] == asked[0] == "a\ufffdb"

    anyio.run(main, backend=loop)


_NO_UTF_8 = """\
    import json
    def put(m):
        text = json.dumps({"jsonrpc": "2.0", **m}).encode().replace(b"!!", bytes([255]))
        sys.stdout.buffer.write(text + b"\\n")
        sys.stdout.buffer.flush()
    m = json.loads(line)
    if "id" not in m or "method" not in m:
        continue
    r = {"result": {"tools": []}}
    if m["method"] == "initialize":
        r["result"] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        r["result"]["serverInfo"] = {"name": "f", "version": "1"}
    if m["method"] == "tools/call":
        name = m["params"]["name"]
        params = {"level": "info", "data": "a!!b"}
        put({"method": "notifications/message", "params": params})
        params = {"message": "a!!b", "requestedSchema": {"type": "object", "properties": {}}}
        put({"id": "q" + str(m["id"]), "method": "elicitation/create", "params": params})
        r = {"result": {"content": [{"type": "text", "text": "a!!b"}]}}
        if name == "error":
            r = {"error": {"code": 5, "message": "a!!b"}}
        if name == "long":
            r["result"]["content"][0]["text"] += "y" * 2_000_000
    put({"id": m["id"], **r})
"""

_UNFIT = """\
    import json
    m = json.loads(line)
    r = {"result": {"tools": []}}
    if m["method"] == "initialize":
        r["result"] = {"protocolVersion": "2025-06-18", "capabilities": {}}
        r["result"]["serverInfo"] = {"name": "f", "version": "1"}
    if m["method"] == "tools/call":
        r = {m["params"]["name"]: 5}
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/x", "params": [5]}))
    if "id" in m:
        print(json.dumps({"jsonrpc": "2.0", "id": m["id"], **r}), flush=True)
"""
_FORGETFUL = """\
    import json
    m = json.loads(line)
    if m["method"] == "tools/call":
        sys.exit()
    r = {"tools": []}
    if m["method"] == "initialize":
        r = {"protocolVersion": "2025-06-18", "capabilities": {}}
        r["serverInfo"] = {"name": "f", "version": "1"}
    if "id" in m:
        print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
"""


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(BaseExceptionGroup) as failed:
        async with Client(over("ws://127.0.0.1:9")):
            pass
    assert failed.group_contains(MCPError, match="No connection")


async def test_a_server_that_is_just_starting_is_waited_for() -> None:
    async with trio.open_nursery() as nursery:
        proxy = Proxy(0)
        await nursery.start(proxy.serve)

        async def start(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            await trio.sleep(0.5)
            async with backend_served(SdkBackend(make_server())) as served:
                proxy._upstream_port = served.ws_port
                await trio.sleep_forever()

        await nursery.start(start)
        async with Client(over(f"ws://127.0.0.1:{proxy.port}", connect_s=20)) as client:
            assert client.server_info.name == "things"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("url", ["tcp://x", "ws//x", "http://example.com/mcp"])
def test_a_url_that_cannot_be_dialled_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"dial|token|TLS"):
        over(url, token="secret")


def test_programs_of_both_loops_use_it_at_once() -> None:
    """An asyncio loop with two clients, each of which has a session of its own."""

    async def main() -> None:
        guest = await Guest.enter()
        held = guest.nursery
        served: Served = await guest.run(held.start, _serve)
        try:
            async with Client(over(served.ws_url)) as one, Client(over(served.http_url)) as two:
                rows = await asyncio.gather(
                    *(each.call_tool("flood", {"rows": 50}) for each in (one, two, one, two))
                )
                assert [each.structured_content["rows"] for each in rows] == [50] * 4
        finally:
            await guest.leave()

    async def _serve(*, task_status: trio.TaskStatus[Served]) -> None:
        async with backend_served(SdkBackend(make_server())) as served:
            task_status.started(served)
            await trio.sleep_forever()

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))
