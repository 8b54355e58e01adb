"""Bytes on the wire: handshakes, frames, lines, and messages that are too long."""

import json
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import PeerGone, PipePeer, WebSocketPeer, answers_to, method_is
from tests.wire.verbs import (
    END,
    MIB,
    STREAMS,
    counted,
    ping_of,
    read_stream,
    refused,
    resume,
    start,
    up_to,
)


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["mcp"], "mcp"),
        (["mcp-streams.v1"], "mcp-streams.v1"),
        (["mcp", "mcp-streams.v1"], "mcp-streams.v1"),
        (["mcp-streams.v1", "mcp"], "mcp-streams.v1"),
        (["soap", "mcp"], "mcp"),
        (None, None),
    ],
)
def test_the_subprotocol_is_chosen(
    server: ServerProcess, offered: list[str] | None, chosen: str | None
) -> None:
    """W§7: "`mcp-streams.v1` (ours, preferred) […]. None offered: as `mcp`"."""
    with WebSocketPeer(server.url, offered) as peer:
        assert peer.subprotocol == chosen
        peer.initialize(STREAMS)
        assert peer.ask("ping").result == {}


def test_foreign_subprotocols_are_refused(server: ServerProcess) -> None:
    """W§7: "Only others offered: refused"."""
    with pytest.raises(InvalidStatus) as refusal:
        WebSocketPeer(server.url, ["soap", "mcp-streams.v2"])
    assert 400 <= refusal.value.response.status_code < 500


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://localhost.evil.example", "null", "http://127.0.0.1.x"],
)
def test_a_web_page_of_another_origin_is_refused(server: ServerProcess, origin: str) -> None:
    """W§7: "`Origin` and `Host` are checked at the handshake as over HTTP (403)"."""
    with pytest.raises(InvalidStatus) as refusal:
        WebSocketPeer(server.url, headers={"Origin": origin})
    assert refusal.value.response.status_code == 403


def test_a_page_of_our_own_origin_is_let_in(server: ServerProcess) -> None:
    """W§7: the check is against strangers only."""
    with WebSocketPeer(server.url, headers={"Origin": f"http://127.0.0.1:{server.port}"}) as peer:
        peer.initialize()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_another_host_is_refused(server: ServerProcess, host: str) -> None:
    """W§7: "`Origin` and `Host` are checked": a name that was bent to loopback gives itself away by
    its `Host`."""
    reply = server.handshake(host=host)
    assert reply.split(b" ", 2)[1] == b"403", reply
    assert server.handshake(host=f"127.0.0.1:{server.port}").split(b" ", 2)[1] == b"101"


def test_a_frame_may_hold_many_messages(server: ServerProcess) -> None:
    """W§7: "a **binary** frame holds one or more messages, each ended by a newline"; all answered,
    bad ones too, in their order."""
    with WebSocketPeer(server.url, ["mcp-streams.v1"]) as peer:
        peer.initialize(STREAMS)
        pings = [json.dumps({"jsonrpc": "2.0", "id": n, "method": "ping"}) for n in range(500)]
        peer.send_frame("".join(f"{ping}\n" for ping in [*pings, "{nonsense"]).encode())
        for n in range(500):
            assert peer.response(n).result == {}
        assert peer.expect(lambda message: "error" in message).error["code"] == -32700


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b'{"jsonrpc":"2.0","id":7,"method":"pi\xc3"}', b"\x80"]
)
@pytest.mark.parametrize("kind", ["ws-streams", "stdio", "http-sse", "http-lines"])
def test_bad_utf8_in_a_line_is_a_parse_error(server: ServerProcess, kind: str, data: bytes) -> None:
    """W§7: "Bad UTF-8 or JSON in a line: -32700, and on with the next"; in a binary frame nothing
    but its lines can be wrong, so the same holds (W§9: never ends a connection), and so it does for
    the body of a POST."""
    with server.connect(kind) as peer:
        peer.initialize(STREAMS)
        peer.send_raw(data)
        refusal = peer.expect(lambda message: "error" in message)
        assert refusal.error["code"] == -32700
        assert peer.settle() == []


@pytest.mark.parametrize("offered", ["mcp", "mcp-streams.v1"])
def test_bad_utf8_in_a_text_frame_ends_the_connection(
    server: ServerProcess, gate: Gate, offered: str
) -> None:
    """W§7: RFC 6455's 1007; announced streams can be resumed as after any other cut."""
    with WebSocketPeer(server.url, [offered]) as peer:
        peer.initialize(STREAMS)
        started = start(peer, "count", n=3, gate=gate.path)
        gate.wait_for("sent")
        peer.socket.send(b"\xff\xfe", text=True)
        assert peer.wait_closed() == 1007
    gate.release()
    with server.connect("ws-mcp") as peer:
        peer.initialize(STREAMS)
        assert counted(resume(peer, started.with_token, after=0)) == [1, 2, 3]


