"""The handler at the far end of most tests of the transports."""

import contextlib
import json
from typing import Final

import trio

from streams.exchange import Channel
from streams.messages import Incoming, TooLarge

LIMIT: Final = 64 * 1024  # of a message, in all of these tests


def as_line(incoming: Incoming) -> bytes:
    if isinstance(incoming, TooLarge):
        return json.dumps({"tooLarge": incoming.limit}).encode() + b"\n"
    return incoming + b"\n"


async def echo(channel: Channel) -> None:
    """Send back each message.

    `{"stall": FIFO}` is answered, and then the handler stops reading. It sends each line that is
    written to the FIFO, and reads messages again once that is closed.
    """
    with contextlib.suppress(trio.EndOfChannel, trio.BrokenResourceError):
        while True:
            lines: list[bytes] = []
            for incoming in await channel.receive():
                lines.append(as_line(incoming))
                if isinstance(incoming, bytes) and incoming.startswith(b'{"stall"'):
                    await channel.send(*lines)
                    lines.clear()
                    await _stall(channel, json.loads(incoming)["stall"])
            if lines:
                await channel.send(*lines)


async def _stall(channel: Channel, fifo: str) -> None:
    opened = await trio.to_thread.run_sync(open, fifo, "rb", abandon_on_cancel=True)
    with opened:
        while line := await trio.to_thread.run_sync(opened.readline, abandon_on_cancel=True):
            await channel.send(line)
