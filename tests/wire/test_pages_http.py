"""Pages over HTTP: each has a response of its own, which can be cut and continued."""

import pytest

from tests.wire.conftest import Http
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import announced, messages_of, primed, read_to_n, refusal, streamed
from tests.wire.pages_verbs import following, held, invalid, page_params, text_of, token_of
from tests.wire.process import Gate
from tests.wire.raw import Id, Message
from tests.wire.rawhttp import EVENTS, Event, Exchange
from tests.wire.verbs import END, PLAIN, POSITIONS, STREAMS, counted, refused


def called(
    client: HttpClient, token: object = None, /, id: Id = 1, **arguments: object
) -> Exchange:
    return client.request("tools/call", page_params("pages", token, **arguments), id=id)


def page_of(exchange: Exchange, id: Id) -> Message:
    """The page that a response brings, as JSON or in an event stream."""
    exchange.head()
    assert exchange.status == 200, exchange.body()
    if exchange.media_type != EVENTS:
        return exchange.message()
    return the_page(exchange.events(), id)


def the_page(events: list[Event], id: Id) -> Message:
    (page,) = [message for message in messages_of(events) if message.answers(id)]
    return page


def had_first(client: HttpClient, gate: Gate, **more: object) -> str:
    """The first page of a run that waits before the second; returns the page token."""
    return following(page_of(called(client, id=1, **held(gate), **more), 1))


def test_a_response_ends_with_its_page(http: Http, gate: Gate) -> None:
    """W§6: "POST of a request: SSE if accepted, for `tools/call`"; MCP, Transports: the server
    "SHOULD" close the event stream "After the JSON-RPC response has been sent", which a page is."""
    client = http.opened()
    token = had_first(client, gate, notes=2)
    exchange = called(client, token, id=2, **held(gate), notes=2)
    primed(exchange)
    gate.release()
    events = exchange.events()
    gate.release()
    assert counted(messages_of(events)) == [3, 4]
    assert events[-1].message.answers(2)
    assert text_of(events[-1].message) == "page 2"
    ids = [event.id for event in events if event.data]
    assert len(set(ids)) == 3, "W§4: unique"
    last = page_of(called(client, following(events[-1].message), id=3, **held(gate), notes=2), 3)
    assert text_of(last) == "page 3"


def test_event_ids_are_unique_across_the_pages_of_a_run(http: Http, gate: Gate) -> None:
    """W§4: "unique across the session's event streams, as the revision demands", also where the
    same page is had twice."""
    client = http.opened()
    token = had_first(client, gate, notes=1)
    gate.release(2)
    named = []
    for call_id in (2, 3, 4):
        exchange = called(client, token, id=call_id, **held(gate), notes=1)
        named += [event.id for event in streamed(exchange).events() if event.data and event.id]
    assert len(named) >= 6, "a message and a page, three times"
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS, POSITIONS])
def test_a_cut_response_is_continued_under_its_id(
    http: Http, gate: Gate, capabilities: dict[str, object]
) -> None:
    """W§6: "GET with `Last-Event-ID` continues exactly the response that the id belongs to, its own
    reply and id included"; the page is asked for by this call and no other."""
    client = http.opened(capabilities)
    token = had_first(client, gate)
    exchange = called(client, token, id=2, **held(gate))
    last = primed(exchange)
    exchange.cut()
    gate.release(2)
    rest = streamed(client.get(last.id)).events()
    page = the_page(rest, 2)
    assert text_of(page) == "page 2"
    assert [message.method for message in messages_of(rest) if message.method != END] == [None]
    assert text_of(page_of(called(client, following(page), id=3, **held(gate)), 3)) == "page 3"


def test_the_first_call_is_continued_too(http: Http, gate: Gate) -> None:
    """W§8: "over HTTP it is safe from its first event id on, since `Last-Event-ID` works for
    everyone"."""
    client = http.opened()
    exchange = called(client, id=1, **held(gate, free=0))
    last = primed(exchange)
    exchange.cut()
    gate.release(3)
    page = the_page(streamed(client.get(last.id)).events(), 1)
    assert text_of(page) == "page 1"
    assert text_of(page_of(called(client, following(page), id=2, **held(gate, free=0)), 2)) == (
        "page 2"
    )


