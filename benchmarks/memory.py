"""What a connection costs that is attached and idle: ours beside the official Python SDK's server.

    python -m benchmarks.memory [--quick]

Each client has a session of its own and a call under way that has sent one message and sends no
more. The cost is the slope of the server's resident memory between two numbers of clients.
"""

import argparse
import logging
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from benchmarks.events import Response, Session
from benchmarks.reconnect import STOCK_SERVER
from benchmarks.servers import APP, Served, http_server, listening, websocket_server
from benchmarks.sockets import Socket
from streams.console import log_to_stderr

OURS_HTTP: Final = "mcp-streams, HTTP"
OURS_WEBSOCKET: Final = "mcp-streams, WebSocket"
STOCK: Final = "official Python SDK, HTTP"

OPENED_AT_ONCE: Final = 20
SETTLE_S: Final = 2.0  # until what only the beginning takes is given back
PATIENCE_S: Final = 600.0


Closing = Response | Socket


class Plan(msgspec.Struct, frozen=True):
    """Between which two numbers of connections the slope is taken, and how often."""

    rounds: int = 3
    fewer: int = 500
    more: int = 1_500


QUICK: Final = Plan(rounds=1, fewer=10, more=40)


class Figure(msgspec.Struct, frozen=True):
    """Bytes a connection of one server, of every round, and their median; `ratio` is that by the
    SDK's.
    """

    server: str
    slopes: Sequence[float]
    median: float
    ratio: float


class Results(msgspec.Struct, frozen=True):
    """A whole run."""

    plan: Plan
    machine: Mapping[str, str]
    figures: Sequence[Figure]


class Kind(NamedTuple):
    """A server of an app and a journal, and how one client attaches to it."""

    serve: Callable[[str, Path], AbstractAsyncContextManager[Served]]
    attach: Callable[[str], Awaitable[Closing]]


async def run(
    plan: Plan,
    folder: Path,
    *,
    machine: Mapping[str, str],
    app: str = APP,
    on_step: Callable[[str], None] = lambda _: None,
) -> Results:
    """Do all rounds, each server in turn, started anew."""
    slopes: dict[str, list[float]] = {name: [] for name in KINDS}
    with trio.fail_after(PATIENCE_S):
        for number in range(1, plan.rounds + 1):
            for name, kind in KINDS.items():
                on_step(f"round {number}: {name}")
                journal = folder / f"memory-{number}.db"
                slopes[name].append(await slope(kind, plan, app, journal))
    medians = {name: statistics.median(found) for name, found in slopes.items()}
    return Results(
        plan,
        machine,
        [Figure(n, slopes[n], medians[n], medians[n] / medians[STOCK]) for n in KINDS],
    )


async def slope(kind: Kind, plan: Plan, app: str, journal: Path) -> float:
    """Bytes of resident memory for each connection more."""
    with ExitStack() as attached:
        async with kind.serve(app, journal) as served:
            await _attach(kind, served.url, plan.fewer, attached)
            before = _resident_bytes(served.pid)
            await _attach(kind, served.url, plan.more - plan.fewer, attached)
            after = _resident_bytes(served.pid)
            attached.close()
    return (after - before) / (plan.more - plan.fewer)


async def _attach(kind: Kind, url: str, count: int, attached: ExitStack) -> None:
    limiter = trio.CapacityLimiter(OPENED_AT_ONCE)

    async def attach() -> None:
        async with limiter:
            attached.enter_context(await kind.attach(url))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(attach)
    await trio.sleep(SETTLE_S)


async def _attach_by_http(url: str) -> Response:
    session = await Session.opened(url, {})
    return await session.wait()


async def _attach_by_websocket(url: str) -> Socket:
    socket = Socket(url)
    await socket.open()
    await socket.wait()
    return socket


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


KINDS: Final = {
    OURS_HTTP: Kind(http_server, _attach_by_http),
    OURS_WEBSOCKET: Kind(websocket_server, _attach_by_websocket),
    STOCK: Kind(lambda _app, _journal: listening(STOCK_SERVER), _attach_by_http),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, one server a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    plan = QUICK if parser.parse_args(arguments).quick else Plan()
    log_to_stderr(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        results = trio.run(lambda: run(plan, Path(folder), machine={}))
    for figure in results.figures:
        kib = figure.median / 1024
        print(f"{figure.server:30} {kib:8.1f} KiB a connection, ratio {figure.ratio:.2f}")


if __name__ == "__main__":
    main()
