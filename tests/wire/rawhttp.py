"""HTTP by hand: one request on a bare socket, and its response byte by byte as it comes.

There is no library in between, so a test sees exactly the bytes that any client gets: the first
write, the end of a body, the lines between events. Bytes are read only on request. Every wait ends
after `DEADLINE_S` without a byte.
"""

import contextlib
import re
import select
import socket
from dataclasses import dataclass
from typing import Final, Self

from tests.wire.raw import DEADLINE_S, Message, PeerGone

EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
JSON: Final = "application/json"
BOTH: Final = f"{JSON}, {EVENTS}"


@dataclass(frozen=True)
class Event:
    """One event of an event stream; `data` is empty in one that primes."""

    id: str | None
    data: str
    retry: int | None

    @property
    def message(self) -> Message:
        return Message(self.data.encode())


class Exchange:
    """A request that was sent, and the part of its response that was read so far.

    `first` is the result of the first read: the server's first write.
    """

    def __init__(self, connection: socket.socket, *, is_head: bool = False) -> None:
        self.connection = connection
        self.status = 0
        self.headers: dict[str, str] = {}
        self.first = b""
        self.comments = 0  # and the empty lines of newline framing, which keep a proxy awake
        self.is_whole = False
        self.is_cut = False
        self.rest = b""  # bytes after the end of the response
        self._is_head = is_head
        self._wire = bytearray()
        self._body = bytearray()
        self._fields: list[tuple[str, str]] = []
        self._length: int | None = None
        self._is_chunked = False
        self._moved = 0

    # Sending.

    def send(self, data: bytes) -> None:
        """Send bytes; an error is ignored, because a peer that hangs up may have sent its reason
        before.
        """
        with contextlib.suppress(ConnectionError):
            self.connection.sendall(data)

    def half_close(self) -> None:
        """Send the end of the stream."""
        self.connection.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Hang up at once."""
        self.is_cut = self.is_cut or not self.is_whole
        self.connection.close()

    def following(self) -> "Exchange":
        """The next response on the same connection, when this one has ended."""
        exchange = Exchange(self.connection)
        exchange._feed(self.rest)
        return exchange

    # Reading.

    @property
    def is_over(self) -> bool:
        return self.is_whole or self.is_cut

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def can_go_on(self) -> bool:
        """Whether the connection may carry another request."""
        is_framed = self._is_chunked or self._length is not None
        asked_to_close = "close" in self.headers.get("connection", "").lower()
        return self.is_whole and is_framed and not asked_to_close

    def pump(self, within_s: float = DEADLINE_S) -> None:
        """Read once. Raises `TimeoutError` after `within_s` without a byte."""
        if not select.select([self.connection], [], [], within_s)[0]:
            raise TimeoutError(f"nothing came after {bytes(self._wire[-200:])!r}")
        try:
            chunk = self.connection.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        self.first = self.first or chunk
        if chunk:
            self._feed(chunk)
        elif self.status and self._length is None and not self._is_chunked:
            self.is_whole = True  # HTTP/1.0: the end of the connection is the end of the body
        else:
            self.is_cut = True

    def head(self) -> Self:
        """Wait for the status and the headers."""
        while not self.status:
            self._pump_or_gone()
        return self

    def body(self) -> bytes:
        """Wait for the end of the response; returns the rest of its body. Raises `PeerGone`."""
        while not self.is_whole:
            self._pump_or_gone()
        return bytes(self._body)

    def message(self) -> Message:
        """The one message that the response consists of."""
        return Message(self.body())

    def next_event(self) -> Event:
        """The next event. Raises `PeerGone` when there will be none."""
        while (event := self.take_event()) is None:
            self._pump_or_gone()
        return event

    def events(self, *, even_if_cut: bool = False) -> list[Event]:
        """All events to the end of the stream, which ends as HTTP ends a body."""
        taken = []
        while not self.is_over or b"\n" in self._body:
            event = self.take_event()
            if event is not None:
                taken.append(event)
            elif not self.is_over:
                self.pump()
        assert self.is_whole or even_if_cut, "the response was cut off"
        return taken

    def next_line(self) -> bytes:
        """The next message in newline framing. Raises `PeerGone` when there will be none."""
        while (line := self.take_line()) is None:
            self._pump_or_gone()
        return line

    def signs_of_life(self) -> int:
        """Read all that is there, and count the lines that keep a proxy awake."""
        take = self.take_line if self.media_type == LINES else self.take_event
        while take() is not None:
            pass
        return self.comments

    def take_event(self) -> Event | None:
        """An event that was received already (WHATWG HTML, 9.2.6)."""
        while (line := self._take_raw_line()) is not None:
            if line.startswith(b":"):
                self.comments += 1
            elif line:
                name, _, value = line.decode().partition(":")
                self._fields.append((name, value.removeprefix(" ")))
            elif self._fields:
                return self._dispatch()
        return None

    def take_line(self) -> bytes | None:
        """A message in newline framing that was received already."""
        while (line := self._take_raw_line()) is not None:
            if line:
                return line
            self.comments += 1
        return None

    def _dispatch(self) -> Event:
        fields, self._fields = self._fields, []
        assert {name for name, _ in fields} <= {"id", "data", "event", "retry"}, fields
        of: dict[str, list[str]] = {}
        for name, value in fields:
            of.setdefault(name, []).append(value)
        assert of.get("event", ["message"]) == ["message"], "MCP knows no other kind of event"
        retry = of.get("retry")
        return Event(
            id=of["id"][-1] if "id" in of else None,
            data="\n".join(of.get("data", [])),
            retry=int(retry[-1]) if retry else None,
        )

    def _take_raw_line(self) -> bytes | None:
        end = self._body.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._body[:end])
        del self._body[: end + 1]
        return line.removesuffix(b"\r")

    def _pump_or_gone(self) -> None:
        if self.is_over:
            raise PeerGone(f"the response is over: {self.status} {bytes(self._body)!r}")
        self.pump()

    # HTTP/1.1, RFC 9112.

    def _feed(self, chunk: bytes) -> None:
        self._wire += chunk
        while not self.status and b"\r\n\r\n" in self._wire:
            self._take_head()
        if not self.status or self.is_whole:
            self.rest = bytes(self._wire) if self.is_whole else b""
        elif self._is_chunked:
            self._take_chunks()
        elif self._length is not None:
            self._take_length(self._length)
        else:
            self._move(len(self._wire))

    def _take_head(self) -> None:
        head, _, rest = bytes(self._wire).partition(b"\r\n\r\n")
        self._wire = bytearray(rest)
        start, *lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) ?(.*)", start)
        assert match is not None, f"no status line: {start!r}"
        if match[1].startswith("1"):  # 100 Continue: the response itself is still to come
            return
        self.status = int(match[1])
        for line in lines:
            name, colon, value = line.partition(":")
            assert colon, f"no header: {line!r}"
            self.headers[name.lower()] = value.strip()
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if self._is_head or self.status in (204, 304):
            self._length = 0
        elif "content-length" in self.headers:
            assert not self._is_chunked, "RFC 9112, 6.2: never both"
            self._length = int(self.headers["content-length"])

    def _take_length(self, length: int) -> None:
        self._move(min(len(self._wire), length - self._moved))
        self._end_if(self._moved == length)

    def _take_chunks(self) -> None:
        while (end := self._wire.find(b"\r\n")) >= 0:
            size = int(self._wire[:end].partition(b";")[0], 16)
            whole = end + 2 + size + 2
            if len(self._wire) < whole:
                return
            assert self._wire[whole - 2 : whole] == b"\r\n", "a chunk, or the last, without its end"
            del self._wire[: end + 2]
            self._move(size)
            del self._wire[:2]
            if size == 0:
                self._end_if(True)
                return

    def _move(self, size: int) -> None:
        self._body += self._wire[:size]
        self._moved += size
        del self._wire[:size]

    def _end_if(self, is_end: bool) -> None:
        if is_end:
            self.is_whole = True
            self.rest = bytes(self._wire)
