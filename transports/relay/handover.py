"""The relay: hands a process's standard streams over to the journal's owner, and waits.

The owner (`transports.relay.owner`) reads and writes them itself. After the handover, the socket
between the two only shows that both are alive. A client waits for the relay to start, so this
module imports nothing that takes time to load, such as trio.

The whole exchange: the relay sends one line of JSON, such as `{"app": …, "version": …}`, and with
it the two file descriptors. The owner answers with one line, `{"ok": true}` or `{"error": "…"}`.
The first may have more members, for `on_accepted`.
Then either side closes the socket when it ends. The owner sends one more such line before: `ok`
where the client has ended or the owner was shut down, an error where the owner has failed. An owner
that was killed sends none.
"""

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

# `sockaddr_un` has room for 108 bytes; the last one is zero.
PATH_BYTES_MAX = 107
ANSWER_BYTES_MAX = 64 * 1024
ANSWER_S = 10.0

_UCRED = struct.Struct("3i")  # Linux, unix(7): pid, uid, gid
# macOS and the BSDs, unix(4): the level, the option, and the start of a `struct xucred`: version
# and uid.
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_XUCRED = struct.Struct("2I")


class NoOwner(ConnectionError):
    """No owner listens at this path, or it ended before it took over: try again."""


class AnotherUser(Exception):
    """The process at the other end of a socket belongs to another user; the message says which."""


class RelayRefused(Exception):
    """The owner has refused this relay, or ends before the client; the message is the owner's."""


class OwnerLost(Exception):
    """The owner ended before the client, without a word: it was killed, or has crashed."""


@contextlib.contextmanager
def socket_address(path: str | os.PathLike[str]) -> Iterator[str]:
    """The address of a Unix socket at `path`, which may be longer than an address; valid within the
    block.

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
    path: str | os.PathLike[str],
    hello: Mapping[str, object],
    fds: Sequence[int] = (0, 1),
    on_accepted: Callable[[Mapping[str, object]], None] = lambda _: None,
) -> None:
    """Hand `fds` (input, output) over to the owner at `path`; return when the client has ended.

    `on_accepted` is called with the owner's answer. After the handover, /dev/null replaces them in
    this process, so that the owner alone decides when the client sees their end. Before, they are
    unchanged. Raises `NoOwner`, `RelayRefused`, or `AnotherUser` before anything is sent, and
    `RelayRefused` or `OwnerLost` afterwards.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with socket_address(path) as address:
                connection.connect(address)
            _check_user(connection, path)
            socket.send_fds(connection, [json.dumps(hello).encode() + b"\n"], list(fds))
            answer, said = _read_answer(connection)
        except (OSError, ValueError, RecursionError) as error:
            raise NoOwner(f"no owner took over at {os.fspath(path)}: {error}") from error
        if "error" in answer:
            raise RelayRefused(str(answer["error"]))
        _let_go(fds)
        on_accepted(answer)
        connection.settimeout(None)
        farewell = _read_farewell(connection, said)
        if "error" in farewell:
            raise RelayRefused(str(farewell["error"]))
        if "ok" not in farewell:
            raise OwnerLost("the owner of the journal was killed, or has crashed")


def peer_uid(connection: socket.socket) -> int:
    """The effective uid that the peer of a Unix socket had when it connected or began to listen."""
    if hasattr(socket, "SO_PEERCRED"):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(found)[1])
    found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    return int(_XUCRED.unpack(found)[1])


def _check_user(connection: socket.socket, path: str | os.PathLike[str]) -> None:
    """Raise `AnotherUser` where the owner is another user's: then nothing is sent."""
    uid = peer_uid(connection)
    if uid != os.geteuid():
        raise AnotherUser(
            f"The process that listens at {os.fspath(path)} belongs to uid {uid} and not to uid "
            f"{os.geteuid()}: remove that file, or use another journal"
        )


def _read_answer(connection: socket.socket) -> tuple[dict[str, object], bytes]:
    """The owner's answer, and what it has said after that."""
    line = b""
    while b"\n" not in line:
        data = connection.recv(4096)
        if not data or len(line) > ANSWER_BYTES_MAX:
            raise ConnectionResetError("the owner closed the connection")
        line += data
    line, _, said = line.partition(b"\n")
    answer = json.loads(line)
    if not isinstance(answer, dict) or not answer.keys() & {"ok", "error"}:
        raise ConnectionAbortedError("the process that listens there is no owner of a journal")
    return answer, said


def _read_farewell(connection: socket.socket, said: bytes) -> dict[str, object]:
    """Wait for the end of the client, or of the owner; returns what the owner says then.

    `said` is the part of it that has come already.
    """
    # The owner ends the connection, or was killed, which resets it.
    with contextlib.suppress(ConnectionError):
        while len(said) < ANSWER_BYTES_MAX and (data := connection.recv(4096)):
            said += data
    try:
        farewell = json.loads(said) if said else {}
    except (ValueError, RecursionError):
        return {}
    return farewell if isinstance(farewell, dict) else {}


def _let_go(fds: Sequence[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)
