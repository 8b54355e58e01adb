"""Where a `Last-Event-ID` leads: refused and unknown ids, deleted messages, and the cursor of a
POST.
"""

from typing import Any

import pytest

from tests.wire.conftest import Http
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import (
    EventId,
    announced,
    cut_after,
    messages_of,
    read_to_n,
    read_until,
    refusal,
    resumed,
    streamed,
)
from tests.wire.process import Gate
from tests.wire.rawhttp import BOTH, LINES
from tests.wire.verbs import CREATE, STREAMS, counted, refused, up_to


def test_nothing_left_to_say_is_a_405(http: Http) -> None:
    """W§6: "Nothing left to say: 405": the client has the response, and is to stop asking."""
    client = http.opened()
    last = client.call("count", 7, n=2).events()[-1]
    assert EventId.of_call(last).seq == 3
    refusal(client.get(last.id), 405)


def test_nothing_left_to_say_of_a_resume_is_a_405(http: Http) -> None:
    """W§6: as above, of a response whose own reply has come."""
    client = http.opened(STREAMS)
    stream = announced(client.call("count", 7, n=2).events())
    events = resumed(client, stream.by_id, "r", after=0).events()
    assert events[-1].message.answers("r")
    if events[-1].id:
        refusal(client.get(events[-1].id), 405)


@pytest.mark.parametrize(
    "event_id",
    ["nonsense", "a_b", "AAAAAAAAAAAAAAAA_3", "AAAAAAAAAAAAAAAA_3_AAAA", "_", "__", "%00", "ä_1"],
)
def test_an_unknown_id_is_a_400(http: Http, event_id: str) -> None:
    """W§6: "Unknown […]: 400, never 404 (which means "session gone" to clients)"."""
    client = http.opened()
    refusal(client.get(event_id), 400)
    assert client.ask("ping").result == {}


def test_a_garbled_id_of_a_real_response_is_a_400(http: Http, gate: Gate) -> None:
    """W§6: "Unknown […]: 400"; the response itself goes on unharmed."""
    client = http.opened()
    last = cut_after(client, gate, 2)
    for event_id in (f"{last.key}_x", f"{last.key}_-1", f"{last.key}_{2**70}", f"{last.key}_9"):
        refusal(client.get(event_id), 400)
    refusal(client.get(f"{last.key}_2_nodelivery"), 400)
    gate.release(4)
    assert counted(messages_of(client.get(last.at(2)).events())) == [3, 4, 5, 6]


