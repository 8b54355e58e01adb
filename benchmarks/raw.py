"""The limits: the throughput of two processes over a socket or a pipe, with no other work."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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


def pipe(total: int) -> float:
    """Bytes a second through a pipe of the size that we use: `os.write` into `os.readv`."""
    with _sender("pipe", total) as child:
        assert child.stdout is not None
        fd = child.stdout.fileno()
        enlarge_pipe(fd)
        return _rate(lambda buffer: os.readv(fd, [buffer]), total)


LIMITS: Final[dict[str, Callable[[int], float]]] = {"tcp": tcp, "pipe": pipe}


def _sender(kind: str, total: int, *rest: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.raw", kind, str(total), *rest]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # nosec B603 # our own program


def _rate(read_into: Callable[[bytearray], int], total: int) -> float:
    """Read `total` bytes; the clock starts with the first of them."""
    buffer = bytearray(PIECE_BYTES)
    first = read_into(buffer)
    left = total - first
    began_at = time.perf_counter()
    while left > 0:
        count = read_into(buffer)
        if not count:
            raise EOFError(f"the sender has ended {left} bytes early")
        left -= count
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
