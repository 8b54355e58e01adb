"""Clients without numbers, or with a ticket alone, over every transport.

The servers are processes of their own, and are killed; see tests/acceptance/test_client.py.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Final

import pytest
import trio

from streams.client.call import RunningCall
from streams.client.pages import Pages
from streams.errors import CallFailed, StreamGone
from streams.messages import Message
from tests.acceptance.calls import carried, marked, number, open_client, steps, text
from tests.acceptance.launch import LINGER, owners, wait_for_end
from tests.acceptance.ways import APP, KINDS, PATIENCE_S, Listening, Owned, Served
from tests.rigs import ROOT
from tests.wire.process import APP as TOOLS
from tests.wire.process import CLI, Gate, ServerProcess, gate_in

REQUESTS: Final = ("resumableRequests",)

# Has the address, and reads the ticket from its standard input.
JOINER: Final = """
import sys, structlog, trio
from streams import Client, Ticket
from transports import dial, stdio

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def main(*where):
    ticket = Ticket.parse(sys.stdin.readline())
    dialer = dial(*where) if len(where) == 1 else lambda: stdio.connect(where)
    async with Client(dialer) as client:
        print(await client.join(ticket, timeout_s=0.1), flush=True)
        joined = await client.join(ticket)
        print(joined.result["content"][0]["text"], flush=True)

