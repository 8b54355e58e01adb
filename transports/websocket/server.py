"""A WebSocket listener. wsproto has the protocol; a connection has no tasks of its own.

trio-websocket would need two tasks for each connection. Without them, the server can hold ten
thousand connections, and answer a thousand that come back at once.

- `receive` reads the frames. So pings, pongs and Close frames are handled only while it runs.
- The answer to a control frame is written at once if the socket has room, else by the current
  writer, else by a task that is started for it. So `receive` never waits for a peer to read.
- Of several pings only the last needs an answer (RFC 6455, 5.5.3): a flood of pings uses no memory.
- A violation is answered with its close code, and nothing follows a Close frame.
- Frames are handled one by one, in turns (`streams.turns`): a frame of one byte is as much work as
  one of a thousand. Frames without a message have a rate limit (close code 1008).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Unpack

import trio
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import CloseConnection, Event, Message, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

from streams.exchange import Caller, Handler, HttpError, Scopes, TraceHeaders
from streams.keys import new_id
from streams.messages import MESSAGE_BYTES_MAX, Incoming
from streams.turns import RateLimit, Turns
from transports.net.listening import HANDSHAKE_S, Listener, ListenOptions, open_listener, refuse
from transports.net.sockets import (
    CLOSE_S,
    Pieces,
    ServerStream,
    close_gracefully,
    has_hung_up,
    receive_some,
    send_now,
    send_pieces,
    tcp_of,
    unsent_bytes,
)
from transports.websocket.frames import (
    MCP,
    MCP_STREAMS,
    Oversize,
    WebSocketFraming,
    framing_of,
    packed,
)
from transports.websocket.handshake import Opening, parse_head, read_head

# A peer that answers no ping for so long counts as gone.
PING_S: Final = 60.0

# The size of one read: messages of clients are small.
READ_BYTES: Final = 64 * 1024

# How many frames without a message are accepted at once, and per second in the long run: pings,
# pongs that answer no ping, and empty messages. A client that pings every second is far below.
EMPTY_FRAMES_MAX: Final = 200
EMPTY_FRAMES_PER_S: Final = 20.0

# The same for fragments, and one more for each `FRAGMENT_BYTES` of a message. Libraries send
# fragments of some kilobytes.
FRAGMENTS_MAX: Final = 1_000
FRAGMENTS_PER_S: Final = 100.0
FRAGMENT_BYTES: Final = 32

# The size of the header and the mask of a client's control frame.
_CONTROL_BYTES: Final = 2 + 4


async def serve(
    handler: Handler,
    host: str,
    port: int,
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenOptions],
) -> None:
    """Listen at every address of `host` and run `handler` for each connection, until cancelled.

    Reports the port, which matters for port 0. A connection closes when its caller's token expires.
    Raises `OSError` when the address cannot be bound.
    """
    listener = await open_listener(host, port, options)
    task_status.started(listener.port)
    await listener.serve(_Server(listener, handler, message_bytes_max).serve_connection)


@dataclass(frozen=True, slots=True)
class _Server:
    """The state that all connections of one `serve` share."""

    listener: Listener
    handler: Handler
    message_bytes_max: int

    async def serve_connection(self, nursery: trio.Nursery, tcp: trio.SocketStream) -> None:
        """Serve one connection from its handshake to its end; the listener closes it."""
        with ExitStack() as stack:
            channel = None
            with trio.move_on_after(HANDSHAKE_S):
                channel = await self._handshake(nursery, tcp, stack)
            if channel is not None:
                await self._run(channel)

    async def _handshake(
        self, nursery: trio.Nursery, tcp: trio.SocketStream, stack: ExitStack
    ) -> "ServerWebSocket | None":
        """Return an open WebSocket; None where the request was refused, or the peer is gone."""
        stream: ServerStream = tcp
        try:
            stream = await self.listener.secure(tcp)
            head, early = await read_head(stream)
            await self.listener.turn()
            opening = parse_head(head)
            self.listener.check_room(tcp)
            self._check_origins(opening)
            caller = await self.listener.authenticate(opening.head)
            stack.enter_context(self.listener.counted(caller))
            subprotocol = _agreed(opening)
            await send_pieces(stream, [opening.accept(subprotocol)])
        except HttpError as refused:
            await refuse(stream, refused)
            return None
        except (trio.BrokenResourceError, OSError):
            return None  # the peer hung up during the handshake
        framing = framing_of(subprotocol, self.message_bytes_max)
        caller = caller or Caller(f"conn({new_id()})", lambda: math.inf)
        trace = TraceHeaders.of(opening.head.headers)
        return ServerWebSocket(
            stream, framing, nursery, caller=caller, early=early, http_trace=trace
        )

    def _check_origins(self, opening: Opening) -> None:
        if why := self.listener.origins.why_refused(opening.host, opening.origins):
            raise HttpError(403, why)

    async def _run(self, channel: "ServerWebSocket") -> None:
        code = CloseReason.INTERNAL_ERROR
        try:
            await self.handler(channel)
            code = CloseReason.NORMAL_CLOSURE
        finally:
            if trio.current_effective_deadline() == -math.inf:
                code = CloseReason.GOING_AWAY  # cancelled
            if not channel.is_closed:  # the handler may have done it
                with trio.CancelScope(shield=True):
                    await channel.aclose(code)


def _agreed(opening: Opening) -> str | None:
    """The subprotocol to speak, or None where none was offered. Raises `HttpError`."""
    for subprotocol in (MCP_STREAMS, MCP):
        if subprotocol in opening.subprotocols:
            return subprotocol
    if opening.subprotocols:
        raise HttpError(400, f"Offer the subprotocol {MCP_STREAMS} or {MCP}, or none.")
    return None


class ServerWebSocket:
    """A `Channel` over an open WebSocket."""

    transport: Final = "websocket"  # see `streams.exchange.transport_of`

    def __init__(
        self,
        stream: ServerStream,
        framing: WebSocketFraming,
        nursery: trio.Nursery,
        *,
        caller: Caller,
        early: bytes,
        http_trace: TraceHeaders | None = None,
    ) -> None:
        """`early` are the bytes that came behind the handshake; `nursery` is for slow writes."""
        self._stream = stream
        self._tcp = tcp_of(stream)
        self._socket = self._tcp.socket
        self._framing = framing
        self._nursery = nursery
        self.http_trace = http_trace  # see `streams.exchange.http_trace_of`
        self._caller = caller
        self._holds_until = trio.current_time() + caller.holds_for_s()
        self._early = early
        self._protocol = Connection(ConnectionType.SERVER)
        self._events: Iterator[Event] = iter(())  # of the bytes that were read
        self._has_more = False  # there may be more events
        self._turns = Turns()
        self._parts: list[Any] = []  # of an incomplete message
        self._parts_size = 0  # bytes of a binary message, characters of text
        self._unclaimed_bytes = 0  # read since the last complete message
        self._writing = trio.StrictFIFOLock()
        self._pong = b""  # must still be written
        self._close = b""  # likewise
        self._rest: Pieces = ()  # of a partly written control frame
        self._receiving: trio.CancelScope | None = None
        self._is_reading = False  # a task waits for bytes, and not in that scope
        self._pings: dict[bytes, trio.Event] = {}
        self._ping_numbers = itertools.count(1)
        self._is_over = False  # nothing more is received
        self._is_closing = False  # only pending frames are still sent
        self._is_broken = False  # nothing more is sent or received
        self.is_closed = False

    @property
    def principal(self) -> str:
        return self._caller.principal

    @property
    def scopes(self) -> Scopes:
        return self._caller.scopes

    @property
    def claims(self) -> Mapping[str, Any]:
        """See `streams.exchange.claims_of`."""
        return self._caller.claims

    @cached_property  # most connections send no such frame
    def _empty_frames(self) -> RateLimit:
        return RateLimit(EMPTY_FRAMES_MAX, EMPTY_FRAMES_PER_S)

    @cached_property
    def _fragments(self) -> RateLimit:
        return RateLimit(FRAGMENTS_MAX, FRAGMENTS_PER_S)

    # -- receiving

    async def receive(self) -> Sequence[Incoming]:
        while not (self._is_over or self.is_closed):
            if self._has_more:
                await self._turns.wait()
            else:
                data = await self._read()
                if self.is_closed:
                    break  # `aclose` was called meanwhile
                if trio.current_time() >= self._holds_until and not self._is_still_authenticated():
                    break
                if data is None:
                    continue
                await self._feed(data)
            if not self.is_closed and (found := self._handle_frames()):
                return found
        raise trio.EndOfChannel

    async def _read(self) -> bytes | None:
        """The next bytes; empty at the end of the input.

        None as soon as another task closes, or the authentication must be checked again.
        """
        if self._early:
            early, self._early = self._early, b""
            return early
        try:
            if self._holds_until == math.inf and self._stream is self._tcp:
                self._is_reading = True  # a scope for each read would cost more than the read
                return await receive_some(self._stream, READ_BYTES)
            with trio.CancelScope(deadline=self._holds_until) as self._receiving:
                return await receive_some(self._stream, READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            if not self.is_closed:
                self._break()
            return b""
        finally:
            self._is_reading = False
        return None

    def _is_still_authenticated(self) -> bool:
        """Check the authentication again. If it has expired, close the WebSocket (code 1008)."""
        holds_for_s = self._caller.holds_for_s()
        self._holds_until = trio.current_time() + holds_for_s
        if holds_for_s <= 0:
            self._fail(CloseReason.POLICY_VIOLATION, "the bearer token has expired")
            self._write_soon()
        return holds_for_s > 0

    async def _feed(self, data: bytes) -> None:
        """Pass bytes to wsproto; empty at the end of the input."""
        if not data:
            self._end()
            return
        self._unclaimed_bytes += len(data)
        self._protocol.receive_data(data)
        self._events = self._protocol.events()
        self._has_more = True
        if self._turns.spend():
            await self._turns.wait()

    def _handle_frames(self) -> list[Incoming]:
        """Handle the frames of one turn, and return their lines."""
        found: list[Incoming] = []
        for event in self._events:
            if isinstance(event, Message):
                found += self._add_data(event)
            else:
                self._on_control(event)
            if self._is_over or self._turns.spend():
                break
        else:
            self._has_more = False
        if self._unclaimed_bytes > self._framing.unclaimed_bytes_max:
            self._fail(CloseReason.MESSAGE_TOO_BIG, "too many bytes without a message")
        self._write_soon()
        return found

    def _add_data(self, event: Message[Any]) -> list[Incoming]:
        self._parts.append(event.data)
        self._parts_size += len(event.data)
        if self._parts_size > self._framing.message_size_max:
            self._fail(CloseReason.MESSAGE_TOO_BIG, "a message above the limit")
            return []
        if not event.message_finished:
            earned = len(event.data) / FRAGMENT_BYTES
            if event.frame_finished and not self._fragments.spend(earned):
                self._fail(CloseReason.POLICY_VIOLATION, "too many small fragments")
            return []
        whole = ("" if isinstance(event, TextMessage) else b"").join(self._parts)
        self._parts, self._parts_size, self._unclaimed_bytes = [], 0, 0
        try:
            found = self._framing.feed(whole)
        except Oversize as oversize:
            self._fail(CloseReason.MESSAGE_TOO_BIG, str(oversize))
            return oversize.before
        if not found:
            self._count_empty()
        return found

    def _on_control(self, event: Event) -> None:
        """Handle a control frame, or a violation, which wsproto reports as a Close frame."""
        if isinstance(event, Ping):
            self._count_empty()
            self._unclaimed_bytes -= len(event.payload) + _CONTROL_BYTES
            if not self._is_closing:
                self._pong = self._protocol.send(event.response())
        elif isinstance(event, Pong):
            self._unclaimed_bytes -= len(event.payload) + _CONTROL_BYTES
            if not self._answer_pings(bytes(event.payload)):
                self._count_empty()
        elif isinstance(event, CloseConnection):
            if self._protocol.state is ConnectionState.CLOSED:
                self._end()  # the answer to our Close frame
            else:  # the peer's Close frame, or a violation
                self._fail(event.code, event.reason or "")

    def _count_empty(self) -> None:
        """Count a frame without a message."""
        if not self._empty_frames.spend():
            self._fail(CloseReason.POLICY_VIOLATION, "too many pings, pongs or empty messages")

    def _answer_pings(self, payload: bytes) -> bool:
        """A pong also answers all earlier pings. False for a pong that answers none."""
        if payload not in self._pings:
            return False
        for key in list(self._pings):
            self._pings.pop(key).set()
            if key == payload:
                break
        return True

    def _fail(self, code: int, reason: str) -> None:
        """Send a Close frame with this code, unless one was sent; receive no more."""
        self._queue_close(code, reason)
        self._end()

    def _end(self) -> None:
        """Receive no more; wake the tasks that wait for pongs."""
        self._is_over = True
        self._is_broken |= not self._is_closing
        for answered in self._pings.values():
            answered.set()

    def _break(self) -> None:
        """Send and receive no more."""
        self._is_broken = True
        self._end()

    # -- sending

    async def send(self, *lines: bytes) -> None:
        try:
            frames = map(self._framing.frames, packed(lines))
            await self._write(list(itertools.chain.from_iterable(frames)))
        except trio.BrokenResourceError:
            raise
        except BaseException:
            self._fail(CloseReason.GOING_AWAY, "interrupted")  # perhaps some lines were sent
            self._write_soon()
            raise

    async def _write(self, frames: Pieces) -> None:
        """Write whole frames and pending control frames; on return the kernel has all of them.

        Cancelled half-way, it breaks the connection: no frame can follow half a frame. Raises
        `trio.BrokenResourceError` when the peer is gone, or a Close frame was sent.
        """
        async with self._writing:
            await trio.lowlevel.checkpoint_if_cancelled()  # before the first byte of a frame
            if self._is_closing or self._is_broken:
                raise trio.BrokenResourceError("the peer is gone, or the WebSocket closing")
            await self._push(frames)

    async def _push(self, frames: Pieces = ()) -> None:
        rest = self._send_at_once(frames)
        while rest:
            try:
                await send_pieces(self._stream, rest)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._break()
                raise trio.BrokenResourceError("the peer is gone") from None
            except BaseException:
                self._break()
                self._socket.close()
                raise
            rest = self._send_at_once()  # control frames that became pending meanwhile

    def _send_at_once(self, frames: Pieces = ()) -> Pieces:
        """Write without waiting, and return the rest. Most writes fit the socket's buffer.

        Raises `trio.BrokenResourceError` when the peer is gone.
        """
        pieces = [each for each in (*self._rest, self._pong, *frames, self._close) if each]
        self._rest, self._pong, self._close = (), b"", b""
        try:
            return send_now(self._stream, pieces) if pieces else ()
        except OSError:
            self._break()
            raise trio.BrokenResourceError("the peer is gone") from None

    def _write_soon(self) -> None:
        """Write pending control frames, without waiting for the peer."""
        is_pending = bool(self._pong or self._close)
        if not is_pending or self._is_broken or self._rest or self._writing.locked():
            return
        try:
            self._rest = self._send_at_once()
        except trio.BrokenResourceError:
            return  # `receive` notices it
        if self._rest:
            self._nursery.start_soon(self._write_rest)

    async def _write_rest(self) -> None:
        try:
            await self._flush()
        except trio.BrokenResourceError:
            return  # likewise

    async def _flush(self) -> None:
        async with self._writing:
            if not self._is_broken:
                await self._push()

    def _queue_close(self, code: int, reason: str) -> None:
        if not (self._is_closing or self._is_broken):
            self._is_closing = True
            self._close = self._protocol.send(CloseConnection(code=code, reason=reason))

    # -- the other methods of a channel

    async def ping(self) -> bool:
        """See `Channel`; also False when no pong comes within `PING_S`. `receive` must run.

        Raises `trio.BrokenResourceError` when the connection ends first.
        """
        if not self.is_writable():
            raise trio.BrokenResourceError("the peer is gone")
        payload = next(self._ping_numbers).to_bytes(8, "big")
        answered = self._pings[payload] = trio.Event()
        with trio.move_on_after(PING_S):
            try:
                await self._write([self._protocol.send(Ping(payload))])
                await answered.wait()
            finally:
                is_waiting = self._pings.pop(payload, None) is not None
            if is_waiting:
                raise trio.BrokenResourceError("the peer is gone")
            return True
        return False

    def is_writable(self) -> bool:
        is_over = self._is_closing or self._is_broken or self.is_closed
        return not (is_over or has_hung_up(self._tcp))

    def unsent_bytes(self) -> int | None:
        return unsent_bytes(self._socket.fileno())

    async def aclose(self, code: int = CloseReason.NORMAL_CLOSURE) -> None:
        """Send a Close frame and wait for the peer's; hang up after a second in any case."""
        if self.is_closed:
            await trio.lowlevel.checkpoint()
            return
        self.is_closed = True
        if self._receiving is not None:
            self._receiving.cancel()
        try:
            if not self._is_broken:
                with trio.move_on_after(CLOSE_S):
                    await self._close_handshake(code)
        finally:
            self._break()
            self._socket.close()

    async def _close_handshake(self, code: int) -> None:
        self._queue_close(code, "")
        try:
            await self._flush()
            if self._is_reading:
                trio.lowlevel.notify_closing(self._socket)  # ends only the wait of that task
            while not self._is_over:
                if self._has_more:
                    await self._turns.wait()
                else:
                    await self._feed(await receive_some(self._stream, READ_BYTES))
                self._handle_frames()
            await close_gracefully(self._stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the peer did not wait for our Close frame
