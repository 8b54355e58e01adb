"""The answers to a POST: 202, JSON, an event stream, or newline framing."""

from pathlib import Path
from typing import Any

import pytest

from tests.wire.conftest import Http
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import (
    RESPONSE,
    EventId,
    announced,
    messages_of,
    primed,
    read_to_n,
    resumed,
    streamed,
    text_of,
)
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Message
from tests.wire.rawhttp import BOTH, EVENTS, JSON, LINES, Exchange
from tests.wire.verbs import (
    COMPLETED,
    CREATE,
    END,
    PLAIN,
    POSITION,
    POSITIONS,
    STREAMS,
    counted,
    up_to,
)

OUR_CLIENTS = f"{LINES}, {JSON}, {EVENTS}"

UNHURRIED = """
from streams import Call, Server

server = Server("unhurried", version="1", resume_min_s=60)

@server.tool
async def speak(call: Call) -> str:
    await call.notify("notifications/message", {"level": "info", "data": "hello"})
    return "said"
"""


def lines_of(exchange: Exchange) -> list[Message]:
    """All messages of a response in newline framing."""
    exchange.head()
    assert (exchange.status, exchange.media_type) == (200, LINES), exchange.headers
    exchange.body()
    return [Message(line) for line in iter(exchange.take_line, None)]


def whole(exchange: Exchange) -> list[Message]:
    """All messages of a response, in whichever of the two framings."""
    is_lines = exchange.head().media_type == LINES
    return lines_of(exchange) if is_lines else messages_of(streamed(exchange).events())


@pytest.mark.parametrize("accept", [BOTH, f"{EVENTS},{JSON};q=0.5", "*/*"])
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("ping", None),
        ("tools/list", {}),
        ("logging/setLevel", {"level": "info"}),
        ("stream/poll/all", {}),
        ("no/such", {}),
    ],
)
def test_what_is_no_call_is_answered_in_json(
    http: Http, accept: str, method: str, params: object
) -> None:
    """W§6: "POST of a request: SSE if accepted, for `tools/call` and resumes; plain JSON for the
    rest"."""
    exchange = http.opened(accept=accept).request(method, params, id="x")
    assert exchange.message().answers("x")
    assert (exchange.status, exchange.media_type) == (200, JSON)


def test_a_call_is_answered_in_an_event_stream(http: Http) -> None:
    """W§6: "SSE if accepted, for `tools/call` and resumes"; "`X-Accel-Buffering: no`"; MCP,
    Transports: the stream ends after the response."""
    exchange = streamed(http.opened().call("count", 7, n=3))
    assert exchange.headers["x-accel-buffering"] == "no"
    messages = messages_of(exchange.events())
    assert counted(messages) == up_to(3)
    assert [message.method for message in messages] == ["notifications/message"] * 3 + [None]
    assert messages[-1].answers(7)


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS])
def test_a_response_that_comes_alone_is_json(http: Http, capabilities: dict[str, Any]) -> None:
    """W§6: "plain JSON for the rest, and where the first message is the final response already and
    no announcement is due": this depends on the speed of the tool, and most tools here are quick.
    """
    client = http.opened(capabilities)
    kinds = []
    for n in range(20):
        exchange = client.call("blocks", n)
        assert client.read_one(exchange).answers(n)
        kinds.append(exchange.media_type)
    assert set(kinds) <= {JSON, EVENTS}
    assert JSON in kinds


def test_an_announcement_is_no_json_answer(http: Http) -> None:
    """W§6: JSON only "where […] no announcement is due": a call with a key is stored first."""
    key = {"mcp-streams/idempotencyKey": "for one call of one session"}
    blocks = {"name": "blocks", "arguments": {}, "_meta": key}
    exchange = streamed(http.opened(STREAMS).request("tools/call", blocks, id=7))
    create, response, end = messages_of(exchange.events())
    assert [create.method, response.method, end.method] == [CREATE, None, END]


def test_an_error_to_a_call_comes_alone(http: Http) -> None:
    """W§6: as above; an unknown tool's stream is not announced."""
    exchange = http.opened(STREAMS).call("no such tool", 7)
    assert exchange.message().error["code"] == -32602
    assert (exchange.status, exchange.media_type) == (200, JSON)


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/no/such", "params": {"a": 1}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 77}},
        {"jsonrpc": "2.0", "id": "nobody asked", "result": {}},
        {"jsonrpc": "2.0", "id": 7, "error": {"code": 1, "message": "no"}},
    ],
    ids=["initialized", "unknown", "cancelled", "result", "error"],
)
@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_what_asks_nothing_is_accepted(http: Http, message: object, accept: str) -> None:
    """W§6: "Notifications and responses: 202"; MCP, Transports: "with no body"."""
    exchange = http.opened(accept=accept).post(message)
    assert exchange.body() == b""
    assert exchange.status == 202


