"""The owner's side of the relay socket: each relay brings a client.

A relay passes its standard input and output over the socket (SCM_RIGHTS). From then on the owner
talks to the client directly, as over stdio: nothing is copied. `transports.relay.handover` is the
other side, and describes what the two exchange.
"""

import array
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from streams.exchange import Handler
from streams.messages import MESSAGE_BYTES_MAX
from transports.lines import LineChannel, open_fds
from transports.net.listening import serve_listeners
from transports.net.sockets import close_at_once
from transports.relay.handover import peer_uid
from transports.relay.private import listen_privately

# A relay sends its hello at once, and it is short. It brings two file descriptors. Of more, up to
# `FDS_MAX` are received, to be closed.
HELLO_S: Final = 5.0
HELLO_BYTES_MAX: Final = 4096
FDS_MAX: Final = 16

FAREWELL_S: Final = 1.0  # the relay may be stopped

GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)

_INT_BYTES: Final = array.array("i").itemsize

Hello = dict[str, Any]


class _Garbage(Exception):
    """The received bytes are not a relay's hello; the message says why."""


async def serve(
    handler: Handler,
    path: str | os.PathLike[str],
    *,
    hello_check: Callable[[Hello], str | None],
    farewell: Callable[[], Mapping[str, object] | None] = lambda: None,
    answer: Mapping[str, object] = {},
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen at `path` and run `handler` for each relay's client, until cancelled.

    `hello_check` returns None to accept a relay, or the text of a refusal. `farewell` returns the
    last words to a relay, if this process ends before its client. `answer` is told to the relays
    that are accepted. Connections of other users are closed. A socket at `path` is removed first,
    and the new one at the end: call this only while holding the journal's lock. Raises `OSError`
    when it cannot listen at the path.
    """
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listen_privately(path)))

    async def serve_connection(_: trio.Nursery, stream: trio.SocketStream) -> None:
        await _serve_connection(stream, handler, hello_check, farewell, answer, message_bytes_max)

    try:
        task_status.started()
        await serve_listeners(serve_connection, [listener])
    finally:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(path)


async def _serve_connection(
    stream: trio.SocketStream,
    handler: Handler,
    hello_check: Callable[[Hello], str | None],
    farewell: Callable[[], Mapping[str, object] | None],
    answer: Mapping[str, object],
    message_bytes_max: int,
) -> None:
    """Serve one relay from its hello to its end. Its errors affect no other relay."""
    fds: list[int] = []  # to be closed here until a channel owns them
    try:
        uid = _peer_uid(stream)
        if uid != os.geteuid() or not await _admit(stream, hello_check, answer, fds):
            return
        read_fd, write_fd = fds
        fds.clear()
        channel = open_fds(
            read_fd,
            write_fd,
            principal=f"os({uid})",
            transport="relay",
            message_bytes_max=message_bytes_max,
        )
        is_over = False
        try:
            await _run(handler, channel, stream)
            is_over = True
        finally:
            told = farewell() or ({"ok": True} if is_over else None)
            if told:
                with trio.move_on_after(FAREWELL_S, shield=True), contextlib.suppress(*GONE):
                    await stream.send_all(json.dumps(told).encode() + b"\n")
    finally:
        for fd in fds:
            os.close(fd)
        await close_at_once(stream)


async def _admit(
    stream: trio.SocketStream,
    hello_check: Callable[[Hello], str | None],
    answer: Mapping[str, object],
    fds: list[int],
) -> bool:
    """Read the hello and answer it. False for a relay that was refused, or failed."""
    try:
        with trio.fail_after(HELLO_S):
            try:
                why = hello_check(await _read_hello(stream.socket, fds))
            except _Garbage as garbage:
                why = str(garbage)
            told = {"error": why} if why else {"ok": True, **answer}
            await stream.send_all(json.dumps(told).encode() + b"\n")
            return not why
    except (trio.TooSlowError, trio.BrokenResourceError):
        return False


async def _run(handler: Handler, channel: LineChannel, stream: trio.SocketStream) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_close_with, stream, channel)
        try:
            await handler(channel)
        finally:
            with trio.CancelScope(shield=True):
                await channel.aclose()
        nursery.cancel_scope.cancel()


async def _close_with(stream: trio.SocketStream, channel: LineChannel) -> None:
    """Close the channel when its relay ends, or sends anything more."""
    with contextlib.suppress(trio.BrokenResourceError):  # the relay was killed
        await stream.receive_some(1)
    await channel.aclose()


def _peer_uid(stream: trio.SocketStream) -> int:
    accepted = socket.socket(fileno=stream.socket.fileno())
    try:
        return peer_uid(accepted)
    finally:
        accepted.detach()


async def _read_hello(peer: trio.socket.SocketType, fds: list[int]) -> Hello:
    """Read one line, with exactly two file descriptors, which are added to `fds` in any case.

    Raises `_Garbage`, or `trio.BrokenResourceError` when the relay is gone.
    """
    line = b""
    while b"\n" not in line:
        if len(line) >= HELLO_BYTES_MAX:
            raise _Garbage(f"a hello is at most {HELLO_BYTES_MAX} bytes long")
        try:
            data, ancillary, flags, _ = await peer.recvmsg(
                HELLO_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise trio.BrokenResourceError from error
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                # The last one may have been truncated.
                fds += array.array("i", payload[: len(payload) - len(payload) % _INT_BYTES])
        if flags & socket.MSG_CTRUNC or len(fds) > 2:
            raise _Garbage("a hello comes with two file descriptors")
        if not data:
            raise trio.BrokenResourceError("the relay is gone")
        line += data
    return _parse_hello(line, fds)


def _parse_hello(line: bytes, fds: list[int]) -> Hello:
    try:
        hello = json.loads(line)
    except (ValueError, RecursionError):
        raise _Garbage("a hello is one line of JSON") from None
    if not isinstance(hello, dict) or line.index(b"\n") != len(line) - 1:
        raise _Garbage("a hello is one JSON object on one line")
    if len(fds) != 2:
        raise _Garbage("a hello comes with two file descriptors")
    return hello