def test_another_sessions_id_is_a_400(http: Http, gate: Gate) -> None:
    """W§6: "another session's: 400"; "deliveries are journaled with the session that they were
    granted to", so a stream's owner may not use the grant of another session that resumed it."""
    maker, other = http.opened(STREAMS), http.opened(STREAMS)
    call = maker.call("steps", 7, n=4, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    gate.release(2)
    of_call = read_to_n(call, 2)[-1].id
    refusal(other.get(of_call), 400)
    resume = resumed(other, stream.with_token, "r", after=0)
    of_resume = EventId.of_resume(read_to_n(resume, 2)[-1])
    refusal(maker.get(of_resume.at(2)), 400)
    refusal(other.get(of_call), 400)
    resume.cut()
    gate.release(2)
    messages = messages_of(other.get(of_resume.at(2)).events())
    assert counted(messages) == [3, 4]
    assert messages[-1].answers("r")


def test_the_abandoned_are_told_so_under_the_waiting_id(http: Http, gate: Gate) -> None:
    """W§6: "A stream of this session that is abandoned […]: 200 and that error under the waiting
    request's id, with an event id"."""
    client = http.opened()
    exchange = client.call("brief", 7, gate=gate.path)
    last = EventId.of_call(read_to_n(exchange, 1)[-1])
    exchange.cut()
    gate.wait_for("cancelled")
    told(client, last.at(1), 7, "abandoned")


def test_the_cancelled_are_told_so_under_the_waiting_id(http: Http, gate: Gate) -> None:
    """W§6: as above, "cancelled"; MCP, Cancellation: none is owed on the call's own response, which
    ends without one."""
    client = http.opened()
    exchange = client.call("count", 7, n=1, gate=gate.path)
    last = EventId.of_call(read_to_n(exchange, 1)[-1])
    client.notify("notifications/cancelled", {"requestId": 7})
    gate.wait_for("cancelled")
    assert not any(message.answers(7) for message in messages_of(exchange.events()))
    told(client, last.at(1), 7, "cancelled")


def test_who_names_what_is_gone_is_told_so_under_the_waiting_id(http: Http) -> None:
    """W§6: as above, "`messages_gone`"; W§9: "with `earliestSeq`"; the cursor of a POST has deleted
    what lies below."""
    client = http.opened(STREAMS)
    events = client.call("count", 7, n=5).events()
    key = EventId.of_call(events[0])
    resumed(client, announced(events).by_id, "r", after=4).events()
    assert told(client, key.at(2), 7, "messages_gone") == 5
    assert counted(messages_of(client.get(key.at(4)).events())) == [5]


def test_a_resume_is_told_under_its_own_id(http: Http, gate: Gate) -> None:
    """W§6: "that error under the **waiting request's** id"."""
    client = http.opened(STREAMS)
    call = client.call("brief", 7, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    call.cut()
    resume = resumed(client, stream.by_id, "r", after=0)
    last = EventId.of_resume(read_to_n(resume, 1)[-1])
    resume.cut()
    gate.wait_for("cancelled")
    told(client, last.at(1), "r", "abandoned")


def told(client: HttpClient, event_id: str, id: int | str, reason: str) -> object:
    """Send a GET and read the refusal that comes as a 200; returns its `earliestSeq`, if it has
    one.
    """
    events = streamed(client.get(event_id)).events()
    (message,) = messages_of(events)
    assert message.answers(id)
    data = refused(message, reason)
    assert events[-1].id, "with an event id"
    return data.get("earliestSeq")


@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_last_event_id_on_a_post_is_a_cursor(http: Http, accept: str) -> None:
    """W§4: "On a POST, `Last-Event-ID` says the same [as `after`]": delivery starts there, and what
    lies below is delivered, and may be deleted."""
    client = http.opened(STREAMS)
    events = client.call("count", 7, n=5).events()
    key = EventId.of_call(events[0])
    stream = announced(events)
    client.accept = accept
    exchange = resumed(client, stream.by_id, "r", key.at(3))
    body = exchange.body().decode()
    assert '"n":3' not in body.replace(" ", "")
    assert '"n":4' in body.replace(" ", "")
    client.accept = BOTH
    gone = client.ask("stream/resume", {**stream.by_id, "after": 2}, id="again")
    assert refused(gone, "messages_gone")["earliestSeq"] == 4


def test_an_id_of_a_resume_is_a_cursor_on_a_post_too(http: Http) -> None:
    """W§4: "On a POST, `Last-Event-ID` says the same", whichever response of the stream it was."""
    client = http.opened(STREAMS)
    stream = announced(client.call("count", 7, n=5).events())
    first = resumed(client, stream.by_id, "r1", after=0).events()
    last = EventId.of_resume(next(event for event in first if event.id and event.data))
    messages = messages_of(resumed(client, stream.by_id, "r2", last.at(3)).events())
    assert counted(messages) == [4, 5]


def test_after_beats_the_header(http: Http) -> None:
    """W§4: "`after` beats the header"."""
    client = http.opened(STREAMS)
    events = client.call("count", 7, n=5).events()
    last = EventId.of_call(events[0]).at(4)
    stream = announced(events)
    assert counted(messages_of(resumed(client, stream.by_id, "r", last, after=1).events())) == [
        2,
        3,
        4,
        5,
    ]
    kept = client.ask("stream/resume", {**stream.by_id, "after": 0}, id="again")
    assert refused(kept, "messages_gone")["earliestSeq"] == 2, "by the cursor, not by the header"


def test_a_header_that_names_another_stream_is_ignored(http: Http) -> None:
    """W§4: "a header that names another stream is ignored"."""
    client = http.opened(STREAMS)
    events = client.call("count", 7, n=5).events()
    other = EventId.of_call(client.call("count", 8, n=5).events()[0])
    exchange = resumed(client, announced(events).by_id, "r", other.at(4))
    assert counted(messages_of(exchange.events())) == up_to(5)


def flags(client: HttpClient, params: dict[str, Any], last_event_id: str | None) -> Any:
    """`pendingMessages` by either proposal, which must agree; or the refusal."""
    more = {"Last-Event-ID": last_event_id}
    polled = client.request("stream/poll", params, id="p", more=more).message()
    asked = {name: value for name, value in params.items() if name != "streamId"}
    asked |= {"requestId": 7}
    status = client.request("requests/getStatus", asked, id="s", more=more).message()
    if "error" in polled:
        assert polled.error == status.error
        return refused(polled, polled.reason or "")
    assert polled.result["pendingMessages"] == status.result["hasPendingMessage"]
    return polled.result["pendingMessages"]


def test_last_event_id_is_a_cursor_of_a_poll(http: Http, gate: Gate) -> None:
    """W§4: "`stream/poll` and `requests/getStatus` heed it alike (899: "the point from which its
    view of streams will resume and poll from")"; "`after` beats the header; a header that names
    another stream is ignored"; "`after` above the last seq: `cursor_ahead`"."""
    client, other = http.opened(STREAMS), http.opened(STREAMS)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    events = [exchange.next_event(), *read_to_n(exchange, 3)]
    exchange.cut()
    gate.wait_for("sent")
    key, named = EventId.of_call(events[0]), announced(events).with_token
    foreign = EventId.of_call(other.call("count", 7, n=1).events()[0])
    assert flags(client, named, None) is True
    assert flags(client, named, key.at(0)) is True
    assert flags(client, named, key.at(2)) is True
    assert flags(client, named, key.at(3)) is False
    assert flags(http.opened(), named, key.at(3)) is False, "whichever session asks"
    assert flags(client, {**named, "after": 1}, key.at(3)) is True
    assert flags(client, {**named, "after": 3}, key.at(0)) is False
    assert flags(client, {**named, "after": 3}, key.at(9)) is False
    for ignored in (foreign.at(3), "nonsense", f"{key.at(3)}, {key.at(3)}", ""):
        assert flags(client, named, ignored) is True
    assert flags(client, named, key.at(9)) == {"reason": "cursor_ahead", "lastSeq": 3}
    resume = streamed(resumed(client, named, "r", key.at(2)))
    read_to_n(resume, 3)
    assert flags(client, named, key.at(1)) == {"reason": "messages_gone", "earliestSeq": 3}
    gate.release()
