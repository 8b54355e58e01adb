"""Sockets and pipes, where trio's streams cost too much or tell too little.

Stored messages go from the journal to the kernel without a copy, many pieces in one write.

That needs POSIX. A client on Windows uses trio's streams.
"""

import array
import contextlib
import os
import select
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Final

import trio

from streams.turns import TURN_UNITS, Turns

try:
    import fcntl
    import termios
except ImportError:
    IS_POSIX = False
else:
    IS_POSIX = True

# The streams of trio whose files are read and written here.
_SOCKETS: Final = (trio.SocketStream,) if IS_POSIX else ()
_FILES: Final = (trio.lowlevel.FdStream,) if IS_POSIX else ()

# The size of one read. With it, a client that catches up is limited by memory, not by system calls:
# reads of 4 KiB cost three quarters of the throughput.
READ_BYTES: Final = 256 * 1024

# A pipe holds 64 KiB by default. This is the most that an unprivileged process may set.
PIPE_BYTES: Final = 1024 * 1024

# How long a graceful close may take.
CLOSE_S: Final = 1.0

# After this long without an acknowledgement or a window update, the kernel ends the connection.
USER_TIMEOUT_MS: Final = 180_000

# The same for a connection that can be replaced without a loss.
WATCHED_TIMEOUT_MS: Final = 15_000

# At the end of a connection, bytes are read and discarded: so many, then a pause. A refused body of
# 4 MiB is read in 0.2 s: some clients look for the response only then. A client that floods a
# connection after its end is read at 25 MB/s at most.
DISCARDED_BYTES: Final = 256 * 1024
DISCARD_PAUSE_S: Final = 0.01

# The peer has ended its output, whether all of it was read or not. Elsewhere than on Linux only a
# read or a failed write notices that.
_POLLRDHUP: Final[int] = getattr(select, "POLLRDHUP", 0)

_discarded: Final = bytearray(DISCARDED_BYTES)  # one for all connections, since it is never read

Pieces = Sequence[bytes | memoryview]

PIECES_MAX: Final = os.sysconf("SC_IOV_MAX") if IS_POSIX else 1  # of one write

TLSStream = trio.SSLStream[trio.SocketStream]
ServerStream = trio.SocketStream | TLSStream


def tcp_of(stream: ServerStream) -> trio.SocketStream:
    """The TCP connection of a stream."""
    return stream if isinstance(stream, trio.SocketStream) else stream.transport_stream


# -- reading


async def receive_some(
    connection: ServerStream, bytes_max: int, *, is_early: bool = False
) -> bytes:
    """Like the stream's own `receive_some`, at a fraction of the cost over TCP.

    `is_early`: most likely nothing has come yet, so an attempt to read would be in vain.

    Raises `trio.BrokenResourceError`, or `trio.ClosedResourceError` where another task closes.
    """
    if not isinstance(connection, _SOCKETS):
        return bytes(await connection.receive_some(bytes_max))
    try:
        data = None
        if not is_early:
            await trio.lowlevel.checkpoint_if_cancelled()
            data = _received(connection, bytes_max)
            if data is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return data
        while data is None:
            await trio.lowlevel.wait_readable(connection.socket)
            data = _received(connection, bytes_max)
    except OSError as error:
        raise trio.BrokenResourceError("the peer is gone") from error
    return data


def _received(connection: trio.SocketStream, bytes_max: int) -> bytes | None:
    try:
        return os.read(connection.socket.fileno(), bytes_max)
    except BlockingIOError:
        return None


# -- writing


