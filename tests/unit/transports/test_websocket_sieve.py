"""Frames that a client takes past trio-websocket, in order; all others are left to it."""

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Message,
    Ping,
    Request,
    TextMessage,
)

from streams.messages import Incoming
from transports import websocket
from transports.lines import lines_of
from transports.websocket.frames import MCP_STREAMS
from transports.websocket.sieve import Piece, Sieve, until_left

LONGEST = 70_000

payloads = st.one_of(
    st.binary(max_size=130),
    st.sampled_from([126, 0xFFFF, 0x10000, LONGEST, LONGEST + 1]).map(bytes),
)
fragmented = st.lists(st.binary(max_size=5), min_size=2, max_size=4).map(
    lambda parts: [
        BytesMessage(data=part, message_finished=at == len(parts) - 1)
        for at, part in enumerate(parts)
    ]
)
events = st.one_of(
    payloads.map(lambda data: [BytesMessage(data=data)]),
    st.text(max_size=5).map(lambda text: [TextMessage(data=text)]),
    st.binary(max_size=125).map(lambda data: [Ping(payload=data)]),
    fragmented,
)


def wire(sent: list[list[Any]]) -> bytes:
    server = Connection(ConnectionType.SERVER)
    return b"".join(bytes(server.send(event)) for group in sent for event in group)


def read(data: bytes, connection: Connection, found: list[Any]) -> None:
    """Messages, each in one piece, and other events."""
    connection.receive_data(data)
    for event in connection.events():
        is_more = found and isinstance(found[-1], list)
        if not isinstance(event, Message):
            found.insert(len(found) - 1 if is_more else len(found), event)
            continue
        parts = found.pop() if is_more else []
        parts.append(event.data)
        empty: Any = "" if isinstance(event.data, str) else b""
        found.append(empty.join(parts) if event.message_finished else parts)


def sifted(data: bytes, cuts: list[int]) -> list[Any]:
    sieve, connection = Sieve(LONGEST), Connection(ConnectionType.CLIENT)
    found: list[Any] = []
    taken = b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        for piece in sieve.feed(data[start:end]):
            if isinstance(piece, Piece):
                taken += piece.data[piece.start : piece.end]
                if piece.is_last:
                    found.append(taken)
                    taken = b""
            else:
                read(piece, connection, found)
    assert not taken
    return found


@settings(deadline=None)  # a busy machine may take longer over an example
@given(
    sent=st.lists(events, max_size=8),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    ending=st.sampled_from([b"", b"\x88\x00", b"\x88\x00\x82\x01x"]),
)
def test_nothing_is_lost_or_moved_wherever_the_bytes_are_cut(
    sent: list[list[Any]], cuts: list[float], ending: bytes
) -> None:
    data = wire(sent) + ending
    expected: list[Any] = []
    read(data, Connection(ConnectionType.CLIENT), expected)
    assert sifted(data, sorted(int(cut * len(data)) for cut in cuts)) == expected
    assert sifted(data, list(range(1, min(len(data), 2_000)))) == expected


@pytest.mark.parametrize(
    "violation",
    [
        b"\x82\x81\x00\x00\x00\x00x",  # masked
        b"\xc2\x01x",  # compressed
        b"\x83\x00",  # no such opcode
        b"\x80\x01x",  # continues nothing
        b"\x02\x01x\x82\x01y",  # begins a message inside another
        b"\x82\x7e\x00\x01x",  # a length in more bytes than it needs
        b"\x82\x7f" + struct.pack("!Q", 200) + bytes(200),
        b"\x82\x7f" + struct.pack("!Q", 1 << 63) + b"x",
        b"\x89\x7e\x00\x80" + bytes(128),  # a ping too long
    ],
)
def test_what_breaks_a_rule_is_left_to_who_knows_the_rules(violation: bytes) -> None:
    before = wire([[BytesMessage(data=b"before")]])
    for cuts in ([], list(range(1, len(before + violation)))):
        found = sifted(before + violation, cuts)
        assert found[0] == b"before"
        close = next(event for event in found if isinstance(event, CloseConnection))
        assert close.code == 1002


def test_payload_is_handed_over_before_its_frame_is_whole() -> None:
    sieve = Sieve(LONGEST)
    data = wire([[BytesMessage(data=b"ab" * 100)]])
    (first,) = sieve.feed(data[:50])
    assert isinstance(first, Piece)
    assert (first.start, first.end, first.is_last) == (4, 50, False)
    (second,) = sieve.feed(data[50:])
    assert isinstance(second, Piece)
    assert second.is_last


# -- over a socket


