"""Resumes of a request: the missing messages, in order, and the result under the newest id."""

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Id, answers_to, method_is
from tests.wire.requests_verbs import (
    BOTH_DIALECTS,
    POLICY,
    REQUESTS,
    REQUESTS_POSITIONS,
    RESUME,
    Promised,
    both,
    finished,
    held,
    promise,
    regained,
    regained_by_seq,
    return_for,
    sole,
    status_of,
    text_of,
    until_seq,
    wires_to,
)
from tests.wire.verbs import (
    CREATE,
    END,
    PLAIN,
    Reader,
    ack,
    counted,
    read_stream,
    refused,
    start,
    up_to,
)

# The call's own id, another, the own as a string, and two that are false in Python.
IDS: tuple[Id, ...] = (7, 8, "7", 0, "")


def test_the_result_comes_under_the_id_of_the_resume(wire: Wire) -> None:
    """W§3: "the final entry is sent under the id of the `requests/resume` message (its seq stands,
    only `id` differs from what is stored)"; W§4: everything else is "stored bytes untouched"; W§2:
    "Announcements go out whenever delivery starts at seq 1", with the id of the call."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, original = finished(peer, id=7)
    for chosen in IDS:
        reader, response = regained_by_seq(peer, promised, chosen)
        entries = sole(reader)
        assert list(entries) == up_to(6)
        assert [entries[seq].raw for seq in up_to(5)] == [original[seq].raw for seq in up_to(5)]
        assert entries[6] is response
        assert response == {**original[6], "id": chosen}
        assert result_bytes(response.raw) == result_bytes(original[6].raw)
        (policy,) = reader.others
        assert Promised.by(policy) == promised
        assert policy.params["minWait"] == 2
        assert policy.params["maxWait"] == 600
    assert peer.settle() == []


def result_bytes(raw: bytes) -> bytes:
    return raw.partition(b'"result":')[2]


def test_everything_comes_and_an_end_to_who_knows_of_streams(wire: Wire) -> None:
    """W§3: "→ pending entries, then the ORIGINAL result or error"; `stream/end` belongs to
    `capabilities.streams` (W§8). A client that declared nothing knows the words of the method that
    it uses."""
    maker = wire.opened(REQUESTS_POSITIONS)
    for capabilities, announcements in (
        (PLAIN, [POLICY]),
        (REQUESTS, [POLICY]),
        (BOTH_DIALECTS, [POLICY, CREATE]),
    ):
        promised, _ = finished(maker)
        peer = wire.opened(capabilities)
        messages = [*regained(peer, promised, "r"), *peer.settle()]
        told, messages = messages[: len(announcements)], messages[len(announcements) :]
        assert sorted(str(one.method) for one in told) == announcements
        if CREATE in announcements:
            assert messages.pop().method == END
        *entries, response = messages
        assert counted(entries) == up_to(5)
        assert len(entries) == 5
        assert response.answers("r")
        assert text_of(response) == "counted 5"


def test_delivery_starts_after_the_cursor(wire: Wire) -> None:
    """W§4: "`after: N` = "I have processed everything up to N": delivery starts at N+1"; W§2:
    "Announcements go out whenever delivery starts at seq 1". It asks for no capability."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    for after in (0, 1, 3, 4):
        reader, response = regained_by_seq(peer, promised, after=after)
        assert list(sole(reader)) == list(range(after + 1, 7))
        assert counted(reader.all) == list(range(after + 1, 6))
        assert sole(reader)[6] is response
        assert [one.method for one in reader.others] == ([POLICY] if after == 0 else [])
    messages = regained(wire.opened(REQUESTS), promised, after=4)
    assert counted(messages) == [5]
    assert len(messages) == 2


def test_the_response_alone_is_left(wire: Wire) -> None:
    """W§6: "plain JSON […] where the first message is the final response already and no
    announcement is due", or an event; elsewhere it has its number."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    reader, response = regained_by_seq(peer, promised, "r", after=5)
    assert reader.all == [response]
    assert text_of(response) == "counted 5"
    if wire.kind in ("stdio", "ws-mcp", "ws-streams", "http-lines"):
        assert list(sole(reader)) == [6]


def test_a_request_in_flight_goes_on_where_it_was_resumed(wire: Wire, gate: Gate) -> None:
    """The proposal: "send any pending messages […], and then continue as if it were handling the
    original request"."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "steps", 7, n=6, gate=gate.path)
    gate.release(3)
    until_seq(Reader(maker), 3)
    maker.cut()
    peer = wire.opened(REQUESTS_POSITIONS)
    return_for(peer, promised, 7, after=3)
    reader = Reader(peer)
    reader.settle()
    assert not any(message.answers(7) for message in reader.all), "the work goes on"
    gate.release(3)
    assert text_of(reader.response(7)) == "stepped 6"
    assert list(sole(reader)) == [4, 5, 6, 7]
    assert counted(reader.all) == [4, 5, 6]


def test_a_plain_clients_cut_loses_nothing(wire: Wire, gate: Gate) -> None:
    """W§4: "On resume without a cursor everything not delivered is sent: a plain client may see a
    message twice, never miss one"."""
    maker = wire.opened(REQUESTS)
    promised = promise(maker, "steps", n=10, gate=gate.path)
    gate.release(5)
    maker.expect(lambda message: counted([message]) == [5])
    maker.cut()
    gate.release(5)
    *entries, response = regained(wire.opened(REQUESTS), promised, "r")
    seen = counted(entries)
    assert seen == list(range(seen[0], 11))
    assert seen[0] <= 6, "what had come before may be sent again, what had not must be"
    assert text_of(response) == "stepped 10"


