"""The announcement of a call's stream, its entries, and its end, sent to clients that opted in."""

import re
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Id, Message, answers_to, method_is
from tests.wire.verbs import (
    CREATE,
    END,
    PLAIN,
    POSITION,
    POSITIONS,
    STREAMS,
    Reader,
    counted,
    start,
    up_to,
)

URL_SAFE_256_BITS = re.compile(r"[A-Za-z0-9_-]{43}")


def ours(capability: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {**PLAIN, capability: {"mcp-streams/v1": settings}}


def whole_call(wire: Wire, capabilities: dict[str, Any]) -> list[Message]:
    """All that comes from a call of `count(3)` and before the answer to a later ping."""
    peer = wire.opened(capabilities)
    call_id = peer.call("count", n=3)
    return [*peer.read_until(answers_to(call_id)), *peer.settle()]


def test_the_announcement_has_its_fields_to_the_letter(wire: Wire) -> None:
    """W§2: `params.stream {streamId, requestId, resumeInterval {min, max}, resumeToken}`; we send
    the nested `params.stream`; "`streamId` and `resumeToken` are 256 random bits each, url-safe".
    """
    peer = wire.streams()
    call_id = peer.call("count", n=1)
    create = peer.receive()
    assert create.method == CREATE
    assert set(create) == {"jsonrpc", "method", "params"}
    assert set(create.params) == {"stream"}
    stream = create.params["stream"]
    assert set(stream) == {"streamId", "requestId", "resumeInterval", "resumeToken"}
    assert stream["resumeInterval"] == {"min": 2, "max": 600}
    assert stream["requestId"] == call_id
    assert URL_SAFE_256_BITS.fullmatch(stream["streamId"])
    assert URL_SAFE_256_BITS.fullmatch(stream["resumeToken"])
    assert stream["streamId"] != stream["resumeToken"]


def test_a_tool_may_have_its_own_limit(wire: Wire, gate: Gate) -> None:
    """Page, Creation: "`max`: Maximum seconds a client may wait before the server considers the
    stream abandoned"; here the tool's own."""
    peer = wire.streams()
    peer.call("brief", gate=gate.path)
    stream = peer.expect(method_is(CREATE)).params["stream"]
    assert stream["resumeInterval"] == {"min": 2, "max": 1}
    gate.release()


@pytest.mark.parametrize("id", [0, 1, -5, 2**53 - 1, "1", "abc", "", "ä \"'\\", "x" * 300])
def test_the_request_id_keeps_its_type(wire: Wire, id: Id) -> None:
    """W§2: "`requestId` is always sent and keeps its JSON type: `"1"` is not `1`"."""
    peer = wire.streams()
    peer.call("count", id, n=1)
    told = peer.expect(method_is(CREATE)).params["stream"]["requestId"]
    assert told == id
    assert type(told) is type(id)
    assert peer.response(id).result["content"][0]["text"] == "counted 1"


def test_a_string_and_a_number_are_two_ids(wire: Wire, gate: Gate) -> None:
    """W§2: "`"1"` is not `1`"."""
    peer = wire.streams()
    number = start(peer, "count", 1, n=1, gate=gate.path)
    string = start(peer, "count", "1", n=2, gate=gate.path)
    assert number.stream != string.stream
    gate.release(2)
    assert peer.response("1").result["content"][0]["text"] == "counted 2"
    assert peer.response(1).result["content"][0]["text"] == "counted 1"


def test_everything_comes_in_its_order(wire: Wire) -> None:
    """W§2: "`create` comes before any entry"; "`stream/end`, sent after the final response"."""
    peer = wire.streams()
    call_id = peer.call("count", n=20)
    messages = peer.read_until(method_is(END))
    create, *entries, response, end = messages
    assert create.method == CREATE
    assert counted(entries) == up_to(20)
    assert len(entries) == 20
    assert response.answers(call_id)
    assert end == {
        "jsonrpc": "2.0",
        "method": END,
        "params": {"streamId": create.params["stream"]["streamId"]},
    }
    assert peer.settle() == []


def test_every_stream_has_secrets_of_its_own(wire: Wire) -> None:
    """W§2: "`streamId` and `resumeToken` are 256 random bits each"."""
    peer = wire.streams()
    streams = [start(peer, "count", n=0) for _ in range(10)]
    assert len({secret for one in streams for secret in (one.stream, one.token)}) == 20


@pytest.mark.parametrize(
    "capabilities",
    [
        {"streams": {}},
        ours("experimental", {}),
        ours("extensions", {}),
        ours("experimental", {"dialects": ["streams"]}),
        ours("extensions", {"dialects": ["streams"]}),
        ours("experimental", {"dialects": ["streams"], "positions": False, "replayResponse": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_each_way_of_opting_in_opts_in(wire: Wire, capabilities: dict[str, Any]) -> None:
    """W§8: "`capabilities.streams` → `create` and `end`. […]
    `capabilities.experimental["mcp-streams/v1"]` or `capabilities.extensions["mcp-streams/v1"]`
    […] with settings, these being the defaults: `{"dialects": ["streams"], "positions": false,
    […]}`"."""
    messages = whole_call(wire, capabilities)
    assert messages[0].method == CREATE
    assert messages[-1].method == END
    assert not any(map(method_is(POSITION), messages)), "W§8: only with `positions: true`"


@pytest.mark.parametrize("capability", ["experimental", "extensions"])
def test_positions_come_to_those_who_set_them(wire: Wire, capability: str) -> None:
    """W§4: `{"jsonrpc":"2.0","method":"notifications/stream/position",
    "params":{"streamId":S,"seq":N,"count":K}}`; W§1: announcements and end "have no seq"."""
    peer = wire.opened(ours(capability, {"positions": True}))
    call_id = peer.call("count", n=50)
    reader = Reader(peer)
    end = reader.until(method_is(END))
    create = reader.all[0]
    stream = create.params["stream"]["streamId"]
    assert create.method == CREATE
    assert end.params == {"streamId": stream}
    assert reader.seqs(stream) == up_to(51)
    assert counted(list(reader.entries[stream].values())) == up_to(50)
    assert reader.entries[stream][51].answers(call_id)
    assert reader.others == [create, end]


def test_positions_keep_interleaved_streams_apart(wire: Wire, gate: Gate) -> None:
    """W§4: "one header ahead of each run of entries of one stream"; W§1: "numbered `seq` = 1, 2, 3
    … without gaps"."""
    peer = wire.positions()
    started = [start(peer, "steps", n=10, gate=gate.path) for _ in range(5)]
    gate.release(50)
    reader = Reader(peer)
    for _ in started:
        reader.until(method_is(END))
    for one in started:
        entries = reader.entries[one.stream]
        assert list(entries) == up_to(11)
        assert counted(list(entries.values())) == up_to(10)
        assert entries[11].answers(one.id)


@pytest.mark.parametrize("settings", [{"dialects": []}, {"dialects": ["resumableRequests"]}])
def test_another_dialect_is_not_this_one(wire: Wire, settings: dict[str, Any]) -> None:
    """W§8: a dialect that the settings do not name is not used."""
    messages = whole_call(wire, ours("experimental", settings))
    assert not any(map(method_is(CREATE, END), messages))


def test_only_what_can_be_resumed_is_announced(wire: Wire) -> None:
    """W§2: "as soon as the server knows that the request is resumable"."""
    peer = wire.streams()
    peer.ask("tools/list")
    peer.ask("ping")
    assert peer.settle() == []


def test_what_counts_is_the_receiving_connection(wire: Wire) -> None:
    """W§8: "What counts is the receiving connection"; W§5: a resumed stream comes in the form that
    this connection has opted into, here without positions."""
    started = start(maker := wire.positions(), "count", n=3)
    maker.expect(method_is(END))
    other = wire.streams()
    resume_id = other.request("stream/resume", {**started.with_token, "after": 0})
    messages = other.read_until(answers_to(resume_id))
    assert not any(map(method_is(POSITION), messages))
    assert counted(messages) == up_to(3)


@pytest.mark.parametrize("capabilities", [STREAMS, POSITIONS], ids=["streams", "positions"])
def test_a_tool_that_raises_ends_its_stream_in_order(
    wire: Wire, capabilities: dict[str, Any]
) -> None:
    """W§2: "`stream/end`, sent after the final response"; a failing tool's is a result with
    `isError: true`."""
    peer = wire.opened(capabilities)
    call_id = peer.call("fail")
    response = peer.expect(answers_to(call_id))
    assert response.result["isError"] is True
    assert "the tool says no" in response.result["content"][0]["text"]
    peer.expect(method_is(END))
