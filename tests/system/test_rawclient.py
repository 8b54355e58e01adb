"""The raw clients of the benchmarks: they take everything, and notice what is not there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from benchmarks import rawclient
from benchmarks.numbered import Lost
from benchmarks.rawclient import Resumed
from benchmarks.servers import (
    APP,
    http_server,
    stdio_command,
    stdio_server,
    websocket_server,
)
from tests.rigs import HERE

COUNT, SIZE = 3_000, 200
FAULTY = HERE / "faulty_fill.py"

Client = Callable[[int, int], Resumed]


async def resume(name: str, app: str, folder: Path) -> Resumed:
    journal = folder / "journal.db"
    if name == "stdio":
        async with stdio_server(app, journal):
            return await run(partial(rawclient.stdio, stdio_command(app, journal)))
    server = websocket_server if name.startswith("websocket") else http_server
    async with server(app, journal) as served:
        return await run(partial(getattr(rawclient, name), served.url))


async def run(client: Client) -> Resumed:
    return await trio.to_thread.run_sync(client, COUNT, SIZE)


every_client = pytest.mark.parametrize(
    "name", ["stdio", "websocket_lines", "websocket_messages", "http_lines", "sse"]
)


@every_client
async def test_all_that_follows_the_first_message_is_there(name: str, tmp_path: Path) -> None:
    resumed = await resume(name, APP, tmp_path)
    assert resumed.messages == COUNT
    assert resumed.bytes == (COUNT - 1) * SIZE
    assert resumed.seconds > 0


@every_client
async def test_a_message_that_is_missing_is_noticed(name: str, tmp_path: Path) -> None:
    with pytest.raises(Lost):
        await resume(name, f"{FAULTY}:lossy", tmp_path)
