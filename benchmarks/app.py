"""The measured server: tools that send as fast as they can, at a fixed rate, or once."""

import os
import time
from typing import Final

import trio

from benchmarks.numbered import FIRST, METHOD, params, text_for, timed_params
from streams import Call, Server
from streams.limits import Limits

# A client that is away finds all messages waiting: a resume is measured with them.
KEPT_BYTES: Final = 1024 * 1024 * 1024

server = Server(
    "benchmarks",
    version="1",
    resume_min_s=0,
    limits=Limits(
        unsent_entries_max=10_000_000,
        unsent_bytes_max=KEPT_BYTES,
        undelivered_bytes_max=KEPT_BYTES,
    ),
)


@server.tool
async def fill(call: Call, count: int, size: int) -> int:
    """Send `count` numbered messages of `size` bytes each, and return the count."""
    text = text_for(size)
    for number in range(FIRST, FIRST + count):
        await call.notify(METHOD, params(number, text))
    return count


@server.tool
async def pace(call: Call, count: int, size: int, per_second: int) -> int:
    """Send `count` numbered messages of about `size` bytes, so many a second.

    Each message carries its send time, by CLOCK_MONOTONIC in nanoseconds.
    """
    text = text_for(size)
    began_at = trio.current_time()
    for number in range(count):
        await trio.sleep_until(began_at + number / per_second)
        await call.notify(METHOD, timed_params(FIRST + number, time.monotonic_ns(), text))
    return count


@server.tool
async def store(
    call: Call, count: int, size: int, at_ns: int, is_flushed: bool = False
) -> list[int]:
    """Send a message, and the others at `at_ns`. Return when these began, and all were durable.

    Times are of CLOCK_MONOTONIC in nanoseconds. With `is_flushed` each message waits until the one
    before it is durable.
    """
    text = text_for(size)
    await call.notify(METHOD, params(FIRST, text))
    await trio.sleep((at_ns - time.monotonic_ns()) / 1e9 if at_ns > time.monotonic_ns() else 0)
    began_ns = time.monotonic_ns()
    for number in range(FIRST + 1, FIRST + count):
        await call.notify(METHOD, params(number, text))
        if is_flushed:
            await call.flush()
    await call.flush()
    return [began_ns, time.monotonic_ns()]


@server.tool
async def process() -> int:
    """Return the id of the process that runs the tool."""
    return os.getpid()


@server.tool
async def wait(call: Call) -> None:
    """Send one message and then nothing, until the call is cancelled."""
    await call.notify(METHOD, params(FIRST, ""))
    await trio.sleep_forever()


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def note(call: Call, text: str) -> str:
    """Send one log message, and return the text."""
    await call.log("info", text)
    return text
