"""The messages between the two ends of the relay's socket."""

import json
import os
import socket
from collections.abc import Iterable
from typing import Any, cast

import trio

from tests.fuzz.pieces import done, same_however_cut
from transports.relay.handover import ANSWER_BYTES_MAX, _read_answer
from transports.relay.owner import _Garbage, _read_hello


class _Peer:
    """A relay that sends these pieces, with two file descriptors beside the first."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self._fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]

    async def recvmsg(self, size: int, *_: object) -> tuple[bytes, list[Any], int, None]:
        if not self._pieces:
            return b"", [], 0, None
        data, rest = self._pieces[0][:size], self._pieces[0][size:]
        self._pieces[:1] = [rest] if rest else []
        fds, self._fds = self._fds, []
        packed = b"".join(fd.to_bytes(4, "little") for fd in fds)
        return data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else [], 0, None

    def recv(self, size: int) -> bytes:
        data, _, _, _ = done(self.recvmsg(size))
        return data


def hello(data: bytes) -> None:
    """An owner reads a hello, one object on one line, or refuses it; no file descriptor leaks."""

    def read(pieces: Iterable[bytes]) -> object:
        fds: list[int] = []
        peer = _Peer(pieces)
        try:
            return done(_read_hello(cast(Any, peer), fds))
        except (_Garbage, trio.BrokenResourceError) as error:
            return type(error).__name__
        finally:
            for fd in fds or peer._fds:
                os.close(fd)

    line, newline, behind = data[1:].partition(b"\n")
    for pieces in ([data[1:]], [data[1:5], data[5:]]):
        found = read(pieces)
        if isinstance(found, dict):
            assert json.loads(line) == found
            assert newline
    if not behind:  # the bytes behind it may or may not have been read
        same_however_cut(data, read)


def answer(data: bytes) -> None:
    """A relay reads an answer, or gives up on the process that listens there."""

    def read(pieces: Iterable[bytes]) -> object:
        peer = _Peer(pieces)
        try:
            found, _ = _read_answer(cast(Any, peer))
        except (OSError, ValueError, RecursionError):
            return None
        finally:
            for fd in peer._fds:
                os.close(fd)
        assert found.keys() & {"ok", "error"}
        return found

    assert len(data) <= ANSWER_BYTES_MAX
    if not data[1:].partition(b"\n")[2]:
        same_however_cut(data, read)
    read([data[1:]])
