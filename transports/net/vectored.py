"""Writes of many pieces at once: what is stored goes from the journal to the kernel uncopied."""

import os
from collections.abc import Callable, Sequence
from typing import Final

import trio

Pieces = Sequence[bytes | memoryview]

PIECES_MAX: Final = os.sysconf("SC_IOV_MAX")  # of one write


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
