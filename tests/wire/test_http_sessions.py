"""Sessions over HTTP: their beginning and end, their streams, and their state after a restart."""

import signal
from pathlib import Path

import pytest

from tests.wire.conftest import Http
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import (
    EventId,
    announced,
    messages_of,
    primed,
    read_to_n,
    read_until,
    refusal,
    resumed,
    streamed,
    text_of,
)
from tests.wire.process import Gate, ServerProcess
from tests.wire.rawhttp import EVENTS, Exchange
from tests.wire.verbs import (
    CREATE,
    PLAIN,
    POSITIONS,
    STREAMS,
    UNKNOWN,
    counted,
    refused,
    up_to,
)

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


def test_a_session_id_is_a_secret_of_visible_letters(http: Http) -> None:
    """MCP, Transports: "SHOULD be globally unique and cryptographically secure […] MUST only
    contain visible ASCII characters (ranging from 0x21 to 0x7E)"."""
    ids = [http.opened().session or "" for _ in range(10)]
    assert len(set(ids)) == 10
    for one in ids:
        assert len(one) >= 22, "128 bits at least"
        assert all(0x21 <= ord(letter) <= 0x7E for letter in one)


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_each_revision_opens_a_session(http: Http, revision: str) -> None:
    """W§6: "revisions 2025-11-25, 2025-06-18, 2025-03-26 and 2024-11-05"."""
    client = http.opened(revision=revision)
    assert client.revision == revision
    assert client.ask("ping").result == {}


def test_what_names_no_session_is_a_400(http: Http) -> None:
    """W§6: "with the status codes of 2025-11-25": "Servers that require a session ID SHOULD respond
    to requests without an `MCP-Session-Id` header (other than initialization) with HTTP 400"."""
    client = http.unopened()
    refusal(client.post(PING), 400)
    refusal(client.post({"jsonrpc": "2.0", "method": "notifications/initialized"}), 400)
    refusal(client.get(), 400)
    refusal(client.delete(), 400)


@pytest.mark.parametrize("session", [UNKNOWN, "x", "a b", "../../etc", "%00", "y" * 5000])
def test_what_names_an_unknown_session_is_a_404(http: Http, session: str) -> None:
    """W§6: "A session id we did not mint […]: 404"; the same for every method."""
    client = http.unopened()
    client.session = session
    refusal(client.post(PING), 404)
    refusal(client.get(), 404)
    refusal(client.get("AAAAAAAAAAAAAAAA_3"), 404)
    refusal(client.delete(), 404)


@pytest.mark.parametrize("revision", ["1999-01-01", "nonsense", "2025-11-25x", ""])
def test_a_revision_that_is_not_spoken_is_a_400(http: Http, revision: str) -> None:
    """W§6: `MCP-Protocol-Version`; MCP, Transports: "If the server receives a request with an
    invalid or unsupported `MCP-Protocol-Version`, it MUST respond with `400 Bad Request`"."""
    client = http.opened()
    client.revision = revision
    refusal(client.post(PING), 400)
    refusal(client.get(), 400)


def test_a_revision_need_not_be_named(http: Http) -> None:
    """MCP, Transports: "if the server does not receive an `MCP-Protocol-Version` header, and has no
    other way to identify the version […] the server SHOULD assume protocol version `2025-03-26`":
    the session is such a way, and the older clients never send it."""
    client = http.opened(revision="2025-03-26")
    client.revision = None
    assert client.ask("ping").result == {}


def test_a_deleted_session_is_gone(http: Http) -> None:
    """W§6: "DELETE ends the session"; MCP, Transports: "it MUST respond to requests containing that
    session ID with HTTP 404 Not Found"."""
    client = http.opened()
    ended = client.delete().head()
    assert 200 <= ended.status < 300
    refusal(client.post(PING), 404)
    refusal(client.get(), 404)
    refusal(client.delete(), 404)


def test_a_deleted_session_stays_deleted(fresh_http: Http) -> None:
    """W§6: "**Sessions live in the journal**", and so does their end."""
    client = fresh_http.opened()
    assert client.delete().head().status < 300
    fresh_http.server.restart()
    refusal(client.post(PING), 404)


def test_a_deleted_sessions_streams_with_tokens_live_on(http: Http, gate: Gate) -> None:
    """W§6: "streams that have tokens live on": the token alone opens the stream."""
    client = http.opened(STREAMS)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    stream = announced(read_until(exchange, CREATE))
    assert client.delete().head().status < 300
    other = http.opened(STREAMS)
    assert other.ask("stream/poll/all").result["statuses"] == []
    resume = resumed(other, stream.with_token, "r", after=0)
    gate.release()
    assert counted(messages_of(resume.events())) == up_to(3)


