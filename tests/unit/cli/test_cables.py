"""Cables pass every byte on, until they are cut, reset or silenced."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from streams.cli.selftest.cables import Cables

PATIENCE_S = 20


class Laid:
    """Cables, and the two ends of one that is in use."""

    def __init__(self) -> None:
        self.cables = Cables()
        self._arrived, self._arrivals = trio.open_memory_channel[trio.SocketStream](10)
        self.clients: list[trio.SocketStream] = []
        self.client: trio.SocketStream
        self.server: trio.SocketStream

    async def welcome(self, stream: trio.SocketStream) -> None:
        """The server's handler: it leaves the connection to the test."""
        await self._arrived.send(stream)
        await trio.sleep_forever()

    async def connect(self) -> None:
        """Make a connection."""
        self.client = await trio.open_tcp_stream("127.0.0.1", self.cables.port)
        self.clients.append(self.client)
        self.server = await self._arrivals.receive()
        await self.client.send_all(b".")  # a byte that has passed shows that there is a cable
        assert await self.server.receive_some() == b"."


@asynccontextmanager
async def laid() -> AsyncIterator[Laid]:
    laid = Laid()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, laid.welcome, 0)
            laid.cables.lead_to(listeners[0].socket.getsockname()[1])
            await nursery.start(laid.cables.serve)
            await laid.connect()
            yield laid
            for client in laid.clients:
                await trio.aclose_forcefully(client)
            nursery.cancel_scope.cancel()


async def rest(stream: trio.SocketStream) -> bytes:
    """All bytes until the other end hangs up."""
    came = b""
    while data := await stream.receive_some():
        came += data
    return came


async def test_bytes_pass_both_ways() -> None:
    async with laid() as ends:
        await ends.client.send_all(b"up")
        assert await ends.server.receive_some() == b"up"
        await ends.server.send_all(b"down")
        assert await ends.client.receive_some() == b"down"


async def test_either_end_that_hangs_up_ends_the_connection() -> None:
    async with laid() as ends:
        await ends.client.aclose()
        assert await rest(ends.server) == b""
        await ends.connect()
        await ends.server.aclose()
        assert await rest(ends.client) == b""


async def test_a_cut_is_seen_at_both_ends_and_the_next_connection_is_whole() -> None:
    async with laid() as ends:
        assert ends.cables.cut() == 1
        assert await rest(ends.client) == b""
        assert await rest(ends.server) == b""
        assert ends.cables.cut() == 0
        await ends.connect()
        await ends.client.send_all(b"up")
        assert await ends.server.receive_some() == b"up"


async def test_a_cut_may_come_in_the_middle_of_what_is_sent() -> None:
    async with laid() as ends:
        assert ends.cables.cut(after_bytes=7) == 1
        await ends.server.send_all(b"1234")
        assert await ends.client.receive_some() == b"1234"
        await ends.server.send_all(b"5678")
        assert await rest(ends.client) == b"567"


async def test_a_reset_is_an_error_at_both_ends() -> None:
    async with laid() as ends:
        assert ends.cables.reset() == 1
        for end in (ends.client, ends.server):
            with pytest.raises(trio.BrokenResourceError):
                await end.receive_some()


class Resetting(trio.abc.Instrument):
    """Resets the cables at every turn; keeps an error, because a raised one would be lost."""

    def __init__(self, cables: Cables) -> None:
        self._cables = cables
        self.errors: list[OSError] = []

    def after_io_wait(self, timeout: float) -> None:
        try:
            self._cables.reset()
        except OSError as error:
            self.errors.append(error)


async def test_a_reset_may_come_while_a_connection_ends() -> None:
    async with laid() as ends:
        resetting = Resetting(ends.cables)
        trio.lowlevel.add_instrument(resetting)
        assert ends.cables.reset() == 1
        for end in (ends.client, ends.server):
            with pytest.raises(trio.BrokenResourceError):
                await end.receive_some()
        trio.lowlevel.remove_instrument(resetting)
        assert (ends.cables.reset(), resetting.errors) == (0, [])


async def test_nothing_comes_through_a_hushed_connection_nor_later() -> None:
    async with laid() as ends:
        hushed_client, hushed_server = ends.client, ends.server
        assert ends.cables.silence() == 1
        await hushed_client.send_all(b"up")
        await hushed_server.send_all(b"down")
        await ends.connect()  # this is another connection
        await ends.client.send_all(b"up")
        assert await ends.server.receive_some() == b"up"
        await hushed_client.send_eof()
        assert await rest(hushed_server) == b""
        assert await rest(hushed_client) == b""


async def test_where_nobody_is_the_connection_ends_at_once() -> None:
    async with laid() as ends:
        port = ends.cables.port
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nobody = listeners[0].socket.getsockname()[1]
        await listeners[0].aclose()
        for far_port in (None, nobody):
            ends.cables.lead_to(far_port)
            async with await trio.open_tcp_stream("127.0.0.1", port) as client:
                assert await rest(client) == b""
