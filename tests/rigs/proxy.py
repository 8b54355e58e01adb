"""A bad network: a proxy for TCP connections on this machine that cuts them on the test's order."""

from typing import Final

import trio

READ_BYTES: Final = 64 * 1024


class Proxy:
    """Forwards connections at `port` to `upstream_port`, once it is served."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self.to_clients: list[bytearray] = []  # the bytes that passed over each connection
        self.until_cut: int | None = None  # bytes left to clients, over all
        self._upstream_port = upstream_port
        self._open: set[trio.CancelScope] = set()
        self._is_cut = trio.Event()

    @property
    def passed_bytes(self) -> int:
        return sum(map(len, self.to_clients))

    def cut(self) -> None:
        """Cut all open connections."""
        for scope in self._open:
            scope.cancel()

    async def cut_after(self, count: int) -> None:
        """Cut all connections after so many bytes to clients; later connections are not limited."""
        self._is_cut = trio.Event()
        self.until_cut = count
        await self._is_cut.wait()
        self.until_cut = None
        self.cut()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=100)
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._welcome, listeners)

    async def _welcome(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._open.add(scope)
            try:
                await self._connect(client)
            except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # one side has hung up; the other is told below
            finally:
                self._open.remove(scope)
                await trio.aclose_forcefully(client)

    async def _connect(self, client: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream("127.0.0.1", self._upstream_port) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._bring_up, client, server)
            await self._bring_down(server, client)

    async def _bring_up(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        while data := await client.receive_some(READ_BYTES):
            await server.send_all(data)
        await server.send_eof()

    async def _bring_down(self, server: trio.SocketStream, client: trio.SocketStream) -> None:
        passed = bytearray()
        self.to_clients.append(passed)
        while self.until_cut != 0 and (data := await server.receive_some(READ_BYTES)):
            passing = data[: self.until_cut]
            if self.until_cut is not None:
                self.until_cut -= len(passing)
            passed += passing
            await client.send_all(passing)
        if self.until_cut == 0:
            self._is_cut.set()
        # The socket is not closed at once: a reset could overtake the last bytes.
        await client.send_eof()