async def accepted(stream: trio.SocketStream) -> Connection:
    """The server's side of a WebSocket, past its handshake."""
    protocol = WSConnection(ConnectionType.SERVER)
    while True:
        protocol.receive_data(bytes(await stream.receive_some()))
        for event in protocol.events():
            assert isinstance(event, Request)
            await stream.send_all(protocol.send(AcceptConnection(subprotocol=MCP_STREAMS)))
            assert protocol.connection is not None
            return protocol.connection


async def received(sent: bytes, *, in_blocks: bool) -> tuple[list[Incoming], list[Event]]:
    """The messages that a client receives from `sent`, and its answers."""
    said: list[Event] = []

    async def serve(stream: trio.SocketStream) -> None:
        connection = await accepted(stream)
        await stream.send_all(sent)
        while data := await stream.receive_some():
            connection.receive_data(bytes(data))
            said.extend(connection.events())

    found: list[Incoming] = []
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        port = listener.socket.getsockname()[1]
        async with websocket.connect(f"ws://127.0.0.1:{port}", message_bytes_max=1_000) as channel:
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    if in_blocks:
                        found += lines_of(await channel.receive_blocks())
                    else:
                        found += await channel.receive()
        nursery.cancel_scope.cancel()
    return found, said


@pytest.mark.parametrize("in_blocks", [False, True])
async def test_frames_of_every_kind_arrive_in_order(in_blocks: bool) -> None:
    sent = wire(
        [
            [BytesMessage(data=b"1\n2\n")],
            [Ping(payload=b"here?")],
            [BytesMessage(data=b"3\n4", message_finished=False), BytesMessage(data=b"4\n")],
            [BytesMessage(data=b"5\n")],
            [TextMessage(data="6\n")],
            [BytesMessage(data=b"7")],  # the end of the frame ends a line as well
            [BytesMessage(data=b"8\n")],
            [CloseConnection(code=1000)],
        ]
    )
    found, said = await received(sent, in_blocks=in_blocks)
    assert found == [b"1", b"2", b"3", b"44", b"5", b"6", b"7", b"8"]
    assert [type(event).__name__ for event in said] == ["Pong", "CloseConnection"]


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    "data", [b"1\n" + b"x" * 1_001 + b"\n2\n", b"1\n" + b"x" * 5_000, b"1\n" + b"x" * 300_000]
)
async def test_a_message_above_the_limit_closes_behind_what_came_before(
    data: bytes, in_blocks: bool
) -> None:
    sent = wire([[BytesMessage(data=b"0\n")], [BytesMessage(data=data)]])
    found, said = await received(sent, in_blocks=in_blocks)
    assert found in ([b"0", b"1"], [b"0"])  # a frame above 256 KiB is not begun
    (close,) = said
    assert isinstance(close, CloseConnection)
    assert close.code == 1009


def test_what_is_left_comes_between_the_pieces_before_and_behind_it() -> None:
    def payloads_of(pieces: Sequence[Piece]) -> list[bytes]:
        return [piece.data[piece.start : piece.end] for piece in pieces]

    one, two, three = ([BytesMessage(data=data)] for data in (b"1\n", b"2\n", b"3\n"))
    ping = [Ping(payload=b"p")]
    sieved = Sieve(100).feed(wire([one, two, ping, three]))
    taken, left = until_left(sieved)
    assert (payloads_of(taken), left) == ([b"1\n", b"2\n"], wire([ping]))
    taken, left = until_left(sieved)
    assert (payloads_of(taken), left) == ([b"3\n"], b"")
    assert until_left(sieved) == ([], b"")


async def test_the_first_frame_may_come_in_pieces() -> None:
    """The client reads the first piece while it takes up its connection."""
    frame = wire([[BytesMessage(data=b"1\n" + b"2" * 200 + b"\n")], [BytesMessage(data=b"3\n")]])

    async def serve(stream: trio.SocketStream) -> None:
        await accepted(stream)
        for piece in (frame[:10], frame[10:]):
            await trio.testing.wait_all_tasks_blocked()
            await stream.send_all(piece)
        await trio.sleep_forever()

    found: list[Incoming] = []
    with trio.fail_after(100):  # a bound for a test that hangs
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            port = listener.socket.getsockname()[1]
            async with websocket.connect(f"ws://127.0.0.1:{port}") as channel:
                found += await channel.receive()
                assert found == [b"1"], "a line is handed over before its frame is whole"
                while len(found) < 3:
                    found += await channel.receive()
            nursery.cancel_scope.cancel()
    assert found == [b"1", b"2" * 200, b"3"]
