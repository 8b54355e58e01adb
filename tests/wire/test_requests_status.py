"""Status without delivery: `requests/getStatus`."""

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Message, method_is
from tests.wire.requests_verbs import (
    REQUESTS,
    REQUESTS_POSITIONS,
    RESUME,
    STATUS,
    Promised,
    both,
    finished,
    held,
    promise,
    regained,
    regained_by_seq,
    sole,
    status_of,
    text_of,
    until_seq,
    wires_to,
)
from tests.wire.verbs import UNKNOWN, Reader, ack, refused, start, up_to


def test_a_status_has_its_four_fields_and_no_others(wire: Wire, gate: Gate) -> None:
    """W§3: "→ {requestId, status: "processing"|"completed"|"failed", hasPendingMessage,
    hasInputRequest}"; for any client with the token, whatever it has declared."""
    maker = wire.opened(REQUESTS)
    promised = held(maker, gate, 7, n=0)
    expected = {
        "requestId": 7,
        "status": "processing",
        "hasPendingMessage": False,
        "hasInputRequest": False,
    }
    for peer in (maker, wire.plain()):
        answer = peer.ask(STATUS, promised.named)
        assert set(answer) == {"jsonrpc", "id", "result"}
        assert answer.result == expected
        assert type(answer.result["requestId"]) is int
    gate.release()


def test_pending_is_what_lies_above_the_mark_or_the_cursor(wire: Wire, gate: Gate) -> None:
    """W§2: "an entry has a seq above the highest delivered (section 4), or above `after` where
    given"; W§3: `hasPendingMessage`."""
    maker = both(wire)
    started = start(maker, "count", n=5, gate=gate.path)
    promised = Promised.of(started)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    waiting, up_to_date = (promised.status("processing", flag, False) for flag in (True, False))
    assert status_of(maker, promised) == waiting
    assert status_of(maker, promised, after=4) == waiting
    assert status_of(maker, promised, after=5) == up_to_date
    ack(maker, started.stream, 5)
    reader.settle()
    assert status_of(maker, promised) == up_to_date
    gate.release()
    reader.response(started.id)
    assert status_of(maker, promised) == promised.status("completed", True, False)
    assert status_of(maker, promised, after=6) == promised.status("completed", False, False)


def test_a_status_takes_nothing(wire: Wire, gate: Gate) -> None:
    """The proposal: "get the status of the original request without fetching pending messages";
    W§5: "One connection at a time is attached": a status attaches no connection and deletes
    nothing."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "steps", n=5, gate=gate.path)
    other = wire.opened(REQUESTS)
    for _ in range(5):
        gate.release()
        assert status_of(other, promised, after=0)["requestId"] == promised.id
    reader = Reader(maker)
    assert text_of(reader.response(promised.id)) == "stepped 5"
    assert list(sole(reader)) == up_to(6)
    assert other.settle() == []
    again, _ = regained_by_seq(wire.opened(REQUESTS_POSITIONS), promised, after=0)
    assert list(sole(again)) == up_to(6)


def test_a_question_is_pending_until_it_is_answered(wire: Wire) -> None:
    """W§2: "a request to the client is undelivered **or unanswered**"; W§3: `hasInputRequest`."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "ask")
    reader = Reader(maker)
    asked = reader.until(method_is("elicitation/create"))
    assert status_of(maker, promised) == promised.status("processing", True, True)
    assert status_of(maker, promised, after=2) == promised.status("processing", False, True)
    maker.answer(asked["id"], {"action": "decline"})
    reader.response(promised.id)
    assert status_of(maker, promised, after=2) == promised.status("completed", True, False)
    assert status_of(maker, promised, after=4) == promised.status("completed", False, False)


def test_a_failing_tool_has_completed(wire: Wire) -> None:
    """W§3: "`failed` is for a JSON-RPC error response only; `isError: true` is `completed`";
    and it is the result that a resume brings."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "fail")
    Reader(maker).response(promised.id)
    assert status_of(maker, promised) == promised.status("completed", True, False)
    assert status_of(maker, promised, after=2) == promised.status("completed", False, False)
    reader, response = regained_by_seq(maker, promised, "r")
    assert sole(reader)[2] is response
    assert response.result["isError"] is True
    assert "the tool says no" in text_of(response)


def test_an_interrupted_call_has_failed(server: ServerProcess, gate: Gate) -> None:
    """W§9: `interrupted`, -32603: a JSON-RPC error is the final response; W§3: "`failed` is for a
    JSON-RPC error response". It stays so when the error was fetched, and confirmed."""
    with wires_to(server) as wires:
        makers = [wire.opened(REQUESTS_POSITIONS) for wire in wires]
        each = [held(maker, gate, n=1) for maker in makers]
        questions = [promise(maker, "ask") for maker in makers]
        for maker in makers:
            maker.expect(method_is("elicitation/create"))
        server.restart()
        for wire, promised, question in zip(wires, each, questions, strict=True):
            peer = wire.opened(REQUESTS)
            server.taken_over(
                lambda peer=peer, calls=(promised, question): all(
                    status_of(peer, call)["status"] != "processing" for call in calls
                )
            )
            assert status_of(peer, promised) == promised.status("failed", True, False)
            assert regained(peer, promised, 7, after=1)[-1].reason == "interrupted"
            assert status_of(peer, promised, after=2) == promised.status("failed", False, False)
            asked = status_of(peer, question, after=2)
            assert asked["status"] == "failed"
            assert asked["hasInputRequest"] is False, "there is nobody left to answer to"


