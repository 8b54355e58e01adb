"""The busiest day imaginable, compressed: the requests of many clients, right and wrong.

Each function is one action of a client, from beginning to end. It raises where a message is
missing, comes twice or out of order, or where an answer is wrong.
"""

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import trio

from benchmarks import numbered
from benchmarks.events import Check, Session
from benchmarks.numbered import Lost, number_of
from benchmarks.servers import Served
from benchmarks.sockets import Socket
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.protocol.ticket import Ticket

PATIENCE_S: Final = 60.0  # the bound for one action
# A list of all streams extends the life of each one, also of those that no client resumes.
POLL_ALL_EVERY_S: Final = 60.0
FAILURES_MAX: Final = 20
SIZE: Final = 200


class Day:
    """A server, the dice, and the actions so far."""

    def __init__(self, served: Mapping[str, Served], seed: int) -> None:
        self.served = served
        self.dice = Random(seed)  # nosec B311 # what happens next, not a secret
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.polls_all_at = 0.0  # when the next one is due, in trio's time

    def client(self, transport: str = "", **settings: Any) -> Client:
        """A new client, over any transport."""
        chosen = transport or self.dice.choice(list(self.served))
        return Client(self.served[chosen].dialer, name="soak", **settings)

    async def go_on(self, name: str) -> None:
        """Repeat one action, until cancelled."""
        habit = HABITS[name]
        while True:
            await trio.sleep(self.dice.uniform(0, 2 * habit.pause_s))
            try:
                with trio.fail_after(PATIENCE_S):
                    await habit.act(self)
            except Exception as error:  # any error is reported at the end
                if len(self.failures) < FAILURES_MAX:
                    self.failures.append(f"{name}: {error!r}")
            else:
                self.done[name] += 1


async def _call_briefly(day: Day) -> None:
    count = day.dice.randint(1, 300)
    async with day.client() as client, client.call("fill", _fill(count)) as call:
        await numbered.check(call, count)


async def _call_for_long_and_move(day: Day) -> None:
    """Resume now and then, with another client and over another transport."""
    count, ticket, had = 300, None, 0
    asked = {"count": count, "size": SIZE, "per_second": 100}
    while True:
        async with day.client() as client:
            opened = client.call("pace", asked) if ticket is None else client.resume(ticket)
            with trio.move_on_after(day.dice.uniform(0.3, 1.5)) as stay:
                async with opened as call:
                    try:
                        async for run in call.runs():
                            had = _next_of(run.body, had)
                        await call.result()
                    finally:
                        ticket = call.ticket
        if ticket is None:
            return  # left before it was told how to resume
        if not stay.cancelled_caught:
            break
    if had != count:
        raise Lost(f"{had} messages have come, {count} were sent")


def _next_of(body: bytes, had: int) -> int:
    for line in body.splitlines():
        if number_of(line) != had:
            raise Lost(f"message {had} was expected: {line[:160]!r}")
        had += 1
    return had


async def _abandon(day: Day) -> None:
    """Leave a running call, and never resume it."""
    asked = {"count": 1_000, "size": SIZE, "per_second": 200}
    async with day.client() as client, client.call("pace", asked) as call:
        await _read_some(call, 20)


async def _read_some(call: RunningCall, count: int) -> Ticket:
    seen = 0
    async for _ in call:
        seen += 1
        if seen == count:
            break
    if seen != count or call.ticket is None:
        raise Lost(f"{seen} messages have come, {count} were expected at least")
    return call.ticket


async def _stall(day: Day) -> None:
    """Request more than any buffer holds, read nothing, and vanish."""
    with Socket(day.served["ws"].url) as socket:
        await socket.open()
        await socket.begin(30_000, SIZE)
        await trio.sleep(2)


async def _answer(day: Day) -> None:
    async def answer(params: Any) -> Any:
        await trio.sleep(0.01)
        return {"action": "accept", "content": {"n": int(params["message"])}}

    client = day.client(answers={"elicitation/create": answer})
    async with client, client.call("ask", {"count": 3}) as call:
        result = await call.result()
    if result["content"][0]["text"] != "[0,1,2]":
        raise Lost(f"the answers were 0, 1 and 2: {result}")


