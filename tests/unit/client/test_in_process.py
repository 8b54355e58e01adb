"""`Client(server)`: a server in the process of its client, for tests."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from streams import Call, Client, Server, SyncCall
from streams.messages import decode
from tests.rigs.server import open_house


def counting(**settings: Any) -> Server:
    server = Server("counting", version="7", instructions="Count.", resume_min_s=0, **settings)

    @server.tool
    async def count(call: Call, n: int) -> int:
        """Count."""
        for number in range(1, n + 1):
            await call.progress(number, total=n)
            await trio.lowlevel.checkpoint()
        return n

    @server.tool
    def plain(call: SyncCall) -> str:
        """Run in a thread."""
        call.log("info", "here")
        return "plain"

    return server


async def test_one_line_runs_a_server_and_connects_to_it() -> None:
    async with Client(counting()) as client:
        assert [tool.name for tool in await client.tools()] == ["count", "plain"]
        assert client.server_info["name"] == "counting"
        assert client.instructions == "Count."
        assert await client.call_tool("count", {"n": 3}, type=int) == 3
        assert await client.call_tool("plain", type=str) == "plain"


async def test_it_needs_no_files_and_no_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc").exists() else None
    async with Client(counting()) as client:
        await client.call_tool("count", {"n": 1})
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


async def test_a_server_serves_one_test_after_another_and_two_at_once() -> None:
    server = counting()
    for _ in range(2):
        async with Client(server) as one, Client(server) as other:
            assert await one.call_tool("count", {"n": 1}, type=int) == 1
            assert await other.call_tool("count", {"n": 2}, type=int) == 2


@pytest.mark.parametrize("cuts_at", [1, 7, 50])
async def test_a_cut_loses_nothing_and_repeats_nothing(cuts_at: int) -> None:
    seen: list[float] = []
    async with Client(counting()) as client, client.call("count", {"n": 50}) as call:
        async for message in call:
            seen.append(decode(message.params, dict[str, Any])["progress"])
            if len(seen) % cuts_at == 0:
                client.cut()
        assert await call.result(int) == 50
    assert seen == list(range(1, 51))


async def test_a_call_that_was_left_is_resumed_by_its_ticket() -> None:
    async with Client(counting()) as client:
        async with client.call("count", {"n": 200}) as call:
            async for _ in call:
                if call.ticket is not None:
                    break
            ticket = call.ticket
        client.cut()
        assert ticket is not None
        async with client.resume(ticket) as call:
            assert await call.result(int) == 200


async def test_only_a_server_in_this_process_can_be_cut() -> None:
    async with open_house(counting()) as house:
        client = Client(house.running)
        async with client:
            client.cut()
            assert await client.call_tool("count", {"n": 1}, type=int) == 1
    with pytest.raises(RuntimeError, match=r"only the connection of Client\(server\)"):
        Client(lambda: None).cut()  # type: ignore[arg-type, return-value]


async def test_the_error_of_the_block_is_raised_as_it_was() -> None:
    async def fail() -> None:
        async with Client(counting()) as client:
            await client.ping()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_a_group_of_the_block_stays_a_group() -> None:
    async def fail() -> None:
        async with Client(counting()):
            raise ExceptionGroup("mine", [ZeroDivisionError()])

    with pytest.raises(ExceptionGroup, match="mine"):
        await fail()


async def test_cancelling_the_block_from_outside_ends_it() -> None:
    with trio.move_on_after(0.05) as scope:
        async with Client(counting()) as client:
            await client.ping()
            await trio.sleep_forever()
    assert scope.cancelled_caught


class Failing:
    """A server whose start or end fails, as one with a lifespan may."""

    def __init__(self, *, at_end: bool, in_group: bool) -> None:
        self._at_end = at_end
        self._in_group = in_group

    @asynccontextmanager
    async def open(self, journal: Any, keyring: Any) -> AsyncIterator[Any]:
        error: Exception = LookupError("no database")
        if self._in_group:
            error = ExceptionGroup("", [ExceptionGroup("", [error])])
        if not self._at_end:
            raise error
        async with counting().open(journal, keyring) as running:
            yield running
        raise error


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("in_group", [False, True])
async def test_an_error_of_the_servers_start_or_end_reaches_the_test(
    at_end: bool, in_group: bool
) -> None:
    entered = False

    async def enter() -> None:
        nonlocal entered
        async with Client(Failing(at_end=at_end, in_group=in_group)) as client:
            entered = True
            await client.ping()

    with pytest.raises(LookupError, match="no database"):
        await enter()
    assert entered == at_end


async def test_the_servers_shutdown_is_the_blocks_end() -> None:
    server = Server("s")
    ended = False

    @server.tool
    async def wait(call: Call) -> None:
        """Wait."""
        nonlocal ended
        try:
            await call.log("info", "begun")
            await trio.sleep_forever()
        finally:
            ended = True

    async with Client(server) as client, client.call("wait") as call:
        async for _ in call:
            break
    assert ended


@pytest.mark.parametrize("given", ["ws://127.0.0.1:1", 3, None])
def test_what_is_neither_a_server_nor_a_dialer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a Server, or dial\(url\), got"):
        Client(given)
