"""Garbage in: no crash, every well-formed request answered, a line of log for each at most.

`FUZZ_EXAMPLES` and `FUZZ_REQUESTS` say how much of it. The examples come from a fixed seed.
"""

import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.wire.conftest import Wire
from tests.wire.process import ServerProcess
from tests.wire.raw import Message, Peer, PeerGone, WebSocketPeer
from tests.wire.verbs import POSITIONS, STREAMS, refused

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "2000"))

fixed_seed = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking with a live server does not help
    suppress_health_check=list(HealthCheck),
)

METHODS = [
    "ping",
    "initialize",
    "tools/list",
    "tools/call",
    "logging/setLevel",
    "stream/resume",
    "stream/poll",
    "stream/poll/all",
    "notifications/cancelled",
    "notifications/initialized",
    "notifications/stream/ack",
    "notifications/progress",
    "rpc.discover",
]
KEYS = ["streamId", "resumeToken", "after", "cursor", "name", "arguments", "seq", "requestId"]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["ping", "add", "x" * 43, "2.0", "info"])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0") | anything, "method": st.sampled_from(METHODS) | anything},
    optional={
        "id": st.integers(-(2**53), 2**53) | st.text(max_size=10) | anything,
        "params": st.dictionaries(st.sampled_from(KEYS), anything, max_size=4) | anything,
        "result": anything,
        "error": anything,
    },
)


def is_well_formed_request(body: dict[str, Any]) -> bool:
    """JSON-RPC 2.0 with MCP's ids and params, within what every JSON library can count to."""
    request_id = body.get("id")
    is_id = isinstance(request_id, str) or (
        isinstance(request_id, int)
        and not isinstance(request_id, bool)
        and abs(request_id) <= 2**53
    )
    return (
        is_id
        and body["jsonrpc"] == "2.0"
        and isinstance(body["method"], str)
        and isinstance(body.get("params", {}), dict)
        and not body.keys() & {"result", "error"}
        and is_json(body)
    )


def is_json(body: object) -> bool:
    """Whether it is JSON by the standard, without the NaN and Infinity of Python."""
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        return False
    return True


@pytest.fixture
def peers(wire: Wire) -> "Reconnecting":
    return Reconnecting(wire)


