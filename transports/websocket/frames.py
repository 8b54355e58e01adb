"""The two WebSocket subprotocols: how lines become frames, and frames become lines.

`mcp` sends one message in each text frame; `mcp-streams.v1` sends whole lines in binary frames.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from wsproto.frame_protocol import Opcode

from streams.messages import Incoming, TooLarge, lines_in, split_lines
from transports.lines import LineSplitter, one_line
from transports.net.sockets import READ_BYTES

MCP: Final = "mcp"
MCP_STREAMS: Final = "mcp-streams.v1"

# The size of a binary frame, unless one line alone is longer; and of the lines that `mcp` frames at
# a time.
FRAME_BYTES_MAX: Final = 256 * 1024

# A write of more pieces costs more than joining them first.
PIECES_MAX: Final = 256


class Oversize(Exception):
    """A message above the limit, which ends the WebSocket (close code 1009).

    `before` are the complete messages before it.
    """

    def __init__(self, before: list[Incoming]) -> None:
        super().__init__("a message above the limit")
        self.before = before


class WebSocketFraming(Protocol):
    """A subprotocol on one connection."""

    @property
    def message_size_max(self) -> int:
        """The longest WebSocket message to accept, in bytes, or characters of text."""

    @property
    def unclaimed_bytes_max(self) -> int:
        """The bytes that a message may take on the wire, with all headers of its fragments."""

    def messages(self, lines: Sequence[bytes]) -> Sequence[bytes | str]:
        """Whole lines as the messages that a client sends, binary or text."""

    def frames(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Whole lines as the frames that a server sends, in pieces to be written in order."""

    def feed(self, message: str | bytes) -> list[Incoming]:
        """The lines in a WebSocket message. Raises `Oversize`."""


class LineFraming:
    """`mcp-streams.v1`."""

    def __init__(self, message_bytes_max: int) -> None:
        # Newlines around a message do not count for the limit, but are bounded here.
        self.message_size_max = max(message_bytes_max + 2, FRAME_BYTES_MAX)
        self.unclaimed_bytes_max = _unclaimed_bytes_max(self.message_size_max)
        self.splitter = LineSplitter(message_bytes_max)

    def messages(self, lines: Sequence[bytes]) -> Sequence[bytes | str]:
        return (b"".join(lines),)

    def frames(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        return _BINARY[sum(map(len, lines))], *lines

    def feed(self, message: str | bytes) -> list[Incoming]:
        found = self.splitter.feed(_as_bytes(message))
        found += self.splitter.flush()  # the message ends the line as well as a newline would
        if self.splitter.refused:
            first = next(place for place, line in enumerate(found) if isinstance(line, TooLarge))
            raise Oversize(found[:first])
        return found


class MessageFraming:
    """`mcp`. A binary frame is read like a text frame."""

    def __init__(self, message_bytes_max: int) -> None:
        self.message_size_max = message_bytes_max + 2
        self.unclaimed_bytes_max = _unclaimed_bytes_max(self.message_size_max)
        self._limit = message_bytes_max

    def messages(self, lines: Sequence[bytes]) -> Sequence[bytes | str]:
        return [message.decode() for message in _messages(lines)]

    def frames(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        return _text_frames(_messages(lines))

    def feed(self, message: str | bytes) -> list[Incoming]:
        line = one_line(_as_bytes(message))
        if len(line) > self._limit:
            raise Oversize([])
        return [line] if line else []


def framing_of(subprotocol: str | None, message_bytes_max: int) -> WebSocketFraming:
    """The framing of the agreed subprotocol; `mcp` where none was agreed on."""
    if subprotocol == MCP_STREAMS:
        return LineFraming(message_bytes_max)
    return MessageFraming(message_bytes_max)


def _unclaimed_bytes_max(message_size_max: int) -> int:
    """A fragment of one byte takes seven bytes on the wire; a character takes up to four."""
    return 8 * message_size_max + READ_BYTES


def packed(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Group lines into frames of at most `FRAME_BYTES_MAX`, or of one longer line."""
    if 0 < sum(map(len, lines)) <= FRAME_BYTES_MAX:
        yield lines
        return
    frame: list[bytes] = []
    size = 0
    for line in lines:
        pieces = (line,) if len(line) <= FRAME_BYTES_MAX else split_lines(line, FRAME_BYTES_MAX)
        for piece in pieces:
            if frame and size + len(piece) > FRAME_BYTES_MAX:
                yield frame
                frame, size = [], 0
            frame.append(piece)
            size += len(piece)
    if frame:
        yield frame


class _Headers(dict[int, bytes]):
    """The header of an unmasked frame, by the length of its payload; made when first used.

    "The length of the payload data, in bytes: if 0-125, that is the payload length. If 126, the
    following 2 bytes […]. If 127, the following 8 bytes" (RFC 6455, 5.2).

    A server frames with this instead of wsproto, which takes 15 µs a frame instead of 0.2, and
    copies each payload: the server then needs 1.6 times the CPU time to send messages of 200 bytes
    over `mcp`. wsproto would keep no state of such frames: they are unfragmented, and no extension
    was agreed on. `ServerWebSocket` ensures that nothing follows a Close frame.
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


def _messages(lines: Sequence[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for piece in lines:
        found += [line[:-1] for line in lines_in(piece)]
    return found


def _text_frames(messages: list[bytes]) -> Sequence[bytes]:
    """One frame for each message, as a server sends it."""
    parts = [b""] * (2 * len(messages))
    parts[::2] = map(_TEXT.__getitem__, map(len, messages))
    parts[1::2] = messages
    return parts if len(parts) <= PIECES_MAX else [b"".join(parts)]


def _as_bytes(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else message
