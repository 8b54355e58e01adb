"""Resumable requests over HTTP: event ids, the requests that continue them, and deletions."""

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streams.journal.sqlite import SQLiteStore
from streams.limits import MIB
from tests.rigs.journals import as_one
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
    streamed,
)
from tests.wire.process import Gate
from tests.wire.raw import DEADLINE_S, Id, Message
from tests.wire.rawhttp import BOTH, JSON, LINES, Event, Exchange
from tests.wire.requests_verbs import (
    BOTH_DIALECTS,
    POLICY,
    REQUESTS,
    REQUESTS_POSITIONS,
    RESUME,
    STATUS,
    Promised,
    text_of,
)
from tests.wire.verbs import counted, refused, up_to


def came_back(
    client: HttpClient,
    promised: Promised,
    id: Id = "r",
    last_event_id: str | None = None,
    **more: object,
) -> Exchange:
    params = {**promised.by_token, **more}
    return client.request(RESUME, params, id=id, more={"Last-Event-ID": last_event_id})


def promised_in(events: list[Event]) -> Promised:
    (policy,) = [one for one in messages_of(events) if one.method == POLICY]
    return Promised.by(policy)


@pytest.mark.parametrize("id", [7, "another"])
def test_a_response_that_is_not_known_to_be_cut_is_displaced_at_once(
    http: Http, gate: Gate, id: Id
) -> None:
    """W§5: as 925 demands it, under the call's own id too; the half-open response gets no error
    under an id that is still waited for."""
    client = http.opened(REQUESTS)
    call = client.call("steps", 7, n=6, gate=gate.path)
    promised = promised_in(read_until(call, POLICY))
    gate.release(3)
    read_to_n(call, 3)
    for _ in range(2):
        resume = streamed(came_back(client, promised, id, after=3))
    gate.release(3)
    messages = messages_of(resume.events())
    assert counted(messages) == [4, 5, 6]
    assert text_of(messages[-1]) == "stepped 6"
    assert messages[-1].answers(id)
    refusals = [message.reason for message in messages_of(call.events()) if "error" in message]
    assert refusals == ([] if id == 7 else ["superseded"])


def whole(client: HttpClient, n: int = 5, id: Id = 7) -> tuple[Promised, EventId]:
    """A call that is over; and the id of its last event."""
    events = client.call("count", id, n=n).events()
    return promised_in(events), EventId.of_call(events[-1])


def cut_after(client: HttpClient, gate: Gate, n: int, of: int = 6) -> tuple[Promised, EventId]:
    """A call of `steps`, with the id 7, that was cut off after its n-th message."""
    exchange = client.call("steps", 7, n=of, gate=gate.path)
    gate.release(n)
    events = read_until(exchange, POLICY)
    promised = promised_in(events)
    last = EventId.of_call(read_to_n(exchange, n)[-1])
    exchange.cut()
    return promised, last


def answer_of(events: list[Event], id: Id) -> Message:
    """The one response among these events, which is the last of them."""
    messages = messages_of(events)
    assert [one for one in messages if "method" not in one] == [messages[-1]]
    assert messages[-1].answers(id)
    return messages[-1]


def test_the_events_of_a_resume_have_ids_of_their_own(http: Http) -> None:
    """W§4: "`<key>_<seq>_<delivery>` on that of a resume POST"; "Announcements have no event id of
    their own; the priming event is `<key>_0`"; the final entry has its seq."""
    client = http.opened(REQUESTS_POSITIONS)
    promised, of_call = whole(client)
    assert of_call.seq == 6
    deliveries = set()
    for resume_id in ("r", 7):
        exchange = came_back(client, promised, resume_id)
        prime = EventId.of_resume(primed(exchange))
        events = exchange.events()
        policy, *entries = events
        assert policy.message.method == POLICY
        assert policy.id is None
        ids = [EventId.of_resume(event) for event in entries]
        assert [one.seq for one in ids] == up_to(6)
        assert {one.key for one in (*ids, prime)} == {of_call.key}
        assert {one.delivery for one in ids} == {prime.delivery}
        assert prime.seq == 0
        deliveries.add(prime.delivery)
        response = answer_of(events, resume_id)
        assert text_of(response) == "counted 5"
        assert "mcp-streams/response" not in response.raw.decode(), "nothing is embedded"
    assert len(deliveries) == 2


