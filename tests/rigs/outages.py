"""A network with outages: a proxy for TCP connections on this machine that goes dead on order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

import trio

READ_BYTES: Final = 64 * 1024

State = Literal["up", "dead", "refusing"]


class Network:
    """Forwards connections at `port` to `upstream_port` while it is up.

    `dead`: connections stay open, and nothing comes through. Those that were open before, or are
    opened meanwhile, stay dead for ever, as with a cable that was cut. `refusing`: connections are
    reset, and new ones are closed at once.
    """

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self.connections = 0
        self.upstream_port = upstream_port
        self._state: State = "up"
        self._open: set[trio.CancelScope] = set()

    @property
    def is_used(self) -> bool:
        """Whether a connection is open."""
        return bool(self._open)

    def go(self, state: State) -> None:
        """From now on, the network is in this state."""
        self._state = state
        for scope in self._open:
            scope.cancel()

    def cut(self) -> None:
        """Cut all connections that are open now."""
        for scope in self._open:
            scope.cancel()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=100)
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._welcome, listeners)

    async def _welcome(self, client: trio.SocketStream) -> None:
        self.connections += 1
        is_dead = self._state == "dead"
        try:
            if self._state == "up":
                with trio.CancelScope() as scope:
                    self._open.add(scope)
                    try:
                        await self._connect(client)
                    except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                        pass
                    finally:
                        self._open.remove(scope)
                        is_dead = self._state == "dead"
            if is_dead:
                await trio.sleep_forever()
        finally:
            await trio.aclose_forcefully(client)

    async def _connect(self, client: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream("127.0.0.1", self.upstream_port) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pass_on, client, server)
            nursery.start_soon(self._pass_on, server, client)

    async def _pass_on(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        while data := await source.receive_some(READ_BYTES):
            await target.send_all(data)
        await target.send_eof()


@asynccontextmanager
async def network(upstream_port: int) -> AsyncIterator[Network]:
    """A network in front of a port."""
    async with trio.open_nursery() as nursery:
        proxy = Network(upstream_port)
        await nursery.start(proxy.serve)
        yield proxy
        nursery.cancel_scope.cancel()