def test_a_deleted_sessions_other_streams_are_cancelled(http: Http, gate: Gate) -> None:
    """W§6: "others are cancelled": no client could ever resume them."""
    client = http.opened()
    exchange = client.call("count", 7, n=3, gate=gate.path)
    read_to_n(exchange, 3)
    assert client.delete().head().status < 300
    gate.wait_for("cancelled")


def test_a_stream_that_was_cut_off_is_cancelled_with_its_session(http: Http, gate: Gate) -> None:
    """W§6: "others are cancelled", attached or not."""
    client = http.opened()
    exchange = client.call("count", 7, n=3, gate=gate.path)
    read_to_n(exchange, 3)
    exchange.cut()
    assert client.delete().head().status < 300
    gate.wait_for("cancelled")


def test_the_newest_standing_stream_wins(http: Http) -> None:
    """W§6: "GET without it: the session's standing stream; […] newest wins"."""
    client, other = http.opened(), http.opened()
    first, of_other = streamed(client.get()), streamed(other.get())
    assert first.headers["x-accel-buffering"] == "no"
    second = streamed(client.get())
    assert [event for event in first.events() if event.id or event.data] == []
    assert not second.is_over
    assert client.ask("ping").result == {}
    assert not ready(of_other), "another session's has nothing to do with it"


def ready(exchange: Exchange) -> bool:
    """Whether the end of the response is there."""
    try:
        exchange.pump(within_s=0)
    except TimeoutError:
        return False
    return exchange.is_over


def test_a_standing_stream_ends_with_its_session(http: Http) -> None:
    """W§6: "DELETE ends the session", and with it all that it had."""
    client = http.opened()
    standing = streamed(client.get())
    assert client.delete().head().status < 300
    assert standing.events() == []


def test_a_session_knows_its_streams(http: Http, gate: Gate) -> None:
    """W§10: "else `session(hash)` over HTTP": the session needs no token, whichever connection it
    uses; `poll/all` lists its streams."""
    client, other = http.opened(STREAMS), http.opened(STREAMS)
    stream = announced(read_until(client.call("count", 7, n=1, gate=gate.path), CREATE))
    listed = client.ask("stream/poll/all").result["statuses"]
    assert [status["streamId"] for status in listed] == [stream.stream]
    assert other.ask("stream/poll/all").result["statuses"] == []
    assert client.ask("stream/poll", stream.by_id).result["status"] == "live"
    gate.release()


def test_a_session_outlives_the_server(fresh_http: Http) -> None:
    """W§6: "a restarted server knows them": its revision and its capabilities too, so that its
    client notices only cut connections."""
    client = fresh_http.opened(STREAMS)
    old = fresh_http.opened({}, revision="2025-06-18")
    before = streamed(client.get())
    fresh_http.server.restart()
    assert messages_of(before.events(even_if_cut=True)) == []
    assert client.ask("ping").result == {}
    after = streamed(client.get())
    assert announced(client.call("count", 7, n=2).events()).id == 7
    assert all(event.data for event in old.call("count", 7, n=2).events()), "no priming event"
    assert not ready(after)


def test_a_session_keeps_its_streams_across_a_restart(fresh_http: Http) -> None:
    """W§10: the principal is `session(hash)`, the same after the restart: no token is needed, and
    unconfirmed messages come again."""
    client = fresh_http.opened(POSITIONS)
    stream = announced(client.call("count", 7, n=4).events())
    fresh_http.server.restart()
    assert client.ask("stream/poll", stream.by_id).result["pendingMessages"] is True
    messages = messages_of(resumed(client, stream.by_id, "r").events())
    assert counted(messages) == up_to(4)


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS], ids=["plain", "streams"])
def test_a_running_call_outlives_the_server_as_interrupted(
    fresh_http: Http, gate: Gate, capabilities: dict[str, object]
) -> None:
    """W§9: "`interrupted` | -32603 | final response of a call whose handler died with the server";
    W§6: "deliveries are journaled", so the stock client's GET finds everything that was sent."""
    client = fresh_http.opened(capabilities)
    exchange = client.call("count", 7, n=5, gate=gate.path)
    gate.wait_for("sent")
    last = EventId.of_call(read_to_n(exchange, 2)[-1])
    fresh_http.server.restart()
    events = client.get(last.at(2)).events()
    messages = messages_of(events)
    assert counted(messages) == [3, 4, 5]
    (response,) = [message for message in messages if message.answers(7)]
    refused(response, "interrupted", -32603)
    again = messages_of(client.get(last.at(0)).events())
    assert counted(again) == up_to(5)


