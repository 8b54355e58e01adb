"""Many streams, connections and requests, against a real process. See `load.Scale` for the sizes.

    SCALE=full pytest tests/acceptance/test_scale.py -s --timeout 900

prints the figures, and checks times as well, which needs a quiet machine.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import trio
from wsproto.events import TextMessage

from tests.acceptance.load import SERVER, Flood, Highest, Probe, Scale, cpu_s
from tests.rigs.bare_websocket import messages_of, open_bare_websocket
from tests.wire.httppeer import HttpPeer
from tests.wire.process import ServerProcess
from tests.wire.raw import DEADLINE_S, Message, Peer, PipePeer, WebSocketPeer, method_is
from tests.wire.verbs import CREATE, POSITIONS, STREAMS, UNKNOWN

SCALE: Final = Scale.chosen()
KINDS: Final = ("ws-mcp", "ws-streams", "stdio", "http-sse", "http-lines")
LATE_S: Final = 2.0
MEMORY_MIB: Final = 150
FLOOD_LINE: Final = 1000

Serve = Callable[..., ServerProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server with these limits."""
    servers = []

    def serve(**limits: int) -> ServerProcess:
        options = [f"--limit={name}={value}" for name, value in limits.items()]
        servers.append(ServerProcess(tmp_path, app=SERVER, options=tuple(options)))
        return servers[-1].start()

    yield serve
    for server in servers:
        server.kill()


def told(**figures: object) -> None:
    print({name: round(v, 2) if isinstance(v, float) else v for name, v in figures.items()})


# Streams whose clients have left


def test_each_stream_is_given_up_at_its_own_time(serve: Serve, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    server = serve(streams_per_principal_max=2 * SCALE.streams)
    choices = SCALE.given_up_after_s
    deadlines = [choices[n % len(choices)] for n in range(SCALE.streams)]
    with server.connect("ws-streams") as peer:
        peer.initialize(STREAMS)
        began = time.perf_counter()
        for first in range(0, len(deadlines), 100):
            some = deadlines[first : first + 100]
            for seconds in some:
                peer.call(f"hold_{seconds}", marks=str(marks))
            for _ in some:
                peer.expect(method_is(CREATE))
        told(streams=SCALE.streams, began_in_s=time.perf_counter() - began)
    cut_at = time.monotonic()
    if SCALE.is_timed:
        _check_idle(server.pid)
    given_up = _wait_for_lines(marks, SCALE.streams)
    assert sorted(seconds for seconds, _ in given_up) == sorted(deadlines)
    late = [at - cut_at - seconds for seconds, at in given_up]
    told(earliest_s=min(late), latest_s=max(late))
    assert min(late) > -0.5, "none before its time; the server may see the end before we do"
    if SCALE.is_timed:
        assert max(late) < LATE_S


def _check_idle(pid: int) -> None:
    """Check the server between the end of the connections and the first deadline, 8 s later.

    No work is due in that time.
    """
    time.sleep(3)
    used = cpu_s(pid)
    time.sleep(4)
    percent = (cpu_s(pid) - used) / 4 * 100
    told(idle_cpu_percent=percent)
    assert percent < 2


def _wait_for_lines(path: Path, count: int) -> list[tuple[int, float]]:
    give_up_at = time.monotonic() + max(SCALE.given_up_after_s) + DEADLINE_S
    while time.monotonic() < give_up_at:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) == count:
            return [(int(line.split()[0]), float(line.split()[1])) for line in lines]
        time.sleep(0.05)
    raise TimeoutError(f"{len(lines)} of {count} streams were given up")


# A client that stops reading


