"""An open WebSocket: the two subprotocols, and close codes as they are on the wire."""

import contextlib
import json
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from wsproto.events import (
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    TextMessage,
)

from streams.exchange import Channel
from streams.messages import Incoming
from tests.rigs.bare_websocket import (
    bare,
    close_code,
    events_to_the_end,
    frames_of,
    messages_of,
    open_bare_websocket,
)
from tests.rigs.echo import LIMIT, echo
from transports import websocket
from transports.websocket.frames import FRAME_BYTES_MAX, MCP, MCP_STREAMS


async def test_mcp_is_one_message_a_text_frame_without_a_newline() -> None:
    async with bare() as (stream, connection):
        sizes = [1, 125, 126, 127, 65535, LIMIT]
        sent = [TextMessage(data="é" + "x" * (size - 2) if size > 1 else "7") for size in sizes]
        await stream.send_all(b"".join(map(connection.send, sent)))
        assert await messages_of(stream, connection, len(sent)) == sent


async def test_pretty_printed_json_is_one_message_on_one_line() -> None:
    async with bare() as (stream, connection):
        pretty = json.dumps({"a": ["one\ntwo", {"b": None}]}, indent=4)
        await stream.send_all(connection.send(TextMessage(data=f"\n{pretty}\r\n")))
        (echoed,) = await messages_of(stream, connection, 1)
        assert "\n" not in echoed.data
        assert json.loads(echoed.data) == json.loads(pretty)


async def received_by_the_server(subprotocol: str, *wire: Message[Any]) -> list[Incoming]:
    received: list[Incoming] = []
    ended = trio.Event()

    async def collect(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                received.extend(await channel.receive())
        ended.set()

    async with bare(collect, subprotocol) as (stream, connection):
        await stream.send_all(b"".join(map(connection.send, wire)))
        await stream.send_eof()
        await ended.wait()
    return received


async def test_mcp_skips_blank_frames_and_takes_binary_ones() -> None:
    wire: list[Message[Any]] = [
        TextMessage(data=""),
        TextMessage(data="\n"),
        BytesMessage(data=b"1"),
    ]
    assert await received_by_the_server(MCP, *wire) == [b"1"]


async def test_fragments_are_put_together_in_either_subprotocol() -> None:
    wire: list[Message[Any]] = [
        TextMessage(data='{"a', message_finished=False),
        TextMessage(data="", message_finished=False),
        TextMessage(data='":1}\n'),
    ]
    for subprotocol in (MCP, MCP_STREAMS):
        assert await received_by_the_server(subprotocol, *wire) == [b'{"a":1}']


async def test_mcp_streams_takes_lines_in_frames_of_either_kind() -> None:
    wire: list[Message[Any]] = [
        BytesMessage(data=b"1\n\r\n2\r\n"),
        TextMessage(data="3\n4"),  # the end of the frame ends a line as well
        BytesMessage(data=b"5\n"),
    ]
    assert await received_by_the_server(MCP_STREAMS, *wire) == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("is_in_pieces", [False, True])
async def test_mcp_streams_sends_whole_lines_in_frames_of_bounded_size(is_in_pieces: bool) -> None:
    lines = [b"x" * size for size in (100_000, 100_000, 100_000, FRAME_BYTES_MAX, 400_000, 5)]
    lines += [b"y" * 99] * 10_000

    async def send(channel: Channel) -> None:
        pieces = [line + b"\n" for line in lines]
        await channel.send(*(pieces if is_in_pieces else [b"".join(pieces)]))

    async with bare(send, MCP_STREAMS) as (stream, connection):
        found = [b""]
        for event in await events_to_the_end(stream, connection):
            if isinstance(event, BytesMessage):
                found[-1] += event.data
                found += [b""] if event.message_finished else []
    assert found.pop() == b""
    assert b"".join(found) == b"".join(line + b"\n" for line in lines)
    for frame in found:
        assert frame.endswith(b"\n")
        assert len(frame) <= FRAME_BYTES_MAX or frame.count(b"\n") == 1
    assert len(found) <= 2 + 3 + 1_000_000 // FRAME_BYTES_MAX + 1


# -- close codes


MASK = bytes(4)


@pytest.mark.parametrize("subprotocol", [MCP, MCP_STREAMS])
@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"\x81\x82" + MASK + b"\xff\xfe", 1007),
        (b"\x81\x02{}", 1002),  # not masked
        (b"\xc1\x82" + MASK + b"{}", 1002),  # compressed
        (b"\x83\x80" + MASK, 1002),  # no such opcode
        (b"\x80\x80" + MASK, 1002),  # continues nothing
        (b"\x89\xfe\x00\x80" + MASK + bytes(128), 1002),  # a ping too long
        (b"\x88\x81" + MASK + b"x", 1002),  # half a close code
    ],
)
async def test_a_violation_is_answered_with_its_close_code(
    subprotocol: str, wire: bytes, code: int
) -> None:
    received: list[Incoming] = []

    async def collect(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                received.extend(await channel.receive())
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"{}\n")

    async with bare(collect, subprotocol) as (stream, connection):
        await stream.send_all(connection.send(TextMessage(data='"before"')) + wire)
        events = await events_to_the_end(stream, connection)
    assert close_code(events) == code
    assert received == [b'"before"']


