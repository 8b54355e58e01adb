"""The limits: the throughput of two processes over a socket or a pipe, with no other work."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.servers import ROOT
from transports.net.sockets import enlarge_pipe

PIECE_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 60.0


def tcp(total: int) -> float:
    """Bytes a second over TCP on loopback: sends of 256 KiB into `recv_into`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        port = listener.getsockname()[1]
        with _sender("tcp", total, str(port)):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(TIMEOUT_S)
                return _rate(connection.recv_into, total)


def pipe(total: int, *, keeps_all: bool = False) -> float:
    """Bytes a second through a pipe of the size that we use: `os.write` into `os.readv`.

    With `keeps_all` the reader has memory for all of them, as a raw client does. Else they go to
    the same 256 KiB, which stay in the processor's cache.
    """
    with _sender("pipe", total) as child:
        assert child.stdout is not None
        fd = child.stdout.fileno()
        enlarge_pipe(fd)
        return _rate(lambda room: os.readv(fd, [room]), total, total if keeps_all else 0)


LIMITS: Final[dict[str, Callable[[int], float]]] = {
    "tcp": tcp,
    "pipe": pipe,
    "pipe, all kept": partial(pipe, keeps_all=True),
}


def _sender(kind: str, total: int, *rest: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.raw", kind, str(total), *rest]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # nosec B603 # our own program


def _rate(read_into: Callable[[memoryview], int], total: int, kept: int = 0) -> float:
    """Read `total` bytes, of which so many are `kept`; the clock starts with the first of them."""
    memory = memoryview(bytearray(b"\1") * (kept + PIECE_BYTES))
    read = first = read_into(memory[:PIECE_BYTES])
    began_at = time.perf_counter()
    while read < total:
        at = min(read, kept)
        count = read_into(memory[at : at + PIECE_BYTES])
        if not count:
            raise EOFError(f"the sender has ended {total - read} bytes early")
        read += count
    return (total - first) / (time.perf_counter() - began_at)


def _send_all(write: Callable[[memoryview], int], total: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    while total > 0:
        total -= write(piece[:total])


def _send(kind: str, total: int, port: int) -> None:
    if kind == "pipe":
        fd = sys.stdout.fileno()
        _send_all(lambda piece: os.write(fd, piece), total)
        return
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _send_all(connection.send, total)


if __name__ == "__main__":
    _send(sys.argv[1], int(sys.argv[2]), int([*sys.argv, "0"][3]))