def test_a_response_is_continued_in_its_middle(http: Http, gate: Gate) -> None:
    """W§6: "continues exactly the response that the id belongs to": only the missing messages are
    sent."""
    client = http.opened()
    token = had_first(client, gate, notes=3)
    exchange = called(client, token, id=2, **held(gate), notes=3)
    primed(exchange)
    gate.release()
    read = read_to_n(exchange, 5)
    exchange.cut()
    rest = streamed(client.get(read[-1].id)).events()
    assert counted(messages_of(rest)) == [6]
    assert text_of(the_page(rest, 2)) == "page 2"


@pytest.mark.needs_one_process("others know the newest page alone: `messages_gone`")
def test_nothing_left_to_say_of_a_page_is_a_405(http: Http) -> None:
    """W§6: "Nothing left to say: 405": the client has its page, and must stop asking, even if the
    run has gone on since."""
    client = http.opened(STREAMS)
    events = streamed(called(client, id=1, n=4)).events()
    last, page = events[-1], events[-1].message
    for call_id in (2, 3, 4):
        refusal(client.get(last.id), 405)
        page = page_of(called(client, following(page), id=call_id, n=4), call_id)
    assert text_of(page) == "page 4"
    refusal(client.get(last.id), 405)


def test_what_a_later_token_has_let_go_is_gone(http: Http) -> None:
    """W§6: "`messages_gone`: 200 and that error under the waiting request's id": a page is kept
    until a later token was used (W§3), and its client may have missed it."""
    client = http.opened(STREAMS)
    events = streamed(called(client, id=1, n=4, notes=2)).events()
    second = page_of(called(client, following(events[-1].message), id=2, n=4, notes=2), 2)
    assert text_of(second) == "page 2"
    (told,) = messages_of(streamed(client.get(events[0].id)).events())
    assert told.answers(1)
    assert refused(told, "messages_gone")["earliestSeq"] == 4


def test_a_page_is_asked_for_again_instead(http: Http, gate: Gate) -> None:
    """W§3: "the same token gives the same page": a client that was cut off may call again under a
    new id, in this session or another; the first response then gets `superseded` (W§5)."""
    client = http.opened()
    token = had_first(client, gate)
    exchange = called(client, token, id=2, **held(gate))
    primed(exchange)
    again = called(client, token, id=3, **held(gate))
    (told,) = messages_of(exchange.events())
    assert told.answers(2)
    refused(told, "superseded")
    gate.release(2)
    page = page_of(again, 3)
    assert text_of(page) == "page 2"
    other = http.opened()
    assert page_of(called(other, token, id=2, **held(gate)), 2).result == page.result


def test_another_session_may_not_continue_a_page(http: Http, gate: Gate) -> None:
    """W§6: "another session's: 400": an event id is no token."""
    client, other = http.opened(), http.opened()
    token = had_first(client, gate)
    exchange = called(client, token, id=2, **held(gate))
    last = primed(exchange)
    exchange.cut()
    refusal(other.get(last.id), 400)
    gate.release(2)
    assert text_of(the_page(streamed(client.get(last.id)).events(), 2)) == "page 2"


def test_the_end_of_a_session_ends_no_run(http: Http, gate: Gate) -> None:
    """W§6: "DELETE ends the session; streams that have tokens live on"."""
    client = http.opened()
    token = had_first(client, gate)
    assert client.delete().head().status < 300
    gate.release(2)
    page = page_of(called(http.opened(), token, id=1, **held(gate)), 1)
    assert text_of(page) == "page 2"


def test_the_first_page_follows_its_announcement(http: Http) -> None:
    """W§2: "`create` comes before any entry"; the first call's response ends with the first page
    and not with the stream."""
    client = http.opened(STREAMS)
    events = streamed(called(client, id=1, n=2)).events()
    assert announced(events).id == 1
    assert events[-1].message.answers(1)
    page = events[-1].message
    assert not any(message.method == END for message in messages_of(events))
    last = streamed(called(client, following(page), id=2, n=2)).events()
    assert token_of(the_page(last, 2)) is None
    assert messages_of(last)[-1].method == END


def test_a_refused_token_is_a_200(http: Http) -> None:
    """W§6: "an error to a well-formed request in a valid session is HTTP 200 with a JSON-RPC
    error"."""
    client = http.opened()
    invalid(client.ask("tools/call", page_params("pages", "nonsense", n=2), id=5))
