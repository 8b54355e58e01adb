"""Resumes by `Last-Event-ID`, which every MCP client uses, and the limits of a GET."""

from typing import Any

import pytest

from tests.wire.conftest import Http
from tests.wire.httpverbs import (
    RESPONSE,
    EventId,
    announced,
    cut_after,
    messages_of,
    primed,
    read_to_n,
    read_until,
    resumed,
    streamed,
    text_of,
)
from tests.wire.process import Gate
from tests.wire.rawhttp import Event
from tests.wire.verbs import COMPLETED, CREATE, END, POSITIONS, STREAMS, counted, refused, up_to

ELICIT = "elicitation/create"
REPLAY = {"experimental": {"mcp-streams/v1": {"positions": True, "replayResponse": True}}}


def seqs(events: list[Event]) -> list[int]:
    return [EventId.of_call(event).seq for event in events if event.id]


@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_a_get_continues_the_call(http: Http, gate: Gate, n: int) -> None:
    """W§6: "GET with `Last-Event-ID` continues exactly the response that the id belongs to"; "First
    write: headers and a priming event with the given cursor as id"."""
    client = http.opened()
    last = cut_after(client, gate, n)
    gate.release(6 - n)
    exchange = streamed(client.get(last.at(n)))
    prime = exchange.take_event()
    assert prime is not None, "the head came alone"
    assert (prime.id, prime.data, prime.retry) == (last.at(n), "", 2000)
    assert exchange.headers["x-accel-buffering"] == "no"
    events = exchange.events()
    assert seqs(events) == list(range(n + 1, 8))
    assert {EventId.of_call(event).key for event in events} == {last.key}
    *entries, response = messages_of(events)
    assert counted(entries) == list(range(n + 1, 7))
    assert response.answers(7)
    assert text_of(response) == "stepped 6"


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26", "2024-11-05"])
def test_the_older_revisions_continue_too(http: Http, gate: Gate, revision: str) -> None:
    """W§6: of the priming event alone is it said that the older two have none."""
    client = http.opened(revision=revision)
    last = cut_after(client, gate, 2)
    gate.release(4)
    events = client.get(last.at(2)).events()
    assert all(event.data for event in events)
    assert counted(messages_of(events)) == [3, 4, 5, 6]


def test_a_get_that_is_cut_is_continued_by_the_next(http: Http, gate: Gate) -> None:
    """W§6: the id names the response, also of a GET that was cut; three times in a row."""
    client = http.opened()
    last = cut_after(client, gate, 1)
    for n in (2, 3, 4):
        gate.release()
        exchange = client.get(last.at(n - 1))
        assert counted(messages_of(read_to_n(exchange, n))) == [n]
        exchange.cut()
    gate.release(2)
    messages = messages_of(client.get(last.at(4)).events())
    assert counted(messages) == [5, 6]
    assert messages[-1].answers(7)


def test_a_get_goes_back_as_far_as_it_likes(http: Http, gate: Gate) -> None:
    """W§3: "**A GET never deletes and never moves the delivered mark**": whichever id it names,
    what lies above is there, again and again, and the resume that comes last gets everything."""
    client = http.opened(POSITIONS)
    exchange = client.call("count", 7, n=5, gate=gate.path)
    gate.release()
    first = exchange.events()
    last = EventId.of_call(first[0])
    for n in (5, 3, 0, 4):
        events = client.get(last.at(n)).events()
        assert seqs([event for event in events if event.data]) == list(range(n + 1, 7))
    status = client.ask("stream/poll", announced(first).by_id)
    assert status.result["pendingMessages"] is True
    messages = messages_of(resumed(client, announced(first).by_id, "r").events())
    assert counted(messages) == up_to(5)


def test_a_plain_clients_get_deletes_nothing_either(http: Http, gate: Gate) -> None:
    """W§3: "**A GET never deletes**", of a client that confirms nothing in other ways."""
    client = http.opened()
    last = cut_after(client, gate, 3)
    gate.release(3)
    gate.wait_for("sent")
    assert counted(messages_of(client.get(last.at(5)).events())) == [6]
    assert counted(messages_of(client.get(last.at(0)).events())) == up_to(6)


