"""The official Python SDK: its server, with an event store in memory or in SQLite."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from benchmarks.events import PATH
from benchmarks.peers import Peer
from benchmarks.peers.children import free_port, running
from benchmarks.peers.event_streams import Crowd

_SERVER = (sys.executable, "-m", "benchmarks.peers.python_sdk_server")


@contextmanager
def opened_in_memory(_: Path) -> Iterator[Peer]:
    """Start it; its events end with it."""
    with _opened() as peer:
        yield peer


@contextmanager
def opened_in_sqlite(folder: Path) -> Iterator[Peer]:
    """Start it with a file."""
    with _opened(str(folder / "events.db")) as peer:
        yield peer


@contextmanager
def _opened(*store: str) -> Iterator[Peer]:
    port = free_port()
    with running([*_SERVER, str(port), *store], port):
        crowd = Crowd(f"http://127.0.0.1:{port}{PATH}")
        yield Peer(f"mcp {version('mcp')}", crowd.fill, crowd.readers(), skipped=1, slowness=20)


OPENED = {"memory": opened_in_memory, "SQLite": opened_in_sqlite}
