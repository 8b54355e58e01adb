"""A `Channel` over an open WebSocket: wsproto says what the bytes mean, this moves them.

Rules of this file:

- Whoever holds `_writing` writes whole frames, or tears the connection: after half a frame nothing
  can be said any more, not even goodbye.
- Control frames are made at the moment when they are written, under that lock, so that wsproto's
  state and the wire never disagree: after a Close frame nothing follows.
- `receive` reads and never writes. What it owes the peer, a pong or a Close, it leaves to whoever
  writes next; `write_control` sees to it that somebody does.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import trio
from wsproto.connection import Connection, ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

from streams.messages import Incoming
from transports.frames import Framing, Oversize
from transports.lines import CLOSE_S, READ_BYTES, unsent_bytes

# After this long a peer that answers no ping counts as detached.
PING_S: Final = 60.0


class WebSocketChannel:
    """An open WebSocket. Somebody must run `write_control` until `aclose` has returned."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        connection: Connection,
        framing: Framing,
        *,
        principal: str,
        socket: trio.SocketStream | None = None,
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._framing = framing
        self._principal = principal
        self._socket = socket
        self._writing = trio.StrictFIFOLock()
        self._is_receiving = False
        # What is owed to the peer. Of several pings only the last needs an answer (RFC 6455,
        # 5.5.3), so a flood of them takes no memory.
        self._pong: bytes | None = None
        self._unsent_pings: list[bytes] = []
        self._close: CloseConnection | None = None
        self._something_owed = trio.Event()
        # Pings under way, oldest first.
        self._pings: dict[bytes, trio.Event] = {}
        self._ping_numbers = itertools.count(1)
        self._peer_is_done = trio.Event()  # it has closed, or is gone, or broke the protocol
        self._is_torn = False
        self._is_closed = False

    @property
    def principal(self) -> str:
        return self._principal

    async def receive(self) -> Sequence[Incoming]:
        if self._is_closed:
            raise trio.EndOfChannel
        self._is_receiving = True
        try:
            while True:
                found = self._take()
                if found and not self._is_closed:
                    return found
                if self._peer_is_done.is_set():
                    raise trio.EndOfChannel
                # Once we have closed, it is for the peer's Close only that this goes on.
                await self._read()
        finally:
            self._is_receiving = False

    async def send(self, lines: bytes) -> None:
        async with self._writing:
            frames = self._framing.frames(lines)
            while self._connection.state is ConnectionState.OPEN and not self._is_torn:
                frame = next(frames, None)
                if frame is None:
                    return
                await self._write(frame)
        raise trio.BrokenResourceError("the WebSocket is closing")

    async def ping(self) -> bool:
        """False as well when no pong came within `PING_S`; somebody must be receiving meanwhile.

        Raises `trio.BrokenResourceError` when the connection ends first.
        """
        payload = next(self._ping_numbers).to_bytes(8, "big")
        self._pings[payload] = woken = trio.Event()
        self._unsent_pings.append(payload)
        self._something_owed.set()
        try:
            with trio.move_on_after(PING_S):
                if not self._peer_is_done.is_set():
                    await woken.wait()
            if payload not in self._pings:
                return True
            if self._peer_is_done.is_set():
                raise trio.BrokenResourceError("the peer is gone")
            return False
        finally:
            self._pings.pop(payload, None)
            if payload in self._unsent_pings:
                self._unsent_pings.remove(payload)

    def is_writable(self) -> bool:
        return not (self._peer_is_done.is_set() or self._is_torn or self._is_closed)

    def unsent_bytes(self) -> int | None:
        return unsent_bytes(self._socket.socket.fileno()) if self._socket else None

    async def aclose(self, code: int = CloseReason.NORMAL_CLOSURE) -> None:
        """Send a Close frame and wait for the peer's; hang up after a second in any case."""
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        try:
            with trio.move_on_after(CLOSE_S):
                await self._farewell(code)
        finally:
            self._hang_up()
            await trio.aclose_forcefully(self._stream)

    async def write_control(self) -> None:
        """Write what `receive` and `ping` owe the peer. Returns once the channel is closed.

        Shielded, as to stop it in the middle of a frame would tear the connection; the end of
        `aclose` is the end of it in any case.
        """
        with trio.CancelScope(shield=True):
            while not self._is_torn:
                await self._something_owed.wait()
                self._something_owed = trio.Event()
                try:
                    async with self._writing:
                        await self._write(b"")
                except trio.BrokenResourceError:
                    return

    # -- reading

    async def _read(self) -> None:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        if data:
            self._connection.receive_data(bytes(data))
        else:
            self._hang_up()

    def _take(self) -> list[Incoming]:
        """What the bytes at hand amount to, up to the end of the connection."""
        found: list[Incoming] = []
        if self._peer_is_done.is_set():
            return found
        for event in self._connection.events():
            if isinstance(event, TextMessage | BytesMessage):
                try:
                    found += self._framing.feed(event)
                except Oversize as oversize:
                    self._fail(CloseReason.MESSAGE_TOO_BIG, str(oversize))
                    return found + oversize.before
            else:
                self._note(event)
        return found

    def _note(self, event: Event) -> None:
        if isinstance(event, Ping):
            self._pong = bytes(event.payload)
            self._something_owed.set()
        elif isinstance(event, Pong):
            self._answered(bytes(event.payload))
        elif isinstance(event, CloseConnection):
            if self._connection.state is ConnectionState.OPEN:
                # wsproto found a violation, and says so as if the peer had closed.
                self._fail(event.code, event.reason or "")
                return
            if self._connection.state is ConnectionState.REMOTE_CLOSING:
                self._owe_close(event.response())
            self._finish()

    def _answered(self, payload: bytes) -> None:
        """A pong answers its ping and all before it, which the peer may have passed over."""
        if payload not in self._pings:
            return  # unsolicited, or too late
        for sent in list(self._pings):
            self._pings.pop(sent).set()
            if sent == payload:
                return

    def _fail(self, code: int, reason: str) -> None:
        """The peer broke the rules: tell it why; nothing more is read."""
        self._owe_close(CloseConnection(code=code, reason=reason))
        self._finish()

    # -- writing

    def _owe_close(self, close: CloseConnection) -> None:
        self._close = self._close or close
        self._something_owed.set()

    def _control_frames(self) -> bytes:
        frames = b""
        if self._connection.state is ConnectionState.OPEN:
            if self._pong is not None:
                frames += self._connection.send(Pong(payload=self._pong))
            for payload in self._unsent_pings:
                frames += self._connection.send(Ping(payload=payload))
        self._pong = None
        self._unsent_pings.clear()
        if self._close and self._connection.state in _MAY_SEND_CLOSE:
            frames += self._connection.send(self._close)
        return frames

    async def _write(self, data: bytes) -> None:
        """Write the frames in `data`, and then what is owed; the caller holds `_writing`."""
        owed = self._control_frames()
        try:
            if data or owed:
                await self._stream.send_all(data + owed if owed else data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._hang_up()
            raise trio.BrokenResourceError("the peer is gone") from None
        except BaseException:
            self._hang_up()
            await trio.aclose_forcefully(self._stream)
            raise

    # -- the end

    def _finish(self) -> None:
        """Nothing more is to come from the peer: let everybody who waits for it see that."""
        self._peer_is_done.set()
        for woken in self._pings.values():
            woken.set()

    def _hang_up(self) -> None:
        """Nothing goes either way any more."""
        self._is_torn = True
        self._something_owed.set()
        self._finish()

    async def _farewell(self, code: int) -> None:
        self._owe_close(CloseConnection(code=code))
        try:
            async with self._writing:
                await self._write(b"")
            if self._is_receiving:
                await self._peer_is_done.wait()
            while not self._peer_is_done.is_set():
                await self._read()
                self._take()
            if not self._is_torn:
                await linger(self._stream)
        except trio.BrokenResourceError:
            return  # the peer did not wait for it


async def linger(stream: trio.abc.Stream) -> None:
    """End our output and read on to the end of the peer's; to be bounded by the caller.

    To close with bytes unread makes the kernel send a reset, which can overtake our last words.
    """
    try:
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        while await stream.receive_some(READ_BYTES):
            pass
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the peer was faster


_MAY_SEND_CLOSE: Final = (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING)
