"""A server with a long tool, which counts its runs and ends when a test opens its gate."""

import msgspec
import trio

from streams import Call, Server

server = Server("patient", version="1.0")


class Built(msgspec.Struct):
    files: int
    target: str


@server.tool
async def build(call: Call, folder: str, target: str = "all") -> Built:
    """Build it: each run adds a line to `runs`, and waits for the file `gate`."""
    async with await trio.open_file(f"{folder}/runs", "a") as runs:
        await runs.write(f"{target}\n")
    for number in range(1, 4):
        await call.progress(number, 40, "compiling")
    await call.log("info", "compiled")
    while not await trio.Path(folder, "gate").exists():
        await trio.sleep(0.02)
    return Built(40, target)
