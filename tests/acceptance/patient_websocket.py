"""A WebSocket client that reads one message at a time, and answers a ping when it reaches it.

Libraries read ahead and answer pings meanwhile, which confirms messages that their user has not
taken yet (W§4: "on a WebSocket the pong to a ping sent after it"). A test that cuts a client off in
the middle needs pongs that confirm only messages that were taken.
"""

import socket
from collections import deque
from collections.abc import Iterator
from typing import Final

from wsproto import ConnectionType, WSConnection
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

from tests.wire.process import OFFERS
from tests.wire.raw import DEADLINE_S, Peer, PeerGone

_CHUNK_BYTES: Final = 64 * 1024


class PatientWebSocketPeer(Peer):
    """Reads only on request, and only to the end of the message that it returns."""

    def __init__(self, port: int, kind: str) -> None:
        super().__init__()
        self._is_text = kind == "ws-mcp"
        self._lines: deque[bytes] = deque()
        self._part = b""
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: Iterator[Event] = iter(())
        host = f"127.0.0.1:{port}"
        self._send(Request(host=host, target="/", subprotocols=list(OFFERS[kind])))
        assert isinstance(self._next_event(), AcceptConnection)

    def _send(self, event: Event) -> None:
        try:
            self._socket.sendall(self._protocol.send(event))
        except OSError as gone:
            raise PeerGone(str(gone)) from gone

    def send_raw(self, data: bytes) -> None:
        if self._is_text:
            self._send(TextMessage(data.decode()))
        else:
            self._send(BytesMessage(data + b"\n"))

    def receive_raw(self) -> bytes:
        while not self._lines:
            event = self._next_event()
            if isinstance(event, Ping):
                self._send(event.response())
            elif isinstance(event, CloseConnection):
                raise PeerGone(f"closed with {event.code}")
            elif isinstance(event, Message):
                self._take(event)
        return self._lines.popleft()

    def _take(self, event: Message) -> None:
        self._part += event.data.encode() if isinstance(event.data, str) else bytes(event.data)
        if event.message_finished:
            message, self._part = self._part, b""
            self._lines.extend([message] if self._is_text else message[:-1].split(b"\n"))

    def _next_event(self) -> Event:
        while (event := next(self._events, None)) is None:
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except ConnectionError as gone:
                raise PeerGone(str(gone)) from gone
            if not chunk:
                raise PeerGone("the connection has ended")
            self._protocol.receive_data(chunk)
            self._events = iter(self._protocol.events())
        return event

    def cut(self) -> None:
        self._socket.close()
