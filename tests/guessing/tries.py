"""Very many guesses, all of which must get the same answer."""

import re
import socket
from contextlib import closing
from typing import Final

from tests.guessing.guesses import Ask, Guesser, body_of, id_of
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.raw import DEADLINE_S, Message, WebSocketPeer
from tests.wire.rawhttp import EVENTS, JSON
from tests.wire.verbs import PLAIN, POSITIONS

AT_ONCE: Final = 100  # requests in flight


class Answers:
    """The answers to all guesses of one kind, which must be equal."""

    def __init__(self) -> None:
        self.count = 0
        self._one: dict[str, bytes] = {}

    def take(self, kind: str, answer: bytes, n: int) -> None:
        plain = answer.replace(id_of(n).encode(), b"ID")
        one = self._one.setdefault(kind, plain)
        assert plain == one, f"{kind}: {plain!r} is another answer than {one!r}"
        self.count += 1

    def __str__(self) -> str:
        return ", ".join(f"{kind}: {one.decode()!r}" for kind, one in sorted(self._one.items()))

    @property
    def kinds(self) -> set[str]:
        """The kinds of guesses."""
        return set(self._one)

    def reasons(self) -> set[str]:
        """The reasons that the answers give."""
        found = re.findall(rb'"reason":"([a-z_]+)"', b"".join(self._one.values()))
        return {each.decode() for each in found}


def kind_of(ask: Ask) -> str:
    return "page" if ask[0] == "tools/call" else "stream"


def over_websocket(server: ServerProcess, guesser: Guesser, tries: int) -> Answers:
    """Guess over one connection, many at a time."""
    answers = Answers()
    with server.connect("ws-streams") as peer:
        peer.initialize({**POSITIONS, "resumableRequests": {}})
        assert isinstance(peer, WebSocketPeer)
        for first in range(0, tries, AT_ONCE):
            asks = [guesser.any() for _ in range(min(AT_ONCE, tries - first))]
            bodies = [body_of(ask, n) for n, ask in enumerate(asks, first)]
            peer.send_frame(b"".join(body + b"\n" for body in bodies))
            for _ in asks:
                answer = peer.receive_raw()
                n = int(Message(answer)["id"])
                answers.take(kind_of(asks[n - first]), answer, n)
    return answers


class Pipeline:
    """An HTTP connection with many requests in flight, whose responses have a length."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def response(self) -> bytes:
        """Head and body of the next response."""
        while (end := self._read.find(b"\r\n\r\n") + 4) < 4:
            self._more()
        [length] = [
            int(line[15:])
            for line in self._read[:end].lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ]
        while len(self._read) < end + length:
            self._more()
        whole, self._read = self._read[: end + length], self._read[end + length :]
        return whole

    def _more(self) -> None:
        data = self._socket.recv(1 << 18)
        assert data, "the server has hung up"
        self._read += data

    def close(self) -> None:
        self._socket.close()


def over_http(server: ServerProcess, guesser: Guesser, tries: int) -> Answers:
    """Guess in one session, many at a time: by POST, by GET with event ids, and at sessions."""
    answers = Answers()
    client = HttpClient(server.http_port, JSON)
    client.initialize(PLAIN)
    with closing(client), closing(Pipeline(server.http_port)) as pipeline:
        for first in range(0, tries, AT_ONCE):
            kinds = []
            sent = b""
            for n in range(first, min(first + AT_ONCE, tries)):
                kind, request = _request(client, guesser, n)
                kinds.append(kind)
                sent += request
            pipeline.send(sent)
            for n, kind in enumerate(kinds, first):
                answers.take(kind, pipeline.response(), n)
    return answers


def _request(client: HttpClient, guesser: Guesser, n: int) -> tuple[str, bytes]:
    if n % 4 == 0:
        headers = {"Accept": EVENTS, "Last-Event-ID": guesser.event_id()}
        return "event", client.head("GET", headers)
    ask = guesser.any()
    if n % 4 == 1:
        return "session", client.post_bytes(body_of(ask, n), {"Mcp-Session-Id": guesser.word()})
    return kind_of(ask), client.post_bytes(body_of(ask, n))
