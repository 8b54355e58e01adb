"""A proxy that cuts responses at chosen places: the bad network between a stock client and us.

It parses event streams event by event, in either framing of a body, and keeps that framing. All
other bytes pass unchanged. It uses threads, since it often waits for another process.
"""

import contextlib
import json
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

WAIT_S: Final = 60.0
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST
_CALLS: Final = ("tools/call", "requests/resume")
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Cut:
    """The place where one response is cut.

    The cut comes after so many `events` that carry a message, and so many `more` bytes of the next
    one; an event stream's first event carries none. `is_reset`: with RST instead of FIN.
    `is_refusal`: before the first byte of the response. `is_held`: no more bytes pass, but the cut
    comes only once the call's response has arrived here, and `let_go` was called.
    """

    events: int = 0
    more: int = 0
    is_reset: bool = False
    is_refusal: bool = False
    is_held: bool = False


@dataclass(frozen=True)
class Seen:
    """A request that passed: `rpc` is the method of its message, `last_event_id` its header."""

    method: str
    rpc: str | None
    last_event_id: str | None

    @property
    def is_for_the_call(self) -> bool:
        return self.rpc in _CALLS or self.last_event_id is not None


class CutError(Exception):
    """The connection to the client is to be cut."""


class Cutter:
    """Listens at `port`, forwards to `upstream_port`, and makes its `cuts` one after another.

    The cuts are made in the responses that belong to a call: that of its POST, of the POST that
    resumes it, and of each GET with a `Last-Event-ID`. `on_cut` is called after each.
    """

    def __init__(
        self,
        upstream_port: int,
        cuts: Sequence[Cut] = (),
        *,
        on_cut: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.requests: list[Seen] = []
        self.requests_after_result: list[Seen] = []
        self.results = 0  # of the call that were forwarded in whole
        self.failures: list[BaseException] = []
        self.held = threading.Event()
        self.refused = threading.Event()  # by the server behind us; requests wait from then on
        self._upstream_port = upstream_port
        self._cuts = list(cuts)
        self._on_cut = on_cut
        self._made = 0
        self._let_go = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def cuts_left(self) -> int:
        return len(self._cuts) - self._made

    def let_go(self) -> None:
        """Make the cut that is held back."""
        self._let_go.set()

    def resume(self) -> None:
        """Forward the requests that wait since one was refused."""
        self._open.set()

    def close(self) -> None:
        """Cut all connections, and end. Raises an error of any thread."""
        self._let_go.set()
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(WAIT_S)
        self._listener.close()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        if self.failures:
            raise self.failures[0]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=[client])
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._sockets.add(client)
        try:
            while self._exchange(client):
                pass
        except (OSError, CutError):
            pass  # one side has hung up, or must
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            with self._lock:
                self._sockets.discard(client)
            client.close()

    def _exchange(self, client: socket.socket) -> bool:
        """Forward one request and its response; returns whether the connection stays open."""
        request = _read_message(client)
        if request is None:
            return False
        seen = request.seen()
        with self._lock:
            self.requests.append(seen)
            if self.results:
                self.requests_after_result.append(seen)
        assert self._open.wait(WAIT_S), "nobody let the requests pass"
        events = _Events(self._next_cut()) if seen.is_for_the_call else None
        if events and events.cut and events.cut.is_refusal:
            self._make(events.cut, client)
        try:
            upstream = socket.create_connection(("127.0.0.1", self._upstream_port), WAIT_S)
        except ConnectionRefusedError:
            self._open.clear()
            self.refused.set()
            raise
        with upstream:
            with self._lock:
                self._sockets.add(upstream)
            try:
                upstream.sendall(request.raw)
                return self._respond(client, upstream, events)
            finally:
                with self._lock:
                    self._sockets.discard(upstream)

    def _next_cut(self) -> Cut | None:
        return self._cuts[self._made] if self.cuts_left else None

    def _respond(
        self, client: socket.socket, upstream: socket.socket, events: "_Events | None"
    ) -> bool:
        head = _read_head(upstream, other=client)
        response = Message(*head)
        client.sendall(response.head)
        body = _Body(response, ends_at_once=response.status in (202, 204))
        if response.media_type != "text/event-stream":
            events = None
        data = response.rest
        while True:
            payload = body.feed(data)
            if events is not None:
                payload = self._pass_events(client, body, events, payload)
            client.sendall(body.frame(payload))
            if body.is_over:
                client.sendall(body.end)
                return body.is_delimited
            data = _receive(upstream, other=client)
            if not data:
                return False

    def _pass_events(
        self, client: socket.socket, body: "_Body", events: "_Events", payload: bytes
    ) -> bytes:
        passing = events.feed(payload)
        with self._lock:
            self.results += events.take_results()
        if events.is_cut and events.cut is not None:
            client.sendall(body.frame(passing))
            if events.cut.is_held:
                self.held.set()
                assert self._let_go.wait(WAIT_S), "nobody let go"
            self._make(events.cut, client)
        return passing

    def _make(self, cut: Cut, client: socket.socket) -> None:
        self._made += 1  # set first: a client may react to the cut at once, with the next request
        if cut.is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            client.shutdown(socket.SHUT_WR)
        self._on_cut(self._made)
        raise CutError


