"""Pages across connections: lost and requested again, taken over, polled, resumed."""

import json
from typing import Any

from tests.wire.conftest import Wire
from tests.wire.pages_verbs import (
    POLICY,
    RESUMABLE,
    ask_page,
    following,
    held,
    held_run,
    invalid,
    request_page,
    rest_of,
    text_of,
    texts_of,
    token_of,
)
from tests.wire.process import Gate
from tests.wire.raw import Message, Peer, answers_to, method_is
from tests.wire.verbs import (
    CREATE,
    END,
    Reader,
    ack,
    counted,
    refused,
    resume,
    start,
    up_to,
)

ELICIT = "elicitation/create"
ACCEPT = {"action": "accept", "content": {"go": True}}
DECLINE = {"action": "decline"}


def test_a_run_goes_on_over_another_connection(wire: Wire) -> None:
    """W§3: the token is all that it takes: between two calls a run belongs to no connection; page:
    "tolerant of client-side disconnection as a side-effect"."""
    peer = wire.plain()
    token = following(ask_page(peer, "pages", n=3))
    peer.cut()
    again = wire.plain()
    page = ask_page(again, "pages", token, n=3)
    assert texts_of(rest_of(again, "pages", page, n=3)) == ["page 2", "page 3"]


def test_a_page_that_was_lost_is_asked_for_again(wire: Wire, gate: Gate) -> None:
    """W§3: "Stable: the same token gives the same page until a later one was used", whether or not
    the first who asked has ever had it."""
    peer = wire.plain()
    token = held_run(peer, gate)
    request_page(peer, "pages", token, **held(gate))
    peer.arrived()
    peer.cut()
    gate.release(2)
    again = wire.positions()
    page = ask_page(again, "pages", token, **held(gate))
    assert texts_of(rest_of(again, "pages", page, **held(gate))) == ["page 2", "page 3"]


def test_messages_are_lost_with_no_page(wire: Wire) -> None:
    """W§4: "a plain client may see a message twice, never miss one": messages before a lost page
    come with it again."""
    peer = wire.plain()
    token = following(ask_page(peer, "pages", n=3, notes=2))
    call_id = request_page(peer, "pages", token, n=3, notes=2)
    *_, one, other, page = peer.read_until(answers_to(call_id))
    peer.cut()
    again = wire.plain()
    call_id = request_page(again, "pages", token, n=3, notes=2)
    assert again.read_until(answers_to(call_id))[:-1] == [one, other]
    assert text_of(page) == "page 2"


def test_the_newest_call_for_a_page_wins(wire: Wire, gate: Gate) -> None:
    """W§5: "**Newest wins.** […] an original call […] gets the error `superseded` under its id": of
    the calls with one token the last has the page, over this connection or another."""
    peer, newest = wire.plain(), wire.plain()
    token = held_run(peer, gate)
    first = request_page(peer, "pages", token, id=1, **held(gate))
    peer.arrived()
    second = request_page(peer, "pages", token, id=2, **held(gate))
    told = [peer.response(first)]
    third = request_page(newest, "pages", token, id=3, **held(gate))
    told.append(peer.response(second))
    for error in told:
        assert refused(error, "superseded") == {"reason": "superseded"}
        assert b"esumeT" not in error.raw
    gate.release(2)
    assert text_of(newest.response(third)) == "page 2"
    assert not any("id" in message for message in peer.settle())


def test_the_first_call_is_displaced_by_a_resume(wire: Wire, gate: Gate) -> None:
    """W§5: as for any call: "an original call […] gets the error `superseded` under its id"."""
    peer, newest = wire.streams(), wire.streams()
    started = start(peer, "pages", **held(gate, free=0))
    resume_id = newest.request("stream/resume", started.with_token)
    refused(peer.response(started.id), "superseded")
    gate.release(3)
    assert text_of(newest.response(started.id)) == "page 1"
    assert "result" in newest.response(resume_id)


def test_a_resume_of_the_stream_brings_the_page(wire: Wire, gate: Gate) -> None:
    """W§2: "replayed as stored, under the original `id`" and the reply last; W§3: the stream goes
    on with the token that the page holds, so there is no `stream/end` yet."""
    arguments = held(gate, free=0)
    peer = wire.streams()
    started = start(peer, "pages", **arguments)
    peer.cut()
    gate.release(3)
    again = wire.streams()
    create, page, reply = resume(again, started.with_token)
    assert create.params["stream"]["streamId"] == started.stream
    assert page.answers(started.id)
    assert text_of(page) == "page 1"
    assert "result" in reply
    second = ask_page(again, "pages", following(page), **arguments)
    assert texts_of(rest_of(again, "pages", second, **arguments)) == ["page 2", "page 3"]


def test_a_requests_resume_brings_the_page(wire: Wire, gate: Gate) -> None:
    """W§3: "The token identifies the request; the final entry is sent under the id of the
    `requests/resume` message": up to the next page, which leads on."""
    capabilities = RESUMABLE
    peer = wire.opened(capabilities)
    request_page(peer, "pages", **held(gate, free=0))
    token = peer.expect(method_is(POLICY)).params["resumeToken"]
    peer.cut()
    gate.release(3)
    again = wire.opened(capabilities)
    page = again.ask("requests/resume", {"resumeToken": token})
    assert text_of(page) == "page 1"
    second = ask_page(again, "pages", following(page), **held(gate, free=0))
    pages = rest_of(again, "pages", second, **held(gate, free=0))
    assert texts_of(pages) == ["page 2", "page 3"]


