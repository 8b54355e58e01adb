"""Redis streams: XADD with an fsync each, XRANGE in pages.

Three readers: the bytes as they come, hiredis, and coredis on trio.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import coredis
import hiredis
import trio

from benchmarks.numbered import lines_of
from benchmarks.peers import PIECE_BYTES, READ_TIMEOUT_S, Peer, Replayed, is_ended
from benchmarks.peers.children import executable, free_port, running, said_by, with_clients

PAGE: Final = 2_000  # messages; larger ones are no faster
FILL_BATCH: Final = 1_000
_FIELD: Final = b"m"
_PONG: Final = b"+PONG\r\n"


@contextmanager
def opened(folder: Path) -> Iterator[Peer]:
    """Start Redis, which keeps a file to which it appends."""
    program = executable("redis-server", "Debian's redis-server")
    version = said_by(program, "--version").split("v=")[1].split()[0]
    port = free_port()
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
    }
    command = [
        program,
        *(word for name, value in settings.items() for word in (f"--{name}", value)),
    ]
    with running(command, port):
        yield Peer(
            with_clients("Redis", version, "hiredis", "coredis"),
            partial(_fill, port),
            {
                "raw": partial(_replay, port, _take_raw),
                "hiredis": partial(_replay, port, _take_parsed),
                "coredis on trio": partial(_replay_coredis, port),
            },
        )


def _key(size: int) -> bytes:
    return b"stream:%d" % size


def _command(*words: bytes) -> bytes:
    return bytes(hiredis.pack_command(words))


def _fill(port: int, count: int, size: int) -> None:
    lines = lines_of(count, size)
    with _connected(port) as connection:
        reader = hiredis.Reader()
        for at in range(1, count + 1, FILL_BATCH):
            numbers = range(at, min(at + FILL_BATCH, count + 1))
            # Ids of our own, so that a page can be requested by its number.
            asked = [
                _command(b"XADD", _key(size), b"0-%d" % n, _FIELD, next(lines)) for n in numbers
            ]
            connection.sendall(b"".join(asked))
            for _ in numbers:
                _reply(connection, reader)


@contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), READ_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def _reply(connection: socket.socket, reader: Any) -> Any:
    while (reply := reader.gets()) is False:
        reader.feed(connection.recv(PIECE_BYTES))
    if isinstance(reply, hiredis.ReplyError):
        raise reply
    return reply


def _replay(port: int, take_page: Callable[..., Iterable[bytes]], size: int) -> Replayed:
    pages: list[Iterable[bytes]] = []
    with _connected(port) as connection:
        count = _length(connection, size)
        began_at = time.perf_counter()
        for first in range(1, count + 1, PAGE):
            last = min(first + PAGE - 1, count)
            asked = _command(b"XRANGE", _key(size), b"0-%d" % first, b"0-%d" % last)
            pages.append(take_page(connection, asked))
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, (message for page in pages for message in page))


def _length(connection: socket.socket, size: int) -> int:
    connection.sendall(_command(b"XLEN", _key(size)))
    return int(_reply(connection, hiredis.Reader()))


def _take_raw(connection: socket.socket, asked: bytes) -> Iterator[bytes]:
    """A page's bytes, up to the answer to a PING after it."""
    connection.sendall(asked + _command(b"PING"))
    pieces = [connection.recv(PIECE_BYTES)]
    while not is_ended(pieces, _PONG):
        pieces.append(connection.recv(PIECE_BYTES))
    return _parsed_later(pieces)


def _parsed_later(pieces: list[bytes]) -> Iterator[bytes]:
    reader = hiredis.Reader()
    for piece in pieces:
        reader.feed(piece)
    yield from _messages(reader.gets())


def _take_parsed(connection: socket.socket, asked: bytes) -> list[bytes]:
    connection.sendall(asked)
    return _messages(_reply(connection, hiredis.Reader()))


def _messages(entries: Any) -> list[bytes]:
    return [fields[1] for _, fields in entries]


def _replay_coredis(port: int, size: int) -> Replayed:
    return trio.run(_coredis, port, size)


async def _coredis(port: int, size: int) -> Replayed:
    key, messages = _key(size), []
    with trio.fail_after(READ_TIMEOUT_S):
        async with coredis.Redis(host="127.0.0.1", port=port) as client:
            count = await client.xlen(key)
            began_at = time.perf_counter()
            for first in range(1, count + 1, PAGE):
                last = min(first + PAGE - 1, count)
                page = await client.xrange(key, start=f"0-{first}", end=f"0-{last}")
                messages += [entry.field_values[_FIELD] for entry in page]
            took_s = time.perf_counter() - began_at
    return Replayed(took_s, messages)
