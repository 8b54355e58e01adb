"""A server whose tools keep everybody waiting, until the test lets them go on."""

import os

import trio

from streams import Call, Server, SyncCall

server = Server("blocking")


def stand(gate: str) -> str:
    pipe = os.open(os.path.join(gate, "go"), os.O_RDONLY)
    try:
        os.read(pipe, 1)  # the line that is to blame
    finally:
        os.close(pipe)
    return "went on"


@server.tool
async def block(call: Call, gate: str) -> str:
    """Wait without `await`."""
    return stand(gate)


@server.tool
async def await_thread(call: Call, gate: str) -> str:
    """Wait as one should."""
    return await trio.to_thread.run_sync(stand, gate)


@server.tool
def wait(call: SyncCall, gate: str) -> str:
    """Run in a thread."""
    return stand(gate)
