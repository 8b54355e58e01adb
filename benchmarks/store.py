"""A server of Redis, and bare clients of it: what the store itself takes and gives.

The clients use blocking sockets, and no library that would take time: commands are packed before
the clock runs, and answers are parsed after it has stopped. coredis is used as users do.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import coredis
import msgspec

from benchmarks.numbered import Lost, check_messages, lines_of
from benchmarks.peers import Replayed
from benchmarks.peers.children import executable, free_port, running, said_by

# Of each store that is measured: no answer before the disk has it, as our own default has it.
SYNC: Final = "appendfsync always"
_SETTINGS: Final = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "always",
    # Else a fork of the store would be measured now and then.
    "auto-aof-rewrite-percentage": "0",
}
# The bytes of a batch, and of a page: about those of one of our commits and of one of our reads.
BATCH_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 120.0
_FIELD: Final = b"b"


class Store(msgspec.Struct, frozen=True):
    """A running store."""

    port: int
    version: str

    def url(self, prefix: str) -> str:
        """The journal of this prefix, as `--journal` takes it."""
        return f"redis://127.0.0.1:{self.port}/0?prefix={prefix}"

    def ask(self, *words: Any) -> Any:
        """A command, over a connection of its own, and its answer."""
        with _connected(self.port) as connection:
            connection.sendall(packed(*words))
            return _Answers(connection).next()

    @property
    def used_bytes(self) -> int:
        """Memory that the store has given to its data: without the buffers of connections."""
        told = self.ask("INFO", "memory").decode().splitlines()
        figures = dict(line.split(":", 1) for line in told if ":" in line)
        buffers = sum(int(figures[each]) for each in ("mem_clients_normal", "mem_aof_buffer"))
        return int(figures["used_memory"]) - buffers


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """Start redis-server with its files in `folder`. Raises `Missing`."""
    program = executable("redis-server", "Debian's redis-server")
    version = f"Redis {said_by(program, '--version').split('v=')[1].split()[0]}"
    folder.mkdir()
    port = free_port()
    settings = {**_SETTINGS, "port": str(port), "dir": str(folder)}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with running([program, *words], port):
        yield Store(port, version)


# Writing


def xadd(store: Store, streams: int, count: int, size: int) -> float:
    """Messages a second, an XADD each, pipelined over one connection. Raises `Lost`."""
    with _emptied(store, streams) as keys:
        each = count // streams
        batches = list(_batches(keys, each, size))
        with _connected(store.port) as connection:
            answers = _Answers(connection)
            began_at = time.perf_counter()
            for sent, commands in batches:
                connection.sendall(commands)
                answers.skip(2 * sent)  # each is an id, behind a line with its length
            took_s = time.perf_counter() - began_at
        for key in keys:
            _check(store.ask("XRANGE", key, "-", "+"), each)
        return each * streams / took_s


def _batches(keys: Sequence[str], count: int, size: int) -> Iterator[tuple[int, bytes]]:
    """How many commands, and these: a message of each stream in turn."""
    batch: list[bytes] = []
    most = max(1, BATCH_BYTES // size)
    for number, line in enumerate(lines_of(count, size), 1):
        for key in keys:
            batch.append(packed("XADD", key, f"{number}-1", _FIELD, line))
            if len(batch) == most:
                yield len(batch), b"".join(batch)
                batch.clear()
    if batch:
        yield len(batch), b"".join(batch)


async def xadd_by_coredis(store: Store, streams: int, count: int, size: int) -> float:
    """The same with the pipelines of coredis. Raises `Lost`."""
    with _emptied(store, streams) as keys:
        each, most = count // streams, max(1, BATCH_BYTES // size)
        lines = list(enumerate(lines_of(each, size), 1))
        waiting = [(key, f"{number}-1", line) for number, line in lines for key in keys]
        async with coredis.Redis(host="127.0.0.1", port=store.port) as client:
            began_at = time.perf_counter()
            for first in range(0, len(waiting), most):
                async with client.pipeline(transaction=False) as pipeline:
                    for key, entry, line in waiting[first : first + most]:
                        pipeline.xadd(key, {_FIELD: line}, identifier=entry)
            took_s = time.perf_counter() - began_at
        for key in keys:
            _check(store.ask("XRANGE", key, "-", "+"), each)
        return each * streams / took_s


@contextlib.contextmanager
def _emptied(store: Store, streams: int) -> Iterator[list[str]]:
    keys = [f"bare:{number}" for number in range(streams)]
    store.ask("DEL", *keys)
    try:
        yield keys
    finally:
        store.ask("DEL", *keys)


def _check(entries: Any, count: int) -> int:
    lines = [line for _, (_, body) in entries for line in body.splitlines(keepends=True)]
    return check_messages(lines, 0, count)


# Reading


def xrange(store: Store, count: int, size: int) -> float:
    """Messages a second out of a Redis Stream with an entry for each. Raises `Lost`."""
    key = _given(size)
    if store.ask("XLEN", key) != count:
        store.ask("DEL", key)
        _fill(store, count, size, lambda n, line: packed("XADD", key, f"{n}-1", _FIELD, line), 2)
    took_s, entries = _paged(store, _pages_of_stream(key, count, max(1, BATCH_BYTES // size)))
    return _check(entries, count) / took_s


def lrange(store: Store, count: int, size: int) -> float:
    """Messages a second out of a list with an element for each. Raises `Lost`."""
    key, page = f"given:l:{size}", max(1, BATCH_BYTES // size)
    if store.ask("LLEN", key) != count:
        store.ask("DEL", key)
        _fill(store, count, size, lambda _, line: packed("RPUSH", key, line), 1)
    firsts = range(0, count, page)
    commands = [packed("LRANGE", key, first, first + page - 1) for first in firsts]
    took_s, lines = _paged(store, commands)
    return check_messages(lines, 0, count) / took_s


def xrange_of_runs(store: Store, key: str, count: int) -> float:
    """Messages a second out of the Redis Stream of one of our streams, as it is stored.

    It has `count` messages and a result. Raises `Lost`.
    """
    ids = [entry.decode() for entry, _ in store.ask("XRANGE", key, "-", "+")]
    took_s, entries = _paged(store, [packed("XRANGE", key, each, each) for each in ids])
    lines = [line for _, (_, body) in entries for line in body.splitlines(keepends=True)]
    return check_messages(lines[:count], 0, count) / took_s


async def xrange_by_coredis(store: Store, count: int, size: int) -> Replayed:
    """The same as `xrange`, which fills it, with coredis, which has each message in hand."""
    page, messages = max(1, BATCH_BYTES // size), []
    async with coredis.Redis(host="127.0.0.1", port=store.port) as client:
        began_at = time.perf_counter()
        for first in range(1, count + 1, page):
            last = str(first + page - 1)
            entries = await client.xrange(_given(size), start=str(first), end=last)
            messages += [entry.field_values[_FIELD] for entry in entries]
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, messages)


def _given(size: int) -> str:
    return f"given:x:{size}"


def lines_key(prefix: str, stream: str) -> str:
    """The key of the Redis Stream that has the lines of one of our streams."""
    return f"{{{prefix}}}:l:{stream}"


def _pages_of_stream(key: str, count: int, page: int) -> list[bytes]:
    firsts = range(1, count + 1, page)
    return [packed("XRANGE", key, first, first + page - 1) for first in firsts]


def _fill(
    store: Store, count: int, size: int, command: Callable[[int, bytes], bytes], answer_lines: int
) -> None:
    most = max(1, BATCH_BYTES // size)
    commands = [command(number, line) for number, line in enumerate(lines_of(count, size), 1)]
    with _connected(store.port) as connection:
        answers = _Answers(connection)
        for first in range(0, count, most):
            some = commands[first : first + most]
            connection.sendall(b"".join(some))
            answers.skip(answer_lines * len(some))


def _paged(store: Store, commands: Sequence[bytes]) -> tuple[float, list[Any]]:
    """The time of some reads, one after the other, and all that they have brought.

    The end of each page is known by the answer to a PING behind it, so nothing is parsed while the
    clock runs.
    """
    pieces: list[bytes] = []
    with _connected(store.port) as connection:
        began_at = time.perf_counter()
        for command in commands:
            connection.sendall(command + _PING)
            pieces.append(connection.recv(BATCH_BYTES))
            while not pieces[-1].endswith(_PONG):
                pieces.append(connection.recv(BATCH_BYTES))
        took_s = time.perf_counter() - began_at
    parser = _Parser(b"".join(pieces))
    found: list[Any] = []
    for _ in commands:
        found += parser.next()
        if parser.next() != b"PONG":
            raise Lost("the answer to a PING was expected")
    return took_s, found


# The wire


def packed(*words: Any) -> bytes:
    """A command as it is sent."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


