"""The Autobahn cases, to our server in both subprotocols and to our client."""

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Request,
)
from wsproto.events import Message as Data
from wsproto.events import Pong as PongFrame
from wsproto.extensions import PerMessageDeflate

from streams.messages import Incoming
from tests.wire.autobahn_cases import (
    BYE,
    CASES,
    SMALL,
    TEXT,
    Answer,
    Case,
    Close,
    Frame,
    Message,
    Pong,
    Unreadable,
)
from tests.wire.process import ServerProcess
from tests.wire.raw import DEADLINE_S
from transports import websocket

OCTETS_MAX = 2_000  # longer messages go in pieces of 997 bytes, as in Autobahn


def pieces_of(case: Case, *, is_masked: bool) -> Iterator[bytes]:
    """The case's bytes, cut as the case says."""
    frames = [frame.encode(is_masked=is_masked) for frame in case.sent]
    if case.chop == "frames":
        yield from frames
        return
    data = b"".join(frames)
    step = len(data) or 1 if case.chop == "whole" else 1 if len(data) <= OCTETS_MAX else 997
    for at in range(0, len(data), step):
        yield data[at : at + step]


def check(case: Case, found: Sequence[Answer]) -> None:
    """Check that all required answers came, in order, and no others than those allowed."""
    left = list(case.answers)
    for each in found:
        if left and each == left[0]:
            left.pop(0)
        else:
            assert each in case.others, (case.number, each)
    assert not left, (case.number, left)


class Peer:
    """A client made of a socket, and wsproto to read."""

    def __init__(self, port: int, subprotocol: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = WSConnection(ConnectionType.CLIENT)
        hello = Request(
            host=f"127.0.0.1:{port}",
            target="/",
            subprotocols=[subprotocol],
            extensions=[PerMessageDeflate()],
        )
        self.socket.sendall(protocol.send(hello))
        protocol.receive_data(self.socket.recv(4096))
        [self.accepted] = protocol.events()
        assert isinstance(self.accepted, AcceptConnection)
        assert protocol.connection is not None
        self._connection: Connection = protocol.connection
        self._parts = b""

    def send(self, pieces: Iterator[bytes]) -> None:
        with contextlib.suppress(ConnectionError):  # it may be failed before all is sent
            for piece in pieces:
                self.socket.sendall(piece)

    def receive(self) -> list[Answer] | None:
        """The next answer; None at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return None
        if not data:
            return None
        self._connection.receive_data(data)
        return [answer for event in self._connection.events() for answer in self._answers(event)]

    def _answers(self, event: Event) -> Iterator[Answer]:
        if isinstance(event, PongFrame):
            yield Pong(bytes(event.payload))
        elif isinstance(event, CloseConnection):
            yield Close(int(event.code))
        else:
            assert isinstance(event, Data)
            self._parts += event.data.encode() if isinstance(event.data, str) else event.data
            if event.message_finished:
                lines, self._parts = self._parts.splitlines(), b""
                yield from map(answer_in, lines)

    def close(self) -> None:
        self.socket.close()


def answer_in(line: bytes) -> Answer:
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        assert answer["error"]["code"] == -32700
        return Unreadable()
    assert answer["result"] == {}
    return Message(answer["id"])


@pytest.mark.parametrize("subprotocol", ["mcp", "mcp-streams.v1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
def test_our_server_does_as_autobahn_says(
    server: ServerProcess, case: Case, subprotocol: str
) -> None:
    """RFC 6455, as the Autobahn suite reads it; then the closing handshake, where the case leaves
    it open.
    """
    with contextlib.closing(Peer(server.port, subprotocol)) as peer:
        peer.send(pieces_of(case, is_masked=True))
        found: list[Answer] = []
        is_closing = any(isinstance(each, Close) for each in case.answers)
        while not is_closing and any(each not in found for each in case.answers):
            more = peer.receive()
            assert more is not None, f"closed, having said {found}"
            found += more
        if not is_closing:
            peer.send(iter([BYE.encode(is_masked=True)]))
        while (more := peer.receive()) is not None:
            found += more
    if not is_closing:
        assert found.pop() == Close(1000)
    check(case, found)


@pytest.mark.parametrize("subprotocol", ["mcp", "mcp-streams.v1"])
def test_compression_is_never_agreed_on(server: ServerProcess, subprotocol: str) -> None:
    """12.* and 13.*: `permessage-deflate` is offered, and not taken; a compressed frame is then a
    reserved bit (3.*), and fails the connection.
    """
    with contextlib.closing(Peer(server.port, subprotocol)) as peer:
        assert isinstance(peer.accepted, AcceptConnection)
        assert peer.accepted.extensions == []
        peer.send(iter([Frame(TEXT, SMALL, reserved=4).encode(is_masked=True)]))
        assert peer.receive() == [Close(1002)]


async def client_of(case: Case, subprotocol: str) -> tuple[list[Incoming], list[Answer]]:
    """The messages that our client receives in a case, and its answers."""
    said: list[Answer] = []

    async def serve(stream: trio.SocketStream) -> None:
        protocol = WSConnection(ConnectionType.SERVER)
        protocol.receive_data(bytes(await stream.receive_some()))
        [request] = protocol.events()
        assert isinstance(request, Request)
        assert request.extensions == [], "our client offers no compression either"
        await stream.send_all(protocol.send(AcceptConnection(subprotocol=subprotocol)))
        connection = protocol.connection
        assert connection is not None

        async def hear() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                while data := await stream.receive_some():
                    connection.receive_data(bytes(data))
                    for event in connection.events():
                        if isinstance(event, PongFrame):
                            said.append(Pong(bytes(event.payload)))
                        elif isinstance(event, CloseConnection):
                            said.append(Close(int(event.code)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            with contextlib.suppress(trio.BrokenResourceError):
                for piece in pieces_of(case, is_masked=False):
                    await stream.send_all(piece)
                if not any(isinstance(each, Close) for each in case.answers):
                    await stream.send_all(BYE.encode(is_masked=False))

    found: list[Incoming] = []
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            url = f"ws://127.0.0.1:{listener.socket.getsockname()[1]}"
            async with websocket.connect(url, subprotocols=[subprotocol]) as channel:
                with contextlib.suppress(trio.EndOfChannel):
                    while True:
                        found += await channel.receive()
            nursery.cancel_scope.cancel()
    return found, said


def told(line: Incoming) -> Answer:
    assert isinstance(line, bytes)
    try:
        return Message(json.loads(line)["id"])
    except ValueError:
        return Unreadable()


@pytest.mark.parametrize("subprotocol", ["mcp", "mcp-streams.v1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
async def test_our_client_does_as_autobahn_says(case: Case, subprotocol: str) -> None:
    """The same from the other side: messages are received, pings answered, violations named."""
    found, said = await client_of(case, subprotocol)
    is_data = (Message, Unreadable)
    data = [each for each in case.answers if isinstance(each, is_data)]
    others = [each for each in case.others if isinstance(each, is_data)]
    check(case._replace(answers=data, others=others), [told(line) for line in found])
    control = [each for each in case.answers if not isinstance(each, is_data)]
    if not any(isinstance(each, Close) for each in control):
        control.append(Close(1000))
    check(case._replace(answers=control), said)