@pytest.mark.parametrize("resume_id", [7, "r"])
def test_a_get_continues_a_resume_and_its_response(http: Http, gate: Gate, resume_id: Id) -> None:
    """W§6: "GET with `Last-Event-ID` continues exactly the response that the id belongs to, its own
    reply and id included": in the very session of the call, too; "Nothing left to say: 405"."""
    client = http.opened(REQUESTS)
    promised, _ = cut_after(client, gate, 2)
    resume = came_back(client, promised, resume_id, after=1)
    gate.release()
    last = EventId.of_resume(read_to_n(resume, 3)[-1])
    resume.cut()
    gate.release(3)
    exchange = client.get(last.at(3))
    prime = primed(exchange)
    assert prime.id == last.at(3)
    events = exchange.events()
    assert {EventId.of_resume(one).delivery for one in events} == {last.delivery}
    assert [EventId.of_resume(one).seq for one in events] == [4, 5, 6, 7]
    assert counted(messages_of(events)) == [4, 5, 6]
    assert text_of(answer_of(events, resume_id)) == "stepped 6"
    refusal(client.get(last.at(7)), 405)


def test_who_was_cut_off_comes_back_at_once_under_the_same_id(http: Http, gate: Gate) -> None:
    """W§5: "An id is taken […] while in flight there", and it is free once its connection is
    closed, even before the server has handled that."""
    client = http.opened(REQUESTS)
    promised, _ = cut_after(client, gate, 2)
    for _ in range(50):
        resume = streamed(came_back(client, promised, 7))
        read_to_n(resume, 2)
        resume.cut()
    gate.release(4)
    events = came_back(client, promised, 7).events()
    assert counted(messages_of(events)) == up_to(6)
    assert text_of(answer_of(events, 7)) == "stepped 6"


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26", "2024-11-05"])
def test_the_older_revisions_resume_too(http: Http, gate: Gate, revision: str) -> None:
    """W§6: of the priming event alone is it said that the older two have none."""
    client = http.opened(REQUESTS, revision=revision)
    promised, _ = cut_after(client, gate, 2)
    resume = came_back(client, promised)
    assert streamed(resume).next_event().message.method == POLICY
    last = EventId.of_resume(read_to_n(resume, 2)[-1])
    resume.cut()
    gate.release(4)
    events = client.get(last.at(2)).events()
    assert counted(messages_of(events)) == [3, 4, 5, 6]
    assert text_of(answer_of(events, "r")) == "stepped 6"


def test_a_session_ends_and_its_requests_do_not(http: Http, gate: Gate) -> None:
    """W§6: "DELETE ends the session; streams that have tokens live on"."""
    client, other = http.opened(REQUESTS), http.opened(REQUESTS)
    promised, _ = cut_after(client, gate, 2)
    assert client.delete().head().status in (200, 202, 204)
    gate.release(4)
    events = came_back(other, promised, 7).events()
    assert counted(messages_of(events)) == up_to(6)
    assert text_of(answer_of(events, 7)) == "stepped 6"


def test_a_get_of_the_call_continues_the_call(http: Http, gate: Gate) -> None:
    """W§6: "exactly the response that the id belongs to": the resume's under its id, and the
    call's own under the call's, as none was displaced by the other."""
    client = http.opened(REQUESTS)
    promised, of_call = cut_after(client, gate, 2)
    resume = came_back(client, promised, "r")
    of_resume = EventId.of_resume(primed(resume))
    resume.cut()
    gate.release(4)
    events = client.get(of_call.at(2)).events()
    assert counted(messages_of(events)) == [3, 4, 5, 6]
    assert text_of(answer_of(events, 7)) == "stepped 6"
    events = client.get(of_resume.at(4)).events()
    assert counted(messages_of(events)) == [5, 6]
    assert text_of(answer_of(events, "r")) == "stepped 6"


