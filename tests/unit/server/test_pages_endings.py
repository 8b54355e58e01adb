"""The end of a tool that gives pages: by itself, with a failure, or when no pages are wanted."""

import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Limits, Server
from tests.rigs.server import (
    PLAIN,
    REQUESTS,
    House,
    Json,
    Talker,
    is_last,
    next_of,
    open_house,
    page_text,
    reason,
)

MAX_S = 600.0


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_max_s=MAX_S)


def giving(server: Server, *pages: Any) -> None:
    """A tool that yields these values, and raises an exception among them."""

    @server.tool(name="give", pages=True)
    async def give() -> AsyncIterator[Any]:
        for page in pages:
            if isinstance(page, Exception):
                raise page
            yield page


async def given(server: Server) -> list[Json]:
    """The responses to one call after another, up to the one without a page token."""
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        pages = [await talker.page("p1", "give")]
        while "nextResumeToken" in pages[-1]:
            pages.append(await talker.page(f"p{len(pages) + 1}", "give", next_of(pages[-1])))
        return pages


# Failures


@pytest.mark.parametrize("before", [0, 1, 2, 5])
async def test_a_tool_that_fails_gives_what_it_made_and_then_its_error(
    server: Server, before: int, mock_clock: MockClock
) -> None:
    giving(server, *(str(n) for n in range(before)), ValueError("no more rows"))
    *pages, failed = await given(server)
    assert list(map(page_text, pages)) == [str(n) for n in range(before)]
    assert failed["isError"]
    assert page_text(failed) == "no more rows"
    assert is_last(failed)


@pytest.mark.parametrize("bad", [object(), b"bytes", "\ud800"], ids=["object", "bytes", "text"])
async def test_a_page_that_is_no_json_is_the_end(
    server: Server, bad: Any, mock_clock: MockClock
) -> None:
    giving(server, "good", bad, "never")
    good, failed = await given(server)
    assert page_text(good) == "good"
    assert failed["isError"]
    assert page_text(failed).startswith("tool give returned")
    assert is_last(failed)


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_page_that_is_too_large_is_the_end(at: int, mock_clock: MockClock) -> None:
    server = Server("tested", limits=Limits(message_bytes_max=10_000))
    pages = ["a", "b", "c"]
    pages[at] = "x" * 10_000
    giving(server, *pages)
    *good, failed = await given(server)
    assert list(map(page_text, good)) == pages[:at]
    if at == 2:  # as for any tool's result
        assert reason(failed) == "too_large"
    else:
        assert failed["isError"]
        assert "longer than the limit" in page_text(failed)
        assert is_last(failed)


# No more pages are wanted


class Watched:
    """A tool that yields for ever, or stops before page number `stop`, and tells when it is
    closed.
    """

    def __init__(self, server: Server, kind: str) -> None:
        self.closed = threading.Event()
        self.at_stop = threading.Event()
        self.go_on = threading.Event()
        self.kind = kind
        function: Any = self.as_told if kind == "async" else self.in_thread
        server.tool(name="rows", pages=True)(function)

    async def as_told(self, stop: int = 1_000) -> AsyncIterator[str]:
        try:
            for number in itertools.count(1):
                if number == stop:
                    self.at_stop.set()
                    await trio.sleep_forever()
                yield "row"
        finally:
            self.closed.set()

    def in_thread(self, stop: int = 1_000) -> Iterator[str]:
        try:
            for number in itertools.count(1):
                if number == stop:
                    self.at_stop.set()
                    self.go_on.wait()
                yield "row"
        finally:
            self.closed.set()


PATIENCE_S = 20.0  # of the real clock; only a failing test takes this long


async def happens(event: threading.Event) -> bool:
    """Wait for something that a thread does. Returns False if it does not happen."""
    return await trio.to_thread.run_sync(event.wait, PATIENCE_S)


@pytest.fixture(params=["async", "thread"])
def watched(request: pytest.FixtureRequest, server: Server) -> Iterator[Watched]:
    found = Watched(server, request.param)
    yield found
    found.go_on.set()


