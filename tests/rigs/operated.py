"""A server for tests of what operators see: its calls wait, ask, flood and say hostile things."""

from typing import Any

import trio

from streams import Call, Server

server = Server("operated", version="1.0", resume_min_s=0, resume_max_s=600)

ORDER: dict[str, Any] = {
    "message": "Which report shall be built?",
    "requestedSchema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "title": "Name of the report"},
            "rows": {"type": "integer", "title": "Rows"},
            "size": {"type": "string", "title": "Paper", "enum": ["A4", "A5"]},
            "draft": {"type": "boolean", "title": "Draft", "default": True},
        },
        "required": ["name"],
    },
}


@server.tool
async def build(call: Call, n: int, every_s: float = 0.0) -> str:
    """Send n messages, and then never end."""
    for number in range(1, n + 1):
        await call.log("info", f"row {number} of {n}")
        await trio.sleep(every_s)
    await call.flush()
    await trio.sleep_forever()
    return "never"


@server.tool
async def finish(call: Call, n: int) -> str:
    """Send n messages, and end."""
    for number in range(1, n + 1):
        await call.log("info", f"row {number} of {n}")
    return f"{n} rows"


@server.tool
async def order(call: Call) -> str:
    """Ask for an order, and end with it."""
    await call.log("info", "an order is needed")
    answer = await call.request("elicitation/create", ORDER)
    return f"ordered {answer}"


@server.tool
async def orders(call: Call) -> str:
    """Ask for two orders at once, and end with both."""
    answers: dict[str, Any] = {}

    async def ask(message: str) -> None:
        answers[message] = await call.request("elicitation/create", {**ORDER, "message": message})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "The first?")
        nursery.start_soon(ask, "The second?")
    return f"ordered {answers}"


@server.tool
async def repeat(call: Call, text: str, times: int = 1) -> str:
    """Send what the caller has said, and wait."""
    await call.log("info", text * times)
    await call.request("elicitation/create", {**ORDER, "message": text})
    return text


@server.tool(restart=True)
async def resumed(call: Call) -> str:
    """Go on after the server has died."""
    await call.log("info", "begun")
    await call.flush()
    await trio.sleep_forever()
    return "never"
