"""The tasks of a channel end with it, even if it is cancelled while they begin."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio
import trio.testing

from transports.http.client import HttpChannel
from transports.http.connections import ConnectionPool
from transports.net.dialing import HTTP, Address, tasks_until
from transports.websocket.wire import open_wire


@asynccontextmanager
async def http_tasks() -> AsyncIterator[None]:
    connections = ConnectionPool(Address("http://127.0.0.1:1/mcp", HTTP), None)
    channel = HttpChannel(connections, 1024, None)
    async with tasks_until(channel.aclose) as nursery:
        await nursery.start(channel.run)
        yield


@asynccontextmanager
async def websocket_tasks() -> AsyncIterator[None]:
    stream, _ = trio.testing.memory_stream_pair()
    async with open_wire(stream):
        yield


@pytest.mark.parametrize("tasks", [http_tasks, websocket_tasks])
async def test_tasks_that_begin_when_all_is_cancelled_end_at_once(
    tasks: Callable[[], AbstractAsyncContextManager[None]],
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with tasks():
            pytest.fail("it was cancelled before it was open")
    assert scope.cancelled_caught


async def test_an_error_of_the_block_comes_out_as_it_was_raised() -> None:
    closed = trio.Event()

    async def aclose() -> None:
        await trio.lowlevel.checkpoint()
        closed.set()

    with pytest.raises(ZeroDivisionError):
        async with tasks_until(aclose):
            _ = 1 / 0
    assert closed.is_set()
