"""Newline framing, without I/O and over trio's own streams."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from streams.messages import Incoming, TooLarge
from transports.lines import LineChannel, LineSplitter, open_fds
from transports.net.sockets import PIPE_BYTES, unsent_bytes


def split(pieces: Iterable[bytes], limit: int = 100) -> list[Incoming]:
    splitter = LineSplitter(limit)
    return [line for piece in pieces for line in splitter.feed(piece)]


def test_lines_come_out_as_they_went_in() -> None:
    assert split([b"one\ntwo\n", b"thr", b"ee", b"\nfour"]) == [b"one", b"two", b"three"]


def test_a_carriage_return_before_the_newline_is_dropped_wherever_it_is_cut() -> None:
    assert split([b"one\r\ntwo\r", b"\nthree\r\n"]) == [b"one", b"two", b"three"]


def test_blank_lines_are_skipped() -> None:
    assert split([b"\n\r\n\none\n\n\r", b"\n", b"two\n"]) == [b"one", b"two"]


def test_a_line_of_the_limit_passes_whatever_ends_it() -> None:
    line = b"x" * 100
    assert split([line + b"\n", line + b"\r\n", line + b"\r", b"\n"]) == [line] * 3


def test_a_line_above_the_limit_leaves_one_mark_in_its_place() -> None:
    pieces = [b"before\n", b"x" * 101, b"x" * 5000, b"x\nafter\n" + b"y" * 102 + b"\nlast\n"]
    assert split(pieces) == [b"before", TooLarge(100), b"after", TooLarge(100), b"last"]


def test_a_line_is_refused_as_soon_as_it_is_too_long() -> None:
    splitter = LineSplitter(100)
    assert splitter.feed(b"x" * 102) == [TooLarge(100)]
    assert splitter.feed(b"x" * 102) == []


@pytest.mark.parametrize("size", [1, 7, 50, 5000])
@pytest.mark.parametrize(
    ("start", "request_id"),
    [
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":"', 7),
        (b'{ "method" : "ping", "id" : "a b" , "params":{"a":"', "a b"),
        (b'{"id":-1,"method":"ping","a":"', -1),
        (b'{"jsonrpc":"2.0","id":"theirs","result":{"method":"', None),
        (b'{"jsonrpc":"2.0","id":7.5,"method":"ping","a":"', None),
        (b'{"params":{"id":7,"method":"ping"},"a":"', None),
        (b'[{"id":7,"method":"ping","a":"', None),
        (b'{"a":"{\\"id\\":7,\\"method\\":"', None),
    ],
)
def test_a_line_above_the_limit_leaves_the_id_that_it_began_with(
    start: bytes, request_id: int | str | None, size: int
) -> None:
    line = start + b"x" * 2000 + b'"}\n'
    pieces = [line[at : at + size] for at in range(0, len(line), size)]
    assert split(pieces) == [TooLarge(100, request_id)]


def test_half_a_line_can_be_ended_by_other_means() -> None:
    splitter = LineSplitter(100)
    splitter.feed(b"half")
    assert splitter.flush() == [b"half"]
    assert splitter.flush() == []
    splitter.feed(b"x" * 200)
    assert splitter.flush() == []
    assert splitter.feed(b"next\n") == [b"next"]


def reference(data: bytes, limit: int) -> list[Incoming]:
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")[:-1]]
    return [line if len(line) <= limit else TooLarge(limit) for line in lines if line]


@given(
    pieces=st.lists(st.text("ab\r\n", max_size=12).map(str.encode), max_size=20),
    limit=st.integers(1, 6),
)
def test_how_the_bytes_are_cut_does_not_matter(pieces: list[bytes], limit: int) -> None:
    data = b"".join(pieces) + b"\n"  # which ends whatever line was begun
    assert split([*pieces, b"\n"], limit) == reference(data, limit)
    assert split([data], limit) == reference(data, limit)


def test_a_line_that_comes_in_single_bytes_is_not_copied_for_each() -> None:
    """A million bytes one by one: to copy the line each time would move 500 GB."""
    splitter = LineSplitter(1 << 20)
    for _ in range(1 << 20):
        assert not splitter.feed(b"x")
    assert splitter.feed(b"\n") == [b"x" * (1 << 20)]


async def test_half_a_message_at_the_end_is_dropped() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    channel = LineChannel(ours, principal="test")
    await theirs.send_all(b"whole\nhalf")
    await theirs.aclose()
    assert await channel.receive() == [b"whole"]
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()
    await channel.aclose()


async def test_a_broken_connection_ends_for_receiver_and_sender() -> None:
    ours, theirs = socket.socketpair()
    channel = open_fds(os.dup(ours.fileno()), ours.detach(), principal="test")
    await channel.send(b"unread too\n")
    theirs.close()  # with bytes unread: a reset
    with pytest.raises(trio.BrokenResourceError):
        await channel.send(b"{}\n")
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()
    await channel.aclose()


class StubbornStream(trio.abc.Stream):
    """Closes politely only when it is given for ever."""

    def __init__(self) -> None:
        self.was_cut_short = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        raise AssertionError(data)

    async def wait_send_all_might_not_block(self) -> None:
        raise AssertionError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raise AssertionError(max_bytes)

    async def aclose(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.was_cut_short = True


async def test_closing_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    stream = StubbornStream()
    await LineChannel(stream, principal="test").aclose()
    assert stream.was_cut_short
    assert trio.current_time() == pytest.approx(1)


async def test_a_pipe_tells_what_was_not_read_and_is_enlarged() -> None:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    channel = open_fds(ours_in, ours_out, principal="test")
    assert channel.unsent_bytes() == 0
    with trio.fail_after(5):  # more than a pipe holds by itself
        await channel.send(b"x" * (PIPE_BYTES // 2))
    assert channel.unsent_bytes() == PIPE_BYTES // 2
    os.read(theirs_in, 100)
    assert channel.unsent_bytes() == PIPE_BYTES // 2 - 100
    await channel.aclose()
    assert channel.unsent_bytes() is None
    os.close(theirs_in)
    os.close(theirs_out)


def test_a_socket_tells_what_was_not_read_and_a_file_cannot(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unsent_bytes(ours.fileno()) == 0
        ours.sendall(b"x" * 1000)
        unsent = unsent_bytes(ours.fileno())
        assert unsent is not None
        assert unsent >= 1000
        theirs.recv(1000)
        assert unsent_bytes(ours.fileno()) == 0
    with open(tmp_path / "file", "wb") as file:
        assert unsent_bytes(file.fileno()) is None
    with open(os.devnull, "wb") as nowhere:
        assert unsent_bytes(nowhere.fileno()) is None


async def test_a_bad_file_descriptor_is_an_error_and_the_other_is_closed() -> None:
    for is_first in (True, False):
        good, bad = os.pipe()
        os.close(bad)
        fds = (bad, good) if is_first else (good, bad)
        with pytest.raises(OSError, match="Bad file descriptor"):
            open_fds(*fds, principal="test")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(good)


class _Interrupted(trio.abc.Stream):
    """Ctrl-C comes while it sends. Its close wakes a reader, which ends the connection."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        raise KeyboardInterrupt

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep_forever()
        raise AssertionError("it never ends")

    async def aclose(self) -> None:
        self.scope.cancel()
        await trio.lowlevel.checkpoint()


async def test_ctrl_c_during_a_write_is_not_lost_in_the_end_of_the_connection() -> None:
    stream = _Interrupted()
    channel = LineChannel(stream, principal="tested")
    with pytest.raises(KeyboardInterrupt), stream.scope:
        await channel.send(b"line\n")
