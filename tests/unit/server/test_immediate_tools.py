"""Tools that await nothing: they run in the task that has read their call."""

import copy
import functools
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import trio

from streams import Call, Server, StreamsError
from streams.journal.memory import MemoryJournal
from streams.schemas.signatures import never_waits
from streams.server.tools import make_tool
from tests.rigs.idempotency import answered
from tests.rigs.server import PLAIN, open_house, run, text_of


async def plain() -> str:
    return "done"


async def awaits() -> str:
    return await plain()


async def iterates(each: AsyncIterator[str]) -> list[str]:
    return [text async for text in each]


async def enters(lock: trio.Lock) -> str:
    async with lock:
        return "done"


async def makes_one_that_awaits() -> Callable[[], Awaitable[str]]:
    async def inner() -> str:
        return await plain()

    return inner


def in_a_thread() -> str:
    return "done"


def gives_an_awaitable() -> Awaitable[str]:
    return awaits()


@types.coroutine
def steps() -> Iterator[None]:
    yield


class Callee:
    async def __call__(self) -> str:
        return "done"


@functools.wraps(plain)
async def wrapped() -> str:
    return await plain()


@pytest.mark.parametrize("function", [plain, makes_one_that_awaits])
def test_an_async_function_without_await_never_waits(function: Callable[..., Any]) -> None:
    assert never_waits(function)


@pytest.mark.parametrize(
    "function",
    [
        awaits,
        iterates,
        enters,
        wrapped,
        in_a_thread,
        gives_an_awaitable,
        steps,
        functools.partial(plain),
        Callee(),
    ],
)
def test_of_any_other_function_nobody_knows(function: Callable[..., Any]) -> None:
    assert not never_waits(function)


def test_a_limit_of_time_and_a_check_by_a_worker_may_have_to_be_waited_for() -> None:
    assert make_tool(plain).is_immediate
    assert not make_tool(plain, timeout_s=1).is_immediate

    async def row() -> dict[str, int]:
        return {"id": 1}

    assert not make_tool(row, output_schema={"type": "object"}).is_immediate


@pytest.mark.parametrize("announce_after_s", [0.005, 0])
async def test_it_runs_in_the_task_that_has_read_the_call_unless_that_is_stored_at_once(
    announce_after_s: float,
) -> None:
    server, ran_in = Server("tested", announce_after_s=announce_after_s), []

    @server.tool
    async def here() -> str:
        ran_in.append(trio.lowlevel.current_task())
        return "done"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for number in range(2):
            await talker.call(number, "here")
            assert text_of(await talker.answer(number)) == "done"
    assert (ran_in[0] is ran_in[1]) == bool(announce_after_s)


async def test_it_sees_its_call_and_no_call_afterwards() -> None:
    server, calls = Server("tested"), []

    @server.tool
    async def whoami(call: Call) -> str:
        calls.append(call)
        return call.principal.name

    assert text_of((await run(server, "whoami"))[-1]) == "alice"
    with pytest.raises(StreamsError):
        await calls[0].log("info", "too late")


async def test_a_context_variable_does_not_reach_the_next_call() -> None:
    server, count = Server("tested"), ContextVar("count", default=0)

    @server.tool
    async def counted() -> int:
        count.set(count.get() + 1)
        return count.get()

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        for number in range(2):
            await talker.call(number, "counted")
            assert text_of(await talker.answer(number)) == "1"


async def test_a_cancel_scope_that_it_leaves_open_reaches_nobody() -> None:
    server, left = Server("tested"), trio.CancelScope()

    @server.tool
    async def leave() -> str:
        left.__enter__()
        return "left"

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        await talker.call(1, "leave")
        assert text_of(await talker.answer(1)) == "left"
        left.cancel()
        assert await talker.request(2, "ping") == {}
        await talker.leave()


async def test_with_an_idempotency_key_it_runs_once_the_key_is_durable() -> None:
    server, journal = Server("tested"), MemoryJournal()
    found: list[MemoryJournal] = []

    @server.tool
    async def order() -> str:
        found.append(copy.deepcopy(journal))
        return "ordered"

    async with open_house(server, journal=journal) as house:
        talker = await house.dial(PLAIN)
        assert not (await answered(talker, 1, name="order")).get("isError")
    (as_it_ran,) = found
    assert (await as_it_ran.totals()).last_number == 1
