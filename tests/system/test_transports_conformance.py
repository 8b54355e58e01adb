"""The promises of every transport (`transports`), tried on each of them."""

import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import trio
import trio.testing

from streams.exchange import Channel
from streams.messages import Incoming
from tests.rigs.echo import LIMIT
from tests.rigs.proxy import Proxy
from tests.rigs.served import RIGS, Rig, TCPRig, WebSocketRig


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return RIGS[request.param](tmp_path)


def numbered(count: int, size: int = 100) -> list[bytes]:
    padding = "x" * (size - 20)
    return [json.dumps({"n": n, "p": padding}).encode() for n in range(count)]


async def receive(channel: Channel, count: int) -> list[Incoming]:
    received: list[Incoming] = []
    while len(received) < count:
        received += await channel.receive()
    return received


def as_lines(messages: Sequence[bytes]) -> bytes:
    return b"".join(message + b"\n" for message in messages)


class Stall:
    """A far end that has stopped reading, until `resume`."""

    def __init__(self, fifo: BinaryIO) -> None:
        self._fifo = fifo

    def say(self, message: bytes) -> None:
        self._fifo.write(message + b"\n")

    def resume(self) -> None:
        self._fifo.close()


@asynccontextmanager
async def stalled(channel: Channel, tmp_path: Path) -> AsyncIterator[Stall]:
    fifo = tmp_path / "stall"
    os.mkfifo(fifo)
    order = json.dumps({"stall": str(fifo)}).encode()
    await channel.send(order + b"\n")
    assert await receive(channel, 1) == [order]
    with await trio.to_thread.run_sync(lambda: open(fifo, "wb", buffering=0)) as opened:
        yield Stall(opened)


async def blocked(sent: list[bytes]) -> None:
    """Wait until whoever appends to `sent` cannot go on."""
    before = -1
    while len(sent) != before:
        before = len(sent)
        await trio.testing.wait_all_tasks_blocked(0.1)


@pytest.mark.parametrize("count", [1, 10_000])
async def test_messages_arrive_whole_once_and_in_order(rig: Rig, count: int) -> None:
    messages = numbered(count)
    async with rig.serving(), rig.connect() as channel, trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, as_lines(messages))
        assert await receive(channel, count) == messages


async def test_many_sends_of_any_size_arrive_in_order(rig: Rig) -> None:
    sizes = (30, 200, 5000, 63)
    messages = [message for size in sizes for message in numbered(rig.sends // len(sizes), size)]

    async def send() -> None:
        for message in messages:
            await channel.send(message + b"\n")

    async with rig.serving(), rig.connect() as channel, trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert await receive(channel, len(messages)) == messages


async def test_many_connections_are_served_at_once(rig: Rig) -> None:
    async def talk(name: int) -> None:
        messages = [b'{"from":%d,"n":%d}' % (name, n) for n in range(20)]
        async with rig.connect() as channel:
            await channel.send(as_lines(messages))
            assert await receive(channel, 20) == messages

    async with rig.serving(), trio.open_nursery() as nursery:
        for name in range(4):
            nursery.start_soon(talk, name)


async def test_a_stalled_reader_makes_send_wait_and_nobody_else(rig: Rig, tmp_path: Path) -> None:
    messages = numbered(1024, 32 * 1024)  # 32 MiB: more than any two kernel buffers hold
    sent: list[bytes] = []

    async def send() -> None:
        for message in messages:
            await channel.send(message + b"\n")
            sent.append(message)

    async with (
        rig.serving(),
        rig.connect() as channel,
        stalled(channel, tmp_path) as stall,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send)
        await blocked(sent)
        assert len(sent) < len(messages)
        assert channel.unsent_bytes() != 0

        # It still talks, and whoever waits to send still hears it.
        stall.say(b'"listen"')
        assert await receive(channel, 1) == [b'"listen"']

        # The others are served meanwhile.
        async with rig.connect() as other:
            await other.send(b'"hello"\n')
            assert await receive(other, 1) == [b'"hello"']

        stall.resume()
        assert await receive(channel, len(messages)) == messages


async def test_a_cancelled_send_closes_the_channel(rig: Rig, tmp_path: Path) -> None:
    sent: list[bytes] = []

    async def send(cancellable: trio.CancelScope) -> None:
        with cancellable:
            for message in numbered(1024, 32 * 1024):
                await channel.send(message + b"\n")
                sent.append(message)

    async with rig.serving(), rig.connect() as channel:
        async with stalled(channel, tmp_path), trio.open_nursery() as nursery:
            cancellable = trio.CancelScope()
            nursery.start_soon(send, cancellable)
            await blocked(sent)
            cancellable.cancel()
        assert cancellable.cancelled_caught
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"{}\n")


async def test_closing_takes_no_longer_than_a_second_or_so(rig: Rig, tmp_path: Path) -> None:
    sent: list[bytes] = []

    async def send() -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            for message in numbered(1024, 32 * 1024):
                await channel.send(message + b"\n")
                sent.append(message)

    async with (
        rig.serving(),
        rig.connect() as channel,
        stalled(channel, tmp_path),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send)
        await blocked(sent)
        before = trio.current_time()
        await channel.aclose()
        assert trio.current_time() - before < 10  # promised is 1; the machine may be slow
    assert len(sent) < 1024


async def test_closing_ends_a_receive_and_what_comes_after(rig: Rig) -> None:
    async def expect_the_end() -> None:
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()

    async with rig.serving(), rig.connect() as channel:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_the_end)
            await trio.testing.wait_all_tasks_blocked()
            await channel.aclose()
        await channel.aclose()
        await expect_the_end()
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"{}\n")


