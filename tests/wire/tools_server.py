"""The server file of the wire tests: tools that do exactly what a test orders.

A tool's `gate` is a folder with two named pipes (`process.Gate`): it writes marks into one and
waits at the other, so that a test decides when a tool goes on and never has to guess its progress.
"""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec
import trio

from streams import Call, Image, Server, SyncCall, Text

server = Server("wire-tests", version="1.2.3", resume_min_s=2, resume_max_s=600)

Level = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]

ELICITATION = {
    "message": "Go on?",
    "requestedSchema": {"type": "object", "properties": {"go": {"type": "boolean"}}},
}


def mark(gate: str, text: str) -> None:
    """Report the tool's progress to the test."""
    if not gate:
        return
    try:
        pipe = os.open(os.path.join(gate, "marks"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no reader: the test is over
        return
    try:
        os.write(pipe, f"{text}\n".encode())
    finally:
        os.close(pipe)


def note_run(runs: str, name: str) -> None:
    """Write a line in a file."""
    with open(runs, "a") as file:
        file.write(f"{name}\n")


async def passage(gate: str) -> None:
    """Wait until the test lets one tool through."""
    if not gate:
        return
    pipe = os.open(os.path.join(gate, "go"), os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            await trio.lowlevel.wait_readable(pipe)
            try:
                os.read(pipe, 1)
            except BlockingIOError:  # another tool was quicker
                continue
            return
    finally:
        os.close(pipe)


@asynccontextmanager
async def observed(gate: str) -> AsyncIterator[None]:
    """Mark how the tool's work ended, where it was stopped."""
    try:
        yield
    except trio.Cancelled:
        mark(gate, "cancelled")
        raise


async def say(call: Call, n: int, pad: int = 0) -> None:
    data = {"n": n, "pad": "x" * pad} if pad else {"n": n}
    await call.notify("notifications/message", {"level": "info", "logger": "wire", "data": data})


@server.tool
async def count(call: Call, n: int, gate: str = "", pad: int = 0) -> str:
    """Send n messages, then wait at the gate."""
    async with observed(gate):
        for number in range(1, n + 1):
            await say(call, number, pad)
        await call.flush()
        mark(gate, "sent")
        await passage(gate)
    return f"counted {n}"


@server.tool
async def pour(call: Call, n: int, pad: int, gate: str) -> str:
    """Wait at the gate, then send n messages without a pause."""
    await passage(gate)
    for number in range(1, n + 1):
        await say(call, number, pad)
    return f"poured {n}"


@server.tool
async def steps(call: Call, n: int, gate: str) -> str:
    """Send n messages, waiting at the gate ahead of each."""
    async with observed(gate):
        for number in range(1, n + 1):
            await passage(gate)
            await say(call, number)
        await call.flush()
        mark(gate, "sent")
    return f"stepped {n}"


@server.tool
async def killed(call: Call, n: int, flush_every: int, gate: str) -> str:
    """Send n messages and mark each that flush() has confirmed; then wait at the gate."""
    mark(gate, "started")
    for number in range(1, n + 1):
        await say(call, number)
        if number % flush_every == 0:
            await call.flush()
            mark(gate, f"flushed {number}")
    await call.flush()
    mark(gate, "sent")
    await passage(gate)
    return f"survived {n}"


@server.tool
async def steady(call: Call, per_second: int, flush_every: int, gate: str) -> str:
    """Send messages at a pace, for ever, and mark each that flush() has confirmed."""
    began_at = trio.current_time()
    for number in itertools.count(1):
        await trio.sleep_until(began_at + number / per_second)
        await say(call, number)
        if number % flush_every == 0:
            await call.flush()
            mark(gate, f"flushed {number}")
    return "never"


@server.tool
async def ask(call: Call, gate: str = "") -> str:
    """Send a message, ask the client, send another; return the answer as JSON."""
    async with observed(gate):
        await say(call, 1)
        answer: Any = await call.request("elicitation/create", ELICITATION)
        mark(gate, "answered")
        await say(call, 3)
        await call.flush()
        await passage(gate)
    return msgspec.json.encode(answer).decode()


@server.tool
async def fail(call: Call, gate: str = "") -> str:
    """Send a message and raise."""
    await say(call, 1)
    await call.flush()
    mark(gate, "sent")
    await passage(gate)
    raise ValueError("the tool says no")


@server.tool(resume_max_s=1)
async def brief(call: Call, gate: str = "", hold: bool = True) -> str:
    """Be abandoned a second after the client has left."""
    async with observed(gate):
        await say(call, 1)
        await call.flush()
        mark(gate, "sent")
        if hold:
            await passage(gate)
    return "brief"


@server.tool(resume_max_s=0)
async def fleeting(call: Call, gate: str = "") -> str:
    """Not resumable."""
    async with observed(gate):
        await say(call, 1)
        await call.flush()
        mark(gate, "sent")
        await passage(gate)
    return "fleeting"


@server.tool
async def short(name: str, pause_s: float, runs: str) -> str:
    """Write down the run, and end about when the record of the call is stored."""
    note_run(runs, name)
    await trio.sleep(pause_s)
    return name


server.tool(name="short_reading", annotations={"readOnlyHint": True})(short)


@server.tool(resume_max_s=0)
async def hold(gate: str) -> str:
    """Not resumable, and silent until it passes the gate."""
    async with observed(gate):
        mark(gate, "started")
        await passage(gate)
    return "held"


@server.tool
async def forever(call: Call) -> str:
    """Never end by itself."""
    await trio.sleep_forever()
    return "never"


@server.tool
async def hang_up(call: Call, gate: str = "") -> str:
    """Send a message, release the connection, send another."""
    async with observed(gate):
        await say(call, 1)
        await call.disconnect()
        await say(call, 2)
        await call.flush()
        mark(gate, "sent")
        await passage(gate)
    return "called back"


@server.tool
async def progress(call: Call, total: int) -> str:
    """Report progress, as far as the caller has asked for it."""
    for number in range(1, total + 1):
        await call.progress(number, total=total, message=f"step {number}")
    return "arrived"


@server.tool
async def complain(call: Call, levels: list[Level]) -> str:
    """Log once at each of these levels."""
    for level in levels:
        await call.log(level, {"at": level})
    return "complained"


@server.tool
def add(call: SyncCall, a: int, b: int) -> str:
    """Run in a thread."""
    call.log("warning", "adding")
    return str(a + b)


@server.tool
async def blocks(call: Call) -> list[Text | Image]:
    """Return content blocks of two kinds."""
    return [Text(text="a picture:"), Image(data=b"hello", mime_type="image/png")]


@server.tool
async def table(call: Call) -> dict[str, Any]:
    """Return structured content."""
    return {"rows": 3}


# Paged tools.


@contextmanager
def stopping(gate: str, name: str = "") -> Iterator[None]:
    """Mark that a generator was stopped, at work or at a `yield`."""
    try:
        yield
    except (trio.Cancelled, GeneratorExit):
        mark(gate, f"cancelled{name}")
        raise


async def numbered(
    call: Call,
    n: int,
    gate: str = "",
    free: int = 0,
    notes: int = 0,
    tail: bool = False,
    name: str = "",
) -> AsyncIterator[str]:
    """Yield n pages, and send messages before each; wait at the gate, except for the first `free`
    pages.

    With `tail` it waits once more before it ends. `name` is added to the mark of being stopped.
    """
    with stopping(gate, name):
        for number in range(1, n + 1):
            mark(gate, f"at {number}")
            if number > free:
                await passage(gate)
            for note in range(1, notes + 1):
                await say(call, (number - 1) * notes + note)
            mark(gate, f"said {number}")
            yield f"page {number}"
        if tail:
            await passage(gate)
        mark(gate, "ended")


server.tool(name="pages", pages=True)(numbered)
server.tool(name="slow_pages", pages=True, page_wait_s=0.1)(numbered)
server.tool(name="brief_pages", pages=True, resume_max_s=1)(numbered)
server.tool(name="timed_pages", pages=True, expected_s=12.5)(numbered)
server.tool(name="ahead_pages", pages=True, pages_ahead=5)(numbered)


async def alike(call: Call, value: Any = None, other: Any = None) -> AsyncIterator[str]:
    """Yield three pages, whatever the arguments."""
    for number in (1, 2, 3):
        yield f"page {number}"


server.tool(name="anything", pages=True)(alike)
server.tool(name="anything_else", pages=True)(alike)


@server.tool(pages=True)
async def own_token(call: Call, resumeToken: str) -> AsyncIterator[str]:  # noqa: N803
    """Yield three pages, and have a parameter of that name."""
    for number in (1, 2, 3):
        yield f"{resumeToken} {number}"


@server.tool(pages=True)
async def failing_pages(call: Call, n: int, gate: str = "") -> AsyncIterator[str]:
    """Yield n - 1 pages and raise."""
    for number in range(1, n):
        yield f"page {number}"
    await passage(gate)
    raise ValueError("the tool says no")


@server.tool(pages=True)
async def asking_pages(call: Call, gate: str = "") -> AsyncIterator[str]:
    """Yield a page, ask the client, yield its answer as JSON and one page more."""
    with stopping(gate):
        yield "page 1"
        await passage(gate)
        mark(gate, "asking")
        answer: Any = await call.request("elicitation/create", ELICITATION)
        yield msgspec.json.encode(answer).decode()
        yield "page 3"


@server.tool(pages=True)
async def mixed_pages(call: Call) -> AsyncIterator[Any]:
    """Yield every kind of value that a tool may return."""
    yield "a text"
    yield {"rows": 3}
    yield [Text(text="a picture:"), Image(data=b"hello", mime_type="image/png")]
    yield ["a", "b"]
    yield None
    yield "the end"


@server.tool(pages=True)
def thread_pages(call: SyncCall, n: int, gate: str = "") -> Iterator[str]:
    """Be a plain generator, which runs in a thread of its own."""
    with stopping(gate):
        for number in range(1, n + 1):
            call.log("warning", {"n": number})
            yield f"page {number}"
            mark(gate, f"past {number}")
