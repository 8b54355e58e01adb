"""The peers as rows of a suite."""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from benchmarks.harness import Plan, Subject, unmeasured
from benchmarks.numbered import check_messages
from benchmarks.peers import Missing, Opened, Peer, Replayed


class Place(NamedTuple):
    """A module of `benchmarks.peers`, and what opens the peer there."""

    module: str
    opener: str = "opened"


# By the first half of their rows' names.
PEERS: Final[Mapping[str, Place]] = {
    "Python SDK, memory": Place("python_sdk", "opened_in_memory"),
    "Python SDK, SQLite": Place("python_sdk", "opened_in_sqlite"),
    "TypeScript SDK, memory": Place("typescript_sdk"),
    "Redis": Place("redis"),
    "NATS JetStream": Place("jetstream"),
    "Durable Streams": Place("durable_streams"),
    "Mosquitto": Place("mosquitto"),
}
SDK_CLIENT: Final = "Python SDK, memory: Python SDK's client"


async def peer_subjects(
    stack: AsyncExitStack, name: str, where: Place, plan: Plan, folder: Path
) -> list[Subject]:
    """One peer's rows, for each size and each of its readers; it runs until `stack` is left."""
    place = folder / name.replace(", ", "-").replace(" ", "-")
    place.mkdir()
    try:
        module = importlib.import_module(f"benchmarks.peers.{where.module}")
        open_peer: Opened = getattr(module, where.opener)
        peer = await _entered(stack, open_peer, place)
    except (Missing, ImportError) as error:
        why = str(error)
        return [Subject(name, size, unmeasured, role="peer", missing=why) for size in plan.counts]
    subjects = []
    for size, whole in plan.counts.items():
        count = max(whole // peer.slowness, peer.skipped + 1)
        await trio.to_thread.run_sync(peer.fill, count, size)
        for reader, replay in peer.readers.items():
            subjects.append(
                Subject(
                    f"{name}: {reader}",
                    size,
                    partial(_replayed, partial(replay, size), peer.skipped, count),
                    role="peer",
                    version=peer.version,
                )
            )
    return subjects


async def _entered(stack: AsyncExitStack, open_peer: Opened, place: Path) -> Peer:
    """Start a peer in a thread, which its opening blocks; it ends with `stack`, in a thread too."""
    manager = open_peer(place)
    peer = await trio.to_thread.run_sync(manager.__enter__)

    async def leave() -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(manager.__exit__, None, None, None)

    stack.push_async_callback(leave)
    return peer


async def _replayed(replay: Callable[[], Replayed], skipped: int, count: int) -> float:
    found = await trio.to_thread.run_sync(replay, abandon_on_cancel=True)
    return check_messages(found.messages, skipped, count) / found.took_s