async def send_pieces(stream: trio.abc.SendStream, pieces: Pieces) -> None:
    """Send one piece after the other; raises as `stream.send_all` does.

    Pipes and sockets need no copy of the pieces. Any other stream, such as TLS, gets one copy.
    """
    if isinstance(stream, trio.StapledStream):
        stream = stream.send_stream
    if isinstance(stream, _SOCKETS):
        await _write_all(stream.socket.fileno, pieces)
    elif isinstance(stream, _FILES):
        await _write_all(stream.fileno, pieces)
    else:
        await stream.send_all(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def send_now(stream: trio.abc.SendStream, pieces: Pieces) -> Pieces:
    """`write_now` to a socket. Any other stream, such as TLS, may have to wait: nothing is written.

    Raises `OSError` when the peer is gone.
    """
    if isinstance(stream, _SOCKETS):
        return write_now(stream.socket.fileno(), pieces)
    return pieces


def write_now(fd: int, pieces: Pieces) -> Pieces:
    """Write without waiting, and return the rest. Raises `OSError` when the peer is gone."""
    if len(pieces) > PIECES_MAX:
        pieces = [b"".join(pieces)]
    try:
        written = os.writev(fd, pieces) if pieces else 0
    except BlockingIOError:
        return pieces
    for place, piece in enumerate(pieces):
        if written < len(piece):
            return [memoryview(piece)[written:], *pieces[place + 1 :]]
        written -= len(piece)
    return ()


async def _write_all(fileno: Callable[[], int], pieces: Pieces) -> None:
    """Can be cancelled before the first byte and while it waits, as trio's sockets can."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        pieces = write_now(_open(fileno()), pieces)
        if not pieces:
            await trio.lowlevel.cancel_shielded_checkpoint()
        while pieces:
            await trio.lowlevel.wait_writable(_open(fileno()))
            pieces = write_now(_open(fileno()), pieces)
    except OSError as error:
        raise trio.BrokenResourceError(f"cannot write: {error}") from error


def _open(fd: int) -> int:
    if fd < 0:
        raise trio.ClosedResourceError("closed by another task")
    return fd


# -- options and state


def enlarge_pipe(fd: int) -> None:
    """Let a pipe hold `PIPE_BYTES`, where that is possible; leave any other file as it is."""
    if sys.platform != "linux" or not IS_POSIX or not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    # Where the user's pages for pipes are used up, the pipe is slower, but works.
    with contextlib.suppress(OSError):
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < PIPE_BYTES:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def has_reader(fd: int) -> bool:
    """Whether `fd` still has a reader."""
    if fd < 0:
        return False  # closed
    poller = select.poll()
    poller.register(fd, 0)  # errors and hang-ups are always reported
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def unsent_bytes(fd: int) -> int | None:
    """Bytes written to `fd` that its reader has not taken; None where the kernel does not know.

    On TCP, the bytes that the peer's kernel has not acknowledged.
    """
    if fd < 0 or not IS_POSIX:
        return None  # closed, or unknown
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return unsent_to_socket(fd)
    if stat.S_ISFIFO(mode):
        return _queued(fd, termios.FIONREAD)
    return _queued(fd, termios.TIOCOUTQ) if stat.S_ISCHR(mode) else None


def unsent_to_socket(fd: int) -> int | None:
    """The same for a socket, whose kind need not be asked for."""
    return None if fd < 0 or not IS_POSIX else _queued(fd, termios.TIOCOUTQ)  # equals SIOCOUTQ


def _queued(fd: int, question: int) -> int | None:
    answer = array.array("i", [0])
    try:
        fcntl.ioctl(fd, question, answer)
    except OSError:
        return None  # a device without such a queue, like /dev/null
    return answer[0]


def keep_alive(tcp: trio.socket.SocketType) -> None:
    """Let the kernel notice a peer that vanished. Raises `OSError` when it is already gone."""
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def watch_closely(tcp: trio.socket.SocketType) -> None:
    """Let the kernel notice within seconds that a peer has vanished, even if nothing is sent."""
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_USER_TIMEOUT": WATCHED_TIMEOUT_MS}
    with contextlib.suppress(OSError):  # it is gone already: the next read says so
        for name, value in options.items():
            if hasattr(socket, name):
                tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- the end


async def close_at_once(stream: trio.abc.AsyncResource) -> None:
    """Close without waiting for the peer.

    Where that follows an error, such as Ctrl-C, the other tasks of the connection may cancel this
    one meanwhile: that must not take the place of the error.
    """
    with trio.CancelScope(shield=True) as scope:
        scope.cancel()  # as `trio.aclose_forcefully` does, which is not shielded
        await stream.aclose()


async def close_gracefully(stream: ServerStream) -> None:
    """End the output, and read to the end of the peer's; the caller bounds the time."""
    if isinstance(stream, trio.SocketStream):
        await linger(stream)
        return
    tcp = stream.transport_stream
    # Without TLS's closure alert, a body that ends with the connection looks truncated. The alert
    # fails where the peer still sends, or has hung up; then only TCP is closed.
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.unwrap()
    await linger(tcp)


async def linger(stream: trio.abc.Stream) -> None:
    """End the output and read to the end of the peer's; the caller bounds the time.

    A close with unread bytes would make the kernel send a reset, which can overtake the last bytes
    of the output. A peer that still sends is read slowly, and in turn with other busy connections.
    """
    turns = Turns()
    try:
        if isinstance(stream, _SOCKETS):
            stream.socket.shutdown(socket.SHUT_WR)
            while await _discard_some(stream):
                await trio.sleep(DISCARD_PAUSE_S)
                turns.spend(TURN_UNITS)
                await turns.wait()
            return
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        while await stream.receive_some(DISCARDED_BYTES):
            await trio.sleep(DISCARD_PAUSE_S)
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        return  # the peer has closed first


async def _discard_some(connection: trio.SocketStream) -> int:
    """Wait for bytes and discard them; 0 at the end of the input. Raises `OSError`."""
    while True:
        await trio.lowlevel.wait_readable(connection.socket)
        with contextlib.suppress(BlockingIOError):
            return os.readv(connection.socket.fileno(), [_discarded])


def has_hung_up(tcp: trio.SocketStream) -> bool:
    """Whether the peer has ended its output, even if not all of that was read."""
    poller = select.poll()
    poller.register(tcp.socket.fileno(), _POLLRDHUP)
    return bool(poller.poll(0))  # a hang-up or an error