@pytest.mark.parametrize("capabilities", [{}, STREAMS], ids=["plain", "streams"])
def test_an_event_stream_is_primed_in_its_first_write(
    http: Http, capabilities: dict[str, object]
) -> None:
    """W§6: "First write of an SSE response: headers and priming event (`id`, `retry`, empty
    `data`)"; W§4: "the priming event is `<key>_0`"; W§2: "SSE `retry` says the same [as `min`]",
    which is 2 s here."""
    exchange = http.opened(capabilities).call("count", n=2)
    exchange.head()
    event = exchange.take_event()
    assert event is not None, f"the head came alone: {exchange.first!r}"
    assert event.data == ""
    assert event.retry == 2000
    assert EventId.of_call(event).seq == 0
    assert b"data:" in exchange.first, "empty data, but data"


def test_no_client_is_kept_away_for_long(tmp_path: Path) -> None:
    """W§2: "SSE `retry` says the same, at most 15 s": clients drop a connection's state sooner than
    a tool's `min`."""
    (tmp_path / "unhurried.py").write_text(UNHURRIED)
    app = f"{tmp_path / 'unhurried.py'}:server"
    with ServerProcess(tmp_path, app=app) as server, HttpClient(server.http_port) as client:
        client.initialize({})
        assert primed(client.call("speak")).retry == 15_000


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26", "2024-11-05"])
def test_the_older_revisions_are_not_primed(http: Http, revision: str) -> None:
    """W§6: "no priming event for the older two": their clients read every event as a message; but
    ids they have always known."""
    events = http.opened(revision=revision).call("count", 7, n=3).events()
    assert all(event.data for event in events)
    assert [EventId.of_call(event).seq for event in events] == [1, 2, 3, 4]


def test_every_entry_has_its_event_id(http: Http) -> None:
    """W§4: "`<key>_<seq>` on the response of the originating request"; "Announcements have no event
    id of their own; the priming event is `<key>_0`"; "`key` is random and unrelated to
    streamId"."""
    exchange = http.opened(STREAMS).call("count", 7, n=5)
    prime, create, *entries, end = exchange.events()
    stream = announced([create])
    assert create.id is None
    assert end.id is None
    assert end.message.method == END
    ids = [EventId.of_call(event) for event in (prime, *entries)]
    assert [one.seq for one in ids] == list(range(7))
    assert entries[-1].message.answers(7)
    (key,) = {one.key for one in ids}
    assert key
    assert key not in stream.stream
    assert stream.stream not in key
    assert key not in stream.token


def test_keys_are_their_streams_own(http: Http) -> None:
    """W§4: "`key` is random"; MCP, Transports: event ids are unique "across all streams within that
    session"."""
    client = http.opened()
    keys = {EventId.of_call(primed(client.call("count", n, n=1))).key for n in range(20)}
    assert len(keys) == 20


def test_a_resumes_events_are_told_apart_by_their_delivery(http: Http) -> None:
    """W§4: "`<key>_<seq>_<delivery>` on that of a resume POST (unique across the session's event
    streams, as the revision demands)"."""
    client = http.opened(POSITIONS)
    first = client.call("count", 7, n=3).events()
    key = EventId.of_call(first[0]).key
    ids = [event.id for event in first if event.id]
    for n in range(3):
        events = resumed(client, announced(first).with_token, f"r{n}", after=0).events()
        of_resume = [EventId.of_resume(event) for event in events if event.id]
        assert {one.key for one in of_resume} == {key}
        assert len({one.delivery for one in of_resume}) == 1
        numbers = [
            EventId.of_resume(event).seq
            for event in events
            if event.data and event.message.method == "notifications/message"
        ]
        assert numbers == up_to(3)
        ids += [event.id for event in events if event.id]
    assert len(ids) == len(set(ids))


def test_the_original_response_travels_inside_the_reply(http: Http) -> None:
    """W§2: `replayResponse` is "false for one that opts in by extension", "so over HTTP it travels
    inside the reply, `_meta["mcp-streams/response"]` = the whole original response"; "Its reply
    comes **last**", and `stream/end` is "sent after the final response"."""
    for accept in (BOTH, LINES):
        client = http.opened(STREAMS, accept=accept)
        first = whole(client.call("count", 7, n=3))
        (create,) = [one for one in first if one.method == CREATE]
        params = {name: create.params["stream"][name] for name in ("streamId", "resumeToken")}
        extended = {"extensions": {"mcp-streams/v1": {}}}
        messages = whole(resumed(http.opened(extended, accept=accept), params, "r"))
        assert counted(messages) == up_to(3)
        assert not any(message.answers(7) for message in messages), "a client takes it for its own"
        reply = messages[-1]
        assert reply.answers("r")
        (original,) = [message for message in first if message.answers(7)]
        assert reply.result["_meta"][RESPONSE] == original
        assert reply.result["_meta"]["mcp-streams/ended"] == "completed"


def setting(replay: bool) -> dict[str, Any]:
    return {"experimental": {"mcp-streams/v1": {"replayResponse": replay}}}


