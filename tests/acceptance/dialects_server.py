"""The server file of the dialects' acceptance test: slow work that reports its progress."""

import trio

from streams import Call, Server

server = Server("dialects", version="1.0", resume_min_s=0, resume_max_s=600)


@server.tool
async def work(call: Call, steps: int, seconds: float) -> str:
    """Report so many steps, spread over so much time."""
    total = 0
    for step in range(1, steps + 1):
        await trio.sleep(seconds / steps)
        total += step
        data = {"n": step, "sum": total}
        await call.notify("notifications/message", {"level": "info", "data": data})
    await call.flush()
    return f"{steps} steps make {total}"
