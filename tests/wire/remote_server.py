"""A remote server for the tests of attached ones: tools that wait for a file."""

import os
from typing import Any

import trio

from streams import Call, Server

POLL_S = 0.02

server = Server("remote", version="7", resume_min_s=0, resume_max_s=600)

QUESTION = {
    "message": "Which?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
}


async def appeared(until: str) -> None:
    while until and not os.path.exists(until):
        await trio.sleep(POLL_S)


def note(effects: str, text: str) -> None:
    if effects:
        with open(effects, "a") as file:
            file.write(f"{text}\n")


async def count(call: Call, n: int, pause_s: float = 0, until: str = "", effects: str = "") -> str:
    """Report each of `n` steps twice, then wait for the file `until`."""
    note(effects, "run")
    try:
        for step in range(1, n + 1):
            await call.progress(step, total=n, message=f"step {step}")
            await call.log("info", {"step": step, "ratio": 1.0})
            await trio.sleep(pause_s)
        await appeared(until)
    except trio.Cancelled:
        note(effects, "cancelled")
        raise
    return f"{n} steps"


server.tool(count)
server.tool(name="count_again", restart=True)(count)


@server.tool
async def ask(call: Call, after: str = "") -> Any:
    """Ask the user, and return the answer."""
    await call.log("info", "before")
    answer = await call.request("elicitation/create", QUESTION)
    await appeared(after)
    return answer


@server.tool(annotations={"readOnlyHint": True})
async def look(call: Call) -> str:
    """Read something."""
    return "seen"


@server.resource("memo://today")
def today() -> str:
    return "a memo"


@server.prompt
def greet(name: str) -> str:
    """Greet."""
    return f"Hello {name}"