trio.run(main, *sys.argv[1:])
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Serve = Callable[[str], Served]


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Serve an app to all tests, over TCP; a test that killed the server starts it again."""
    with ExitStack() as stack:

        @functools.cache
        def serve(app: str) -> Served:
            folder = tmp_path_factory.mktemp("server")
            return Listening(stack.enter_context(ServerProcess(folder, app=app)), app)

        yield serve


@pytest.fixture
def serve(kind: str, listening: Serve, tmp_path: Path) -> Iterator[Serve]:
    """Serve an app in the usual way for this kind of address."""
    if kind != "stdio":
        yield listening
        return
    yield lambda app: Owned(tmp_path, app)
    _end_owners(Owned(tmp_path, "").journal)


def _end_owners(journal: Path) -> None:
    for pid in owners(journal):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with gate_in(tmp_path / "gate") as gate:
        yield gate


# Resumable requests alone


class Found:
    """The numbers that have come.

    Some come twice, since the wire has no numbers here, but none is missing.
    """

    def __init__(self, call: RunningCall) -> None:
        self.numbers: list[int] = []
        self._call = call

    async def read_to(self, n: int) -> None:
        while n not in self.numbers:
            self.add(await anext(self._call))

    async def rest(self) -> list[int]:
        async for message in self._call:
            self.add(message)
        return self.numbers

    def add(self, message: Message) -> None:
        n = number(message)
        if n not in self.numbers:
            assert n == len(self.numbers) + 1, self.numbers
            self.numbers.append(n)


async def test_without_numbers_a_cut_connection_loses_nothing(
    serve: Serve, kind: str, gate: Gate
) -> None:
    async with (
        open_client(serve(APP), kind, dialects=REQUESTS) as (client, way),
        steps(client, gate, 6) as call,
    ):
        found = Found(call)
        for n in (1, 4):
            gate.release()
            await found.read_to(n)
            way.cut()
            gate.release(2)
            await found.read_to(n + 2)
        assert await found.rest() == list(range(1, 7))
        assert await text(call) == "stepped 6"
        assert call.ticket is not None
        assert (call.ticket.dialect, call.ticket.stream) == (REQUESTS[0], "")


async def test_without_numbers_a_killed_server_loses_nothing(
    serve: Serve, kind: str, gate: Gate
) -> None:
    served = serve(APP)
    async with open_client(served, kind, dialects=REQUESTS) as (client, _):
        async with client.call("count", {"n": 30}) as call:
            found = Found(call)
            await found.read_to(1)
        ticket = carried(call.ticket)
        while (await client.poll(ticket)).status != "completed":
            pass
        await trio.to_thread.run_sync(served.restart)
    async with (
        open_client(served, kind, dialects=REQUESTS) as (other, _),
        other.resume(ticket) as resumed,
    ):
        numbers = [number(message) async for message in resumed]
        assert numbers in (list(range(1, 31)), list(range(2, 31)))
        assert await text(resumed) == "counted 30"


async def test_without_numbers_a_call_is_followed_over_the_death_of_its_server(
    serve: Serve, kind: str, gate: Gate
) -> None:
    served = serve(APP)
    async with (
        open_client(served, kind, dialects=REQUESTS) as (client, _),
        client.call("count", {"n": 3, "gate": gate.path}) as call,
    ):
        found = Found(call)
        await found.read_to(1)
        await marked(gate, "sent")
        await trio.to_thread.run_sync(served.restart)
        assert await found.rest() == [1, 2, 3]
        with pytest.raises(CallFailed) as caught:
            await call.result()
    assert caught.value.data == {"reason": "interrupted"}


async def test_without_numbers_cancel_stops_the_work_also_after_a_cut(
    serve: Serve, kind: str, gate: Gate
) -> None:
    async with (
        open_client(serve(APP), kind, dialects=REQUESTS) as (client, way),
        steps(client, gate, 3) as call,
    ):
        gate.release()
        found = Found(call)
        await found.read_to(1)
        way.cut()
        gate.release()
        await found.read_to(2)
        await call.cancel()
        await marked(gate, "cancelled")
        with pytest.raises(StreamGone) as caught:
            await call.result()
    assert caught.value.reason == "cancelled"


# Joining


@pytest.mark.parametrize("dialects", [("streams", *REQUESTS), REQUESTS], ids=["both", "requests"])
async def test_another_process_joins_with_the_ticket_alone(
    serve: Serve, kind: str, gate: Gate, dialects: tuple[str, ...]
) -> None:
    served = serve(APP)
    async with (
        open_client(served, kind, dialects=dialects) as (client, _),
        steps(client, gate, 3) as call,
    ):
        gate.release(2)
        await Found(call).read_to(2)
    command = [sys.executable, "-c", JOINER, *_address(served, kind)]
    run = functools.partial(trio.run_process, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, cwd=ROOT)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(run, command)
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.send_all(f"{carried(call.ticket)}\n".encode())
            assert await _line(process.stdout) == "Joined(is_done=False, result=None)\n"
            gate.release()
            assert await _line(process.stdout) == "stepped 3\n"


async def _line(stream: trio.abc.ReceiveStream) -> str:
    said = b""
    while not said.endswith(b"\n"):
        data = await stream.receive_some()
        assert data, f"it has ended, after {said!r}"
        said += data
    return said.decode()


def _address(served: Served, kind: str) -> list[str]:
    if kind == "stdio":
        return [*CLI, "serve", served.app, "--stdio", "--journal", str(served.journal), *LINGER]
    return [f"{kind}://127.0.0.1:{served.ports[kind]}"]


# Pages


async def texts(pages: Pages) -> list[str]:
    return [_text(page) async for page in pages]


def _text(page: dict[str, Any]) -> str:
    return str(page["content"][0]["text"])


async def test_pages_that_are_made_are_there_after_cuts_and_the_death_of_the_server(
    serve: Serve, kind: str
) -> None:
    served = serve(TOOLS)
    arguments = {"n": 5, "free": 5}
    async with open_client(served, kind) as (client, way):
        async with client.call("ahead_pages", arguments) as call:
            first = await call.result()
        ticket = carried(call.ticket)
        pages = client.pages("ahead_pages", arguments, token=first["nextResumeToken"])
        found = [_text(first)]
        found.append(_text(await anext(pages)))
        way.cut()
        found.append(_text(await anext(pages)))
        while (await client.poll(ticket)).status != "completed":
            pass
        await trio.to_thread.run_sync(served.restart)
        found.append(_text(await anext(pages)))
    async with open_client(served, kind, dialects=()) as (other, _):
        found += await texts(other.pages("ahead_pages", arguments, token=pages.token))
    assert found == [f"page {n}" for n in range(1, 6)]


async def test_pages_that_were_never_made_are_said_to_be_interrupted(
    serve: Serve, kind: str, gate: Gate
) -> None:
    served = serve(TOOLS)
    arguments = {"n": 3, "free": 2, "gate": gate.path}
    async with open_client(served, kind) as (client, _):
        pages = client.pages("pages", arguments)
        assert _text(await anext(pages)) == "page 1"
        token = pages.token
        second = await anext(pages)
        await trio.to_thread.run_sync(served.restart)
        again = client.pages("pages", arguments, token=token)
        assert await anext(again) == second
        with pytest.raises(CallFailed) as caught:
            await anext(again)
    assert caught.value.data == {"reason": "interrupted"}
