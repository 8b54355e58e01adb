"""Helpers for a client's calls."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio

from streams.client.call import RunningCall
from streams.client.client import Client
from streams.messages import Message
from streams.protocol.ticket import Ticket
from tests.acceptance.ways import PATIENCE_S, Served, Way, way_to
from tests.rigs.clients import said
from tests.wire.process import Gate


@asynccontextmanager
async def open_client(
    served: Served, kind: str, *, within_s: float = PATIENCE_S, **options: Any
) -> AsyncIterator[tuple[Client, Way]]:
    async with way_to(served, kind, within_s=within_s) as way, Client(way, **options) as client:
        yield client, way


def steps(client: Client, gate: Gate, n: int) -> AbstractAsyncContextManager[RunningCall]:
    return client.call("steps", {"n": n, "gate": gate.path})


async def marked(gate: Gate, mark: str) -> None:
    """Wait until the tool sets this mark."""
    await trio.to_thread.run_sync(gate.wait_for, mark)


def number(message: Message) -> int:
    return int(said(message)["n"])


async def numbers(call: RunningCall) -> list[int]:
    return [number(message) async for message in call]


async def text(call: RunningCall) -> str:
    return str((await call.result())["content"][0]["text"])


def carried(ticket: Ticket | None) -> Ticket:
    """The ticket after a conversion to text and back."""
    return Ticket.parse(str(ticket))
