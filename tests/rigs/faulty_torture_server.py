"""The torture test's server with faults in the messages of each call."""

from pathlib import Path

import trio

from streams import Call, Server
from streams.cli.selftest.torture_server import Worked, entry_of, note, note_run

LOST, TWICE, DAMAGED, LATE = 1, 2, 3, 4  # the shortest call has five messages

server = Server("faulty-torture", version="1", resume_min_s=0)


def numbers_of(count: int) -> list[int]:
    """The numbers as they are sent: one is missing, one is late, one comes twice."""
    numbers = [number for number in range(1, count + 1) if number != LOST]
    if count > LATE:
        numbers.remove(LATE)
        numbers.insert(numbers.index(LATE + 1) + 1, LATE)
    if count >= TWICE:
        numbers.insert(numbers.index(TWICE), TWICE)
    return numbers


@server.tool(name="lasting")
@server.tool
async def work(
    call: Call, name: str, count: int, per_second: float, flush_every: int, notes: str
) -> Worked:
    """Do as the real tool does, except for some of the messages."""
    note_run(Path(notes), name)
    with (Path(notes) / name).open("a") as file:
        for number in numbers_of(count):
            await trio.sleep(1 / per_second)
            entry = entry_of(name, number)
            if number == DAMAGED:
                entry["proof"] = entry["proof"][::-1]
            await call.log("info", entry)
            if number % flush_every == 0:
                await call.flush()
                note(file, number)
    return Worked(messages=count)


@server.tool(name="reading")
@server.tool
async def short(call: Call, name: str, count: int, per_second: float, notes: str) -> Worked:
    """Do as the real tool does, as if it were run twice."""
    note_run(Path(notes), name)
    note_run(Path(notes), name)
    for number in range(1, count + 1):
        await call.log("info", entry_of(name, number))
    return Worked(messages=count)
