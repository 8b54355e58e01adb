"""A user's asyncio program, for `test_typing.py`."""

import asyncio
from typing import Any

from streams import Call, RunningCall, Server
from streams.aio import Client

server = Server("counting", resume_min_s=0)


@server.tool
async def count(call: Call, rows: int) -> int:
    """Count."""
    for row in range(1, rows + 1):
        await call.progress(row, total=rows)
    return rows


async def agree(params: dict[str, Any], call: RunningCall | None) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"action": "accept" if call is None else call.name}


async def counted(client: Client) -> int:
    async with client.call("count", {"rows": 3}) as call:
        seen = 0
        async for message in call:
            seen += message.method == "notifications/progress"
        assert await call.result(int) == 3
        return seen


async def main() -> None:
    async with Client(server, answers={"elicitation/create": agree}) as client:
        rows: int = await client.call_tool("count", {"rows": 3}, type=int)
        print(rows, await counted(client))


asyncio.run(main())