def test_cancelling_a_requests_resume_only_detaches(wire: Wire, gate: Gate) -> None:
    """W§3: "Cancelling it: under the original id it stops the work, under another it detaches", as
    of any stream."""
    peer = wire.opened(RESUMABLE)
    request_page(peer, "pages", id=1, **held(gate, free=0))
    params = {"resumeToken": peer.expect(method_is(POLICY)).params["resumeToken"]}
    peer.cut()
    again = wire.opened(RESUMABLE)
    again.request("requests/resume", params, id=2)
    again.arrived()
    again.notify("notifications/cancelled", {"requestId": 2})
    again.settle()
    assert "cancelled" not in gate.marks()
    again.request("requests/resume", params, id=1)
    again.arrived()
    again.notify("notifications/cancelled", {"requestId": 1})
    gate.wait_for("cancelled")
    refused(again.ask("requests/resume", params), "cancelled")


def test_a_streams_token_leads_to_no_page(wire: Wire) -> None:
    """W§3: a resume token is not a page token."""
    peer = wire.streams()
    started = start(peer, "pages", n=3)
    page = peer.response(started.id)
    invalid(ask_page(peer, "pages", started.token, n=3))
    wrong = {**started.by_id, "resumeToken": following(page)}
    refused(peer.ask("stream/resume", wrong), "stream_not_found")


def test_numbers_go_on_from_page_to_page(wire: Wire) -> None:
    """W§4: "one header ahead of each run of entries of one stream"; W§1: "numbered `seq` = 1, 2, 3
    … without gaps"; one run of pages is one stream, whichever call asks for them."""
    reader = Reader(peer := wire.positions())
    page = reader.response(request_page(peer, "pages", n=4, notes=2))
    while (token := token_of(page)) is not None:
        page = reader.response(request_page(peer, "pages", token, n=4, notes=2))
    assert counted(reader.all) == up_to(8)
    assert counted(reader.others) == [], "each message has a number"
    seqs = [seq for entries in reader.entries.values() for seq in entries]
    assert seqs == up_to(len(seqs))


def test_acks_delete_nothing_of_a_page(wire: Wire) -> None:
    """W§3: "the same token gives the same page until a later one was used", and nothing else voids
    it: neither an ack nor a cursor."""
    peer = wire.positions()
    started = start(peer, "pages", n=4, notes=1)
    reader = Reader(peer)
    token = following(reader.response(started.id))
    second = reader.response(request_page(peer, "pages", token, n=4, notes=1))
    for seq in range(1, 10):
        ack(peer, started.stream, seq)
    reader.settle()
    again = wire.positions()
    assert ask_page(again, "pages", token, n=4, notes=1).result == second.result
    for seq in range(1, 10):
        ack(again, started.stream, seq)
    pages = rest_of(peer, "pages", ask_page(peer, "pages", token, n=4, notes=1), n=4, notes=1)
    assert texts_of(pages) == ["page 2", "page 3", "page 4"]


# Requests of a tool to the client between two pages.


def asking_run(peer: Peer, gate: Gate) -> str:
    """A run that waits for the client's answer before its second page."""
    page = ask_page(peer, "asking_pages", gate=gate.path)
    gate.release()
    gate.wait_for("asking")
    return following(page)


def second_page(peer: Peer, token: str, gate: Gate) -> tuple[int | str, Message]:
    """Call for the page that needs an answer; returns the call's id and the question."""
    call_id = request_page(peer, "asking_pages", token, gate=gate.path)
    return call_id, peer.expect(method_is(ELICIT))


def answer_in(page: Message) -> Any:
    return json.loads(text_of(page))


def test_a_question_comes_with_the_call_that_asks_for_its_page(wire: Wire, gate: Gate) -> None:
    """W§5: requests to the client go to the attached connection, and none is attached between two
    calls; only "Unanswered ones" come again with their page."""
    peer = wire.plain()
    token = asking_run(peer, gate)
    assert not any(map(method_is(ELICIT), peer.settle()))
    call_id, question = second_page(peer, token, gate)
    peer.answer(question["id"], ACCEPT)
    page = peer.response(call_id)
    assert answer_in(page) == ACCEPT
    assert ask_page(peer, "asking_pages", token, gate=gate.path).result == page.result
    third = ask_page(peer, "asking_pages", following(page), gate=gate.path)
    assert text_of(third) == "page 3"
    assert token_of(third) is None


def test_a_question_is_asked_again_where_its_page_is(wire: Wire, gate: Gate) -> None:
    """W§5: "Unanswered ones are kept whatever the cursor says", and come again "under the same id"
    to the client that calls for the page again; the answer of the attached client counts."""
    peer = wire.plain()
    token = asking_run(peer, gate)
    displaced, question = second_page(peer, token, gate)
    newer = wire.plain()
    _, again = second_page(newer, token, gate)
    assert again.raw == question.raw
    refused(peer.response(displaced), "superseded")
    newer.cut()
    newest = wire.plain()
    call_id, again = second_page(newest, token, gate)
    assert again.raw == question.raw
    newest.answer(again["id"], DECLINE)
    assert answer_in(newest.response(call_id)) == DECLINE


def test_a_stream_of_pages_ends_once(wire: Wire) -> None:
    """W§2: ""the stream is over" is `stream/end`, sent after the final response", the last page."""
    peer = wire.streams()
    started = start(peer, "pages", n=3)
    page = peer.response(started.id)
    for _ in range(2):
        call_id = request_page(peer, "pages", following(page), n=3)
        *before, page = peer.read_until(answers_to(call_id))
        assert not any(map(method_is(CREATE, END), before))
    end = peer.expect(method_is(END))
    assert end.params == {"streamId": started.stream}
