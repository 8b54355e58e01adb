"""The server file for the stock clients whose connections over HTTP are cut."""

import trio

from streams import Call, Server

POLL_S = 0.01

server = Server("cuts", version="1.0", resume_min_s=0.2)


@server.tool
async def journey(call: Call, gates: str, steps: int, seconds: float = 0) -> str:
    """Wait for so many gates, files with a number for a name, and report each one twice."""
    for step in range(1, steps + 1):
        while not await (trio.Path(gates) / str(step)).exists():
            await trio.sleep(POLL_S)
        await trio.sleep(seconds / steps)
        await call.progress(step, total=steps)
        await call.log("info", {"step": step})
    return f"{steps} steps"
