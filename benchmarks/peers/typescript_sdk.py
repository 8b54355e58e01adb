"""The official TypeScript SDK: its server, with the event store of its examples.

That store orders events by a time in milliseconds and a random word. Events of one millisecond
therefore come in any order, and those sorted before the last seen one are lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.events import PATH
from benchmarks.peers import Peer
from benchmarks.peers.children import HERE, executable, free_port, node_module, running
from benchmarks.peers.event_streams import RAW, Crowd


@contextmanager
def opened(_: Path) -> Iterator[Peer]:
    """Start it; its events end with it."""
    node = executable("node", "Node.js")
    version = node_module("@modelcontextprotocol/sdk")
    port = free_port()
    with running([node, str(HERE / "typescript_sdk_server.mjs"), str(port)], port):
        crowd = Crowd(f"http://127.0.0.1:{port}{PATH}")
        yield Peer(
            f"@modelcontextprotocol/sdk {version}",
            crowd.fill,
            {RAW: crowd.readers()[RAW]},
            skipped=1,
            slowness=20,
        )
