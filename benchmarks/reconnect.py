"""A thousand clients resume at once: ours beside the official Python SDK's server.

Each has called `fill` and was cut off at once, and has only the means to resume. All of them then
fetch the rest, each over a new connection: with a GET and the id of the first event, which both
servers understand, or over a WebSocket with `stream/resume`, which only ours does. The SDK's server
keeps events in memory, ours in its journal.
"""

import re
import select
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from math import inf
from time import perf_counter
from typing import Any, Final, NamedTuple

import msgspec
import trio

from benchmarks import sockets
from benchmarks.events import Check, Response, Session, fill
from benchmarks.sockets import Step

STOCK_SERVER: Final = (sys.executable, "-m", "benchmarks.stock")

CALLS_AT_ONCE: Final = 20  # while the clients get ready
READ_BYTES: Final = 64 * 1024
SILENCE_S: Final = 60.0  # of all connections; then a server has hung

# The text at which a client may stop to read: the SDK's server does not end a response that is
# complete. It is near the end.
_RESULT: Final = re.compile(rb'"(?:result|error)":[^\r\n]*\r?\n\r?\n')
_TAIL_BYTES: Final = 4096


class Plan(msgspec.Struct, frozen=True):
    """How many clients resume, and how much waits for each of them."""

    clients: int = 1_000
    count: int = 100
    size: int = 200


class Absent(NamedTuple):
    """A client that is away, and its last event."""

    session: Session
    last_event_id: bytes


class Way(NamedTuple):
    """How clients resume: `gather` prepares them, `come_back` times them."""

    gather: Callable[[str, Plan], Awaitable[Sequence[Any]]]
    come_back: Callable[[Sequence[Any], Plan], Awaitable[float]]


async def _gather(url: str, plan: Plan) -> list[Absent]:
    """So many clients that have called and been cut off."""
    limiter = trio.CapacityLimiter(CALLS_AT_ONCE)
    crowd: list[Absent] = []

    async def call(number: int) -> None:
        async with limiter:
            session = await Session.opened(url, {})
            # The SDK's server tells streams apart by the ids of their requests, in all sessions.
            with await session.post(
                "tools/call", fill(plan.count, plan.size), request_id=number
            ) as response:
                events = await response.rest()
        crowd.append(Absent(session, events[0].id))

    async with trio.open_nursery() as nursery:
        for number in range(1, plan.clients + 1):
            nursery.start_soon(call, number)
    return crowd


async def _come_back(crowd: Sequence[Absent], plan: Plan) -> float:
    """Resume all at once; returns clients a second, from the first connection to the last result.

    The bytes are checked afterwards, so that no client waits for that. Raises `Lost`.
    """
    asking = [each.session.get(each.last_event_id) for each in crowd]
    took_s, came = _talk_at_once(
        [(each.address, [Step(each.asked, _has_result)]) for each in asking]
    )
    for absent, response, data in zip(crowd, asking, came, strict=True):
        check = Check(absent.last_event_id, plan.count)
        check.take(response.take(bytes(data)))
        check.end()
    return len(crowd) / took_s


def _talk_at_once(
    talks: Sequence[tuple[tuple[str, int], Sequence[Step]]],
) -> tuple[float, list[bytearray]]:
    """Take the steps of each talk, over a connection each; how long all took, and what came last.

    One loop without tasks, so that the clients cost little beside the server. A connection is
    closed as soon as its last answer is there. Raises `TimeoutError`.
    """
    came = [bytearray() for _ in talks]
    done = [0] * len(talks)  # steps
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        connections: dict[int, tuple[int, socket.socket]] = {}
        began_at = perf_counter()
        for place, (address, steps) in enumerate(talks):
            connection = stack.enter_context(socket.create_connection(address))
            connection.setblocking(False)
            connection.send(steps[0].sent)
            connections[connection.fileno()] = place, connection
            poll.register(connection, select.EPOLLIN)
        while connections:
            if not (ready := poll.poll(SILENCE_S)):
                raise TimeoutError(f"{len(connections)} clients wait for an answer")
            for fd, _ in ready:
                place, connection = connections[fd]
                steps, answer = talks[place][1], came[place]
                data = connection.recv(READ_BYTES)
                answer += data
                if data and not steps[done[place]].is_answered(answer):
                    continue
                done[place] += 1
                if data and done[place] < len(steps):
                    answer.clear()
                    connection.send(steps[done[place]].sent)
                else:  # the end, or too early: then the check finds a message missing
                    del connections[fd]
                    connection.close()
        return perf_counter() - began_at, came


def _has_result(came: bytearray) -> bool:
    return _RESULT.search(came, max(0, len(came) - _TAIL_BYTES)) is not None


async def up_to_the_result(response: Response, silence_s: float = inf) -> bytes:
    """The bytes up to the end of a result, or to a silence of so many seconds."""
    came = bytearray()
    while not _has_result(came):
        data = b""
        with trio.move_on_after(silence_s):
            data = await response.read()
        if not data:
            break  # too early: the check will find a message missing
        came += data
    return bytes(came)


async def _gather_over_websockets(url: str, plan: Plan) -> list[tuple[str, sockets.Ticket]]:
    limiter = trio.CapacityLimiter(CALLS_AT_ONCE)
    crowd: list[tuple[str, sockets.Ticket]] = []

    async def call() -> None:
        async with limiter:
            with sockets.Socket(url) as socket:
                await socket.open()
                crowd.append((url, await socket.call(plan.count, plan.size)))

    async with trio.open_nursery() as nursery:
        for _ in range(plan.clients):
            nursery.start_soon(call)
    return crowd


async def _come_back_over_websockets(
    crowd: Sequence[tuple[str, sockets.Ticket]], plan: Plan
) -> float:
    """As `_come_back`, with handshake and `initialize`."""
    took_s, came = _talk_at_once(
        [(sockets.address_of(url), sockets.coming_back(url, ticket)) for url, ticket in crowd]
    )
    for (_, ticket), data in zip(crowd, came, strict=True):
        sockets.check(data, ticket, plan.count)
    return len(crowd) / took_s


EVENTS: Final = Way(_gather, _come_back)
SOCKETS: Final = Way(_gather_over_websockets, _come_back_over_websockets)
