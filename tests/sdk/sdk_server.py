"""The server file for the official SDKs, as a tool author would write it."""

import os
from typing import Any

import trio

from streams import Call, Server

server = Server("sdk-tests", version="1.0", resume_min_s=0)


@server.tool
async def work(call: Call, steps: int, pause_s: float = 0) -> str:
    """Report progress and log at each of so many steps, with a pause before each."""
    for step in range(1, steps + 1):
        if pause_s:
            await trio.sleep(pause_s)
        await call.progress(step, total=steps, message=f"step {step}")
        await call.log("info", {"step": step})
    return f"{steps} steps"


@server.tool
async def ask(call: Call) -> dict[str, Any]:
    """Ask the user and return the answer."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"mode": "form", "message": "Who is it?", "requestedSchema": schema}
    answer: dict[str, Any] = await call.request("elicitation/create", form)
    return answer


@server.tool
async def fail() -> str:
    """Raise."""
    raise ValueError("the tool says no")


@server.tool
async def measure(values: list[float]) -> dict[str, float]:
    """Return structured content that a client can check against the tool's schema."""
    return {"sum": sum(values), "largest": max(values)}


@server.tool
async def outlast(call: Call, directory: str) -> str:
    """Send a message at the start, wait for a file named `go`, send a message at the end."""
    place = trio.Path(directory)
    await call.log("info", "begun")
    await call.flush()
    while not await (place / "go").exists():
        await trio.sleep(0.01)
    await (place / "done").write_text(f"{os.getpid()}")
    return "outlasted"
