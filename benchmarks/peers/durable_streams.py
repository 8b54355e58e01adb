"""Durable Streams, its Node.js server with files: a catch-up read, page after page."""

import http.client
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.numbered import Lost, lines_of
from benchmarks.peers import READ_TIMEOUT_S, Peer, Replayed
from benchmarks.peers.children import HERE, executable, free_port, node_module, running

APPENDED_AT_ONCE: Final = 1_000
_JSON: Final = {"Content-Type": "application/json"}


@contextmanager
def opened(folder: Path) -> Iterator[Peer]:
    """Start the server; it syncs each append."""
    node = executable("node", "Node.js")
    version = node_module("@durable-streams/server")
    port = free_port()
    script = str(HERE / "durable_streams_server.mjs")
    with running([node, script, str(port), str(folder)], port):
        yield Peer(
            f"@durable-streams/server {version}",
            partial(_fill, port),
            {"catch-up": partial(_replay, port)},
        )


def _connected(port: int) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=READ_TIMEOUT_S))


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request(method, path, body, _JSON if body is not None else {})
    response = connection.getresponse()
    told = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{method} {path}: HTTP {response.status}: {told[:160]!r}")
    return response, told


def _path(size: int) -> str:
    return f"/size-{size}"


def _fill(port: int, count: int, size: int) -> None:
    lines = lines_of(count, size)
    with _connected(port) as connection:
        _ask(connection, "PUT", _path(size), b"")
        for at in range(0, count, APPENDED_AT_ONCE):
            batch = [next(lines) for _ in range(min(APPENDED_AT_ONCE, count - at))]
            _ask(connection, "POST", _path(size), b"[%b]" % b",".join(batch))


def _replay(port: int, size: int) -> Replayed:
    pages: list[bytes] = []
    offset = "-1"
    with _connected(port) as connection:
        began_at = time.perf_counter()
        while True:
            response, page = _ask(connection, "GET", f"{_path(size)}?offset={offset}")
            pages.append(page)
            offset = response.headers["Stream-Next-Offset"]
            if response.headers["Stream-Up-To-Date"]:
                break
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, _messages(pages))


def _messages(pages: Iterable[bytes]) -> Iterator[bytes]:
    for page in pages:
        try:
            found = msgspec.json.decode(page, type=list[msgspec.Raw])
        except msgspec.DecodeError:
            raise Lost(f"a page is no array: {page[:160]!r}") from None
        yield from map(bytes, found)