@pytest.mark.parametrize("kind", ["ws-streams", "stdio"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["waits", "journaled"])
def test_a_client_that_stops_reading_loses_nothing_and_harms_nobody(
    serve: Serve, tmp_path: Path, kind: str, is_kept: bool
) -> None:
    """At default limits the tool waits; with higher ones all of it is journaled meanwhile."""
    roomy = {"unsent_bytes_max": 2**31, "unsent_entries_max": 10_000_000}
    tight = {} if SCALE.is_timed else {"unsent_bytes_max": SCALE.flood_bytes // 8}
    server = serve(**(roomy if is_kept else tight))
    probes = [Probe(server.url, method) for method in ("ping", "tools/call")]
    for probe in probes:
        probe.start()
    time.sleep(SCALE.stall_s / 6)
    memory, began = Highest(server.pid), time.perf_counter()
    memory.start()
    with _stalling(server, kind) as peer:
        flood = Flood(peer, total_bytes=SCALE.flood_bytes, size=FLOOD_LINE, marks=tmp_path / "m")
        _until_stalled(flood, is_kept=is_kept)
        sent_by = time.perf_counter()
        time.sleep(max(0.0, began + SCALE.stall_s - sent_by))
        told(kind=kind, sent=flood.sent(), of=flood.count, in_s=sent_by - began)
        read_from = time.perf_counter()
        flood.read_all()
        told(read_in_s=time.perf_counter() - read_from)
    more_mib = memory.stop()
    for probe in probes:
        probe.stop()
    told(more_mib=more_mib)
    assert more_mib < MEMORY_MIB
    if SCALE.is_timed:
        _compare(probes, began, sent_by, read_from)


def _stalling(server: ServerProcess, kind: str) -> Peer:
    """A client that reads only when we call it."""
    if kind == "stdio":
        peer = server.connect(kind)
    else:
        peer = WebSocketPeer(server.url, ("mcp-streams.v1",), queue_max=1)
    peer.initialize(STREAMS)
    return peer


def _until_stalled(flood: Flood, *, is_kept: bool) -> None:
    """Wait until the tool is done, or makes no progress for a while."""
    give_up_at = time.monotonic() + 120
    before = None
    while (now := flood.sent()) != "flushed" and (is_kept or now != before or now == "0"):
        assert time.monotonic() < give_up_at, now
        before = now
        time.sleep(1.0)
    assert (now == "flushed") == is_kept


def _compare(probes: list[Probe], began: float, sent_by: float, read_from: float) -> None:
    for probe in probes:
        quiet = probe.percentile(0.99, 0.0, began)
        flooded = probe.percentile(0.99, began, sent_by)
        stalled = probe.percentile(0.99, began, read_from)
        told(method=probe.method, p99_ms=quiet, flooded_ms=flooded, stalled_ms=stalled)
        assert stalled < 2 * quiet


# Requests that make no sense


def _senseless(dice: random.Random, number: int) -> tuple[bytes, int | None]:
    """One message, and the id under which an answer is due."""

    def request(method: object, params: object) -> tuple[bytes, int]:
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return json.dumps(body).encode(), number

    match number % 5:
        case 0:
            return request("stream/resume", {"streamId": f"{number:043}"})
        case 1:
            return request("stream/poll", {"streamId": UNKNOWN, "resumeToken": UNKNOWN})
        case 2:
            return request(f"method-{number}", [dice.random()])
        case 3:
            junk: object = dice.choice(
                [[], {}, 7, None, "x", [{}], {"id": None}, {"jsonrpc": "2.0"}]
            )
            return json.dumps(junk).encode(), None
        case _:
            text = "".join(dice.choices('abc{}[]"\\:,\u1234 ', k=dice.randint(1, 80)))
            return text.replace("\n", " ").encode(), None


@pytest.mark.parametrize("kind", KINDS)
def test_senseless_requests_are_answered_and_harm_nothing(serve: Serve, kind: str) -> None:
    server = serve()
    dice = random.Random(SCALE.requests)
    began = time.perf_counter()
    answered = 0
    for first in range(1, SCALE.requests, 500):
        with server.connect(kind) as peer:
            peer.initialize(POSITIONS)
            numbers = range(first, min(first + 500, SCALE.requests + 1))
            due = [_send_senseless(peer, dice, number) for number in numbers]
            for number in filter(None, due):
                assert peer.response(number).error["code"] < 0
                answered += 1
            _leave_badly(peer, dice)
    told(kind=kind, requests=SCALE.requests, answered=answered, in_s=time.perf_counter() - began)
    assert server.is_alive()
    told(log_lines=len(server.log))
    assert len(server.log) <= SCALE.requests * 1.1 + 10, (
        "one line each at most, and one a connection"
    )
    with server.connect(kind) as peer:
        peer.initialize()
        call = peer.call("echo", text="still here")
        assert peer.response(call).result["content"][0]["text"] == "still here"


def _send_senseless(peer: Peer, dice: random.Random, number: int) -> int | None:
    message, due = _senseless(dice, number)
    peer.send_raw(message)
    return due


def _leave_badly(peer: Peer, dice: random.Random) -> None:
    """End the connection with half a message, or with invalid bytes."""
    junk = dice.randbytes(dice.randint(1, 3000))
    if isinstance(peer, PipePeer):
        peer.send_bytes(junk)
    elif isinstance(peer, HttpPeer):
        peer.http.send(junk)
    else:
        assert isinstance(peer, WebSocketPeer)
        frame = b"\x82\xfe" + junk  # the length is random and does not fit
        peer.socket.socket.sendall(frame[: dice.randint(1, len(frame))])
    peer.cut()


def test_garbage_before_a_handshake_harms_nothing(serve: Serve) -> None:
    server = serve()
    dice = random.Random(SCALE.requests)
    for _ in range(SCALE.requests // 100):
        server.exchange(dice.randbytes(dice.randint(0, 5000)))
        server.exchange(b"GET / HTTP/1.1\r\n" + dice.randbytes(100))
        server.handshake(then=dice.randbytes(dice.randint(1, 500)))
    assert server.is_alive()
    told(connections=3 * (SCALE.requests // 100), log_lines=len(server.log))
    with server.connect("ws-mcp") as peer:
        assert "serverInfo" in peer.initialize().result


# Many connections


async def test_many_connections_are_served_at_once(serve: Serve) -> None:
    server = serve()
    answers: list[Message] = []
    everybody_is_here = trio.Event()
    here = 0

    async def client(number: int) -> None:
        nonlocal here
        stream, protocol = await open_bare_websocket(server.port, "mcp")

        async def ask(method: str, params: object) -> Message:
            body = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
            await stream.send_all(protocol.send(TextMessage(data=json.dumps(body))))
            (answer,) = await messages_of(stream, protocol, 1)
            return Message(str(answer.data).encode())

        async with stream:
            opening = {"protocolVersion": "2025-11-25", "capabilities": {}}
            assert "serverInfo" in (await ask("initialize", opening)).result
            here += 1
            if here == SCALE.connections:
                everybody_is_here.set()
            await everybody_is_here.wait()
            params = {"name": "echo", "arguments": {"text": str(number)}}
            answers.append(await ask("tools/call", params))

    began = time.perf_counter()
    with trio.fail_after(4 * DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for number in range(SCALE.connections):
                nursery.start_soon(client, number)
    told(connections=SCALE.connections, in_s=time.perf_counter() - began)
    texts = sorted(int(answer.result["content"][0]["text"]) for answer in answers)
    assert texts == list(range(SCALE.connections))
    assert server.is_alive()