@dataclass
class Message:
    """A request or a response: its head, and the bytes that were read behind it."""

    head: bytes
    rest: bytes
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        lines = self.head.decode("latin-1").split("\r\n")
        self.first = lines[0].split(" ")
        pairs = (line.partition(":") for line in lines[1:] if line)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}

    @property
    def raw(self) -> bytes:
        return self.head + self.rest

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def length(self) -> int | None:
        length = self.headers.get("content-length")
        return None if length is None else int(length)

    @property
    def is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    def seen(self) -> Seen:
        said = json.loads(self.rest) if self.rest else None
        rpc = said.get("method") if isinstance(said, dict) else None
        return Seen(self.first[0], rpc, self.headers.get("last-event-id"))


class _Body:
    """Takes a response's body out of its framing, and frames it again."""

    def __init__(self, response: Message, *, ends_at_once: bool) -> None:
        self._left = 0 if ends_at_once else response.length
        self._is_chunked = response.is_chunked and not ends_at_once
        self._wire = b""
        self.is_over = self._left == 0 and not self._is_chunked
        self.is_delimited = self._is_chunked or self._left is not None
        self.end = b"0\r\n\r\n" if self._is_chunked else b""

    def feed(self, data: bytes) -> bytes:
        """The payload of these bytes."""
        if self._is_chunked:
            self._wire += data
            return b"".join(iter(self._next_chunk, b""))
        if self._left is not None:
            self._left -= len(data)
            self.is_over = self._left <= 0
        return data

    def _next_chunk(self) -> bytes:
        size_line, found, rest = self._wire.partition(b"\r\n")
        if not found:
            return b""
        size = int(size_line, 16)
        if len(rest) < size + 2:
            return b""
        self._wire = rest[size + 2 :]
        self.is_over = size == 0
        return rest[:size]

    def frame(self, payload: bytes) -> bytes:
        if not self._is_chunked or not payload:
            return payload
        return b"%x\r\n%b\r\n" % (len(payload), payload)


class _Events:
    """Counts the events that pass, and stops at the cut."""

    def __init__(self, cut: Cut | None) -> None:
        self.cut = cut
        self.is_cut = False
        self._is_stopped = False
        self._passed = 0
        self._results = 0
        self._waiting = b""

    def take_results(self) -> int:
        results, self._results = self._results, 0
        return results

    def feed(self, payload: bytes) -> bytes:
        """The bytes that may pass now: whole events, up to the cut."""
        self._waiting += payload
        passing = b""
        while not self.is_cut and (end := _EVENT_END.search(self._waiting)):
            event, self._waiting = self._waiting[: end.end()], self._waiting[end.end() :]
            passing += self._pass(event)
        return passing

    def _pass(self, event: bytes) -> bytes:
        """The bytes of this event that pass."""
        message = _message_of(event)
        if self._is_stopped:
            self.is_cut = _is_response(message)
            return b""
        if message and self.cut is not None and self._passed == self.cut.events:
            self._is_stopped = True
            self.is_cut = not self.cut.is_held or _is_response(message)
            return event[: self.cut.more]
        self._passed += bool(message)
        self._results += _is_response(message)
        return event


def _is_response(message: bytes) -> bool:
    said = json.loads(message or b"null")
    return said is not None and ("result" in said or "error" in said)


def _message_of(event: bytes) -> bytes:
    lines = (line.partition(b":") for line in event.splitlines())
    return b"\n".join(value.strip() for name, _, value in lines if name == b"data")


def _receive(connection: socket.socket, *, other: socket.socket | None = None) -> bytes:
    """The next bytes, b"" at the end. Raises `CutError` where the other side hangs up meanwhile."""
    watched = [connection] if other is None else [connection, other]
    ready, _, _ = select.select(watched, [], [], None if other is None else WAIT_S)
    if connection not in ready:
        raise CutError
    return connection.recv(1 << 16)


def _read_head(
    connection: socket.socket, *, other: socket.socket | None = None
) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = _receive(connection, other=other)
        if not more:
            raise CutError
        data += more
    head, found, rest = data.partition(b"\r\n\r\n")
    return head + found, rest


def _read_message(connection: socket.socket) -> Message | None:
    """A whole request; None at the end of the connection."""
    try:
        message = Message(*_read_head(connection))
    except CutError:
        return None
    while len(message.rest) < (message.length or 0):
        message.rest += connection.recv(1 << 16)
    return message