async def test_a_violation_is_named_whatever_the_sender_is_doing() -> None:
    async def talk_and_listen(channel: Channel) -> None:
        async def talk() -> None:
            while True:
                await channel.send(b"{}\n")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    await channel.receive()
            nursery.cancel_scope.cancel()

    for _ in range(20):
        async with bare(talk_and_listen) as (stream, connection):
            await stream.send_all(b"\x81\x82" + MASK + b"\xff\xfe")
            assert close_code(await events_to_the_end(stream, connection)) == 1007


async def test_a_cancelled_send_is_followed_by_a_farewell_alone() -> None:
    async def give_up(channel: Channel) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await channel.send(b"{}\n")
        assert not channel.is_writable()
        with pytest.raises(trio.BrokenResourceError):
            await channel.send(b"{}\n")

    async with bare(give_up) as (stream, connection):
        assert close_code(await events_to_the_end(stream, connection)) == 1001


@pytest.mark.parametrize("subprotocol", [MCP, MCP_STREAMS])
@pytest.mark.parametrize("data", ["x" * 50 * LIMIT, "é" * (LIMIT // 2) + "x"])
async def test_a_message_above_the_limit_in_bytes_closes_with_1009(
    subprotocol: str, data: str
) -> None:
    async with bare(echo, subprotocol) as (stream, connection):

        async def send() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(connection.send(TextMessage(data=data)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            events = await events_to_the_end(stream, connection)
        assert close_code(events) == 1009


FLOODS = {
    "empty fragments": (b"\x01\x80" + MASK, b"\x00\x80" + MASK),
    "fragments of a byte": (b"\x01\x81" + MASK + b"x", b"\x00\x81" + MASK + b"x"),
    "pings": (b"", b"\x89\x80" + MASK),
    "pongs": (b"", b"\x8a\x80" + MASK),
    "empty messages": (b"", b"\x81\x80" + MASK),
    "line ends": (b"", b"\x82\x81" + MASK + b"\n"),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_frames_that_bring_no_message_closes_with_1008(flood: str) -> None:
    """Each of them takes as long as one that does."""
    first, more = FLOODS[flood]
    async with bare(echo) as (stream, connection):

        async def send() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(first + more * 20_000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert close_code(await events_to_the_end(stream, connection)) == 1008


async def test_a_message_may_come_in_many_fragments_of_some_bytes() -> None:
    async with bare(echo, message_bytes_max=1_000_000) as (stream, connection):
        for number in range(5_000):
            is_last = number == 4_999
            part = TextMessage(data="x" * 99, message_finished=is_last)
            await stream.send_all(connection.send(part))
        events: list[Event] = []
        while sum(len(event.data) for event in events if isinstance(event, TextMessage)) < 495_000:
            data = bytes(await stream.receive_some())
            assert data
            connection.receive_data(data)
            events += connection.events()


async def test_what_came_whole_before_a_message_above_the_limit_is_received() -> None:
    received: list[Incoming] = []

    async def collect(channel: Channel) -> None:
        with contextlib.suppress(trio.EndOfChannel):
            while True:
                received.extend(await channel.receive())
                await trio.testing.wait_all_tasks_blocked()  # the reader is always ahead

    for data in ("x" * (LIMIT + 3), "é" * (LIMIT // 2) + "x"):
        received.clear()
        sent = [TextMessage(data=text) for text in ("1", "2", data, "3")]
        async with bare(collect) as (stream, connection):
            await stream.send_all(b"".join(map(connection.send, sent)))
            assert close_code(await events_to_the_end(stream, connection)) == 1009
        assert received == [b"1", b"2"]


async def test_a_ping_may_cross_our_close_frame() -> None:
    async def done(channel: Channel) -> None:
        await channel.send(b"1\n")

    async with bare(done) as (stream, connection):
        while not any(isinstance(event, CloseConnection) for event in connection.events()):
            connection.receive_data(bytes(await stream.receive_some()))
        ping, close = b"\x89\x80" + MASK, b"\x88\x82" + MASK + b"\x03\xe8"
        await stream.send_all(ping + close)
        assert await stream.receive_some() == b""


async def test_a_server_that_goes_away_says_1001() -> None:
    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(websocket.serve, echo, "127.0.0.1", 0))
        stream, connection = await open_bare_websocket(port, MCP)
        await stream.send_all(connection.send(TextMessage(data="1")))
        assert await messages_of(stream, connection, 1) == [TextMessage(data="1")]
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            assert close_code(await events_to_the_end(stream, connection)) == 1001
            await stream.aclose()


async def test_a_handler_that_is_done_closes_with_1000() -> None:
    async def done(channel: Channel) -> None:
        await channel.send(b"1\n")

    async with bare(done) as (stream, connection):
        assert close_code(await events_to_the_end(stream, connection)) == 1000


async def test_who_receives_while_another_task_closes_sees_the_end_at_once() -> None:
    ended: list[str] = []
    both_have_ended = trio.Event()

    async def handler(channel: Channel) -> None:
        async def expect_the_end(name: str) -> None:
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()
            ended.append(name)
            if len(ended) == 2:
                both_have_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_the_end, "before")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(channel.aclose)
            await trio.testing.wait_all_tasks_blocked()
            await expect_the_end("during")

    async with bare(handler) as (stream, connection):
        connection.receive_data(bytes(await stream.receive_some()))
        (close,) = connection.events()
        await both_have_ended.wait()  # and the peer has not answered
        assert isinstance(close, CloseConnection)
        late = b"\x81\x81" + MASK + b"1"  # what still comes is for nobody
        await stream.send_all(late + connection.send(close.response()))
        assert await stream.receive_some() == b""
    assert sorted(ended) == ["before", "during"]


async def test_a_handler_that_crashes_closes_with_1011() -> None:
    async def crash(channel: Channel) -> None:
        raise KeyError("a bug")

    codes: list[int] = []

    async def look() -> None:
        async with bare(crash) as (stream, connection):
            with trio.CancelScope(shield=True):
                codes.append(close_code(await events_to_the_end(stream, connection)))
                await stream.aclose()
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await look()
    assert caught.group_contains(KeyError)
    assert codes == [1011]


async def test_the_peer_s_close_is_answered_and_the_connection_ended() -> None:
    async with bare() as (stream, connection):
        await stream.send_all(connection.send(CloseConnection(code=4321, reason="bye")))
        assert close_code(await events_to_the_end(stream, connection)) == 4321


@pytest.mark.parametrize("subprotocol", [MCP, MCP_STREAMS])
async def test_nothing_follows_a_close_frame_and_control_frames_split_no_other(
    subprotocol: str,
) -> None:
    async def flood(channel: Channel) -> None:
        async def listen() -> None:
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    await channel.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            with contextlib.suppress(trio.BrokenResourceError):
                while True:
                    await channel.send((b"x" * 999 + b"\n") * 1000)

    async with bare(flood, subprotocol) as (stream, connection):
        wire = bytes(await stream.receive_some())
        for number in range(20):
            await stream.send_all(connection.send(Ping(payload=b"%d" % number)))
            wire += await stream.receive_some(1 << 20)
        await stream.send_all(connection.send(CloseConnection(code=1000)))
        while data := await stream.receive_some(1 << 20):
            wire += data
    frames = frames_of(wire)
    opcodes = [opcode for opcode, _ in frames]
    assert opcodes.index(0x88) == len(frames) - 1
    pongs = [payload for opcode, payload in frames if opcode == 0x8A]
    assert pongs
    assert pongs == sorted(pongs, key=int)


# -- the end


async def test_a_server_with_stalled_peers_ends_in_time() -> None:
    stalled = trio.Event()

    async def flood(channel: Channel) -> None:
        stalled.set()
        while True:
            await channel.send((b"x" * 999 + b"\n") * 1000)

    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(websocket.serve, flood, "127.0.0.1", 0))
        peers = [await open_bare_websocket(port, MCP) for _ in range(10)]
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert stalled.is_set()
        before = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - before < 10  # promised are 2; the machine may be slow
    for stream, _ in peers:
        await stream.aclose()