async def test_a_far_end_that_closes_is_the_end_after_all_that_it_sent(rig: Rig) -> None:
    async def farewell(channel: Channel) -> None:
        await channel.send(as_lines(numbered(100)))

    async with rig.serving(farewell):
        bare = await rig.knock()
        read = await bare.read_all()
        await bare.close()
    assert read.count(b'{"n": ') == 100


async def test_a_cut_at_any_byte_loses_no_whole_message_and_adds_no_half_one(rig: Rig) -> None:
    """Every byte boundary of two frames, the second with a payload that needs a longer header."""
    messages = numbered(1, 30) + numbered(1, 200)
    ended = trio.Event()
    received: list[Incoming] = []

    async def record(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                received.extend(await channel.receive())
        ended.set()

    async with rig.serving(record):
        size = None
        length = 0
        while size is None or length <= size:
            bare = await rig.knock()
            frames = [bare.frame(message) for message in messages]
            size = sum(map(len, frames))
            received.clear()
            ended = trio.Event()
            await bare.stream.send_all(b"".join(frames)[:length])
            await bare.close()
            await ended.wait()
            whole = (length >= len(frames[0])) + (length >= size)
            assert received == messages[:whole], length
            length += 1


async def test_a_cut_at_any_byte_of_what_comes_loses_no_whole_message_and_adds_no_half_one(
    rig: Rig,
) -> None:
    """Every byte boundary of two messages on their way to the client, and of what frames them."""
    if not isinstance(rig, TCPRig):
        pytest.skip("lines in a pipe are cut by the test above, the same either way")
    if rig.is_encrypted:
        pytest.skip("nobody can see where in TLS a message ends")
    messages = numbered(1, 30) + numbered(1, 200)
    async with rig.serving(), trio.open_nursery() as nursery:
        proxy = Proxy(rig.port)
        await nursery.start(proxy.serve)
        rig.port = proxy.port
        start, end = await _until_cut(rig, proxy, messages, None)
        for length in range(end - start + 1):
            await _until_cut(rig, proxy, messages, length)
        nursery.cancel_scope.cancel()


async def _until_cut(
    rig: TCPRig, proxy: Proxy, messages: list[bytes], length: int | None
) -> tuple[int, int]:
    """Have messages echoed until so many bytes have passed, and check which came back.

    Returns how many bytes had passed before the messages, and after them.
    """
    proxy.until_cut = None
    proxy.to_clients.clear()
    received: list[Incoming] = []

    async def send() -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            for message in messages:
                await channel.send(message + b"\n")

    async with rig.connect() as channel, trio.open_nursery() as nursery:
        start = proxy.passed_bytes
        proxy.until_cut = length
        nursery.start_soon(send)
        with contextlib.suppress(trio.EndOfChannel):
            while len(received) < len(messages):
                received += await channel.receive()
    passed = b"".join(proxy.to_clients)
    whole = [message for message in messages if message + rig.message_end in passed]
    assert received == whole, length
    return start, len(passed)


async def test_the_end_of_input_does_not_end_the_output(rig: Rig) -> None:
    if not rig.can_half_close:
        pytest.skip("a WebSocket whose peer has closed is closed both ways")
    messages = numbered(1000)
    async with rig.serving():
        bare = await rig.knock()
        await bare.stream.send_all(b"".join(map(bare.frame, messages)))
        if isinstance(bare.stream, trio.StapledStream):
            await bare.stream.send_stream.aclose()
        else:
            assert isinstance(bare.stream, trio.abc.HalfCloseableStream)
            await bare.stream.send_eof()
        assert await bare.read_all() == as_lines(messages)
        await bare.close()


async def test_a_message_of_the_limit_passes_and_one_more_byte_does_not(rig: Rig) -> None:
    largest = b'"' + b"x" * (LIMIT - 2) + b'"'
    async with rig.serving():
        async with rig.connect() as channel:
            await channel.send(as_lines([largest]))
            assert await receive(channel, 1) == [largest]
            with contextlib.suppress(trio.BrokenResourceError):
                await channel.send(as_lines([b" " + largest, b'"next"']))
            if rig.survives_oversize:
                answers = await receive(channel, 2)
                assert answers == [rig.oversize_answer, b'"next"']
            else:
                with pytest.raises(trio.EndOfChannel):
                    await channel.receive()
        async with rig.connect() as channel:
            await channel.send(b'"again"\n')
            assert await receive(channel, 1) == [b'"again"']


async def test_a_message_far_above_the_limit_is_no_burden(rig: Rig) -> None:
    if not rig.survives_oversize:
        pytest.skip("a WebSocket ends with it")
    async with rig.serving(), rig.connect() as channel, trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, as_lines([b"x" * (200 * LIMIT), b'"next"']))
        assert [type(message) for message in await receive(channel, 2)] == [bytes, bytes]


