"""The two WebSocket subprotocols, without I/O: lines to frames, and frames to messages.

`mcp` is one message a text frame; `mcp-streams.v1` is a binary frame of whole lines.
"""

import struct
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from wsproto.connection import Connection
from wsproto.events import BytesMessage, TextMessage
from wsproto.frame_protocol import Opcode

from streams.messages import Incoming, TooLarge
from transports.lines import LineSplitter

MCP: Final = "mcp"
MCP_STREAMS: Final = "mcp-streams.v1"

# The most that one binary frame holds, unless one line alone is longer; and what is framed at a
# time for the other subprotocol.
FRAME_BYTES_MAX: Final = 256 * 1024


class Oversize(Exception):
    """A message above the limit; a WebSocket ends with it (close code 1009).

    `before` are the messages that came whole, ahead of it.
    """

    def __init__(self, before: list[Incoming]) -> None:
        super().__init__("a message above the limit")
        self.before = before


class Framing(Protocol):
    """What a subprotocol makes of lines and of frames. One for each connection: it has a state."""

    def frames(self, lines: bytes) -> Iterator[bytes]:
        """Whole lines, as the bytes of whole frames, a bounded piece at a time."""

    def feed(self, event: TextMessage | BytesMessage) -> list[Incoming]:
        """The messages that a piece of a frame completes. Raises `Oversize`."""


class LineFraming:
    """`mcp-streams.v1`. Lines are handed on as they come, long before their frame ends."""

    def __init__(self, connection: Connection, message_bytes_max: int) -> None:
        self._connection = connection
        self._splitter = LineSplitter(message_bytes_max)

    def frames(self, lines: bytes) -> Iterator[bytes]:
        for piece in pieces(lines):
            if self._connection.client:
                yield self._connection.send(BytesMessage(data=piece))
            else:
                yield b"".join((_BINARY[len(piece)], piece))

    def feed(self, event: TextMessage | BytesMessage) -> list[Incoming]:
        found = self._splitter.feed(_payload(event))
        if event.message_finished:
            found += self._splitter.flush()  # the frame ends the line as well as a newline would
        if self._splitter.refused:
            first = next(place for place, line in enumerate(found) if isinstance(line, TooLarge))
            raise Oversize(found[:first])
        return found


class MessageFraming:
    """`mcp`. A binary frame is taken as a text frame is."""

    def __init__(self, connection: Connection, message_bytes_max: int) -> None:
        self._connection = connection
        self._limit = message_bytes_max
        self._message = bytearray()

    def frames(self, lines: bytes) -> Iterator[bytes]:
        for piece in pieces(lines):
            messages = piece.split(b"\n")
            if not messages[-1]:
                messages.pop()
            if self._connection.client:
                yield b"".join(
                    self._connection.send(TextMessage(data=message.decode()))
                    for message in messages
                )
            else:
                yield _text_frames(messages)

    def feed(self, event: TextMessage | BytesMessage) -> list[Incoming]:
        self._message += _payload(event)
        # Line ends around the message are not counted, but bounded all the same.
        if len(self._message) > self._limit + 2:
            raise Oversize([])
        if not event.message_finished:
            return []
        message = _one_line(bytes(self._message))
        self._message.clear()
        if len(message) > self._limit:
            raise Oversize([])
        return [message] if message else []


def framing_of(subprotocol: str | None, connection: Connection, message_bytes_max: int) -> Framing:
    """The framing of an agreed subprotocol; none is taken for `mcp`."""
    if subprotocol == MCP_STREAMS:
        return LineFraming(connection, message_bytes_max)
    return MessageFraming(connection, message_bytes_max)


def pieces(lines: bytes) -> Iterator[bytes]:
    """Cut whole lines into pieces of at most `FRAME_BYTES_MAX`, or of one line that is longer."""
    start = 0
    while len(lines) - start > FRAME_BYTES_MAX:
        end = lines.rfind(b"\n", start, start + FRAME_BYTES_MAX) + 1
        if not end:
            end = lines.find(b"\n", start + FRAME_BYTES_MAX) + 1 or len(lines)
        yield lines[start:end]
        start = end
    if start < len(lines):
        yield lines[start:] if start else lines


class _Headers(dict[int, bytes]):
    """The header of an unmasked frame, by the length of its payload; made when first used.

    "The length of the payload data, in bytes: if 0-125, that is the payload length. If 126, the
    following 2 bytes […]. If 127, the following 8 bytes" (RFC 6455, 5.2).

    A server's frames are made with it, past wsproto, which takes 10 µs a frame, this 0.2, and
    copies every payload three times. It keeps no state for unfragmented frames where no extension
    was agreed on; the sender sees to it that the connection is open.
    """

    def __init__(self, opcode: Opcode) -> None:
        self._first = 0x80 | opcode  # the whole message in one frame

    def __missing__(self, length: int) -> bytes:
        if length > 0xFFFF:
            return struct.pack("!BBQ", self._first, 127, length)  # too many lengths to keep
        if length > 125:
            header = struct.pack("!BBH", self._first, 126, length)
        else:
            header = struct.pack("!BB", self._first, length)
        self[length] = header
        return header


_TEXT: Final = _Headers(Opcode.TEXT)
_BINARY: Final = _Headers(Opcode.BINARY)


def _text_frames(messages: list[bytes]) -> bytes:
    """One frame for each message, as a server sends it."""
    parts = [b""] * (2 * len(messages))
    parts[::2] = map(_TEXT.__getitem__, map(len, messages))
    parts[1::2] = messages
    return b"".join(parts)


def _payload(event: TextMessage | BytesMessage) -> bytes:
    data = event.data
    return data.encode() if isinstance(data, str) else bytes(data)


def _one_line(message: bytes) -> bytes:
    """A message as a line: pretty-printed JSON loses its line breaks.

    What is no JSON is passed on as it is, to be answered like any other.
    """
    message = message.strip(b"\r\n")
    if b"\n" not in message:
        return message
    try:
        return msgspec.json.format(message, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return message
