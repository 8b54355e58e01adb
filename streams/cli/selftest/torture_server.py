"""The server that is tortured: one tool, which sends numbered messages and notes which are safe.

All that the tool sends follows from its arguments, so that a run of it that begins anew sends the
same.
"""

import hashlib
import os
from pathlib import Path
from typing import TypedDict

import trio

from streams.server.call import Call
from streams.server.server import Server

server = Server("torture", version="1", resume_min_s=0)


class Entry(TypedDict):
    """What a message says: whose it is, which one it is, and a proof that it is that one."""

    call: str
    number: int
    proof: str


class Worked(TypedDict):
    """What came of a call."""

    messages: int


def entry_of(name: str, number: int) -> Entry:
    """What message `number` of the call `name` says."""
    proof = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
    return Entry(call=name, number=number, proof=proof)


@server.tool
async def work(
    call: Call, name: str, count: int, per_second: float, flush_every: int, notes: str
) -> Worked:
    """Send `count` messages at a pace, and note in a file in `notes` how many are durable."""
    began_at = trio.current_time()
    for number in range(1, count + 1):
        await trio.sleep_until(began_at + number / per_second)
        await call.log("info", entry_of(name, number))
        if number % flush_every == 0:
            await call.flush()
            await note(Path(notes) / name, number)
    return Worked(messages=count)


@server.tool(restart=True)
async def lasting(
    call: Call, name: str, count: int, per_second: float, flush_every: int, notes: str
) -> Worked:
    """The same, and go on where the server died."""
    done = call.restored or 0
    for number in range(done + 1, count + 1):
        await trio.sleep(1 / per_second)
        await call.log("info", entry_of(name, number))
        if number % flush_every == 0:
            await call.checkpoint(number)
            await note(Path(notes) / name, number)
    return Worked(messages=count)


async def note(path: Path, number: int) -> None:
    """Say, for whoever asks later, that the messages up to `number` are durable."""
    await trio.to_thread.run_sync(_write_through, path, b"%d\n" % number)


def _write_through(path: Path, line: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_DSYNC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def noted(path: Path) -> int:
    """Up to which number the messages of a call are durable, as far as its tool has said so."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max(map(int, lines), default=0)
