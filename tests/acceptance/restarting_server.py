"""A server whose calls restart after it was killed; a file keeps the tool's side effects."""

import os

import trio

from streams import Call, Server

EVERY = 10  # steps from one checkpoint to the next

server = Server("restarting", resume_min_s=0)


@server.tool(restart=True)
async def work(call: Call, steps: int, pause_s: float, effects: str, until: str) -> str:
    """Take so many steps, each with a line in a file and a message, and ask now and then.

    The tool ends only once the file `until` exists.
    """
    answers = call.restored["answers"] if call.restored else []
    first = call.restored["step"] + 1 if call.restored else 1
    fd = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in range(first, steps + 1):
        os.write(fd, f"{step}\n".encode())
        await call.notify("notifications/message", {"level": "info", "data": {"n": step}})
        if step % (5 * EVERY) == EVERY // 2:
            answers.append((await call.request("elicitation/create", {"message": f"{step}"}))["n"])
        if step % EVERY == 0:
            await call.checkpoint({"step": step, "answers": answers})
        await trio.sleep(pause_s)
    os.close(fd)
    while not os.path.exists(until):
        await trio.sleep(pause_s)
    return ",".join(map(str, answers))


def note(effects: str, name: str) -> None:
    """Write a line in a file."""
    with open(effects, "a") as file:
        file.write(f"{name}\n")


async def brief(name: str, pause_s: float, effects: str) -> str:
    """Write a line in a file, and end about when the record of the call is stored."""
    note(effects, name)
    await trio.sleep(pause_s)
    return name


server.tool(brief)
server.tool(name="brief_lasting", restart=True)(brief)