@pytest.mark.parametrize("replay", [False, True])
def test_a_get_continues_a_resume_and_its_reply(http: Http, gate: Gate, replay: bool) -> None:
    """W§6: "continues exactly the response that the id belongs to, **its own reply and id
    included**": what waits is the `stream/resume`, not the call."""
    client = http.opened(REPLAY if replay else POSITIONS)
    call = client.call("steps", 7, n=6, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    call.cut()
    resume = resumed(client, stream.by_id, "the resume", after=0)
    gate.release(3)
    last = EventId.of_resume(read_to_n(resume, 3)[-1])
    resume.cut()
    gate.release(3)
    exchange = client.get(last.at(3))
    prime = primed(exchange)
    assert prime.id == last.at(3)
    events = exchange.events()
    of_resume = [EventId.of_resume(event) for event in events if event.id]
    assert {(one.key, one.delivery) for one in of_resume} == {(last.key, last.delivery)}
    messages = messages_of(events)
    assert counted(messages) == [4, 5, 6]
    reply = messages[-1]
    assert reply.answers("the resume")
    assert any(message.answers(7) for message in messages) == replay
    assert any(message.method == END for message in messages)
    if replay:
        assert reply.result == COMPLETED
    else:
        assert text_of_inner(reply.result["_meta"][RESPONSE]) == "stepped 6"


@pytest.mark.parametrize("by", ["the same id", "another id", "a GET"])
def test_a_response_that_is_not_known_to_be_cut_is_displaced_at_once(
    http: Http, gate: Gate, by: str
) -> None:
    """W§5: a resume, by POST or GET, displaces a delivery of the same stream "at once, also where
    nobody has noticed yet that its connection is dead (half-open), and under the same id"."""
    client = http.opened(STREAMS)
    call = client.call("steps", 7, n=6, gate=gate.path)
    prime = EventId.of_call(primed(call))
    stream = announced(read_until(call, CREATE))
    gate.release(3)
    read_to_n(call, 3)
    awaited = "another" if by == "another id" else 7
    for _ in range(2):  # `call` stays open from here on, and is not read
        if by == "a GET":
            resume = client.get(prime.at(3))
        else:
            resume = resumed(client, stream.by_id, awaited, after=3)
        streamed(resume)
    gate.release(3)
    messages = messages_of(resume.events())
    assert counted(messages) == [4, 5, 6]
    assert [message for message in messages if "id" in message][-1].answers(awaited)


def text_of_inner(response: dict[str, object]) -> object:
    assert response["id"] == 7
    result = response["result"]
    assert isinstance(result, dict)
    return result["content"][0]["text"]


def test_each_response_is_continued_as_itself(http: Http, gate: Gate) -> None:
    """W§6: "exactly the response that the id belongs to": two resumes of one stream, and the call
    itself, each under its own id."""
    client = http.opened(POSITIONS)
    call = client.call("count", 7, n=3, gate=gate.path)
    of_call = EventId.of_call(primed(call))
    stream = announced(read_until(call, CREATE))
    call.cut()
    ids = []
    for name in ("first", "second"):
        resume = resumed(client, stream.by_id, name, after=0)
        ids.append(EventId.of_resume(read_to_n(resume, 1)[-1]))
        resume.cut()
    gate.release()
    for name, last in zip(("first", "second"), ids, strict=True):
        messages = messages_of(client.get(last.at(1)).events())
        assert counted(messages) == [2, 3]
        assert messages[-1].answers(name)
    messages = messages_of(client.get(of_call.at(2)).events())
    assert counted(messages) == [3]
    assert any(message.answers(7) for message in messages)


def test_the_announcement_comes_with_the_first_entry(http: Http, gate: Gate) -> None:
    """W§2: "Announcements go out whenever delivery starts at seq 1": a client that was cut off
    before anything but the priming event had come can opt in all the same."""
    client = http.opened(STREAMS)
    last = cut_after(client, gate, 0)
    gate.release(6)
    events = client.get(last.at(0)).events()
    assert announced(events).id == 7
    later = client.get(last.at(1)).events()
    assert not any(message.method == CREATE for message in messages_of(later))


def test_a_get_asks_nothing_twice(http: Http, gate: Gate) -> None:
    """W§5: "A GET never re-sends them", the requests to the client that have been delivered; their
    answer is awaited all the same."""
    client = http.opened()
    exchange = client.call("ask", 7)
    asked = read_until(exchange, ELICIT)[-1]
    exchange.cut()
    rest = client.get(asked.id)
    primed(rest)
    answer = {"jsonrpc": "2.0", "id": asked.message["id"], "result": {"action": "decline"}}
    assert client.post(answer).head().status == 202
    messages = messages_of(rest.events())
    assert counted(messages) == [3]
    assert messages[-1].answers(7)


def test_a_question_that_was_not_had_comes_with_a_get(http: Http) -> None:
    """W§5: a question above the cursor is an entry like any other, and comes under its id."""
    client = http.opened()
    exchange = client.call("ask", 7)
    asked = read_until(exchange, ELICIT)[-1]
    exchange.cut()
    rest = client.get(EventId.of_call(asked).at(1))
    again = read_until(rest, ELICIT)[-1]
    assert (again.id, again.data) == (asked.id, asked.data)
    answer = {"jsonrpc": "2.0", "id": asked.message["id"], "result": {"action": "decline"}}
    assert client.post(answer).head().status == 202
    assert messages_of(rest.events())[-1].answers(7)


def test_the_call_is_told_of_the_newest_and_its_events_end(http: Http, gate: Gate) -> None:
    """W§5: "an original call […] gets the error `superseded` under its id (not an entry), then its
    SSE closes"."""
    maker, newest = http.opened(STREAMS), http.opened(STREAMS)
    call = maker.call("count", 7, n=3, gate=gate.path)
    stream = announced(read_until(call, CREATE))
    read_to_n(call, 3)
    resume = resumed(newest, stream.with_token, "r", after=0)
    (told_so,) = messages_of(call.events())
    assert told_so.answers(7)
    refused(told_so, "superseded")
    gate.release()
    assert messages_of(resume.events())[-1].answers("r")


def test_a_plain_client_is_not_cancelled_by_a_cut(http: Http, gate: Gate) -> None:
    """W§8: "over HTTP it is safe from its first event id on, since `Last-Event-ID` works for
    everyone"; MCP, Transports: "Disconnection SHOULD NOT be interpreted as the client cancelling
    its request"."""
    client = http.opened()
    last = cut_after(client, gate, 0)
    gate.release(6)
    gate.wait_for("sent")
    assert counted(messages_of(client.get(last.at(0)).events())) == up_to(6)


def test_what_lasts_no_time_cannot_be_continued(http: Http, gate: Gate) -> None:
    """W§2: "`max: 0` = not resumable, cancelled on disconnect"; W§6: a GET gets an error under the
    waiting id, or no id was ever given."""
    client = http.opened()
    exchange = client.call("fleeting", 7, gate=gate.path)
    events = read_to_n(exchange, 1)
    exchange.cut()
    gate.wait_for("cancelled")
    if events[-1].id:
        (message,) = messages_of(client.get(events[-1].id).events())
        assert message.answers(7)
        assert message.error["code"] == -32602


def test_a_get_takes_the_call_from_a_connection_that_only_seems_alive(
    http: Http, gate: Gate
) -> None:
    """W§5: "One connection at a time is attached to a stream": the client that resumes knows better
    than the server that its first connection is dead."""
    client = http.opened()
    call = client.call("steps", 7, n=4, gate=gate.path)
    gate.release(2)
    last = read_to_n(call, 2)[-1]
    rest = client.get(last.id)
    primed(rest)
    assert counted(messages_of(call.events())) == [], "nothing more comes here"
    gate.release(2)
    messages = messages_of(rest.events())
    assert counted(messages) == [3, 4]
    assert messages[-1].answers(7)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_call_that_was_cut_off_can_be_cancelled(http: Http, gate: Gate, is_back: bool) -> None:
    """W§10: "`cancelled` reaches requests of this connection (session)", also after the connection
    that they came over was cut."""
    client = http.opened()
    exchange = client.call("count", 7, n=1, gate=gate.path)
    last = read_to_n(exchange, 1)[-1]
    exchange.cut()
    if is_back:
        primed(client.get(last.id))
    client.notify("notifications/cancelled", {"requestId": 7})
    gate.wait_for("cancelled")


POLICY = "notifications/requests/resumePolicy"


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26"])
@pytest.mark.parametrize(
    ("capabilities", "first"),
    [
        (STREAMS, CREATE),
        ({"resumableRequests": {}}, POLICY),
        ({**STREAMS, "resumableRequests": {}}, CREATE),
        ({"extensions": {"mcp-streams/v1": {"positions": True}}}, CREATE),
    ],
)
def test_without_a_priming_event_the_first_announcement_has_its_id(
    http: Http, gate: Gate, revision: str, capabilities: dict[str, Any], first: str
) -> None:
    """W§4: "before 2025-11-25, which has none, the first announcement carries that id (925: the
    policy "causes … a usable `Last-Event-ID`")": a call that was cut before it sent anything can be
    continued from there, by GET and by POST."""
    client = http.opened(capabilities, revision=revision)
    exchange = client.call("steps", 7, n=2, gate=gate.path)
    announcement = streamed(exchange).next_event()
    assert announcement.message.method == first
    key = EventId.of_call(announcement)
    assert key.seq == 0
    exchange.cut()
    again = client.get(key.at(0))
    repeated = streamed(again).next_event()
    assert (repeated.id, repeated.message.method) == (key.at(0), first)
    again.cut()
    gate.release(2)
    gate.wait_for("sent")
    events = client.get(key.at(0)).events()
    numbered = [event.id for event in events if event.id]
    assert numbered == [key.at(seq) for seq in range(4)]
    assert counted(messages_of(events)) == [1, 2]


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26"])
def test_the_announcement_of_a_resume_has_an_id_as_well(http: Http, revision: str) -> None:
    """W§4: "`<key>_<seq>_<delivery>` on that of a resume POST"; `Last-Event-ID` on it counts."""
    client = http.opened(STREAMS, revision=revision)
    events = client.call("count", 7, n=2).events()
    stream, key = announced(events), EventId.of_call(events[0])
    assert key.seq == 0
    first, *rest = resumed(client, stream.by_id, "r", key.at(0)).events()
    assert (first.message.method, EventId.of_resume(first).seq) == (CREATE, 0)
    assert EventId.of_resume(first).key == key.key
    assert counted(messages_of(rest)) == [1, 2]
    behind = resumed(client, stream.by_id, "r2", key.at(1)).events()
    assert [EventId.of_resume(event).seq for event in behind if event.id] == [2, 3]


def test_a_question_that_comes_again_has_no_number(http: Http) -> None:
    """W§5: "`stream/resume` […] first re-send those at or below the cursor, without a number"."""
    client = http.opened({**STREAMS, "elicitation": {}}, revision="2025-06-18")
    exchange = client.call("ask", 7)
    events = read_until(exchange, ELICIT)
    exchange.cut()
    resume = resumed(client, announced(events).by_id, "r", after=2)
    (question,) = read_until(resume, ELICIT)
    assert question.id is None
    answer = {"jsonrpc": "2.0", "id": question.message["id"], "result": {"action": "decline"}}
    assert client.post(answer).head().status == 202
    assert messages_of(resume.events())[-1].answers("r")
