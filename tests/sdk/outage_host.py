"""A host over stdio with the official Python client: makes one call, and tells when what comes.

Its arguments are the arguments of the tool as JSON, and the command to start. Each line that it
prints is a word and the time of CLOCK_MONOTONIC.
"""

import json
import sys
import time

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client


async def main() -> None:
    """Call the tool `journey`."""
    given, command, *arguments = sys.argv[1:]
    server = stdio_client(StdioServerParameters(command=command, args=arguments))

    async def progressed(*_: object) -> None:
        tell("progress")

    async with Client(server, mode="legacy") as client:
        result = await client.call_tool("journey", json.loads(given), progress_callback=progressed)
        tell("failed" if result.is_error else "result")


def tell(word: str) -> None:
    print(word, time.monotonic(), flush=True)


anyio.run(main)