async def _turn_pages(day: Day) -> None:
    """Fetch some pages; another client may fetch the next ones."""
    count, until = 6, day.dice.randint(1, 6)
    texts: list[str] = []
    token: str | None = None
    for first, last in ((0, until), (until, count))[: day.dice.randint(1, 2)]:
        if first == last or (first and token is None):
            continue
        async with day.client("ws") as client:
            pages = client.pages("pages", {"count": count}, token=token)
            async for page in pages:
                texts.append(page["content"][0]["text"])
                token = pages.token
                if len(texts) == last:
                    break
    if texts != [str(number) for number in range(len(texts))]:
        raise Lost(f"pages in order were expected: {texts}")


async def _look_around(day: Day) -> None:
    async with day.client() as client:
        await client.ping()
        if len(await client.list_tools()) != 5:
            raise Lost("the server has 5 tools")
    if trio.current_time() >= day.polls_all_at:
        day.polls_all_at = trio.current_time() + POLL_ALL_EVERY_S
        async with day.client("stdio") as client:
            await client.poll_all()


async def _open_sessions(day: Day) -> None:
    """Leave one session, and delete another."""
    session = await Session.opened(day.served["http"].url, {})
    await session.ask("ping", {}, request_id=1)
    async with day.client("http") as client:
        await client.ping()


async def _let_it_rest(day: Day) -> None:
    """Leave a call, and resume it long after the server has evicted it."""
    count = day.dice.randint(50, 500)
    async with day.client() as client, client.call("fill", _fill(count)) as call:
        ticket = await _read_some(call, 1)
    await trio.sleep(day.dice.uniform(2, 8))
    async with day.client() as client:
        await client.poll(ticket)
        async with client.resume(ticket) as call:
            await numbered.check(call, count, after=1)


async def _cancel(day: Day) -> None:
    async with day.client() as client, client.call("wait") as call:
        await _read_some(call, 1)
        await call.cancel()


async def _continue_events(day: Day) -> None:
    """Be cut as a client without our extensions, and continue with Last-Event-ID."""
    count = day.dice.randint(10, 300)
    session = await Session.opened(day.served["http"].url, {})
    _, last = await session.leave(count, SIZE)
    await trio.sleep(day.dice.uniform(0, 3))
    check = Check(last, count)
    with session.get(last) as response:
        await response.connect()
        await response.ask()
        check.take(await response.rest())
    check.end()


async def _send_rubbish(day: Day) -> None:
    """Send broken requests, and check that the server survives them."""
    scheme = day.dice.choice(["ws", "http"])
    parts = urlsplit(day.served[scheme].url)
    assert parts.hostname is not None
    assert parts.port is not None
    head = f"POST /mcp HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    rubbish = day.dice.choice(
        [
            b"",
            os.urandom(day.dice.randint(1, 5_000)),
            b"GET / HTTP/1.1\r\n\r\n",
            f"{head}Content-Length: 9\r\n\r\n{{not json".encode(),
            f"{head}Content-Length: 99999\r\n\r\n{{".encode(),
            f"{head}Content-Length: 300000\r\n\r\n".encode() + b" " * 300_000,
            head.encode() * 200,
        ]
    )
    try:
        stream = await trio.open_tcp_stream(parts.hostname, parts.port)
        async with stream:
            await stream.send_all(rubbish)
            with trio.move_on_after(1):
                while await stream.receive_some():
                    pass
    except trio.BrokenResourceError:
        pass  # the server may hang up here
    async with day.client(scheme) as client:
        await client.ping()


def _fill(count: int) -> dict[str, int]:
    return {"count": count, "size": SIZE}


class Habit(NamedTuple):
    """An action that so many clients repeat, each with a pause of so many seconds on average."""

    act: Callable[[Day], Awaitable[None]]
    clients: int
    pause_s: float


HABITS: Final = {
    "calls": Habit(_call_briefly, 4, 0.5),
    "long calls, moved": Habit(_call_for_long_and_move, 4, 0.5),
    "abandoned": Habit(_abandon, 2, 1.0),
    "stalled readers": Habit(_stall, 1, 3.0),
    "questions": Habit(_answer, 2, 1.0),
    "pages": Habit(_turn_pages, 2, 1.0),
    "polls and lists": Habit(_look_around, 1, 1.0),
    "sessions": Habit(_open_sessions, 2, 0.5),
    "streams at rest": Habit(_let_it_rest, 8, 0.5),
    "cancels": Habit(_cancel, 2, 0.5),
    "event streams": Habit(_continue_events, 2, 0.5),
    "rubbish": Habit(_send_rubbish, 2, 0.5),
}
