"""Sockets and pipes, where trio's streams cost too much or say too little.

What is stored goes from the journal to the kernel uncopied, many pieces in one write.
"""

import array
import contextlib
import fcntl
import os
import select
import socket
import stat
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Final

import trio

from streams.turns import FREE_UNITS, Turns

# What one read asks for: the kernel hands over whatever it has, so replay is bound by memory, not
# by system calls (4 KiB reads cost three quarters of the throughput).
READ_BYTES: Final = 256 * 1024

# A pipe holds 64 KiB unless asked for more. This is what an unprivileged process may have.
PIPE_BYTES: Final = 1024 * 1024

# How long a polite close may take.
CLOSE_S: Final = 1.0

# How long the kernel goes on about bytes that nobody acknowledges, or no window is opened for.
USER_TIMEOUT_MS: Final = 180_000

# One read of what is thrown away at the end of a connection, and the pause after it. A refused body
# of 4 MiB is read in 0.2 s: some clients look for the answer only then. A client that floods a
# connection after its end is read at 25 MB/s at most.
DISCARDED_BYTES: Final = 256 * 1024
DISCARD_PAUSE_S: Final = 0.01
# What such a read counts as in `Turns`: the second one joins the queue of the busy connections.
DISCARD_UNITS: Final = int(FREE_UNITS)

_discarded: Final = bytearray(DISCARDED_BYTES)  # one for all connections: nothing is read from it

Pieces = Sequence[bytes | memoryview]

PIECES_MAX: Final = os.sysconf("SC_IOV_MAX")  # of one write

TLSStream = trio.SSLStream[trio.SocketStream]
ServerStream = trio.SocketStream | TLSStream


def tcp_of(stream: ServerStream) -> trio.SocketStream:
    """The connection below."""
    return stream if isinstance(stream, trio.SocketStream) else stream.transport_stream


# -- reading


async def receive_some(connection: ServerStream, bytes_max: int) -> bytes:
    """What comes next, as from the stream's own method, at a fraction of what that costs TCP.

    Raises `trio.BrokenResourceError`, or `trio.ClosedResourceError` where another task closes.
    """
    if not isinstance(connection, trio.SocketStream):
        return bytes(await connection.receive_some(bytes_max))
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
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
    """`stream.send_all` of one piece after the other, and raises what that does.

    A pipe or a socket is given them where they are; any other stream, such as TLS, one copy.
    """
    if isinstance(stream, trio.StapledStream):
        stream = stream.send_stream
    if isinstance(stream, trio.SocketStream):
        await _write_all(stream.socket.fileno, pieces)
    elif isinstance(stream, trio.lowlevel.FdStream):
        await _write_all(stream.fileno, pieces)
    else:
        await stream.send_all(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def send_now(stream: trio.abc.SendStream, pieces: Pieces) -> Pieces:
    """`write_now` to a socket; any other stream, such as TLS, cannot but wait, and takes nothing.

    Raises `OSError` when nobody reads.
    """
    if isinstance(stream, trio.SocketStream):
        return write_now(stream.socket.fileno(), pieces)
    return pieces


def write_now(fd: int, pieces: Pieces) -> Pieces:
    """Write what there is room for, and return the rest. Raises `OSError` when nobody reads."""
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
    """As trio's sockets do, it is either cancelled before the first byte, or while it waits."""
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


# -- what the kernel knows


def enlarge_pipe(fd: int) -> None:
    """Let a pipe hold `PIPE_BYTES`; what is no pipe, or may not grow, stays as it is."""
    if sys.platform != "linux" or not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    # Where the user's pages for pipes are used up, it is slower, not wrong.
    with contextlib.suppress(OSError):
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < PIPE_BYTES:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def has_reader(fd: int) -> bool:
    """Whether somebody may still read what is written to `fd`."""
    if fd < 0:
        return False  # closed
    poller = select.poll()
    poller.register(fd, 0)  # errors and hang-ups are always told
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def unsent_bytes(fd: int) -> int | None:
    """Bytes written to `fd` that its reader has not taken; None where the kernel cannot tell.

    On TCP they are the bytes that the peer's kernel has not acknowledged.
    """
    if fd < 0:
        return None  # closed
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        question = termios.FIONREAD
    elif stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
        question = termios.TIOCOUTQ  # the same number as a socket's SIOCOUTQ
    else:
        return None
    answer = array.array("i", [0])
    try:
        fcntl.ioctl(fd, question, answer)
    except OSError:
        return None  # a device without such a queue, as /dev/null
    return answer[0]


def keep_alive(tcp: trio.socket.SocketType) -> None:
    """Notice a peer that vanished without a word. Raises `OSError` when it is gone already."""
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


# -- the end


async def close_gracefully(stream: ServerStream) -> None:
    """Say that nothing follows, and hear the peer out; to be bounded by the caller."""
    if isinstance(stream, trio.SocketStream):
        await linger(stream)
        return
    tcp = stream.transport_stream
    # Without the farewell of TLS, a body that ends with the connection looks cut off. A peer that
    # talks on, or has hung up, is TCP's business alone.
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.unwrap()
    await linger(tcp)


async def linger(stream: trio.abc.Stream) -> None:
    """End our output and read on to the end of the peer's; to be bounded by the caller.

    To close with bytes unread makes the kernel send a reset, which can overtake our last words. A
    peer that goes on sending is read at a low rate, and in turn with the other busy connections.
    """
    turns = Turns()
    try:
        if isinstance(stream, trio.SocketStream):
            stream.socket.shutdown(socket.SHUT_WR)
            while await _discard_some(stream):
                await trio.sleep(DISCARD_PAUSE_S)
                turns.spend(DISCARD_UNITS)
                await turns.wait()
            return
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        while await stream.receive_some(DISCARDED_BYTES):
            await trio.sleep(DISCARD_PAUSE_S)
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        return  # the peer was faster


async def _discard_some(connection: trio.SocketStream) -> int:
    """Wait for bytes and throw them away; 0 at the end of them. Raises `OSError`."""
    while True:
        await trio.lowlevel.wait_readable(connection.socket)
        with contextlib.suppress(BlockingIOError):
            return os.readv(connection.socket.fileno(), [_discarded])
