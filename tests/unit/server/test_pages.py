"""The results that a tool yields, as pages: in order, and no earlier than wanted."""

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server, SyncCall
from streams.server.pages import HOLD_S
from tests.rigs.server import (
    PLAIN,
    Json,
    Talker,
    is_last,
    methods,
    next_of,
    open_house,
    page_text,
    run,
    said,
)
from tests.rigs.toolkit import Point

WAIT_S = 10.0


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_max_s=3600)


@pytest.fixture(params=["async", "thread"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def count(server: Server, kind: str, **settings: Any) -> list[int]:
    """A tool that yields the numbers up to `to`. Returns the list of those that it has made."""
    made: list[int] = []

    async def as_told(to: int) -> AsyncIterator[str]:
        for number in range(1, to + 1):
            made.append(number)
            yield str(number)

    def in_thread(to: int) -> Iterator[str]:
        for number in range(1, to + 1):
            made.append(number)
            yield str(number)

    function: Any = as_told if kind == "async" else in_thread
    server.tool(name="count", pages=True, **settings)(function)
    return made


async def turn_all(talker: Talker, tool: str, **arguments: Any) -> list[Json]:
    """All pages of a tool, one call after another."""
    pages = [await talker.page("p1", tool, **arguments)]
    while not is_last(pages[-1]):
        token = next_of(pages[-1])
        pages.append(await talker.page(f"p{len(pages) + 1}", tool, token, **arguments))
    return pages


# Order, and the end


@pytest.mark.parametrize("to", [1, 2, 3, 7])
@pytest.mark.parametrize("pages_ahead", [1, 2, 100])
async def test_pages_come_in_order_and_the_last_leads_nowhere(
    server: Server, kind: str, to: int, pages_ahead: int, mock_clock: MockClock
) -> None:
    count(server, kind, pages_ahead=pages_ahead)
    async with open_house(server) as house:
        pages = await turn_all(await house.dial(PLAIN), "count", to=to)
    assert list(map(page_text, pages)) == [str(n) for n in range(1, to + 1)]
    assert set(pages[-1]) == {"content"}


async def test_a_page_says_for_how_long_its_token_holds(
    server: Server, mock_clock: MockClock
) -> None:
    count(server, "async", resume_max_s=7.5)
    async with open_house(server) as house:
        page = await (await house.dial(PLAIN)).page(1, "count", to=2)
    assert page["_meta"] == {
        "mcp-streams/nextResumeToken": page["nextResumeToken"],
        "mcp-streams/resumeTtl": 7.5,
    }


async def test_a_tool_that_yields_nothing_gives_one_empty_page(
    server: Server, kind: str, mock_clock: MockClock
) -> None:
    count(server, kind)
    assert (await run(server, "count", to=0))[-1]["result"] == {"content": []}


async def test_a_page_becomes_a_result_as_what_a_tool_returns_does(
    server: Server, mock_clock: MockClock
) -> None:
    @server.tool(pages=True)
    async def table() -> AsyncIterator[Point]:
        yield Point(1, 2)
        yield Point(3, 4)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        pages = await turn_all(talker, "table")
        (listed,) = (await talker.request(9, "tools/list"))["tools"]
    assert [page["structuredContent"] for page in pages] == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    assert page_text(pages[0]) == '{"x":1,"y":2}'
    assert "outputSchema" not in listed  # an empty page would not fit


# Pages that are made ahead


@pytest.mark.parametrize("pages_ahead", [1, 3])
async def test_no_more_pages_are_made_than_asked_for_and_a_few_ahead(
    server: Server, pages_ahead: int, mock_clock: MockClock
) -> None:
    made = count(server, "async", pages_ahead=pages_ahead)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        page = await talker.page(1, "count", to=100)
        for asked in range(1, 6):
            mock_clock.jump(1000)
            await wait_all_tasks_blocked()
            assert len(made) == asked + pages_ahead
            token = next_of(page)
            page = await talker.page(asked + 1, "count", token, to=100)
            assert await talker.page("again", "count", token, to=100) == page
        assert page_text(page) == "6"


async def test_a_plain_generator_is_not_hurried_either(
    server: Server, mock_clock: MockClock
) -> None:
    yielded = [threading.Event() for _ in range(9)]

    @server.tool(pages=True)
    def rows() -> Iterator[str]:
        for number, event in enumerate(yielded):
            event.set()
            yield str(number)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        page = await talker.page(1, "rows")
        for asked in range(1, 8):
            await trio.to_thread.run_sync(yielded[asked].wait)  # one ahead
            page = await talker.page(asked + 1, "rows", next_of(page))
            assert page_text(page) == str(asked)
            assert not any(event.is_set() for event in yielded[asked + 2 :])


async def test_a_plain_generator_keeps_one_thread_from_the_first_page_to_the_last(
    server: Server, mock_clock: MockClock
) -> None:
    threads: list[int] = []

    @server.tool(pages=True)
    def rows(call: SyncCall, to: int) -> Iterator[str]:
        for number in range(to):
            threads.append(threading.get_ident())
            call.log("info", number)
            yield str(number)
        threads.append(threading.get_ident())

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        pages = await turn_all(talker, "rows", to=5)
    assert [page for page in map(page_text, pages) if page] == ["0", "1", "2", "3", "4"]
    assert said(talker.seen) == [0, 1, 2, 3, 4]
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


# Slow tools


class Slow:
    """A tool that yields and ends when the test tells it to."""

    def __init__(self, server: Server, **settings: Any) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        server.tool(name="slow", pages=True, page_wait_s=WAIT_S, **settings)(self.slow)

    async def slow(self, call: Call) -> AsyncIterator[Any]:
        async for page in self._receive:
            if isinstance(page, Exception):
                raise page
            if callable(page):
                await page(call)
            else:
                yield page

    def give(self, *pages: Any) -> None:
        for page in pages:
            self._send.send_nowait(page)

    def end(self) -> None:
        self._send.close()

    def log(self, text: str) -> None:
        async def log(call: Call) -> None:
            await call.log("info", text)

        self.give(log)

    def progress(self, value: float) -> None:
        async def progress(call: Call) -> None:
            await call.progress(value)

        self.give(progress)


async def timed(talker: Talker, id: int, token: str | None = None) -> tuple[float, Json]:
    """The seconds until a page came, and the page."""
    start = trio.current_time()
    page = await talker.page(id, "slow", token)
    return round(trio.current_time() - start, 6), page


async def test_a_page_waits_a_moment_to_know_whether_it_is_the_last(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        slow.give("a")
        passed, page = await timed(talker, 1)
        assert (passed, page_text(page)) == (HOLD_S, "a")
        slow.give("b", "c")
        passed, page = await timed(talker, 2, next_of(page))
        assert (passed, page_text(page)) == (0, "b")  # another page follows


async def test_what_ends_long_after_its_last_page_ends_with_an_empty_one(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        slow.give("a")
        first = await talker.page(1, "slow")
        slow.end()
        passed, last = await timed(talker, 2, next_of(first))
    assert (passed, last) == (0, {"content": []})


async def test_a_caller_that_waits_too_long_gets_an_empty_page_and_comes_back_with_its_token(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        passed, page = await timed(talker, 1)
        tokens = []
        for number in range(2, 5):
            assert (passed, page["content"]) == (WAIT_S, [])
            tokens.append(next_of(page))
            passed, page = await timed(talker, number, tokens[-1])
        assert len(set(tokens)) == 3
        slow.give("a", "b")
        slow.end()
        assert page_text(await talker.page(5, "slow", next_of(page))) == "a"


async def test_while_nobody_asks_no_empty_pages_are_made(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        page = await talker.page(1, "slow")
        await trio.sleep(100 * WAIT_S)
        (stream,) = house.running.engine._streams.index
        assert stream.state.last == 1
        slow.give("a", "b")
        slow.end()
        passed, page = await timed(talker, 2, next_of(page))
        assert (passed, page_text(page)) == (0, "a")
        passed, page = await timed(talker, 3, next_of(page))
        assert (passed, page_text(page), is_last(page)) == (0, "b", True)


# Messages between pages


async def test_messages_come_ahead_of_the_page_on_the_call_that_asks_for_it(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        slow.log("before a")
        slow.give("a")
        slow.log("before b")
        slow.give("b")
        slow.log("behind b")
        slow.end()
        heard = []
        page: Json = {}
        for number in (1, 2, 3):
            talker.seen.clear()
            page = await talker.page(number, "slow", next_of(page) if page else None)
            heard.append((said(talker.seen), page_text(page)))
    assert heard == [(["before a"], "a"), (["before b"], "b"), (["behind b"], "")]
    assert is_last(page)


async def test_progress_goes_to_the_call_that_waits_now(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token: Json = {}
        for number in (1, 2):
            turn = {"name": "slow", "_meta": {"progressToken": f"p{number}"}} | token
            await talker.ask(number, "tools/call", **turn)
            await wait_all_tasks_blocked()
            slow.progress(number)
            slow.give(f"page {number}")
            answer = (await talker.answer(number))["result"]
            token = {"resumeToken": next_of(answer)}
    told = [m["params"] for m in talker.seen if m.get("method") == "notifications/progress"]
    assert told == [
        {"progressToken": "p1", "progress": 1},
        {"progressToken": "p2", "progress": 2},
    ]


async def test_progress_of_a_page_that_nobody_asked_for_yet_is_not_sent(
    server: Server, autojump_clock: MockClock
) -> None:
    slow = Slow(server, pages_ahead=2)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        slow.give("1", "2")
        slow.progress(0.5)  # of a call that has its response, or of no call
        slow.give("3")
        slow.end()
        await talker.call("c", "slow", token="p")
        token = next_of((await talker.answer("c"))["result"])
        await wait_all_tasks_blocked()  # by now all pages are made
        for number in (2, 3):
            page = await talker.page(number, "slow", token)
            token = "" if is_last(page) else next_of(page)
        assert page_text(page) == "3"
    assert "notifications/progress" not in methods(talker.seen)