_PING: Final = packed("PING")
_PONG: Final = b"+PONG\r\n"


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


class _Parser:
    """Answers out of bytes. Raises `IndexError` where they are incomplete."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def next(self) -> Any:
        kind, text = self._line()
        match kind:
            case b"-":
                raise Lost(f"the store refuses: {text!r}")
            case b"+":
                return text
            case b":":
                return int(text)
            case b"*":
                return [self.next() for _ in range(int(text))]
            case _:
                size = int(text)
                if size < 0:
                    return None
                if len(self.data) < self.at + size + 2:
                    raise IndexError
                body = self.data[self.at : self.at + size]
                self.at += size + 2
                return body

    def _line(self) -> tuple[bytes, bytes]:
        end = self.data.find(b"\r\n", self.at)
        if end < 0:
            raise IndexError
        found = self.data[self.at : self.at + 1], self.data[self.at + 1 : end]
        self.at = end + 2
        return found


class _Answers:
    """The answers that come over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""

    def next(self) -> Any:
        """The next one. Raises `Lost` for an error."""
        while True:
            parser = _Parser(self._rest)
            try:
                found = parser.next()
            except IndexError:
                self._more()
            else:
                self._rest = self._rest[parser.at :]
                return found

    def skip(self, lines: int) -> None:
        """Let answers pass that have so many lines. Raises `Lost` where one is an error."""
        while (came := self._rest.count(b"\r\n")) < lines and not self._is_refused:
            self._more()
        if came != lines or self._is_refused:
            raise Lost(f"the store refuses: {self._rest[:200]!r}")
        self._rest = b""

    @property
    def _is_refused(self) -> bool:
        return self._rest.startswith(b"-") or b"\n-" in self._rest

    def _more(self) -> None:
        data = self._connection.recv(BATCH_BYTES)
        if not data:
            raise Lost("the store hung up")
        self._rest += data
