"""One JSON message a line: the framing of stdio, of relays and of the memory transport.

`LineSplitter` has the rules, without I/O. `LineChannel` applies them to any `trio.abc.Stream`.
`open_fds` makes a `LineChannel` of two file descriptors.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import trio

from streams.exchange import Scopes
from streams.forks import withhold
from streams.messages import (
    LEADING_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Block,
    Incoming,
    TooLarge,
    leading_id,
)
from streams.turns import Turns
from transports.net.sockets import (
    CLOSE_S,
    READ_BYTES,
    close_at_once,
    enlarge_pipe,
    has_reader,
    send_pieces,
    unsent_bytes,
)

# Where one read brings more lines, it is handled in pieces, and other tasks run in between.
LINES_MAX: Final = 256
PIECE_BYTES: Final = 4 * 1024


class LineSplitter:
    """Cuts a stream of bytes into lines. It holds no more than one line of `limit` bytes.

    Blank lines are skipped, and a carriage return before the newline is removed. A line above the
    limit is discarded as it comes; one `TooLarge` takes its place.
    """

    def __init__(self, limit: int) -> None:
        self.refused = 0  # how many lines were above the limit
        self._limit = limit
        self._rest = bytearray()  # the start of a line whose newline has not come
        self._is_skipping = False

    def feed(self, data: bytes) -> list[Incoming]:
        """The lines that `data` completes, in order."""
        lines: list[bytes] = data.split(b"\n")
        rest = lines.pop()
        found: list[Incoming] = []
        if lines:
            found += self._first(lines)
            found += self._whole(lines, is_large=len(data) > self._limit, has_cr=b"\r" in data)
        found += self._keep(rest)
        return found

    def blocks(self, data: bytes, start: int, stop: int) -> list[Block | TooLarge]:
        """Like `feed` for `data` from `start` to `stop`, but in blocks as large as possible."""
        end = data.rfind(b"\n", start, stop) + 1
        # If all lines together are below the limit, each of them is.
        is_short = len(self._rest) + end - start <= self._limit
        has_cr = data.find(b"\r", start, end) >= 0 or b"\r" in self._rest
        if not (end and is_short) or self._is_skipping or has_cr:
            return in_blocks(self.feed(data[start:stop]))
        found: list[Block | TooLarge] = []
        if self._rest:
            first = data.index(b"\n", start) + 1
            line = bytes(self._rest + data[start:first])
            found.append(Block(line, 0, len(line)))
            self._rest.clear()
            start = first
        if start < end:
            found.append(Block(data, start, end))
        return found + in_blocks(self._keep(data[end:stop]))

    def flush(self) -> list[Incoming]:
        """Complete the last line, where something other than a newline ends it."""
        return self.feed(b"\n") if self._rest or self._is_skipping else []

    def _first(self, lines: list[bytes]) -> list[Incoming]:
        """Take the first of `lines`, which completes the line that was kept."""
        line = lines.pop(0)
        if self._is_skipping:
            self._is_skipping = False
            return []
        if self._rest:
            line = bytes(self._rest + line)
            self._rest.clear()
        return self._whole([line], is_large=True, has_cr=True)

    def _whole(self, lines: list[bytes], *, is_large: bool, has_cr: bool) -> list[Incoming]:
        if has_cr:
            lines = [line.removesuffix(b"\r") for line in lines]
        filled = filter(None, lines)
        if not is_large:
            return list(filled)
        return [line if len(line) <= self._limit else self._refuse(line) for line in filled]

    def _keep(self, rest: bytes) -> list[Incoming]:
        if self._is_skipping:
            return []
        # The byte above the limit may be the carriage return, which does not count.
        if len(self._rest) + len(rest) <= self._limit + 1:
            self._rest += rest
            return []
        start = bytes(self._rest[:LEADING_BYTES_MAX] + rest[:LEADING_BYTES_MAX])
        self._rest = bytearray()
        self._is_skipping = True
        return [self._refuse(start)]

    def _refuse(self, start: bytes) -> TooLarge:
        self.refused += 1
        return TooLarge(self._limit, leading_id(start))


def in_blocks(lines: Iterable[Incoming]) -> list[Block | TooLarge]:
    """Lines without newlines as blocks, as large as possible."""
    found: list[Block | TooLarge] = []
    for is_line, group in itertools.groupby(lines, lambda line: isinstance(line, bytes)):
        if is_line:
            data = b"".join(line + b"\n" for line in group if isinstance(line, bytes))
            found.append(Block(data, 0, len(data)))
        else:
            found += [lost for lost in group if isinstance(lost, TooLarge)]
    return found


def lines_of(blocks: Iterable[Block | TooLarge]) -> list[Incoming]:
    """The lines in blocks, without their newlines."""
    found: list[Incoming] = []
    for block in blocks:
        if isinstance(block, TooLarge):
            found.append(block)
        else:
            found += filter(None, block.data[block.start : block.end].split(b"\n"))
    return found


def last_lines(blocks: Sequence[Block | TooLarge], most: int) -> list[Incoming]:
    """At most `most` of the last lines in blocks, without their newlines, the very last one first.

    Blank lines are skipped.
    """
    found: list[Incoming] = []
    for block in reversed(blocks):
        if isinstance(block, TooLarge):
            found.append(block)
            continue
        end = block.end
        while end > block.start and len(found) < most:
            start = max(block.start, block.data.rfind(b"\n", block.start, end - 1) + 1)
            if start < end - 1:
                found.append(block.data[start : end - 1])
            end = start
    return found[:most]


def one_line(message: bytes) -> bytes:
    """A message as a line: pretty-printed JSON loses its line breaks.

    Text that is not JSON stays as it is: its receiver answers with an error.
    """
    message = message.strip(b"\r\n")
    if b"\n" not in message:
        return message
    try:
        return msgspec.json.format(message, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return message


class LineChannel:
    """A `ClientChannel` that frames messages by newlines, over any `trio.abc.Stream`.

    `unsent` returns how many bytes the peer has not taken yet, and `has_reader` whether the peer is
    still there, where that can be known.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        principal: str,
        transport: str = "stdio",
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        unsent: Callable[[], int | None] | None = None,
        has_reader: Callable[[], bool] | None = None,
    ) -> None:
        self._stream = stream
        self._principal = principal
        self.transport = transport  # see `streams.exchange.transport_of`
        self._splitter = LineSplitter(message_bytes_max)
        self._unsent = unsent
        self._has_reader = has_reader
        self._is_closed = False
        self._turns = Turns()
        self._unseen = b""  # was read, and not yet split into lines

    @property
    def principal(self) -> str:
        return self._principal

    @property
    def scopes(self) -> Scopes:
        return None  # the peer is a user of this machine, or the server

    async def receive(self) -> Sequence[Incoming]:
        while True:
            if self._unseen:
                await self._turns.wait()
                data, self._unseen = self._unseen, b""
            else:
                data = await self._read()
            if data.count(b"\n") > LINES_MAX:
                data, self._unseen = data[:PIECE_BYTES], data[PIECE_BYTES:]
            if found := self._splitter.feed(data):
                return found
            if self._turns.spend():
                await self._turns.wait()

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        while True:
            data = await self._read()
            if found := self._splitter.blocks(data, 0, len(data)):
                return found

    async def _read(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(READ_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise trio.EndOfChannel from None
        if not data:
            # A last line without a newline is half a message: its sender was interrupted.
            raise trio.EndOfChannel
        return data

    async def send(self, *lines: bytes) -> None:
        try:
            await send_pieces(self._stream, lines)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._is_closed = True
            raise trio.BrokenResourceError("the peer is gone") from None
        except BaseException:
            # Perhaps half a line was written, and nothing may follow it.
            self._is_closed = True
            await close_at_once(self._stream)
            raise

    async def ping(self) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    def unsent_bytes(self) -> int | None:
        return self._unsent() if self._unsent else None

    def is_writable(self) -> bool:
        return not self._is_closed and (self._has_reader is None or self._has_reader())

    async def aclose(self) -> None:
        self._is_closed = True
        with trio.move_on_after(CLOSE_S):
            await self._stream.aclose()


def open_fds(
    read_fd: int,
    write_fd: int,
    *,
    principal: str,
    transport: str = "stdio",
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> LineChannel:
    """A channel that owns two file descriptors: pipes, sockets, terminals or regular files.

    Closing the channel restores their blocking mode. Raises `OSError` when one of them is invalid;
    then both are closed.
    """
    try:
        os.fstat(read_fd)
        os.fstat(write_fd)
    except OSError:
        for fd in (read_fd, write_fd):
            with contextlib.suppress(OSError):  # one of them is invalid
                os.close(fd)
        raise
    reader = trio.lowlevel.FdStream(read_fd)
    writer = trio.lowlevel.FdStream(write_fd)
    withhold(reader)
    withhold(writer)
    enlarge_pipe(read_fd)
    enlarge_pipe(write_fd)
    return LineChannel(
        trio.StapledStream(writer, reader),
        principal=principal,
        transport=transport,
        message_bytes_max=message_bytes_max,
        unsent=lambda: unsent_bytes(writer.fileno()),
        has_reader=lambda: has_reader(writer.fileno()),
    )
