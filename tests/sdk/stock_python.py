"""The official Python SDK's client over HTTP. Prints its records as one line of JSON.

Like its siblings in TypeScript it gets `{"calls": [{"url", "tool", "arguments"}], "patience_s",
"quiet_s"}`. It makes all calls at once, each in a session of its own, each for `patience_s` at
most. After the last result it waits for `quiet_s`, so that a test can see whether it still sends
requests.
"""

import asyncio
import json
import sys
from typing import Any

from mcp import Client, MCPError, types

Json = dict[str, Any]


async def make(call: Json, peace: asyncio.Barrier, quiet_s: float, patience_s: float) -> Json:
    """Make one call; returns its result or error."""
    reported: list[float] = []
    logs: list[Any] = []
    seen: Json = {"progress": reported, "logs": logs, "result": None, "error": None}

    async def log(params: types.LoggingMessageNotificationParams) -> None:
        logs.append(params.data)

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    async with Client(call["url"], logging_callback=log) as client:
        try:
            result = await client.call_tool(
                call["tool"],
                call["arguments"],
                progress_callback=report,
                read_timeout_seconds=patience_s,
            )
            seen["result"] = result.model_dump(by_alias=True, mode="json")["content"][0]["text"]
        except MCPError as error:
            seen["error"] = {"code": error.code, "message": error.message}
        await peace.wait()
        await asyncio.sleep(quiet_s)
    return seen


async def main() -> None:
    """Make all calls."""
    given = json.loads(sys.argv[1])
    peace = asyncio.Barrier(len(given["calls"]))
    makings = [make(call, peace, given["quiet_s"], given["patience_s"]) for call in given["calls"]]
    print(json.dumps(await asyncio.gather(*makings)))


asyncio.run(main())