@pytest.mark.parametrize(
    "message",
    [b"nonsense", b'{"jsonrpc":', b"[]", b"17", b'{"jsonrpc":"1.0","id":1}', b'"\\ud800"'],
)
async def test_what_a_message_says_is_nobodys_business(rig: Rig, message: bytes) -> None:
    async with rig.serving(), rig.connect() as channel:
        await channel.send(message + b"\n")
        assert await receive(channel, 1) == [message]


async def test_invalid_utf_8_is_passed_on_where_the_framing_is_of_bytes(rig: Rig) -> None:
    message = b'{"jsonrpc": "2.0", "id": 1, "method": "\xff\xfe"}'
    if isinstance(rig, WebSocketRig) and rig.subprotocol == "mcp":
        pytest.skip("a text frame must be UTF-8: tests/unit/transports/test_websocket.py")
    async with rig.serving():
        bare = await rig.knock()
        await bare.stream.send_all(bare.frame(message) + bare.frame(b'"next"'))
        read = b""
        while b'"next"' not in read:
            read += await bare.stream.receive_some()
        assert message in read
        await bare.close()


async def test_a_ping_is_answered_where_the_transport_has_one(rig: Rig) -> None:
    async def listen() -> None:
        with contextlib.suppress(trio.EndOfChannel):
            await channel.receive()

    async with rig.serving(), rig.connect() as channel, trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        assert await channel.ping() is rig.can_ping
        nursery.cancel_scope.cancel()


async def test_the_principal_says_who_the_client_is(rig: Rig) -> None:
    if rig.client_principal is None:
        pytest.skip("an HTTP listener does not ask: sessions are the endpoint's business")
    principals: list[str] = []

    async def note(channel: Channel) -> None:
        principals.append(channel.principal)

    async with rig.serving(note):
        bare = await rig.knock()
        await bare.read_all()
        await bare.close()
    assert principals[0].startswith(rig.client_principal)


async def test_nothing_is_unsent_once_the_far_end_has_read_it(rig: Rig) -> None:
    if not rig.knows_unsent:
        pytest.skip("the messages of an HTTP client are on many connections, and soon on none")
    async with rig.serving(), rig.connect() as channel:
        await channel.send(b'"here"\n')
        await receive(channel, 1)
        assert channel.unsent_bytes() == 0
