"""Failures as a tool author sees them, end to end."""

import threading

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Limits, Server, SyncCall
from streams.errors import StreamsError
from tests.rigs.server import (
    PLAIN,
    Json,
    Steps,
    Talker,
    open_house,
    reason,
    run,
    said,
    text_of,
)
from transports.memory import Cable


@pytest.fixture
def server() -> Server:
    return Server("tested", version="1.2", instructions="Ask nicely.")


async def test_an_exception_is_an_error_result_and_its_traceback_is_logged(
    server: Server,
) -> None:
    @server.tool
    async def fail() -> str:
        raise ValueError("no such table")

    @server.tool
    def fail_in_a_thread() -> str:
        raise KeyError

    with structlog.testing.capture_logs() as logs:
        first = (await run(server, "fail"))[-1]
        second = (await run(server, "fail_in_a_thread"))[-1]
    assert (text_of(first), first["result"]["isError"]) == ("no such table", True)
    assert (text_of(second), second["result"]["isError"]) == ("KeyError", True)
    failures = [entry for entry in logs if entry["event"] == "a tool failed"]
    assert [entry["tool"] for entry in failures] == ["fail", "fail_in_a_thread"]
    assert all(entry["exc_info"] and entry["stream"] for entry in failures)


async def test_bad_arguments_are_told_to_the_model(server: Server) -> None:
    @server.tool
    async def build(rows: int) -> str:
        raise AssertionError(rows)

    wrong = (await run(server, "build", rows="many"))[-1]["result"]
    assert wrong["isError"]
    assert "rows" in wrong["content"][0]["text"]
    missing = (await run(server, "build"))[-1]["result"]
    assert missing["isError"]


async def test_what_is_no_tool_or_no_call_is_refused(server: Server) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        assert (await talker.request(1, "tools/call", name="none"))["code"] == -32602
        assert (await talker.request(2, "tools/call"))["code"] == -32602
        assert (await talker.request(3, "tools/call", name="none", arguments=[]))["code"] == -32602
        unknown = await talker.request(4, "tools/make")
        assert unknown["code"] == -32601
        assert "tools/call" in unknown["message"]
        await talker.say({"method": "tools/call", "params": {"name": "none"}})
        assert (await talker.read())["error"]["code"] == -32600


async def test_a_stream_whose_client_is_too_far_behind_may_fail(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested", limits=Limits(unsent_entries_max=10))
    failures: list[StreamsError] = []

    @server.tool(overflow="fail")
    async def talk(call: Call) -> str:
        await trio.sleep(10)
        for n in range(100):
            try:
                await call.log("info", n)
            except StreamsError as error:
                failures.append(error)
                raise
        return "never"

    async with open_house(server) as house:
        talker = await house.dial()
        stream = await talker.begin(1, "talk")
        await talker.leave()
        await trio.sleep(20)
        heard = await (await house.dial()).resume(2, stream)
    (final,) = [m for m in heard if m.get("id") == 1]
    assert len(failures) == 1
    assert reason(final["error"]) == "too_slow"
    assert "too slowly" in final["error"]["message"]
    assert said(heard) == list(range(10))


async def test_a_tool_with_a_patient_client_waits_instead(autojump_clock: MockClock) -> None:
    server = Server("tested", limits=Limits(unsent_entries_max=10))

    @server.tool
    async def talk(call: Call) -> str:
        for n in range(100):
            await call.log("info", n)
        return "all of it"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN, capacity=128)
        await talker.call(1, "talk")
        await trio.sleep(30)
        assert text_of(await talker.answer(1)) == "all of it"
    assert said(talker.seen) == list(range(100))


async def test_a_message_that_is_too_large_is_the_tools_error() -> None:
    server = Server("tested", limits=Limits(message_bytes_max=1_000))

    @server.tool
    async def talk(call: Call) -> str:
        try:
            await call.log("info", "x" * 1_000)
        except StreamsError as error:
            return str(error)
        return "sent"

    @server.tool
    async def answer() -> str:
        return "x" * 1_000

    heard = await run(server, "talk")
    assert said(heard) == []
    assert "longer than the limit" in text_of(heard[-1])
    refused = (await run(server, "answer"))[-1]["error"]
    assert (reason(refused), refused["data"]["limit"]) == ("too_large", 1_000)


async def test_a_message_of_the_client_that_is_too_large_is_refused(server: Server) -> None:
    async with open_house(server) as house:
        cable = Cable(message_bytes_max=1_000)
        house.serve(cable.far)
        talker = Talker(cable.near, cable)
        await talker.ask(1, "x" * 1_000)
        refused = (await talker.read())["error"]
        assert (reason(refused), refused["data"]["limit"]) == ("too_large", 1_000)


async def test_cancelled_stops_an_async_tool(server: Server) -> None:
    steps = Steps(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "step")
        await wait_all_tasks_blocked()  # a cancel may come before the tool has begun
        await talker.tell("notifications/cancelled", requestId=1)
        await steps.is_over.wait()
        assert await talker.request(2, "ping") == {}
    assert steps.was_cancelled
    assert [m["id"] for m in talker.seen] == [2]


async def test_cancelled_stops_a_plain_function_when_it_next_says_something(
    server: Server,
) -> None:
    go_on, ended = threading.Event(), threading.Event()
    why: list[str] = []

    @server.tool
    def build(call: SyncCall) -> str:
        try:
            call.log("info", "running")
            go_on.wait(60)
            call.log("info", "never")
        except StreamsError as error:
            why.append(str(error))
            raise
        finally:
            ended.set()
        return "never"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "build")
        await talker.find(said_something)
        await talker.tell("notifications/cancelled", requestId=1)
        assert await talker.request(2, "ping") == {}  # the server does not wait for the thread
        go_on.set()
        await trio.to_thread.run_sync(ended.wait, 60)
    assert why == ["a message: the stream is cancelled already"]
    assert said(talker.seen) == ["running"]


def said_something(message: Json) -> bool:
    return bool(said([message]))
