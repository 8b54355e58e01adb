"""Writes of many pieces, to pipes, sockets and other streams."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from transports.net.sockets import PIECES_MAX, send_pieces, write_now

Way = tuple[trio.abc.SendStream, trio.abc.ReceiveStream]
Opener = Callable[[], AbstractAsyncContextManager[Way]]


@asynccontextmanager
async def pipe() -> AsyncIterator[Way]:
    read_fd, write_fd = os.pipe()
    reader = trio.lowlevel.FdStream(read_fd)
    async with reader, trio.lowlevel.FdStream(write_fd) as writer:
        _, from_elsewhere = trio.testing.memory_stream_one_way_pair()
        yield trio.StapledStream(writer, from_elsewhere), reader


@asynccontextmanager
async def tcp() -> AsyncIterator[Way]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        near = await trio.testing.open_stream_to_socket_listener(listener)
        async with near, await listener.accept() as far:
            yield near, far


@asynccontextmanager
async def memory() -> AsyncIterator[Way]:
    yield trio.testing.memory_stream_one_way_pair()


every_way = pytest.mark.parametrize("way", [pipe, tcp, memory])
of_the_kernel = pytest.mark.parametrize("way", [pipe, tcp])


async def read(stream: trio.abc.ReceiveStream, count: int, at_once: int) -> bytes:
    came = b""
    while len(came) < count:
        data = await stream.receive_some(at_once)
        assert data, "the sender has ended early"
        came += data
    return came


@every_way
@pytest.mark.parametrize(
    "pieces",
    [
        [b"one"],
        [b"", b"one", b"", b"two", b""],
        [b"%d," % number for number in range(3 * PIECES_MAX)],
        [b"header", b"x" * 3_000_000, b"header", b"y" * 1_000_000, b"z"],
        [bytes([number]) * 40_000 for number in range(256)],
    ],
    ids=["one", "empty", "many", "long", "both"],
)
async def test_pieces_arrive_one_after_the_other(way: Opener, pieces: list[bytes]) -> None:
    expected = b"".join(pieces)
    async with way() as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(send_pieces, near, pieces)
        # No reads end where pieces do, so writes are cut in the middle of them.
        assert await read(far, len(expected), 9_973) == expected


@every_way
async def test_who_is_cancelled_beforehand_writes_nothing(way: Opener) -> None:
    async with way() as (near, far):
        with trio.CancelScope() as scope:
            scope.cancel()
            await send_pieces(near, [b"not", b"sent"])
        assert scope.cancelled_caught
        await send_pieces(near, [b"sent"])
        assert await read(far, 4, 100) == b"sent"


@of_the_kernel
async def test_who_is_cancelled_half_way_has_written_a_beginning(way: Opener) -> None:
    pieces = [bytes([number]) * 1_000_003 for number in range(50)]
    async with way() as (near, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_pieces, near, pieces)
            await trio.testing.wait_all_tasks_blocked(0.1)
            nursery.cancel_scope.cancel()
        await near.aclose()
        came = b""
        while data := await far.receive_some():
            came += data
        assert 0 < len(came) < 50 * 1_000_003
        assert b"".join(pieces).startswith(came)


async def send_for_ever(stream: trio.abc.SendStream) -> None:
    while True:  # TCP learns from what it has sent that nobody is there
        await send_pieces(stream, [b"x" * 1000, b"y" * 1000])


@every_way
async def test_a_peer_that_is_gone_breaks_the_write(way: Opener) -> None:
    async with way() as (near, far):
        await far.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever(near)


@of_the_kernel
async def test_who_closes_frees_who_waits_to_write(way: Opener) -> None:
    async with way() as (near, _), trio.open_nursery() as nursery:

        @partial(nursery.start_soon)
        async def write() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await send_pieces(near, [b"x" * 10_000_000] * 5)

        await trio.testing.wait_all_tasks_blocked(0.1)
        await near.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await send_pieces(near, [b"x"])


def test_what_is_left_of_a_write_begins_where_that_ended() -> None:
    read_fd, write_fd = os.pipe()
    try:
        os.set_blocking(write_fd, False)
        pieces = [b"a" * 50_000, b"b" * 50_000, b"c" * 50_000]
        rest = write_now(write_fd, pieces)
        written = os.read(read_fd, 200_000)
        assert written + b"".join(rest) == b"".join(pieces)
        assert written
        assert rest
        assert write_now(write_fd, [b"there is room again"]) == ()
    finally:
        os.close(read_fd)
        os.close(write_fd)
