"""Requests of a tool to the client, where `requests/resume` resumes the call."""

import json
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, method_is
from tests.wire.requests_verbs import (
    POLICY,
    REQUESTS,
    REQUESTS_POSITIONS,
    Promised,
    promise,
    regained,
    regained_by_seq,
    return_for,
    sole,
    status_of,
    text_of,
    until_seq,
)
from tests.wire.verbs import Reader, counted, refused

ELICIT = "elicitation/create"
ACCEPT = {"action": "accept", "content": {"go": True}}
DECLINE = {"action": "decline"}


def asked(wire: Wire) -> tuple[Promised, Message]:
    """A call that waits for the client's answer, which is seq 2; its client has left."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "ask", 7)
    reader = Reader(maker)
    until_seq(reader, 2)
    maker.cut()
    return promised, sole(reader)[2]


def answer_in(response: Message) -> Any:
    return json.loads(text_of(response))


def test_every_resume_asks_again_what_is_unanswered(wire: Wire) -> None:
    """W§5: "Unanswered ones are kept whatever the cursor says; `stream/resume` and
    `requests/resume` first re-send those at or below the cursor, without a number, under the same
    id"."""
    promised, question = asked(wire)
    peer = wire.opened(REQUESTS_POSITIONS)
    for displaced, resume_id in ((None, 7), (7, "second"), ("second", "third")):
        return_for(peer, promised, resume_id, after=2)
        assert peer.expect(method_is(ELICIT)).raw == question.raw
        if displaced is not None:
            refused(peer.response(displaced), "superseded")
    assert peer.settle() == [], "no number came with it"
    assert status_of(wire.plain(), promised)["hasInputRequest"] is True
    peer.answer(question["id"], ACCEPT)
    reader = Reader(peer)
    assert answer_in(reader.response("third")) == ACCEPT
    assert list(sole(reader)) == [3, 4]


def test_above_the_cursor_a_question_is_an_entry(wire: Wire) -> None:
    """W§1: "its requests to the client" are entries; W§5: only "those at or below the cursor" come
    without a number, so that none comes twice."""
    promised, question = asked(wire)
    peer = wire.opened(REQUESTS_POSITIONS)
    reader = Reader(peer)
    return_for(peer, promised, "r", after=1)
    until_seq(reader, 2)
    assert sole(reader)[2].raw == question.raw
    assert reader.others == []
    peer.answer(question["id"], ACCEPT)
    assert answer_in(reader.response("r")) == ACCEPT
    assert list(sole(reader)) == [2, 3, 4]


def test_without_positions_it_comes_once(wire: Wire) -> None:
    """W§5: as above, to a client that knows no numbers: the policy, the messages, the question."""
    promised, question = asked(wire)
    peer = wire.opened(REQUESTS)
    return_for(peer, promised, 7)
    policy, first, again = (peer.receive() for _ in range(3))
    assert policy.method == POLICY
    assert counted([first]) == [1]
    assert again.raw == question.raw
    peer.answer(question["id"], DECLINE)
    last, response = peer.receive(), peer.receive()
    assert counted([last]) == [3]
    assert response.answers(7)
    assert answer_in(response) == DECLINE


def test_an_answered_question_is_not_asked_again(wire: Wire, gate: Gate) -> None:
    """W§5: only "Unanswered ones" are re-sent."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "ask", gate=gate.path)
    reader = Reader(maker)
    until_seq(reader, 2)
    maker.answer(sole(reader)[2]["id"], ACCEPT)
    gate.wait_for("answered")
    maker.cut()
    gate.release()
    again, response = regained_by_seq(wire.opened(REQUESTS_POSITIONS), promised, "r", after=2)
    assert list(sole(again)) == [3, 4]
    assert again.others == []
    assert answer_in(response) == ACCEPT


@pytest.mark.needs_one_process("the first that reaches the owner counts", over="http")
def test_the_first_answer_counts(wire: Wire) -> None:
    """W§5: "An answer counts from the stream's owner or from the connection that it was delivered
    to; the first counts, later ones are dropped": the displaced client had been asked as well."""
    promised, question = asked(wire)
    first, second = wire.opened(REQUESTS), wire.opened(REQUESTS)
    return_for(first, promised, 7, after=2)
    first.expect(method_is(ELICIT))
    return_for(second, promised, 7, after=2)
    second.expect(method_is(ELICIT))
    refused(first.response(7), "superseded")
    first.answer(question["id"], ACCEPT)
    first.settle()
    second.answer(question["id"], DECLINE)
    assert answer_in(second.response(7)) == ACCEPT
    second.answer(question["id"], DECLINE)
    assert not any("id" in message for message in second.settle())


def test_a_question_can_be_answered_and_the_result_fetched_later(wire: Wire) -> None:
    """W§5: an answer counts from a connection that was asked, attached or not; the result is kept
    for the client that resumes."""
    promised, question = asked(wire)
    peer = wire.opened(REQUESTS_POSITIONS)
    return_for(peer, promised, 7, after=2)
    peer.expect(method_is(ELICIT))
    peer.answer(question["id"], ACCEPT)
    peer.settle()
    peer.cut()
    *entries, response = regained(wire.opened(REQUESTS), promised, 7, after=2)
    assert counted(entries) == [3]
    assert len(entries) == 1
    assert answer_in(response) == ACCEPT
