"""The server file of the acceptance tests: tools that load the server by known amounts."""

import time

import trio

from streams import Call, Server

server = Server("acceptance", version="1.0", resume_min_s=0, resume_max_s=600)

# `hold_1` … `hold_20` are abandoned so many seconds after their client has left.
HOLD_S = range(1, 21)


def mark(path: str, text: str) -> None:
    """Append a line to a file.

    A short line is written in one piece, so lines of several writers do not mix.
    """
    if path:
        with open(path, "a") as marks:
            marks.write(f"{text}\n")


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    await trio.lowlevel.checkpoint()
    return text


@server.tool
async def flood(call: Call, count: int, size: int, marks: str = "") -> str:
    """Send so many messages with so many bytes of text each, numbered from 1."""
    pad = "x" * size
    for number in range(1, count + 1):
        await call.notify("notifications/message", {"level": "info", "data": [number, pad]})
        if number % 100 == 0:
            mark(marks, f"{number}")
    await call.flush()
    mark(marks, "flushed")
    return f"sent {count}"


def make_hold(seconds: int) -> None:
    """Register `hold_<seconds>`."""

    @server.tool(name=f"hold_{seconds}", resume_max_s=seconds)
    async def hold(call: Call, marks: str) -> str:
        """Work without an end, and mark the cancellation."""
        try:
            await trio.sleep_forever()
        finally:
            mark(marks, f"{seconds} {time.monotonic()}")
        return "never"


for seconds in HOLD_S:
    make_hold(seconds)
