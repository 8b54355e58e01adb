"""The lifespan of a server, and what it yields."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from streams import Call, MemoryJournal, Server, SyncCall
from streams.errors import JournalUnusable, LifespanFailed
from streams.keys import Keyring
from streams.server.lifespan import CLOSE_S
from tests.rigs.server import PLAIN, next_of, open_house, text_of

Events = list[Any]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def server(events: Events) -> Server:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[dict[str, str]]:
        events.append(f"begin {server.name}")
        try:
            yield {"database": "open"}
        finally:
            await trio.sleep(1)  # also where the server was cancelled
            events.append("end")

    return Server("tested", lifespan=lifespan)


def opened(server: Server) -> Any:
    return server.open(MemoryJournal(), Keyring.load(None))


async def test_a_server_without_a_lifespan_has_no_state() -> None:
    server = Server("tested")

    @server.tool
    async def look(call: Call) -> str:
        return repr(call.state)

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "look")
        assert text_of(await talker.answer(1)) == "None"


async def test_every_kind_of_tool_has_the_state(server: Server, autojump_clock: MockClock) -> None:
    @server.tool
    async def asynchronous(call: Call) -> str:
        return str(call.state["database"])

    @server.tool
    def plain(call: SyncCall) -> str:
        return str(call.state["database"])

    @server.tool(pages=True)
    async def pages(call: Call) -> AsyncIterator[str]:
        yield str(call.state["database"])

    @server.tool(pages=True)
    def plain_pages(call: SyncCall) -> Iterator[str]:
        yield str(call.state["database"])

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for tool in ("asynchronous", "plain", "pages", "plain_pages"):
            result = await talker.page(tool, tool)
            while not result["content"]:  # the clock is faster than a thread
                result = await talker.page(tool, tool, next_of(result))
            assert result["content"][0]["text"] == "open"


async def test_it_is_left_after_the_handlers_have_ended(
    server: Server, events: Events, autojump_clock: MockClock
) -> None:
    @server.tool
    async def wait(call: Call) -> str:
        events.append("call")
        try:
            await trio.sleep_forever()
        finally:
            events.append(call.state["database"])
        return "never"

    async with open_house(server) as house:
        assert events == ["begin tested"]
        talker = await house.dial(PLAIN)
        await talker.call(1, "wait")
        await trio.sleep(1)
    assert events == ["begin tested", "call", "open", "end"]


async def test_it_is_entered_before_a_call_is_restarted(
    events: Events, server: Server, autojump_clock: MockClock
) -> None:
    @server.tool(restart=True)
    async def wait(call: Call) -> str:
        events.append(call.state["database"])
        await trio.sleep_forever()
        return "never"

    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "wait")
        journal, keyring = house.as_after_a_crash(), Keyring.load(None)
    events.clear()
    async with open_house(server, journal=journal, keyring=keyring):
        await trio.sleep(1)
        assert events == ["begin tested", "open"]


@pytest.mark.parametrize("error", [ValueError("no reason"), JournalUnusable("corrupt")])
async def test_it_is_left_after_an_error_which_it_cannot_hide(
    events: Events, error: Exception
) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        try:
            async with trio.open_nursery():
                yield
        except* Exception as errors:
            events.append(errors)

    with pytest.raises(ExceptionGroup) as raised:
        async with opened(Server("tested", lifespan=lifespan)):
            raise error
    assert len(events) == 1
    assert raised.group_contains(type(error), match=str(error))


async def test_it_is_left_when_the_server_is_cancelled(
    server: Server, events: Events, autojump_clock: MockClock
) -> None:
    with trio.move_on_after(5) as scope:
        async with opened(server):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert events == ["begin tested", "end"]


async def test_one_that_does_not_end_is_cancelled(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        yield
        await trio.sleep_forever()

    began = trio.current_time()
    with structlog.testing.capture_logs() as logs:
        async with opened(Server("tested", lifespan=lifespan)):
            pass
    assert trio.current_time() - began == pytest.approx(CLOSE_S, abs=0.5)
    assert any("took too long" in entry["event"] for entry in logs)


async def test_its_own_tasks_run_while_the_server_does(autojump_clock: MockClock) -> None:
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(trio.current_time())
            await trio.sleep(1)

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            yield
            nursery.cancel_scope.cancel()

    async with opened(Server("tested", lifespan=lifespan)):
        await trio.sleep(9.5)
    assert len(ticks) == 10


@pytest.mark.parametrize("is_grouped", [False, True])
async def test_its_failure_at_the_start_is_told_with_its_place(is_grouped: bool) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        if is_grouped:
            async with trio.open_nursery():
                raise ConnectionError("no database")
        raise ConnectionError("no database")
        yield

    with pytest.raises(LifespanFailed) as raised:
        async with opened(Server("tested", lifespan=lifespan)):
            raise AssertionError("it was not entered")
    text = str(raised.value)
    assert text.startswith("The server's lifespan failed at its start: ConnectionError: no data")
    assert f"({__file__}, line " in text


async def test_its_failure_at_the_end_is_raised() -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise ConnectionError("no database")

    server = Server("tested", lifespan=lifespan)
    with pytest.raises(LifespanFailed, match="failed at its end: ConnectionError"):
        async with opened(server):
            pass
    with structlog.testing.capture_logs() as logs, pytest.raises(ExceptionGroup) as raised:
        async with opened(server):
            raise ValueError("first")
    assert raised.group_contains(ValueError, match="first")
    assert [str(each["exc_info"][1]) for each in logs if "exc_info" in each] == ["no database"]


@pytest.mark.parametrize("error", [ConnectionError("lost"), SystemExit("lost")])
async def test_its_failure_while_the_server_runs_is_raised(
    error: BaseException, autojump_clock: MockClock
) -> None:
    async def fail() -> None:
        await trio.sleep(1)
        raise error

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield

    with pytest.raises(LifespanFailed, match=f"failed: {type(error).__name__}: .*lost") as raised:
        async with opened(Server("tested", lifespan=lifespan)):
            await trio.sleep_forever()
    assert isinstance(raised.value.__cause__, BaseExceptionGroup)


async def test_a_lifespan_that_cancels_the_server_has_failed(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        with trio.move_on_after(1):
            yield

    with pytest.raises(LifespanFailed, match="has cancelled the server"):
        async with opened(Server("tested", lifespan=lifespan)):
            await trio.sleep_forever()


async def test_its_failure_beside_a_cancellation_is_logged(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[None]:
        try:
            yield
        finally:
            raise ConnectionError("no database")

    with structlog.testing.capture_logs() as logs, trio.move_on_after(1) as scope:
        async with opened(Server("tested", lifespan=lifespan)):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert [str(each["exc_info"][1]) for each in logs if "exc_info" in each] == ["no database"]


@pytest.mark.parametrize("error", [SystemExit("no DATABASE_URL"), KeyboardInterrupt("odd")])
async def test_it_cannot_end_the_process(error: BaseException) -> None:
    @asynccontextmanager
    async def at_the_start(server: Server) -> AsyncIterator[None]:
        raise error
        yield

    @asynccontextmanager
    async def at_the_end(server: Server) -> AsyncIterator[None]:
        yield
        raise error

    for lifespan in (at_the_start, at_the_end):
        with pytest.raises(LifespanFailed, match=str(error)):
            async with opened(Server("tested", lifespan=lifespan)):
                pass


def test_a_lifespan_is_a_context_manager_function() -> None:
    async def generator(server: Server) -> AsyncIterator[None]:
        yield

    async def coroutine(server: Server) -> None: ...

    for lifespan in (generator, coroutine):
        with pytest.raises(TypeError, match="decorate it with contextlib"):
            Server("tested", lifespan=lifespan)  # type: ignore[arg-type]
