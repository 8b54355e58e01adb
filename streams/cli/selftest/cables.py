"""A TCP proxy between clients and a server, whose connections can be made to fail.

A cable is one connection through it. It fails in the three ways of a network: it is cut (both ends
see a hang-up, perhaps in the middle of a message), it is reset (both ends see an error), or it is
silenced: it stays open and passes nothing on.
"""

import socket
import struct
from typing import Final

import trio

READ_BYTES: Final = 64 * 1024
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # closing then sends a reset


class Cables:
    """Listens at `port`, once it is served, and connects each client to the server."""

    def __init__(self) -> None:
        self.port = 0
        self._far_port: int | None = None
        self._is_parted = False
        self._cables: set[_Cable] = set()

    def lead_to(self, port: int | None) -> None:
        """Connect new clients to this port of this machine; None: hang up on them."""
        self._far_port = port

    # Each of these returns the number of cables, which are all that exist now.

    def cut(self, after_bytes: int = 0) -> int:
        """Cut them, at once or after so many more bytes to each client."""
        for cable in self._cables:
            cable.cut(after_bytes)
        return len(self._cables)

    def reset(self) -> int:
        """Reset them."""
        for cable in self._cables:
            cable.reset()
        return len(self._cables)

    def silence(self) -> int:
        """Pass nothing on, either way, and leave them open."""
        for cable in self._cables:
            cable.is_silenced = True
        return len(self._cables)

    def part(self) -> int:
        """Like `silence`, also for all later ones until `mend`."""
        self._is_parted = True
        return self.silence()

    def mend(self) -> None:
        """End `part`. The cables that have lost bytes are reset."""
        self._is_parted = False
        self.reset()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Accept clients until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=100)
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._accept, listeners)

    async def _accept(self, near: trio.SocketStream) -> None:
        async with near:
            if self._far_port is None:
                return
            try:
                far = await trio.open_tcp_stream("127.0.0.1", self._far_port)
            except OSError:
                return  # the server has just ended: hang up
            cable = _Cable(near, far)
            cable.is_silenced = self._is_parted
            async with far:
                self._cables.add(cable)
                try:
                    await cable.carry()
                finally:
                    self._cables.discard(cable)  # first: closing an end takes a turn


class _Cable:
    """One connection from a client to the server."""

    def __init__(self, near: trio.SocketStream, far: trio.SocketStream) -> None:
        self.is_silenced = False
        self._near = near
        self._far = far
        self._left_bytes: int | None = None  # that still pass to the client before a cut
        self._scope = trio.CancelScope()

    def cut(self, after_bytes: int) -> None:
        if after_bytes:
            self._left_bytes = after_bytes
        else:
            self._scope.cancel()

    def reset(self) -> None:
        for end in (self._near, self._far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._scope.cancel()

    async def carry(self) -> None:
        """Pass bytes on both ways until either end or the cable fails."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry_up)
                nursery.start_soon(self._carry_down)

    async def _carry_up(self) -> None:
        try:
            while data := await self._near.receive_some(READ_BYTES):
                if not self.is_silenced:
                    await self._far.send_all(data)
        except trio.BrokenResourceError:
            pass  # one end is gone: so is the cable
        self._scope.cancel()

    async def _carry_down(self) -> None:
        try:
            while data := await self._far.receive_some(READ_BYTES):
                if self.is_silenced:
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
