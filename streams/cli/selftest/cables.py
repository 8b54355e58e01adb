"""Cables between clients and a server that listens: this process carries every byte, until it does
not.

A cable fails in three ways, as networks do: it is cut (both ends see the other hang up, perhaps in
the middle of a message), it is reset (an error at both ends), or it is hushed: it stays open and
nothing comes through any more.
"""

import socket
import struct
from typing import Final

import trio

READ_BYTES: Final = 64 * 1024
_LINGER_NOT: Final = struct.pack("ii", 1, 0)  # to close is to reset


class Cables:
    """Listens at `port`, once it is served, and leads each connection to the server."""

    def __init__(self) -> None:
        self.port = 0
        self._far_port: int | None = None
        self._laid: set[_Cable] = set()

    def lead_to(self, port: int | None) -> None:
        """From now on connections lead to this port of this machine; None: nobody is there."""
        self._far_port = port

    # Each of these says how many cables it was done to: all that lie now.

    def cut(self, after_bytes: int = 0) -> int:
        """Cut them, or let so many bytes pass to each client before that."""
        for cable in self._laid:
            cable.cut(after_bytes)
        return len(self._laid)

    def reset(self) -> int:
        """Reset the connections."""
        for cable in self._laid:
            cable.reset()
        return len(self._laid)

    def hush(self) -> int:
        """Let nothing through any more, either way."""
        for cable in self._laid:
            cable.is_hushed = True
        return len(self._laid)

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Lay cables until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=100)
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._lay, listeners)

    async def _lay(self, near: trio.SocketStream) -> None:
        async with near:
            if self._far_port is None:
                return
            try:
                far = await trio.open_tcp_stream("127.0.0.1", self._far_port)
            except OSError:
                return  # the server has just ended: the client sees that nobody is there
            cable = _Cable(near, far)
            async with far:
                self._laid.add(cable)
                try:
                    await cable.carry()
                finally:
                    self._laid.discard(cable)  # before an end is closed: that takes a turn


class _Cable:
    """One connection from a client's end to the server's."""

    def __init__(self, near: trio.SocketStream, far: trio.SocketStream) -> None:
        self.is_hushed = False
        self._near = near
        self._far = far
        self._left_bytes: int | None = None  # that still pass to the client
        self._scope = trio.CancelScope()

    def cut(self, after_bytes: int) -> None:
        if after_bytes:
            self._left_bytes = after_bytes
        else:
            self._scope.cancel()

    def reset(self) -> None:
        for end in (self._near, self._far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._scope.cancel()

    async def carry(self) -> None:
        """Carry bytes both ways until either end is gone or the cable is."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry_up)
                nursery.start_soon(self._carry_down)

    async def _carry_up(self) -> None:
        try:
            while data := await self._near.receive_some(READ_BYTES):
                if not self.is_hushed:
                    await self._far.send_all(data)
        except trio.BrokenResourceError:
            pass  # one end is gone: so is the cable
        self._scope.cancel()

    async def _carry_down(self) -> None:
        try:
            while data := await self._far.receive_some(READ_BYTES):
                if self.is_hushed:
                    continue
                passing = data[: self._left_bytes]
                await self._near.send_all(passing)
                if self._left_bytes is not None:
                    self._left_bytes -= len(passing)
                    if self._left_bytes <= 0:
                        break
        except trio.BrokenResourceError:
            pass  # as above
        self._scope.cancel()