@pytest.mark.parametrize("stop", [1, 3])
async def test_who_cancels_the_call_for_a_page_stops_the_tool(
    server: Server, watched: Watched, stop: int, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        turn: Json = {}
        for number in range(1, stop):
            await talker.ask(number, "tools/call", name="rows", arguments={"stop": stop}, **turn)
            if number == stop - 1:
                assert await happens(watched.at_stop)
                mock_clock.jump(1)  # it is not known whether this page is the last
            turn = {"resumeToken": next_of((await talker.answer(number))["result"])}
        await talker.ask(stop, "tools/call", name="rows", arguments={"stop": stop}, **turn)
        assert await happens(watched.at_stop)
        await talker.tell("notifications/cancelled", requestId=stop)
        await wait_all_tasks_blocked()
        watched.go_on.set()  # a thread notices it when it yields
        assert await happens(watched.closed)
        if turn:
            refused = await talker.page(9, "rows", turn["resumeToken"], stop=stop)
            assert reason(refused) == "invalid_token"
        assert all(m.get("id") != stop for m in talker.seen)


async def begun(house: House, capabilities: Json = PLAIN) -> tuple[Talker, str]:
    """A client that has the first page, and the page token for the second."""
    talker = await house.dial(capabilities)
    return talker, next_of(await talker.page(1, "rows"))


async def leave(talker: Talker) -> None:
    await talker.channel.aclose()
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("capabilities", [PLAIN, REQUESTS])
async def test_when_nobody_comes_back_for_a_page_the_tool_is_stopped(
    server: Server, watched: Watched, capabilities: Json, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await begun(house, capabilities)
        await leave(talker)
        mock_clock.jump(MAX_S - 1)
        await wait_all_tasks_blocked()
        assert not watched.closed.is_set()
        mock_clock.jump(2)
        await wait_all_tasks_blocked()
        assert await happens(watched.closed)
        refused = await (await house.dial()).page(2, "rows", token)
        assert reason(refused) == "invalid_token"


async def test_a_page_that_nobody_comes_for_keeps_a_connected_client_no_longer(
    server: Server, watched: Watched, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await begun(house)
        mock_clock.jump(MAX_S + 1)  # the client is attached, but asks for no page
        await wait_all_tasks_blocked()
        assert await happens(watched.closed)
        assert reason(await talker.page(2, "rows", token)) == "invalid_token"


async def test_who_asks_again_keeps_the_tool_waiting(
    server: Server, watched: Watched, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, token = await begun(house)
        for number in range(2, 6):
            mock_clock.jump(MAX_S - 1)
            await wait_all_tasks_blocked()
            assert page_text(await talker.page(number, "rows", token)) == "row"
        assert not watched.closed.is_set()


async def test_a_plain_client_that_is_cut_before_its_first_page_cannot_come_back(
    server: Server, watched: Watched, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "rows", stop=1)
        assert await happens(watched.at_stop)
        await leave(talker)
        watched.go_on.set()
        assert await happens(watched.closed)
        assert list(house.running.engine._streams.index) == []


async def test_a_shutdown_stops_the_tool(
    server: Server, watched: Watched, mock_clock: MockClock
) -> None:
    async with open_house(server) as house:
        await begun(house)
        with trio.fail_after(1):
            await house.running.engine.shut_down()
        assert await happens(watched.closed)


async def test_what_has_no_room_for_its_page_is_stopped_too(mock_clock: MockClock) -> None:
    limits = Limits(unsent_bytes_max=1)
    # The announcement goes ahead, and takes the room.
    server = Server("tested", resume_max_s=MAX_S, announce_after_s=0, limits=limits)
    watched = Watched(server, "thread")
    async with open_house(server) as house:
        talker = await house.dial(REQUESTS, capacity=1)
        await talker.call(1, "rows")
        await wait_all_tasks_blocked()
        await talker.tell("notifications/cancelled", requestId=1)
        await wait_all_tasks_blocked()
        assert await happens(watched.closed)
