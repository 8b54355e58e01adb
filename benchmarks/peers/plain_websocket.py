"""One message a text frame without this project: trio-websocket's `send_message` in a loop.

    python -m benchmarks.peers.plain_websocket PORT

The path gives the number and the size of the messages: /COUNT/SIZE. The server keeps nothing, and
hangs up at the end.
"""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import trio
import trio_websocket

from benchmarks.numbered import Lost, lines_of
from benchmarks.peers import PIECE_BYTES, READ_TIMEOUT_S, Peer, Replayed, is_ended
from benchmarks.peers.children import free_port, running
from benchmarks.rawcheck import frames_of

# A close frame with code 1000 and no reason. No message ends so: each is JSON.
_CLOSE: Final = b"\x88\x02\x03\xe8"


@contextmanager
def opened(_: Path) -> Iterator[Peer]:
    """Start the server."""
    port = free_port()
    counts: dict[int, int] = {}
    with running([sys.executable, "-m", "benchmarks.peers.plain_websocket", str(port)], port):
        yield Peer(
            f"trio-websocket {version('trio-websocket')}",
            lambda count, size: counts.update({size: count}),
            {
                "raw client": lambda size: _raw(port, counts[size], size),
                "trio-websocket": lambda size: trio.run(_in_hand, port, counts[size], size),
            },
            slowness=10,
        )


def _raw(port: int, count: int, size: int) -> Replayed:
    pieces: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), READ_TIMEOUT_S) as connection:
        began_at = time.perf_counter()
        connection.sendall(
            f"GET /{count}/{size} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        while not is_ended(pieces, _CLOSE):
            pieces.append(connection.recv(PIECE_BYTES))
            if not pieces[-1]:
                break  # too early: the check will find a message missing
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, _payloads(b"".join(pieces)))


def _payloads(came: bytes) -> Iterator[bytes]:
    head, _, body = came.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 101 "):
        raise Lost(f"the server refused: {head!r}")
    yield from frames_of(body)[0]


async def _in_hand(port: int, count: int, size: int) -> Replayed:
    messages: list[str | bytes] = []
    host = f"127.0.0.1:{port}"
    with trio.fail_after(READ_TIMEOUT_S):
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as stream,
            trio.open_nursery() as nursery,
        ):
            began_at = time.perf_counter()
            connection = await trio_websocket.wrap_client_stream(
                nursery, stream, host, f"/{count}/{size}"
            )
            try:
                while len(messages) < count:
                    messages.append(await connection.get_message())
            except trio_websocket.ConnectionClosed:
                pass  # too early: the check will find a message missing
            took_s = time.perf_counter() - began_at
            await connection.aclose()
    return Replayed(took_s, (str(message).encode() for message in messages))


async def _send(request: trio_websocket.WebSocketRequest) -> None:
    count, size = map(int, request.path.split("/")[1:])
    connection = await request.accept()
    for line in lines_of(count, size):
        await connection.send_message(line.decode().removesuffix("\n"))
    await connection.aclose()


if __name__ == "__main__":
    trio.run(
        partial(
            trio_websocket.serve_websocket, _send, "127.0.0.1", int(sys.argv[1]), ssl_context=None
        )
    )
