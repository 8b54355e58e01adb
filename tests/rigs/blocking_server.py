"""A server whose tools block its event loop until the test releases them."""

import os

import trio

from streams import Call, Server, SyncCall

server = Server("blocking")


def stand(gate: str) -> str:
    pipe = os.open(os.path.join(gate, "go"), os.O_RDONLY)
    try:
        os.read(pipe, 1)  # the line that the warning must name
    finally:
        os.close(pipe)
    return "went on"


@server.tool
async def block(call: Call, gate: str) -> str:
    """Block without `await`."""
    return stand(gate)


@server.tool
async def await_thread(call: Call, gate: str) -> str:
    """Wait with `await`, in a thread."""
    return await trio.to_thread.run_sync(stand, gate)


@server.tool
def wait(call: SyncCall, gate: str) -> str:
    """Run in a thread."""
    return stand(gate)