@pytest.mark.parametrize("settings", [STREAMS, setting(True), {**STREAMS, **setting(True)}])
@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_a_client_of_the_proposal_is_sent_the_response_as_it_was(
    http: Http, accept: str, settings: dict[str, Any]
) -> None:
    """W§2: "unless `replayResponse` is set: true by default for a client that declares bare
    `capabilities.streams`": then "replayed as stored, under the original `id`"."""
    maker = http.opened(STREAMS, accept=accept)
    first = whole(maker.call("count", 7, n=3))
    params = first[0].params["stream"]
    token = {"streamId": params["streamId"], "resumeToken": params["resumeToken"]}
    messages = whole(resumed(http.opened(settings, accept=accept), token, "r"))
    *_, response, end, reply = messages
    assert response.raw == first[-2].raw
    assert end.method == END
    assert reply.result == COMPLETED


@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_an_explicit_setting_beats_the_bare_capability(http: Http, accept: str) -> None:
    """W§8: the settings of the extension count where there are any."""
    maker = http.opened(STREAMS, accept=accept)
    params = whole(maker.call("count", 7, n=1))[0].params["stream"]
    named = {"streamId": params["streamId"]}
    messages = whole(resumed(http.opened({**STREAMS, **setting(False)}, accept=accept), named, "r"))
    assert not any(message.answers(7) for message in messages)
    assert messages[-1].result["_meta"][RESPONSE]["id"] == 7


@pytest.mark.parametrize("accept", [LINES, OUR_CLIENTS])
def test_newline_framing_is_the_framing_of_stdio(http: Http, accept: str) -> None:
    """W§6: "a client that sends `Accept: application/x-ndjson` is answered in the stdio framing
    (position headers, […])"; "`X-Accel-Buffering: no`"."""
    client = http.opened(POSITIONS, accept=accept)
    exchange = client.call("count", 7, n=3)
    messages = lines_of(exchange)
    assert exchange.headers["x-accel-buffering"] == "no"
    numbers = [message for message in messages if message.method == POSITION]
    assert sum(message.params["count"] for message in numbers) == 4
    assert messages[0].method == CREATE
    assert messages[-1].method == END
    assert counted(messages) == up_to(3)


def test_newline_framing_is_for_every_answer(http: Http) -> None:
    """W§6: "is answered in the stdio framing": the short answers too, which may not be of a type
    that the client has not accepted."""
    client = http.unopened(LINES)
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x"}}
    exchange = client.request("initialize", params)
    (message,) = lines_of(exchange)
    assert message.result["protocolVersion"] == "2025-11-25"
    (pong,) = lines_of(http.opened(accept=LINES).request("ping", id="p"))
    assert pong.answers("p")


def test_newline_framing_without_positions_has_no_headers(http: Http) -> None:
    """W§8: "Positions and acks only with `positions: true`"."""
    messages = lines_of(http.opened(accept=LINES).call("count", 7, n=3))
    assert [message.method for message in messages] == ["notifications/message"] * 3 + [None]


def test_an_event_stream_has_no_position_headers(http: Http) -> None:
    """W§4: "**SSE**: the event id": the header is for the other framings."""
    messages = messages_of(http.opened(POSITIONS).call("count", 7, n=3).events())
    assert not any(message.method == POSITION for message in messages)


def test_both_framings_keep_an_idle_connection_awake(http: Http, gate: Gate) -> None:
    """W§6: "A comment line every 15 s keeps proxies awake"; newline framing: "an empty line as
    keep-alive". The one test that waits for it: 15 s, and as much again for a slow machine."""
    waiting = [
        http.opened().call("count", n=1, gate=gate.path),
        http.opened().get(),
        http.opened(accept=LINES).call("count", n=1, gate=gate.path),
    ]
    openings = [exchange.head().signs_of_life() for exchange in waiting]
    for exchange, opening in zip(waiting, openings, strict=True):
        while exchange.signs_of_life() == opening:
            exchange.pump()
    gate.release(2)
    assert text_of(whole(waiting[0])[-1]) == "counted 1"
    assert text_of(whole(waiting[2])[-1]) == "counted 1"


def test_a_tool_may_let_go_of_an_event_stream(http: Http, gate: Gate) -> None:
    """W§6: "The server may close the connection after any id, only if more will come": the response
    ends as HTTP ends it, without an answer; the rest comes to a GET."""
    client = http.opened()
    events = client.call("hang_up", 7, gate=gate.path).events()
    assert counted(messages_of(events)) == [1]
    assert EventId.of_call(events[-1]).seq == 1
    gate.wait_for("sent")
    rest = client.get(events[-1].id)
    read_to_n(rest, 2)
    gate.release()
    (response,) = messages_of(rest.events())
    assert response.answers(7)
    assert text_of(response) == "called back"


def test_a_tool_may_not_let_go_of_who_cannot_come_back(http: Http, gate: Gate) -> None:
    """W§6: the connection may be closed "after any id", and newline framing has none; W§5: a client
    that was told of no stream "can never" resume. It keeps its connection."""
    exchange = http.opened(accept=LINES).call("hang_up", 7, gate=gate.path)
    gate.wait_for("sent")
    gate.release()
    messages = lines_of(exchange)
    assert counted(messages) == [1, 2]
    assert text_of(messages[-1]) == "called back"