def test_the_id_must_be_the_calls(wire: Wire, gate: Gate) -> None:
    """W§3: "A `requestId` that is not that stream's (type included) is `stream_not_found`"; W§9:
    "one answer, byte-identical", whichever of the two is wrong."""
    maker = wire.opened(REQUESTS)
    promised = held(maker, gate, 7)
    other = promise(maker, "count", 8, n=0)
    maker.response(8)
    attempts = [
        {**promised.named, "requestId": "7"},
        {**promised.named, "requestId": 8},
        {**promised.named, "requestId": ""},
        {**promised.named, "resumeToken": other.token},
        {**promised.named, "resumeToken": UNKNOWN},
        {**promised.named, "resumeToken": UNKNOWN, "after": 999},
        {"requestId": "7", "resumeToken": promised.token, "after": 999},
    ]
    answers = {maker.ask(STATUS, params, id="s").raw for params in attempts}
    answers.add(maker.ask("stream/poll", {"streamId": UNKNOWN}, id="s").raw)
    assert len(answers) == 1, answers
    refused(Message(answers.pop()), "stream_not_found")
    assert status_of(maker, promised)["status"] == "processing"
    gate.release()


@pytest.mark.parametrize("id", [0, "", "1"])
def test_an_odd_id_is_the_calls_too(stdio: Wire, id: int | str) -> None:
    """W§2: "keeps its JSON type"; 0 and "" are false in some languages, but are ids in JSON."""
    maker = stdio.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "count", id, n=0)
    Reader(maker).response(id)
    status = status_of(maker, promised)
    assert status == promised.status("completed", True, False)
    assert type(status["requestId"]) is type(id)
    wrong = {0: "0", "": 0, "1": 1}[id]
    refused(maker.ask(STATUS, {**promised.named, "requestId": wrong}), "stream_not_found")


def test_params_that_do_not_fit_are_refused(wire: Wire) -> None:
    """W§9: "bad params" -32602."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    assert peer.ask(STATUS).error["code"] == -32602
    lacking = [{}, {"requestId": promised.id}, promised.by_token]
    tokens = [{**promised.named, "resumeToken": token} for token in (None, 7, [], {})]
    ids = [{**promised.named, "requestId": wrong} for wrong in (None, 1.5, True, [], {})]
    cursors = [{**promised.named, "after": wrong} for wrong in (-1, "1", 1.5, True, [])]
    for params in (*lacking, *tokens, *ids, *cursors):
        assert peer.ask(STATUS, params).error["code"] == -32602, params
    assert status_of(peer, promised) == promised.status("completed", True, False)


def test_the_abandoned_have_no_status(server: ServerProcess, gate: Gate) -> None:
    """W§9: "`abandoned` | -32602 | past `max`; told to the owner or a right token"; to others it is
    as if it had never been."""
    with wires_to(server) as wires:
        makers = [wire.opened(REQUESTS) for wire in wires]
        each = [promise(maker, "brief", 7, gate=gate.path) for maker in makers]
        for _ in makers:
            gate.wait_for("sent")
        for maker in makers:
            maker.cut()
        for _ in makers:
            gate.wait_for("cancelled")
        for wire, promised in zip(wires, each, strict=True):
            peer = wire.plain()
            for method, params in ((STATUS, promised.named), (RESUME, promised.by_token)):
                refused(peer.ask(method, params), "abandoned")
                wrong = peer.ask(method, {**params, "resumeToken": UNKNOWN}, id="s").raw
                assert wrong == peer.ask("stream/resume", {"streamId": UNKNOWN}, id="s").raw
            assert peer.settle() == []


def test_who_asks_keeps_the_request(stdio: Wire, gate: Gate) -> None:
    """W§2: "resume, poll, […] getStatus […] reset it [`max`]": asked without a pause until more
    than `max` has gone by, it is there still."""
    maker = stdio.opened(REQUESTS)
    promised = promise(maker, "brief", gate=gate.path)
    gate.wait_for("sent")
    peer = stdio.opened(REQUESTS)
    maker.cut()
    for _ in range(15):
        with pytest.raises(TimeoutError):
            gate.wait_for("cancelled", within_s=0.1)
        assert status_of(peer, promised)["status"] == "processing"
    gate.release()
    assert text_of(regained(peer, promised)[-1]) == "brief"


def test_after_a_resume_the_id_is_the_calls_still(wire: Wire, gate: Gate) -> None:
    """The proposal: `requestId` is "the request": the one that was announced, under whichever id it
    is resumed."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    peer = wire.opened(REQUESTS_POSITIONS)
    reader = Reader(peer)
    peer.request(RESUME, {**promised.by_token, "after": 0}, id="r")
    until_seq(reader, 5)
    asked = peer.request(STATUS, promised.named)
    assert reader.response(asked).result == promised.status("processing", True, False)
    wrong = peer.request(STATUS, {**promised.named, "requestId": "r"})
    refused(reader.response(wrong), "stream_not_found")
    gate.release()
    assert text_of(reader.response("r")) == "counted 5"
