"""Short messages are taken ahead of wsproto: the events are those of wsproto alone."""

import random
from typing import Any

import pytest
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage
from wsproto.frame_protocol import FrameProtocol, Opcode

from transports.websocket.frames import ShortMessages

SIZES = (0, 1, 3, 125, 126, 127, 300, 65_535, 65_536, 70_000)


def frame(payload: bytes, opcode: Opcode = Opcode.BINARY, *, fin: bool = True) -> bytes:
    """One masked frame."""
    protocol = FrameProtocol(client=True, extensions=[])
    return bytes(protocol._serialize_frame(opcode, payload, fin=fin))


def events_of(pieces: list[bytes], *, is_alone: bool) -> list[Event]:
    """The events up to the first Close frame or violation, with whole messages."""
    short, protocol = ShortMessages(), Connection(ConnectionType.SERVER)
    found: list[Event] = []
    parts: list[Any] = []

    def take(event: Event) -> None:
        if not isinstance(event, Message):
            found.append(event)
            return
        parts.append(event.data)
        if event.message_finished:
            found.append(type(event)(data=type(event.data)().join(parts)))
            parts.clear()

    for piece in pieces:
        for part in [piece] if is_alone else short.feed(piece):
            if isinstance(part, bytes):
                if protocol.state is ConnectionState.OPEN:
                    protocol.receive_data(part)
                    for event in protocol.events():
                        take(event)
                        if isinstance(event, CloseConnection):
                            return found
            else:
                take(part)
    return found


def cut(data: bytes, generator: random.Random) -> list[bytes]:
    few = [[1], [2, 5, 9]] if len(data) < 5_000 else []  # bytes in a piece
    sizes = generator.choice([*few, [1_000], [65_536], [len(data) + 1]])
    found, at = [], 0
    while at < len(data):
        size = generator.choice(sizes)
        found.append(data[at : at + size])
        at += size
    return found


def some_frames(generator: random.Random, size_max: int) -> list[bytes]:
    size = min(size_max, generator.choice(SIZES))
    text = ("é" * (size // 2) + "x" * (size % 2)).encode()
    half = size // 2
    return generator.choice(
        [
            [frame(generator.randbytes(size))],
            [frame(text, Opcode.TEXT)],
            [frame(b"ping", Opcode.PING)],
            [
                frame(text[:half], Opcode.TEXT, fin=False),
                frame(b"between", Opcode.PING),
                frame(text[half:], Opcode.CONTINUATION),
            ],
        ]
    )


VIOLATIONS = {
    "unmasked": b"\x82\x01x",
    "text that is not UTF-8": frame(b"\xff", Opcode.TEXT),
    "a length in too many bytes": b"\x82\xfe\x00\x05\0\0\0\0hello",
    "a length in far too many bytes": b"\x82\xff" + (300).to_bytes(8, "big") + bytes(4 + 300),
    "a reserved bit": b"\xc2\x81\0\0\0\0x",
    "an unknown opcode": b"\x83\x81\0\0\0\0x",
    "a continuation of nothing": frame(b"x", Opcode.CONTINUATION),
    "a message between fragments": frame(b"a", fin=False) + frame(b"whole"),
    "a long ping": b"\x89\xfe\x00\x7e\0\0\0\0" + bytes(126),
    "a close frame": frame(b"\x03\xe8done", Opcode.CLOSE),
}


@pytest.mark.parametrize("seed", range(60))
def test_all_frames_in_any_pieces_mean_the_same(seed: int) -> None:
    generator = random.Random(seed)
    size_max = generator.choice([300, SIZES[-1]])
    frames = [each for _ in range(12) for each in some_frames(generator, size_max)]
    pieces = cut(b"".join(frames), generator)
    assert events_of(pieces, is_alone=False) == events_of(pieces, is_alone=True) != []


@pytest.mark.parametrize("name", VIOLATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_a_violation_is_left_to_wsproto_and_nothing_follows_it(name: str, seed: int) -> None:
    generator = random.Random(seed)
    data = frame(b"first") + VIOLATIONS[name] + frame(b"last")
    pieces = cut(data, generator)
    found = events_of(pieces, is_alone=False)
    assert found == events_of(pieces, is_alone=True)
    assert found[0] == BytesMessage(data=b"first")
    assert isinstance(found[-1], CloseConnection)


@pytest.mark.parametrize("size", SIZES)
def test_a_message_in_one_frame_and_one_read_is_taken(size: int) -> None:
    text = "x" * size
    wire = frame(text.encode(), Opcode.TEXT) + frame(b"p", Opcode.PING) + frame(text.encode())
    first, ping, last = ShortMessages().feed(wire)
    is_short = size < 65_536
    assert (first == TextMessage(data=text)) == is_short
    assert (last == BytesMessage(data=text.encode())) == is_short
    assert isinstance(ping, bytes)
    protocol = Connection(ConnectionType.SERVER)
    protocol.receive_data(ping)
    assert list(protocol.events()) == [Ping(payload=b"p")]