class Reconnecting:
    """A connection that is opened again after an example has rightly ended it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            self._peer = self.wire.opened(POSITIONS)
        return self._peer

    def lose(self) -> None:
        self._peer = None


def lines_of(server: ServerProcess) -> int:
    return len(server.log)


def test_random_json_is_answered_where_it_asks(peers: Reconnecting) -> None:
    """W§9: "Parse errors and invalid requests never end a connection on their own"; JSON-RPC: every
    request has its response."""
    before = lines_of(peers.wire.server)
    sent = 0

    @fixed_seed
    @given(body=bodies)
    def run(body: dict[str, Any]) -> None:
        nonlocal sent
        sent += 1
        peers.peer.send(body)
        if is_well_formed_request(body):
            peers.peer.response(body["id"])
        peers.peer.settle()

    run()
    assert lines_of(peers.wire.server) - before <= sent


def test_random_values_are_answered_as_errors(peers: Reconnecting) -> None:
    """W§9: -32700 for invalid JSON, -32600 for JSON that is no message: an error for each."""

    @fixed_seed
    @given(value=anything)
    def run(value: Any) -> None:
        peers.peer.send(value)
        assert peers.peer.expect(lambda message: "error" in message).error["code"] in (
            -32600,
            -32700,
        )
        assert peers.peer.settle() == []

    run()


def test_random_bytes_end_nothing_but_their_connection(peers: Reconnecting) -> None:
    """W§7: "Bad UTF-8 or JSON in a line: -32700, and on with the next"; a text frame that is no
    UTF-8 may end its WebSocket (1007), and that alone."""
    before = lines_of(peers.wire.server)
    sent = 0

    @fixed_seed
    @given(data=st.binary(min_size=1, max_size=400))
    def run(data: bytes) -> None:
        nonlocal sent
        sent += 1
        try:
            send_bytes(peers.peer, data)
            peers.peer.settle()
        except PeerGone:
            assert isinstance(peers.peer, WebSocketPeer)
            assert peers.peer.socket.close_code == 1007
            peers.lose()

    run()
    assert lines_of(peers.wire.server) - before <= 2 * sent, "a line for each, one for each peer"


def send_bytes(peer: Peer, data: bytes) -> None:
    if isinstance(peer, WebSocketPeer) and peer.subprotocol == "mcp":
        peer.socket.send(data, text=True)
    else:
        peer.send_raw(data.replace(b"\n", b" "))


@pytest.mark.parametrize(
    "data",
    [
        b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}',
        b'{"jsonrpc":"2.0","id":7,"method":"ping","id":8}',
        b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":'
        + b"[" * 3000
        + b"]" * 3000
        + b"}}",
        b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":' + b"9" * 5000 + b"}}",
        b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":1e999}}',
        b'{"jsonrpc":"2.0","id":1e2,"method":"ping"}',
        b'\xef\xbb\xbf{"jsonrpc":"2.0","id":7,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":7,"method":"ping"} trailing',
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=[
        "surrogate",
        "twice",
        "deep",
        "long number",
        "huge",
        "exponent",
        "mark",
        "trailing",
        "abyss",
    ],
)
def test_json_at_its_edges_is_answered(wire: Wire, data: bytes) -> None:
    """W§9: a result or an error, and the connection goes on."""
    peer = wire.streams()
    peer.send_raw(data)
    answer = peer.expect(lambda message: "method" not in message)
    assert ("result" in answer) != ("error" in answer)
    assert peer.settle() == []


def test_requests_for_unknown_streams_are_all_refused(wire: Wire) -> None:
    """W§9: `stream_not_found`, each of them; one line of log each at most."""
    peer = wire.opened(STREAMS)
    before = lines_of(wire.server)
    dice = random.Random(7)
    for first in range(0, REQUESTS, 100):
        ids = range(first, min(first + 100, REQUESTS))
        for request_id in ids:
            peer.request(
                dice.choice(["stream/resume", "stream/poll"]),
                {"streamId": f"{dice.getrandbits(256):043x}"[:43], "resumeToken": "y" * 43},
                id=request_id,
            )
        answers: dict[object, Message] = {}
        while len(answers) < len(ids):
            answer = peer.receive()
            refused(answer, "stream_not_found")
            assert answer["id"] not in answers
            answers[answer["id"]] = answer
        assert answers.keys() == set(ids)
    assert lines_of(wire.server) - before <= REQUESTS


@pytest.mark.parametrize("offered", ["mcp", "mcp-streams.v1"])
def test_truncated_frames_are_just_a_cut(server: ServerProcess, offered: str) -> None:
    """W§9: no crash: a frame that is cut at each of its bytes, then nothing more."""
    frame = masked_frame(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n', is_text=offered == "mcp")
    before = lines_of(server)
    for cut in range(len(frame)):
        server.handshake(subprotocol=offered, then=frame[:cut])
    with server.connect("ws-mcp") as peer:
        peer.initialize(STREAMS)
        assert peer.ask("ping").result == {}
    assert lines_of(server) - before <= len(frame) + 1


def masked_frame(payload: bytes, *, is_text: bool) -> bytes:
    """RFC 6455, 5.2: one final frame of a client, with a key of zeros."""
    assert len(payload) < 126
    return bytes([0x81 if is_text else 0x82, 0x80 | len(payload)]) + bytes(4) + payload


def test_random_frames_end_only_their_connection(server: ServerProcess) -> None:
    """RFC 6455: a protocol error fails that connection; the server goes on."""
    dice = random.Random(11)
    before = lines_of(server)
    for _ in range(EXAMPLES):
        server.handshake(subprotocol="mcp-streams.v1", then=dice.randbytes(dice.randint(1, 200)))
    with server.connect("ws-streams") as peer:
        peer.initialize(STREAMS)
        assert peer.ask("ping").result == {}
    assert lines_of(server) - before <= EXAMPLES + 1


def test_random_handshakes_end_only_their_connection(server: ServerProcess) -> None:
    """Bytes that are no HTTP, or no WebSocket handshake, are refused, and the server goes on."""
    dice = random.Random(13)
    before = lines_of(server)
    for _ in range(EXAMPLES):
        server.exchange(dice.randbytes(dice.randint(1, 2000)))
    for request in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n" * 99,
    ):
        server.exchange(request)
    with server.connect("ws-mcp") as peer:
        peer.initialize(STREAMS)
        assert peer.ask("ping").result == {}
    assert lines_of(server) - before <= EXAMPLES + 4
