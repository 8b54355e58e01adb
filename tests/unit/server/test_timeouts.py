"""Tools with a time limit."""

import math
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from streams import Call, Server, SyncCall
from tests.rigs.server import PLAIN, is_last, next_of, open_house, run, text_of
from tests.unit.engine.test_restarts import Lives, begin, rest_of

STOPPED = "was stopped: it ran for longer than 2 s"


async def test_a_tool_is_cancelled_when_its_time_is_over(autojump_clock: MockClock) -> None:
    server, ended = Server("tested"), []

    @server.tool(timeout_s=2)
    async def wait(call: Call, s: float) -> str:
        try:
            await trio.sleep(s)
        finally:
            ended.append(trio.current_time())
        return "done"

    assert text_of((await run(server, "wait", s=1.9))[-1]) == "done"
    began = trio.current_time()
    final = (await run(server, "wait", s=1000))[-1]
    assert final["result"]["isError"]
    assert text_of(final) == f"wait {STOPPED}"
    assert 2 <= ended[-1] - began < 3


async def test_the_time_of_a_question_counts(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool(timeout_s=2)
    async def ask(call: Call) -> str:
        return str(await call.request("elicitation/create", {"message": "?"}))

    assert text_of((await run(server, "ask"))[-1]) == f"ask {STOPPED}"


async def test_an_error_of_a_stopped_tool_is_logged_and_not_told(
    autojump_clock: MockClock,
) -> None:
    server = Server("tested")

    @server.tool(timeout_s=2)
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("cannot close")

    with structlog.testing.capture_logs() as logs:
        assert text_of((await run(server, "wait"))[-1]) == f"wait {STOPPED}"
    assert [type(each["exc_info"][1]) for each in logs if "exc_info" in each] == [ValueError]


async def test_an_error_before_the_limit_is_told(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool(timeout_s=2)
    async def fail() -> str:
        with trio.move_on_after(1):
            await trio.sleep_forever()
        raise ValueError("no rows")

    assert text_of((await run(server, "fail"))[-1]) == "no rows"


async def test_the_client_may_cancel_before_the_limit(autojump_clock: MockClock) -> None:
    server, ended = Server("tested"), trio.Event()

    @server.tool(timeout_s=1000)
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return "never"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "wait")
        await trio.sleep(1)
        await talker.tell("notifications/cancelled", requestId=1)
        with trio.fail_after(10):
            await ended.wait()


async def test_a_plain_function_ends_its_call_and_is_told_so() -> None:
    server = Server("tested")
    gone, seen, ended = threading.Event(), list[Any](), threading.Event()

    @server.tool(timeout_s=0.05)
    def work(call: SyncCall) -> str:
        seen.append(call.is_over)
        gone.wait(30)
        seen.append(call.is_over)
        try:
            call.progress(1)
        except Exception as error:
            seen.append(str(error))
        ended.set()
        return "too late"

    final = (await run(server, "work"))[-1]
    assert text_of(final) == "work was stopped: it ran for longer than 0.05 s"
    gone.set()
    await trio.to_thread.run_sync(ended.wait, 30)
    assert seen[:2] == [False, True]
    assert seen[2].startswith("a message: the stream is "), seen


async def paged(server: Server, count: int) -> list[str]:
    """The texts of all pages, asked for one a minute."""
    texts = []
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = None
        for number in range(count):
            result = await talker.page(number, "pages", token)
            texts += [block["text"] for block in result["content"]]
            token = _token(result)
            if token is None:
                break
            await trio.sleep(60)
    return texts


def _token(result: dict[str, Any]) -> str | None:
    return None if is_last(result) else next_of(result)


async def test_each_page_has_the_whole_time(autojump_clock: MockClock) -> None:
    server = Server("tested")

    @server.tool(pages=True, timeout_s=2)
    async def pages() -> AsyncIterator[str]:
        for number, pause_s in enumerate([1.5, 1.5, 1.5, 1000]):
            await trio.sleep(pause_s)
            yield str(number)

    assert await paged(server, 9) == ["0", "1", "2", f"pages {STOPPED}"]


async def test_a_plain_generator_is_left_and_ends_when_it_yields() -> None:
    server, go, closed = Server("tested"), threading.Event(), threading.Event()

    @server.tool(pages=True, timeout_s=0.3)
    def pages() -> Iterator[str]:
        try:
            yield "0"
            go.wait(30)
            yield "1"
        finally:
            closed.set()

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        first = await talker.page(1, "pages")
        token = _token(first)
        last = await talker.page(2, "pages", token)
        assert (first["content"][0]["text"], last["isError"]) == ("0", True)
        assert last["content"][0]["text"] == "pages was stopped: it ran for longer than 0.3 s"
        go.set()
        assert await trio.to_thread.run_sync(closed.wait, 30)


async def test_a_restarted_call_has_the_whole_time_again(autojump_clock: MockClock) -> None:
    lives = Lives()

    async def work(call: Call) -> str:
        await call.notify("count", {"n": 1})
        await trio.sleep(1.5)
        return "done"

    async with lives.house(work, timeout_s=2) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count")
        await trio.sleep(1)
        lives.die(house)
    async with lives.house(work, timeout_s=2) as house:
        came = await rest_of(house, stream)
    assert text_of(next(m for m in came if m.get("id") == 1)) == "done"

    async def hang(call: Call) -> str:
        await call.notify("count", {"n": 1})
        await trio.sleep_forever()
        return "never"

    lives = Lives()
    async with lives.house(hang, timeout_s=2) as house:
        talker, stream = await begin(house)
        await talker.find(lambda m: m.get("method") == "count")
        lives.die(house)
    async with lives.house(hang, timeout_s=2) as house:
        came = await rest_of(house, stream)
    final = next(m for m in came if m.get("id") == 1)
    assert text_of(final) == f"step {STOPPED}"


@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_a_limit_is_a_number_of_seconds(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s: expected seconds above 0"):
        Server("tested").tool(name="x", timeout_s=timeout_s)(lambda: None)
