"""The server of a torture run: its tools send numbered messages, and write down which are durable.

All that a tool sends follows from its arguments, so that a call that is restarted sends the same.
Each run of a tool is written down as well, so that a tool that was run twice is found.
"""

from collections import Counter
from pathlib import Path
from typing import TextIO, TypedDict

import trio

from streams.cli.selftest.torture_child import RUNS, note_run, proof_of
from streams.server.call import Call
from streams.server.server import Server

server = Server("torture", version="1", resume_min_s=0)


class Entry(TypedDict):
    """The content of a message: its call, its number, and a hash that proves both."""

    call: str
    number: int
    proof: str


class Worked(TypedDict):
    """The result of a call."""

    messages: int


def entry_of(name: str, number: int) -> Entry:
    """The content of message `number` of the call `name`."""
    return Entry(call=name, number=number, proof=proof_of(name, number))


@server.tool
async def work(
    call: Call, name: str, count: int, per_second: float, flush_every: int, notes: str
) -> Worked:
    """Send `count` messages at a pace, and note in a file in `notes` how many are durable.

    After a pause, of the store for instance, it does not make up for lost time: that would take the
    processor from calls that wait for their next message.
    """
    note_run(Path(notes), name)
    with (Path(notes) / name).open("a") as file:
        for number in range(1, count + 1):
            due_at = trio.current_time() + 1 / per_second
            await call.log("info", entry_of(name, number))
            if number % flush_every == 0:
                await call.flush()
                note(file, number)
            await trio.sleep_until(due_at)
    return Worked(messages=count)


@server.tool(restart=True)
async def lasting(
    call: Call, name: str, count: int, per_second: float, flush_every: int, notes: str
) -> Worked:
    """Like `work`, and continue from the last checkpoint if the server dies.

    It makes no pause then until it has sent a new message, so that it adds no silence of its own.
    """
    note_run(Path(notes), name)
    done = call.restored or 0
    repeated = flush_every - 1 if done else 0  # at most
    with (Path(notes) / name).open("a") as file:
        for number in range(done + 1, count + 1):
            due_at = trio.current_time() + 1 / per_second
            await call.log("info", entry_of(name, number))
            if number % flush_every == 0:
                await call.checkpoint(number)
                note(file, number)
            if number > done + repeated:
                await trio.sleep_until(due_at)
    return Worked(messages=count)


@server.tool
async def short(call: Call, name: str, count: int, per_second: float, notes: str) -> Worked:
    """Send a few messages or none, and end after some milliseconds or at once."""
    note_run(Path(notes), name)
    for number in range(1, count + 1):
        await call.log("info", entry_of(name, number))
    if per_second:
        await trio.sleep(1 / per_second)
    return Worked(messages=count)


@server.tool(annotations={"readOnlyHint": True})
async def reading(call: Call, name: str, count: int, per_second: float, notes: str) -> Worked:
    """Like `short`, and may be run again."""
    return await short(call, name, count, per_second, notes)


def noted_runs(notes: Path) -> Counter[str]:
    """How often the tool of each call was run."""
    path = notes / RUNS
    return Counter(path.read_text().split() if path.exists() else ())


def note(file: TextIO, number: int) -> None:
    """Write down that the messages of a call up to `number` are durable. See `note_run`."""
    file.write(f"{number}\n")
    file.flush()


def noted(path: Path) -> int:
    """The number up to which a call's messages are durable, by the notes of its tool."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max(map(int, lines), default=0)