def test_a_resume_is_continued_after_a_restart(http: Http, gate: Gate, gate2: Gate) -> None:
    """W§6: "deliveries are journaled with the session that they were granted to"; "**Sessions live
    in the journal** […]: a restarted server knows them"; and both know what the work has come to,
    or that it has come to nothing."""
    client, other = http.opened(REQUESTS), http.opened(REQUESTS)
    (over, _), (lost, _) = cut_after(client, gate, 2), cut_after(other, gate2, 2)
    resumes = [came_back(client, over), came_back(other, lost)]
    last = [EventId.of_resume(read_to_n(resume, 2)[-1]) for resume in resumes]
    resumes[0].cut()
    resumes[1].cut()
    gate.release(4)
    while client.ask(STATUS, over.named, id="s").result["status"] == "processing":
        pass
    http.server.restart()
    events = client.get(last[0].at(2)).events()
    assert counted(messages_of(events)) == [3, 4, 5, 6]
    assert text_of(answer_of(events, "r")) == "stepped 6"
    events = other.get(last[1].at(2)).events()
    refused(answer_of(events, "r"), "interrupted", -32603)


@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_last_event_id_on_a_post_is_a_cursor(http: Http, accept: str) -> None:
    """W§4: "On a POST, `Last-Event-ID` says the same [as `after`]": of the call's events, and of
    another resume's; what lies below may be deleted."""
    client = http.opened(REQUESTS)
    promised, of_call = whole(client)
    of_resume = EventId.of_resume(primed(came_back(client, promised, "first", of_call.at(2))))
    client.accept = accept
    for last_event_id, numbers in ((of_call.at(3), [4, 5]), (of_resume.at(4), [5])):
        exchange = came_back(client, promised, "r", last_event_id)
        if accept == LINES:
            exchange.body()
            messages = [Message(line) for line in iter(exchange.take_line, None)]
        else:
            messages = messages_of(exchange.events())
        assert counted(messages) == numbers
        assert messages[-1].answers("r")
        assert not any(one.method == POLICY for one in messages)
    client.accept = BOTH
    gone = client.ask(RESUME, {**promised.by_token, "after": 2}, id="again")
    assert refused(gone, "messages_gone")["earliestSeq"] == 5


def test_after_beats_the_header_and_another_calls_is_ignored(http: Http) -> None:
    """W§4: "`after` beats the header; a header that names another stream is ignored"."""
    client = http.opened(REQUESTS)
    promised, own = whole(client)
    _, others = whole(client, id=8)
    events = came_back(client, promised, "r", others.at(4)).events()
    assert counted(messages_of(events)) == up_to(5)
    events = came_back(client, promised, "r", own.at(4), after=1).events()
    assert counted(messages_of(events)) == [2, 3, 4, 5]
    assert text_of(answer_of(events, "r")) == "counted 5"


@pytest.mark.needs_file("it reads the file")
def test_a_post_frees_what_was_had_and_a_get_frees_nothing(http: Http, gate: Gate) -> None:
    """W§3: "Over HTTP a `requests/resume` POST may delete what is delivered. **A GET never deletes
    and never moves the delivered mark.**" The journal shows that both are so."""
    client = http.opened(BOTH_DIALECTS)
    exchange = client.call("steps", 7, n=6, gate=gate.path)
    started = announced(read_until(exchange, POLICY))
    for n in up_to(6):  # one at a time, so that each is a run of its own in the journal
        gate.release()
        last = EventId.of_call(read_to_n(exchange, n)[-1])
    exchange.events()
    journal, promised = http.server.journal, Promised.of(started)
    assert kept(journal, started.stream) == 7
    assert counted(messages_of(client.get(last.at(5)).events())) == [6]
    client.ask("ping")
    assert kept(journal, started.stream) == 7
    events = came_back(client, promised, "r", last.at(4)).events()
    assert counted(messages_of(events)) == [5, 6]
    wait_until_kept(journal, started.stream, 3)
    of_resume = EventId.of_resume(next(one for one in events if one.id))
    assert counted(messages_of(client.get(of_resume.at(4)).events())) == [5, 6]
    client.ask("ping")
    assert kept(journal, started.stream) == 3
    came_back(client, promised, "again", of_resume.at(6)).body()
    wait_until_kept(journal, started.stream, 1)