def test_a_finished_call_outlives_the_server(fresh_http: Http, gate: Gate) -> None:
    """W§1: entries are "stored in the journal before they are sent": a call whose client was cut
    off, and whose server was killed when the work was done, is had all the same."""
    client = fresh_http.opened()
    exchange = client.call("steps", 7, n=3, gate=gate.path)
    last = EventId.of_call(primed(exchange))
    exchange.cut()
    gate.release(3)
    gate.wait_for("sent")
    fresh = client.get(last.at(0))
    response = messages_of(fresh.events())[-1]
    fresh_http.server.restart()
    messages = messages_of(client.get(last.at(1)).events())
    assert counted(messages) == [2, 3]
    assert messages[-1].raw == response.raw


def test_a_resume_outlives_the_server(fresh_http: Http, gate: Gate) -> None:
    """W§6: "deliveries are journaled with the session that they were granted to": the GET of a
    resume that was cut by the kill ends with that resume's reply."""
    maker, client = fresh_http.opened(POSITIONS), fresh_http.opened(POSITIONS)
    call = maker.call("count", 7, n=5, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    gate.wait_for("sent")
    resume = resumed(client, stream.with_token, "r", after=0)
    last = EventId.of_resume(read_to_n(resume, 2)[-1])
    fresh_http.server.restart()
    messages = messages_of(client.get(last.at(2)).events())
    assert counted(messages) == [3, 4, 5]
    reply = messages[-1]
    assert reply.answers("r")
    assert reply.result["_meta"]["mcp-streams/response"]["error"]["data"]["reason"] == "interrupted"


def test_a_server_that_ends_in_good_order_closes_after_an_id(fresh_http: Http, gate: Gate) -> None:
    """W§5: "A server that lets go (drain, shutdown) […]: an original call over HTTP just has its
    connection closed after an event id"; W§7: "running handlers end as `interrupted`". The client
    has one thing or the other, and the rest by a GET."""
    client = fresh_http.opened()
    exchange = client.call("count", 7, n=3, gate=gate.path)
    last = EventId.of_call(read_to_n(exchange, 3)[-1])
    assert fresh_http.server.stop(signal.SIGTERM, within_s=5) == 0
    had = messages_of(exchange.events(even_if_cut=True))
    fresh_http.server.start()
    messages = had or messages_of(client.get(last.at(3)).events())
    (response,) = messages
    assert response.answers(7)
    refused(response, "interrupted", -32603)


def test_a_server_that_ends_lets_go_of_a_resume(fresh_http: Http, gate: Gate) -> None:
    """W§5: it "ends `stream/resume` with `released`", unless the stream was over by then; the
    standing stream just ends, possibly cut."""
    maker, client = fresh_http.opened(POSITIONS), fresh_http.opened(POSITIONS)
    call = maker.call("count", 7, n=3, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    standing = streamed(client.get())
    resume = resumed(client, stream.with_token, "r", after=0)
    read_to_n(resume, 3)
    assert fresh_http.server.stop(signal.SIGTERM, within_s=5) == 0
    reply = messages_of(resume.events())[-1]
    assert reply.answers("r")
    assert reply.result["_meta"]["mcp-streams/ended"] in ("released", "completed")
    assert messages_of(standing.events(even_if_cut=True)) == []


def test_a_server_goes_on_while_clients_hang(http: Http, gate: Gate) -> None:
    """MCP, Transports: "The client MAY remain connected to multiple SSE streams simultaneously"."""
    client = http.opened()
    calls = [client.call("count", f"c{n}", n=1, gate=gate.path) for n in range(20)]
    for call in calls:
        assert streamed(call).media_type == EVENTS
    assert client.ask("ping").result == {}
    gate.release(20)
    assert [text_of(messages_of(call.events())[-1]) for call in calls] == ["counted 1"] * 20


@pytest.mark.needs_file("a store keeps an idle session for up to an hour longer")
def test_an_idle_session_is_ended(tmp_path: Path, gate: Gate) -> None:
    """W§6: "idle limit 24 h", here a second; an unused session is deleted after that, a used one is
    not. The test waits for time to pass."""
    options = ("--limit", "session_idle_s=1")
    with (
        ServerProcess(tmp_path, options=options) as server,
        HttpClient(server.http_port) as idle,
        HttpClient(server.http_port) as busy,
    ):
        idle.initialize(PLAIN)
        busy.initialize(PLAIN)
        for _ in range(15):
            with pytest.raises(TimeoutError):
                gate.wait_for("nothing", within_s=0.1)
            assert busy.ask("ping").result == {}
        refusal(idle.post(PING), 404)