def test_a_message_may_be_as_long_as_the_limit(wire: Wire) -> None:
    """W§7: "A message **above** 4 MiB […] is refused"."""
    peer = wire.streams()
    peer.send_raw(ping_of(4 * MIB))
    assert peer.response(7).result == {}


def test_a_message_above_the_limit_is_refused(wire: Wire) -> None:
    """W§7: "A message above 4 MiB (`--max-message-bytes`) is refused with a clear error; the
    connection survives where the framing allows (not after RFC 6455's 1007 and 1009)"; W§9:
    `too_large`, -32602, "a limit; with `limit`"."""
    peer = wire.streams()
    try:
        peer.send_raw(ping_of(4 * MIB + 1))
        refusal = peer.expect(lambda message: "error" in message)
        assert refused(refusal, "too_large")["limit"] == 4 * MIB
        assert peer.settle() == []
    except PeerGone:
        assert isinstance(peer, WebSocketPeer), "stdio can go on after a long line"
        assert peer.wait_closed() == 1009
    assert wire.streams().ask("ping").result == {}


def test_the_limit_can_be_set(tmp_path: Path) -> None:
    """W§7: `--max-message-bytes`."""
    limited = ServerProcess(tmp_path, options=("--max-message-bytes", "100000"))
    with limited, limited.connect("stdio") as peer:
        peer.initialize(STREAMS)
        peer.send_raw(ping_of(100_000))
        assert peer.response(7).result == {}
        peer.send_raw(ping_of(100_001))
        refusal = peer.expect(lambda message: "error" in message)
        assert refused(refusal, "too_large")["limit"] == 100_000
        assert refusal.answers(7)
        assert peer.settle() == []


@pytest.mark.parametrize(("n", "pad"), [(5_000, 100), (20, 300_000), (3, 2 * MIB)])
def test_much_arrives_as_it_was_sent(wire: Wire, n: int, pad: int) -> None:
    """W§7: at most 256 KiB a frame "unless one message alone is longer" (the peer checks each
    frame), one message a text frame, one a line."""
    peer = wire.streams()
    call_id = peer.call("count", n=n, pad=pad)
    messages = peer.read_until(answers_to(call_id))
    assert counted(messages) == up_to(n)
    notes = filter(method_is("notifications/message"), messages)
    assert {note.params["data"]["pad"] == "x" * pad for note in notes} == {True}
    peer.expect(method_is(END))


def test_much_is_resumed_as_it_was_sent(wire: Wire) -> None:
    """W§4: runs of stored bytes, within the same frames."""
    maker = wire.positions()
    started = start(maker, "count", n=5_000, pad=100)
    maker.expect(method_is(END))
    reader, _ = read_stream(wire.positions(), started.with_token, after=17)
    assert reader.seqs(started.stream) == list(range(18, 5_002))
    assert counted(reader.all) == list(range(18, 5_001))


def test_a_line_may_come_in_pieces(server: ServerProcess) -> None:
    """W§7: stdio: "one JSON message a line": however the pipe cuts it."""
    with server.connect("stdio") as peer:
        assert isinstance(peer, PipePeer)
        peer.initialize(STREAMS)
        lines = ping_of(300, 1) + b"\n" + ping_of(300, 2) + b"\n"
        for at in range(len(lines)):
            peer.send_bytes(lines[at : at + 1])
        assert [peer.response(text_id).result for text_id in (1, 2)] == [{}, {}]


@pytest.mark.parametrize("text", ["\u2028\u2029", "\x85", "\U0001f9ea", '\n\r\t"\\', "\x00\x7f"])
def test_no_character_ends_a_line(wire: Wire, text: str) -> None:
    """W§7: "UTF-8, no newline inside": characters that Python or a web page may take for a newline
    are no line ends.
    """
    peer = wire.streams()
    for text_id in (f"{text}ascii", f"ä{text}"):
        assert peer.ask("ping", id=text_id).result == {}
        encoded = json.dumps(
            {"jsonrpc": "2.0", "id": text_id, "method": "ping"}, ensure_ascii=False
        )
        peer.send_raw(encoded.encode())
        assert peer.response(text_id).result == {}


def test_a_farewell_is_answered(server: ServerProcess) -> None:
    """RFC 6455, 5.5.1: a close frame is answered with one, so both know that nothing was cut."""
    with WebSocketPeer(server.url, ["mcp"]) as peer:
        peer.initialize()
        assert peer.ask("ping").result == {}
        peer.socket.close(1000)
        assert peer.socket.close_code == 1000
