"""Resumes: all waiting messages, from the request for them to the last one.

A raw client reads bytes as fast as it can and checks them after the clock has stopped; the others
parse each message, one by one, and check it at once.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from benchmarks import raw, rawclient
from benchmarks.harness import Plan, Subject
from benchmarks.numbered import Lost, check_messages
from benchmarks.servers import APP, Served, http_server, stdio_server, websocket_server
from benchmarks.suites.peers import PEERS, SDK_CLIENT, peer_subjects
from streams import Client
from streams.client.call import RunningCall
from streams.protocol.ticket import Ticket

POLL_EVERY_S: Final = 0.02
PIPE, TCP = "limit: pipe", "limit: TCP"
PIPE_KEPT = "limit: pipe, the reader keeps all"
STDIO, WEBSOCKET, HTTP, EVENTS = "stdio", "WebSocket mcp-streams.v1", "HTTP x-ndjson", "HTTP SSE"

# Each of our transports: the row it is compared with, and its raw reader.
_Reader = Callable[[Served, int, int], rawclient.Resumed]
RAW_READERS: Final[Mapping[str, tuple[str, _Reader]]] = {
    STDIO: (PIPE, lambda served, *what: rawclient.stdio(served.command, *what)),
    WEBSOCKET: (TCP, lambda served, *what: rawclient.websocket_lines(served.url, *what)),
    HTTP: (TCP, lambda served, *what: rawclient.http_lines(served.url, *what)),
    EVENTS: (TCP, lambda served, *what: rawclient.sse(served.url, *what)),
}


def in_hand(transport: str) -> str:
    """The name of the row for our client over a transport."""
    return f"{transport}: our client"


def by_runs(transport: str) -> str:
    """The name of the row for our client over a transport, with runs that it splits."""
    return f"{transport}: our client, by runs"


def raw_row(transport: str) -> str:
    """The name of the row for a raw client over a transport."""
    return f"{transport}: raw client"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """All servers, for all sizes."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(http_server(APP, folder / "http.db"))
        servers = {
            STDIO: await stack.enter_async_context(stdio_server(APP, folder / "stdio.db")),
            WEBSOCKET: await stack.enter_async_context(websocket_server(APP, folder / "ws.db")),
            HTTP: http,
            EVENTS: http,
        }
        subjects = _limits(plan)
        for size, count in plan.counts.items():
            subjects += _ours(servers, count, size)
        if plan.has_peers:
            for name, place in PEERS.items():
                subjects += await peer_subjects(stack, name, place, plan, folder)
        yield subjects


def _limits(plan: Plan) -> list[Subject]:
    async def rate(kind: str, total: int, size: int) -> float:
        return await trio.to_thread.run_sync(raw.LIMITS[kind], total) / size

    found = []
    for size, count in plan.counts.items():
        for name, kind in ((PIPE, "pipe"), (TCP, "tcp")):
            measure = partial(rate, kind, plan.limit_bytes, size)
            found.append(Subject(name, size, measure, role="limit"))
        measure = partial(rate, "pipe, all kept", count * size, size)
        found.append(Subject(PIPE_KEPT, size, measure, of=PIPE, role="limit"))
    return found


def _ours(servers: Mapping[str, Served], count: int, size: int) -> list[Subject]:
    found = []
    for transport, (limit, reader) in RAW_READERS.items():
        measure = partial(resumed_raw, reader, servers[transport], count, size)
        found.append(Subject(raw_row(transport), size, measure, of=limit))
    for transport in (STDIO, WEBSOCKET, HTTP):
        measure = partial(resumed_in_hand, servers[transport], count, size)
        found.append(Subject(in_hand(transport), size, measure, of=SDK_CLIENT))
        measure = partial(resumed_in_hand, servers[transport], count, size, in_runs)
        found.append(Subject(by_runs(transport), size, measure, of=SDK_CLIENT))
    return found


async def resumed_raw(reader: _Reader, served: Served, count: int, size: int) -> float:
    """Messages a second to a raw client. Raises `Lost`."""
    resumed = await trio.to_thread.run_sync(reader, served, count, size)
    return resumed.messages / resumed.seconds


Take = Callable[[RunningCall], Awaitable[Iterable[bytes]]]


async def one_by_one(call: RunningCall) -> Iterable[bytes]:
    """All messages of a call, each as it comes; parsed as JSON only by the check."""
    taken = [message.params async for message in call]
    return (b'{"params":%b}' % bytes(params) for params in taken)


async def in_runs(call: RunningCall) -> Iterable[bytes]:
    """All messages of a call, split from the runs that they come in."""
    lines: list[bytes] = []
    async for run in call.runs():
        lines += run.lines
    return lines


async def resumed_in_hand(
    served: Served, count: int, size: int, take: Take = one_by_one, *, at: Served | None = None
) -> float:
    """Messages a second to our client, which may resume `at` another server. Raises `Lost`.

    The call is left after its first message and runs on; the time is that of the resume alone, over
    a connection that is already open.
    """
    ticket = await left(served, count, size)
    async with Client((at or served).dialer) as client:
        while (await client.poll(ticket)).status != "completed":
            await trio.sleep(POLL_EVERY_S)
        began_at = time.perf_counter()
        async with client.resume(ticket) as call:
            messages = await take(call)
            result = await call.result()
        took_s = time.perf_counter() - began_at
    if result.get("isError"):
        raise Lost(f"the tool failed: {result}")
    return check_messages(messages, ticket.after or 0, count) / took_s


async def left(served: Served, count: int, size: int) -> Ticket:
    """A call of `fill` that is left after its first message."""
    async with (
        Client(served.dialer) as client,
        client.call("fill", {"count": count, "size": size}) as call,
    ):
        await anext(call)
        ticket = call.ticket
    assert ticket is not None  # it was announced before the first message
    return ticket
