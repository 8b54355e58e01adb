"""The relay: hands a process's standard streams over to the journal's owner, and waits.

The owner (`transports.unix`) speaks over them itself; the socket between the two only says that
both are alive. A client waits for this process to start, so nothing is imported here that takes
time to load, trio least of all.

The whole exchange: the relay sends one line, `{"app": …, "version": …}` or whatever the two have
agreed on, and with it the two file descriptors; the owner answers `{"ok": true}` or
`{"error": "…"}`, also a line. Then either side's end is the end of the connection.
"""

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

# `sockaddr_un` has room for 108 bytes, the last a zero.
PATH_BYTES_MAX = 107
ANSWER_BYTES_MAX = 64 * 1024
ANSWER_S = 10.0


class NobodyListens(ConnectionError):
    """There is no owner at this path, or it went away before it took over: try again."""


class Refused(Exception):
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
    when the client sees their end. Until then they are untouched. Raises `NobodyListens` or
    `Refused`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with socket_address(path) as address:
                connection.connect(address)
            socket.send_fds(connection, [json.dumps(hello).encode() + b"\n"], list(fds))
            answer = _read_answer(connection)
        except (OSError, ValueError, RecursionError) as error:
            raise NobodyListens(f"nobody took over at {os.fspath(path)}: {error}") from error
        if "error" in answer:
            raise Refused(str(answer["error"]))
        _let_go(fds)
        connection.settimeout(None)
        # A reset is an end too: the owner was killed.
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass


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