def kept(journal: Path, stream: str) -> int:
    """How many entries of a stream the journal keeps, as a server would find them after a crash."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.db"
        with (
            closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
            closing(sqlite3.connect(copy)) as copied,
        ):
            connection.backup(copied)
        with closing(SQLiteStore(copy)) as opened:
            record = opened.lookups.find(stream)
            assert record is not None
            run = as_one(opened.read(stream, record.acked, bytes_max=MIB))
    return 0 if run is None else run.count


def wait_until_kept(journal: Path, stream: str, count: int) -> None:
    """Wait for the number of entries: the journal may delete them after the response."""
    give_up_at = time.monotonic() + DEADLINE_S
    while (now := kept(journal, stream)) != count:
        assert time.monotonic() < give_up_at, f"{now} are kept, not {count}"


def test_who_reads_json_alone_gets_the_response_alone(http: Http, gate: Gate) -> None:
    """W§6: a client that does not accept events gets the final response only: its answer has no
    room for more."""
    maker = http.opened(REQUESTS)
    promised, _ = cut_after(maker, gate, 2)
    client = http.opened(REQUESTS, accept=JSON)
    exchange = came_back(client, promised, "r")
    gate.release(4)
    exchange.head()
    assert (exchange.status, exchange.media_type) == (200, JSON)
    response = exchange.message()
    assert response.answers("r")
    assert text_of(response) == "stepped 6"
    again = came_back(client, promised, 7).message()
    assert again == {**response, "id": 7}


def test_the_call_is_told_of_the_newest_and_its_events_end(http: Http, gate: Gate) -> None:
    """W§5: "an original call or a `requests/resume` gets the error `superseded` under its id (not
    an entry), then its SSE closes"."""
    maker, newest = http.opened(REQUESTS), http.opened(REQUESTS)
    call = maker.call("count", 7, n=3, gate=gate.path)
    promised = promised_in(read_until(call, POLICY))
    read_to_n(call, 3)
    first = came_back(newest, promised, 7, after=3)
    (told,) = messages_of(call.events())
    assert told.answers(7)
    refused(told, "superseded")
    primed(first)
    second = came_back(newest, promised, "second", after=3)
    (told,) = messages_of(first.events())
    assert told.answers(7)
    refused(told, "superseded")
    gate.release()
    assert text_of(answer_of(second.events(), "second")) == "counted 3"


def test_a_resume_is_told_under_its_own_id_of_what_is_gone(http: Http, gate: Gate) -> None:
    """W§6: "A stream of this session that is abandoned, cancelled or `messages_gone`: 200 and that
    error under the waiting request's id, with an event id"."""
    client = http.opened(REQUESTS)
    call = client.call("brief", 7, gate=gate.path)
    promised = promised_in(read_until(call, POLICY))
    call.cut()
    resume = came_back(client, promised, "r")
    last = EventId.of_resume(read_to_n(resume, 1)[-1])
    resume.cut()
    gate.wait_for("cancelled")
    told(client, last.at(1), "abandoned")
    promised, _ = whole(client)
    key = EventId.of_resume(came_back(client, promised).events()[0])
    came_back(client, promised, "newest", after=4).events()
    assert told(client, key.at(2), "messages_gone")["earliestSeq"] == 5
    assert counted(messages_of(client.get(key.at(4)).events())) == [5]


def told(client: HttpClient, event_id: str, reason: str) -> dict[str, Any]:
    """Send a GET and read the refusal that comes as a 200, under the id of the resume."""
    events = streamed(client.get(event_id)).events()
    (message,) = messages_of(events)
    assert message.answers("r")
    assert events[-1].id, "with an event id"
    return refused(message, reason)


def test_what_was_granted_to_one_session_is_no_others(http: Http, gate: Gate) -> None:
    """W§6: "another session's: 400": the token leads another session to the request, an event id
    does not."""
    maker, other = http.opened(REQUESTS), http.opened(REQUESTS)
    promised, of_call = cut_after(maker, gate, 2)
    refusal(other.get(of_call.at(2)), 400)
    resume = came_back(other, promised, 7)
    of_resume = EventId.of_resume(read_to_n(resume, 2)[-1])
    refusal(maker.get(of_resume.at(2)), 400)
    resume.cut()
    gate.release(4)
    events = other.get(of_resume.at(2)).events()
    assert counted(messages_of(events)) == [3, 4, 5, 6]
    assert text_of(answer_of(events, 7)) == "stepped 6"