def test_a_cursor_confirms_what_lies_below(wire: Wire) -> None:
    """W§4: "below may be deleted"; "Below what is kept: `messages_gone` with `earliestSeq`: never a
    silent gap"; "`after` above the last seq: `cursor_ahead` with `lastSeq`, nothing deleted"."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    regained_by_seq(peer, promised, after=4)
    gone = peer.ask(RESUME, {**promised.by_token, "after": 2})
    assert refused(gone, "messages_gone") == {"reason": "messages_gone", "earliestSeq": 5}
    ahead = peer.ask(RESUME, {**promised.by_token, "after": 7})
    assert refused(ahead, "cursor_ahead") == {"reason": "cursor_ahead", "lastSeq": 6}
    reader, _ = regained_by_seq(peer, promised)
    assert list(sole(reader)) == [5, 6]


def test_an_ack_over_a_resumed_connection_counts(wire: Wire, gate: Gate) -> None:
    """W§4: "While attached, a positions client confirms": the attached connection, by either
    method."""
    maker = both(wire)
    started = start(maker, "count", n=5, gate=gate.path)
    gate.wait_for("sent")
    maker.cut()
    peer = both(wire)
    reader = Reader(peer)
    return_for(peer, Promised.of(started), after=0)
    until_seq(reader, 5)
    ack(peer, started.stream, 4)
    reader.settle()
    peer.cut()
    gate.release()
    again, _ = regained_by_seq(both(wire), Promised.of(started))
    assert list(sole(again)) == [5, 6]


@pytest.mark.parametrize("by_ack", [False, True], ids=["by cursor", "by ack"])
def test_with_all_of_it_had_there_is_nothing_to_answer_with(wire: Wire, by_ack: bool) -> None:
    """W§4: "`messages_gone` with `earliestSeq`": the client has confirmed the response too, so only
    an error is left to send."""
    peer = both(wire)
    started = start(peer, "count", n=5)
    promised = Promised.of(started)
    reader = Reader(peer)
    reader.until(method_is(END))
    if by_ack:
        ack(peer, started.stream, 6)
        reader.settle()
    else:
        gone = peer.ask(RESUME, {**promised.by_token, "after": 6})
        assert refused(gone, "messages_gone")["earliestSeq"] == 7
    for cursor in ({}, {"after": 6}, {"after": 0}):
        gone = peer.ask(RESUME, {**promised.by_token, **cursor}, id="r")
        assert refused(gone, "messages_gone") == {"reason": "messages_gone", "earliestSeq": 7}
    assert status_of(peer, promised) == promised.status("completed", False, False)
    assert peer.settle() == []


def test_both_methods_lead_to_the_same_entries(wire: Wire) -> None:
    """W§3: "gets both announcements and may use either"; W§1: the proposals "are ways to talk about
    this one thing"."""
    peer = both(wire)
    started = start(peer, "count", 7, n=5)
    Reader(peer).until(method_is(END))
    by_stream, _ = read_stream(peer, started.with_token, after=0)
    by_request, response = regained_by_seq(peer, Promised.of(started), "r", after=0)
    first, second = by_stream.entries[started.stream], sole(by_request)
    assert list(first) == list(second) == up_to(6)
    assert [first[seq].raw for seq in up_to(5)] == [second[seq].raw for seq in up_to(5)]
    assert first[6] == {**response, "id": 7}


def test_a_tool_may_let_go_of_its_connection(wire: Wire, gate: Gate) -> None:
    """The proposal: "After the resume policy is sent, both the client and the server MAY
    disconnect at will"."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = promise(maker, "hang_up", gate=gate.path)
    gate.wait_for("sent")
    peer = wire.opened(REQUESTS)
    resume_id = return_for(peer, promised, after=0)
    gate.release()
    messages = peer.read_until(answers_to(resume_id))
    assert counted(messages) == [1, 2]
    assert text_of(messages[-1]) == "called back"


def test_results_outlive_the_server_and_the_lack_of_one_is_told(
    server: ServerProcess, gate: Gate
) -> None:
    """W§1: "stored in the journal before they are sent"; W§9: `interrupted`, -32603, "final
    response of a call whose handler died with the server": each under the id of its resume."""
    with wires_to(server) as wires:
        makers = [wire.opened(REQUESTS_POSITIONS) for wire in wires]
        over = [finished(maker) for maker in makers]
        under_way = [held(maker, gate, n=3) for maker in makers]
        server.restart()
        for wire, (promised, original), interrupted in zip(wires, over, under_way, strict=True):
            peer = wire.opened(REQUESTS_POSITIONS)
            reader, response = regained_by_seq(peer, promised, "r", after=2)
            assert list(sole(reader)) == [3, 4, 5, 6]
            assert response == {**original[6], "id": "r"}
            reader, response = regained_by_seq(peer, interrupted, "s")
            assert list(sole(reader)) == [1, 2, 3, 4]
            assert response.answers("s")
            refused(response, "interrupted", -32603)
