"""The relay: hands a process's standard streams over to the journal's owner, and waits.

The owner (`transports.relay.owner`) speaks over them itself; the socket between the two only says
that both are alive. A client waits for this process to start, so nothing is imported here that
takes time to load, trio least of all.

The whole exchange: the relay sends one line, `{"app": …, "version": …}` or whatever the two have
agreed on, and with it the two file descriptors; the owner answers `{"ok": true}` or
`{"error": "…"}`, also a line. Then either side's end is the end of the connection.
"""

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

# `sockaddr_un` has room for 108 bytes, the last a zero.
PATH_BYTES_MAX = 107
ANSWER_BYTES_MAX = 64 * 1024
ANSWER_S = 10.0

_UCRED = struct.Struct("3i")  # Linux, unix(7): pid, uid, gid
# macOS and the BSDs, unix(4): the level, the option, and what a `struct xucred` begins with: its
# version and the uid.
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_XUCRED = struct.Struct("2I")


class NoOwner(ConnectionError):
    """There is no owner at this path, or it went away before it took over: try again."""


class AnotherUser(Exception):
    """The process at the other end of a socket belongs to another user; the message says which."""


class RelayRefused(Exception):
    """The owner does not want this relay; the message is the owner's."""


@contextlib.contextmanager
def socket_address(path: str | os.PathLike[str]) -> Iterator[str]:
    """What to bind or connect to for a Unix socket at `path`, however long that is; valid within
    the block.

    Raises `OSError` when the directory does not exist or the name alone is too long.
    """
    path = os.fspath(path)
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:
        yield path
        return
    directory, name = os.path.split(path)
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{fd}/{name}"
        if len(os.fsencode(short)) > PATH_BYTES_MAX or not os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENAMETOOLONG, "too long for a Unix socket", path)
        yield short
    finally:
        os.close(fd)


def relay(
    path: str | os.PathLike[str], hello: Mapping[str, object], fds: Sequence[int] = (0, 1)
) -> None:
    """Hand `fds` (input, output) over to the owner at `path`; return when the owner has closed.

    Once they are handed over their numbers lead to /dev/null here, so that the owner alone decides
    when the client sees their end. Until then they are untouched. Raises `NoOwner`,
    `RelayRefused`, or `AnotherUser` before anything is sent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with socket_address(path) as address:
                connection.connect(address)
            _check_user(connection, path)
            socket.send_fds(connection, [json.dumps(hello).encode() + b"\n"], list(fds))
            answer = _read_answer(connection)
        except (OSError, ValueError, RecursionError) as error:
            raise NoOwner(f"nobody took over at {os.fspath(path)}: {error}") from error
        if "error" in answer:
            raise RelayRefused(str(answer["error"]))
        _let_go(fds)
        connection.settimeout(None)
        # A reset is an end too: the owner was killed.
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass


def peer_uid(connection: socket.socket) -> int:
    """The effective uid of the process at the other end of a Unix socket, when it connected or
    began to listen.
    """
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(found)[1])
    found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    return int(_XUCRED.unpack(found)[1])


def _check_user(connection: socket.socket, path: str | os.PathLike[str]) -> None:
    """Raise `AnotherUser` where the owner that listens is not ours, so that it is given nothing."""
    uid = peer_uid(connection)
    if uid != os.geteuid():
        raise AnotherUser(
            f"The process that listens at {os.fspath(path)} belongs to uid {uid} and not to uid "
            f"{os.geteuid()}: remove that file, or use another journal"
        )


def _read_answer(connection: socket.socket) -> dict[str, object]:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(4096)
        if not data or len(line) > ANSWER_BYTES_MAX:
            raise ConnectionResetError("the owner went away")
        line += data
    answer = json.loads(line)
    if not isinstance(answer, dict) or not answer.keys() & {"ok", "error"}:
        raise ConnectionAbortedError("whoever listens there is no owner of a journal")
    return answer


def _let_go(fds: Sequence[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)
