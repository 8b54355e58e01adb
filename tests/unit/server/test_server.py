"""The server as a tool author sees it, end to end."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Image, Server, SyncCall, Text
from streams.errors import CallFailed
from streams.turns import LARGE_BYTES, PIECE_S, large_work, pause_after
from tests.rigs.server import (
    PLAIN,
    Json,
    Steps,
    Talker,
    methods,
    open_house,
    run,
    said,
    text_of,
)


@pytest.fixture
def server() -> Server:
    return Server("tested", version="1.2", instructions="Ask nicely.")


# Tools


async def test_an_async_tool_is_called_with_its_arguments(server: Server) -> None:
    @server.tool
    async def build(call: Call, rows: int, title: str = "yearly") -> str:
        return f"{title}: {rows} for {call.request_id}"

    assert text_of((await run(server, "build", rows=3))[-1]) == "yearly: 3 for 1"


async def test_a_plain_function_runs_in_a_thread_of_its_own(server: Server) -> None:
    @server.tool
    def build(call: SyncCall, rows: int) -> str:
        call.log("info", "in a thread")
        call.progress(1, total=2)
        call.notify("notifications/x", {"a": 1})
        call.flush()
        return f"{rows} {threading.current_thread() is threading.main_thread()} {call.request_id}"

    heard = await run(server, "build", token=7, rows=3)
    assert methods(heard) == [
        "notifications/message",
        "notifications/progress",
        "notifications/x",
        "result",
    ]
    assert text_of(heard[-1]) == "3 False 1"


async def test_a_plain_function_may_use_the_call_in_threads_of_its_own(server: Server) -> None:
    @server.tool
    def build(call: SyncCall) -> str:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(call.progress, [1]))
            return pool.submit(call.elicit, "Sure?").result().action

    async with open_house(server) as house:
        talker = await house.dial({"elicitation": {}})
        await talker.call(1, "build", token=7)
        question = await talker.question()
        await talker.say({"id": question["id"], "result": {"action": "decline"}})
        assert text_of(await talker.answer(1)) == "decline"
    assert "notifications/progress" in methods(talker.seen)


@pytest.mark.parametrize("params", ["text", 3, [1], True, msgspec.Raw(b" []")])
async def test_params_of_a_message_are_an_object(server: Server, params: Any) -> None:
    @server.tool
    async def build(call: Call) -> str:
        with pytest.raises(TypeError, match="params: expected an object in JSON"):
            await call.request("client/ask", params)
        with pytest.raises(TypeError, match="params: expected an object in JSON"):
            await call.notify("notifications/x", params)
        with pytest.raises(TypeError, match="params: expected an object in JSON"):
            await server.notify_all("notifications/x", params)
        await call.notify("notifications/x", msgspec.Raw(b' {"a":1}'))
        await call.notify("notifications/x", Text("b"))
        await call.notify("notifications/x")
        return "done"

    heard = await run(server, "build")
    assert text_of(heard[-1]) == "done"
    sent = [each.get("params") for each in heard if each.get("method") == "notifications/x"]
    assert sent == [{"a": 1}, {"type": "text", "text": "b"}, None]


@pytest.mark.parametrize("level", ["warn", "INFO", 1, None])
async def test_a_log_message_of_an_unknown_level_names_the_known_ones(
    server: Server, level: Any
) -> None:
    @server.tool
    async def build(call: Call) -> str:
        await call.log(level, "x")
        return "done"

    told = text_of((await run(server, "build"))[-1])
    assert told.startswith("level: expected one of debug, info, notice, warning, ")
    assert told.endswith(f"got {level!r}")


def test_an_entry_that_no_client_could_read_is_refused(server: Server) -> None:
    def build() -> str:
        """Never added."""

    bad: Any = {"since": object()}
    with pytest.raises(ValueError, match="tool build: its entry in the list is not JSON"):
        server.tool(annotations={"title": "\ud800"})(build)
    with pytest.raises(ValueError, match="resource x://a: its entry in the list is not JSON"):
        server.resource("x://a", meta=bad)(build)
    with pytest.raises(ValueError, match="prompt build: its entry in the list is not JSON"):
        server.prompt(meta=bad)(build)
    assert len(server.tools) == 0


async def test_a_tool_needs_no_call(server: Server) -> None:
    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    assert text_of((await run(server, "add", a=1, b=2))[-1]) == "3"


async def test_progress_goes_to_who_asked_for_it(server: Server) -> None:
    @server.tool
    async def build(call: Call) -> str:
        await call.progress(1)
        await call.progress(2, total=3, message="nearly")
        return "done"

    assert methods(await run(server, "build")) == ["result"]
    heard = await run(server, "build", token="p")
    assert [m["params"] for m in heard[:-1]] == [
        {"progressToken": "p", "progress": 1},
        {"progressToken": "p", "progress": 2, "total": 3, "message": "nearly"},
    ]


async def test_a_client_chooses_the_level_of_what_is_logged(server: Server) -> None:
    @server.tool
    async def talk(call: Call) -> str:
        for level in ("debug", "info", "warning", "emergency"):
            await call.log(level, level)
        await call.log("error", {"any": ["json"]}, logger="mine")
        return "done"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "talk")
        await talker.answer(1)
        assert said(talker.seen) == ["debug", "info", "warning", "emergency", {"any": ["json"]}]
        assert [m["params"]["logger"] for m in talker.seen[:5]] == ["talk"] * 4 + ["mine"]
        talker.seen.clear()
        assert await talker.request(2, "logging/setLevel", level="warning") == {}
        await talker.call(3, "talk")
        await talker.answer(3)
        assert said(talker.seen) == ["warning", "emergency", {"any": ["json"]}]
        refused = await talker.request(4, "logging/setLevel", level="loud")
        assert (refused["code"], "debug" in refused["message"]) == (-32602, True)


async def test_a_tool_may_ask_the_client(server: Server) -> None:
    @server.tool
    async def ask(call: Call) -> str:
        answer = await call.request("elicitation/create", {"message": "name?"})
        try:
            await call.request("roots/list")
        except CallFailed as failed:
            return f"{answer['name']}, {failed.code}"
        return "no"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "ask")
        asked = await talker.read()
        assert (asked["method"], asked["params"]) == ("elicitation/create", {"message": "name?"})
        await talker.say({"id": asked["id"], "result": {"name": "Ada"}})
        asked = await talker.read()
        assert (asked["method"], asked["params"]) == ("roots/list", {})
        await talker.say({"id": asked["id"], "error": {"code": -32601, "message": "none"}})
        assert text_of(await talker.answer(1)) == "Ada, -32601"


async def test_flush_returns_when_no_crash_can_take_it_back(server: Server) -> None:
    steps = Steps(server)
    kept: list[int] = []
    async with open_house(server) as house:

        async def flush(call: Call) -> None:
            await call.log("info", "kept")
            await call.flush()
            kept.extend(record.last for record in await house.as_after_a_crash().claim())

        talker = await house.dial()
        await talker.begin(1, "step")
        steps.do(flush)
        steps.finish()
        await talker.answer(1)
    assert kept == [1]


async def test_a_tool_does_not_let_go_of_who_could_not_come_back(server: Server) -> None:
    @server.tool
    async def build(call: Call) -> str:
        return str(await call.disconnect())

    assert text_of((await run(server, "build"))[-1]) == "False"


async def test_results_become_content(server: Server) -> None:
    @server.tool
    async def draw() -> list[Text | Image]:
        return [Text("a picture"), Image(b"\x89PNG", "image/png")]

    result = (await run(server, "draw"))[-1]["result"]
    assert result["content"] == [
        {"type": "text", "text": "a picture"},
        {"type": "image", "data": "iVBORw==", "mimeType": "image/png"},
    ]


# The server


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"resume_min_s": -1}, "seconds, 0 or more"),
        ({"resume_max_s": math.inf}, "seconds, 0 or more"),  # no number in JSON
        ({"announce_after_s": 2}, "0 to 1"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
    ],
)
def test_a_setting_that_no_client_could_use_is_refused(given: Json, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Server("tested", **given)


async def test_the_tools_are_listed_with_their_schemas_a_page_at_a_time() -> None:
    server = Server("tested", page_size=2)
    for number in range(5):

        async def build(rows: int, title: str = "yearly") -> str:
            """Build a report."""
            raise AssertionError(rows, title)

        server.tool(name=f"build{number}", title="Build")(build)
    found: list[Json] = []
    async with open_house(server) as house:
        talker = await house.dial()
        page = await talker.request(1, "tools/list")
        found += page["tools"]
        for number in (2, 3):
            page = await talker.request(number, "tools/list", cursor=page["nextCursor"])
            found += page["tools"]
        assert "nextCursor" not in page
        assert (await talker.request(4, "tools/list", cursor="no"))["code"] == -32602
    assert [tool["name"] for tool in found] == [f"build{n}" for n in range(5)]
    assert (found[0]["title"], found[0]["description"]) == ("Build", "Build a report.")
    schema = found[0]["inputSchema"]
    assert schema["type"] == "object"
    assert schema["required"] == ["rows"]
    assert schema["properties"]["title"] == {"type": "string", "default": "yearly"}


async def test_a_tool_may_have_a_resume_interval_of_its_own(server: Server) -> None:
    steps = Steps(server, resume_min_s=0.5, resume_max_s=7)
    async with open_house(server) as house:
        stream = await (await house.dial()).begin(1, "step")
        steps.finish()
    assert stream["resumeInterval"] == {"min": 0.5, "max": 7}


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("2025-11-25", "2025-11-25"),
        ("2025-06-18", "2025-06-18"),
        ("2025-03-26", "2025-03-26"),
        ("2024-11-05", "2024-11-05"),
        ("2024-10-07", "2025-11-25"),
    ],
)
async def test_initialize_settles_the_revision(server: Server, asked: str, given: str) -> None:
    async with open_house(server) as house:
        cable = house.cable()
        talker = Talker(cable.near, cable)
        params = {"protocolVersion": asked, "capabilities": {}, "clientInfo": {"name": "x"}}
        answer = await talker.request(1, "initialize", **params)
        again = await talker.request(2, "initialize", **params)
    assert answer["protocolVersion"] == given
    assert answer["serverInfo"] == {"name": "tested", "version": "1.2"}
    assert answer["instructions"] == "Ask nicely."
    assert answer["capabilities"]["tools"] == {"listChanged": True}
    dialects = ["streams", "resumableRequests", "resumeTokens"]
    ours = answer["capabilities"]["extensions"]
    assert len(ours["mcp-streams/v1"].pop("idempotencyKeys")) == 43
    assert ours == {"mcp-streams/v1": {"dialects": dialects, "positions": True}}
    assert answer["capabilities"]["experimental"].keys() == ours.keys()
    assert again["code"] == -32600


async def test_a_server_answers_pings_while_tools_run(server: Server) -> None:
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        assert await talker.request("p", "ping") == {}
        assert not steps.is_over.is_set()


async def test_what_is_no_message_is_refused_and_the_connection_goes_on(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.channel.send(b'{"jsonrpc"\n[]\n{"jsonrpc":"2.0","id":3}\n\xff\n')
        codes = [(await talker.read())["error"]["code"] for _ in range(4)]
        assert codes == [-32700, -32600, -32600, -32700]
        assert await talker.request(4, "ping") == {}


async def test_who_does_not_read_its_replies_is_not_read_either(server: Server) -> None:
    async with open_house(server) as house, trio.open_nursery() as nursery:
        talker = await house.dial(capacity=4096)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await talker.ask("x" * 1_000, "ping")
                sent += 1

        nursery.start_soon(flood)
        with trio.fail_after(60):
            await wait_all_tasks_blocked(0.05)
        assert 500 < sent < 5_000
        nursery.cancel_scope.cancel()


def test_intervals_are_not_negative() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Server("tested", resume_max_s=-1)
    with pytest.raises(ValueError, match="0 or more"):
        Server("tested", resume_min_s=float("nan"))


# Turns


@pytest.mark.parametrize("method", ["ping", "tools/call"])
async def test_others_are_answered_while_a_large_message_waits_for_its_turn(
    method: str, server: Server, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        large_work(), "_clock", trio.current_time
    )  # the mock clock measures the work

    @server.tool
    async def size(text: str) -> int:
        return len(text)

    answered: list[str] = []
    async with open_house(server) as house, trio.open_nursery() as nursery:
        alice, bob = await house.dial(principal="alice"), await house.dial(principal="bob")
        await large_work().do("eve", partial(mock_clock.jump, 2 * PIECE_S))  # the pause begins

        async def send() -> None:
            arguments = {"text": "x" * LARGE_BYTES}
            await bob.request(1, method, name="size", arguments=arguments)
            answered.append("bob")

        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        mock_clock.jump(pause_after(2 * PIECE_S) - 0.01)
        await alice.request(1, "ping")
        await wait_all_tasks_blocked()
        assert answered == []
        mock_clock.jump(0.02)
        await wait_all_tasks_blocked()
        assert answered == ["bob"]
