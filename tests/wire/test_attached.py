"""Attachment: the newest reader wins, ids that are taken, and the acks that count."""

from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, Peer, answers_to, method_is
from tests.wire.verbs import (
    COMPLETED,
    CREATE,
    END,
    SUPERSEDED,
    UNKNOWN,
    Reader,
    Started,
    ack,
    counted,
    read_stream,
    refused,
    start,
    up_to,
)


def held(peer: Peer, gate: Gate, id: int | str | None = None, n: int = 5) -> Started:
    started = start(peer, "count", id, n=n, gate=gate.path)
    gate.wait_for("sent")
    return started


def last_kept(wire: Wire, started: Started) -> list[int]:
    """The numbers that a delivery without a cursor begins with now."""
    reader = Reader(peer := wire.positions())
    peer.request("stream/resume", started.with_token)
    reader.until_seq(started.stream, 5)
    return reader.seqs(started.stream)


def test_the_original_call_is_told_that_it_was_superseded(wire: Wire, gate: Gate) -> None:
    """W§5: "**Newest wins.** […] an original call […] gets the error `superseded` under its id (not
    an entry)"; only one connection is attached, so the rest comes to the newest alone."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    newest = wire.positions()
    resume_id = newest.request("stream/resume", {**started.with_token, "after": 5})
    told = reader.response(started.id)
    refused(told, "superseded")
    assert told in reader.others, "not an entry: it has no number"
    gate.release()
    of_newest = Reader(newest)
    assert "result" in of_newest.response(resume_id)
    assert of_newest.seqs(started.stream) == [6]
    assert of_newest.entries[started.stream][6].result["content"][0]["text"] == "counted 5"
    reader.settle()
    assert reader.seqs(started.stream) == up_to(5)
    assert not any(map(method_is(END), reader.others)), "the stream has ended elsewhere"


def test_a_resume_is_told_that_it_was_superseded(wire: Wire, gate: Gate) -> None:
    """W§5: "`stream/resume` gets its reply with `superseded`"; nothing ends but this delivery."""
    started = held(maker := wire.positions(), gate)
    maker.cut()
    first, second = wire.positions(), wire.positions()
    first_id = first.request("stream/resume", {**started.with_token, "after": 0})
    of_first = Reader(first)
    of_first.until_seq(started.stream, 5)
    second_id = second.request("stream/resume", {**started.with_token, "after": 5})
    told = of_first.response(first_id)
    assert told.result == SUPERSEDED
    assert not any(map(method_is(END), of_first.others))
    gate.release()
    of_second = Reader(second)
    assert "result" in of_second.response(second_id)
    assert of_second.seqs(started.stream) == [6]


def test_the_newest_wins_every_time(wire: Wire, gate: Gate) -> None:
    """W§5: "the originating request's own, or that of the newest resume": two connections take the
    stream from each other ten times, and the last has it."""
    started = held(maker := wire.positions(), gate)
    maker.cut()
    readers = [Reader(wire.positions()), Reader(wire.positions())]
    ids: list[Any] = [None, None]
    for turn in range(10):
        mine, other = turn % 2, 1 - turn % 2
        readers[mine] = Reader(readers[mine].peer)
        params = {**started.with_token, "after": 3}
        ids[mine] = readers[mine].peer.request("stream/resume", params)
        readers[mine].until_seq(started.stream, 5)
        if turn:
            assert readers[other].response(ids[other]).result == SUPERSEDED
    gate.release()
    assert readers[1].response(ids[1]).result["_meta"]["mcp-streams/ended"] == "completed"
    assert readers[1].seqs(started.stream) == [4, 5, 6]


def test_a_positions_client_may_resume_anew_on_its_own_connection(wire: Wire, gate: Gate) -> None:
    """W§5: an id is taken "while a stream with that originating id is attached without positions":
    with positions, a second resume over the same connection is the newest, and wins."""
    started = held(maker := wire.positions(), gate)
    maker.cut()
    peer = wire.positions()
    first = peer.request("stream/resume", {**started.with_token, "after": 0})
    Reader(peer).until_seq(started.stream, 5)
    second = peer.request("stream/resume", {**started.with_token, "after": 2})
    reader = Reader(peer)
    assert reader.response(first).result == SUPERSEDED
    reader.until_seq(started.stream, 5)
    gate.release()
    assert "result" in reader.response(second)
    assert reader.seqs(started.stream) == [3, 4, 5, 6]


@pytest.mark.parametrize("is_same_id", [False, True])
def test_a_second_resume_on_one_connection_displaces_the_first(
    wire: Wire, gate: Gate, is_same_id: bool
) -> None:
    """W§5: an id is taken "except by a delivery of the very stream that is asked for: a resume
    […] displaces that one at once, […] and under the same id". Under the same id there is one
    reply."""
    started = held(maker := wire.streams(), gate, id=7)
    maker.cut()
    peer = wire.streams()
    first = peer.request("stream/resume", {**started.with_token, "after": 0})
    peer.expect(lambda message: counted([message]) == [5])
    second = first if is_same_id else None
    second = peer.request("stream/resume", {**started.with_token, "after": 2}, id=second)
    if not is_same_id:
        assert peer.response(first).result == SUPERSEDED
    peer.expect(lambda message: counted([message]) == [5])
    gate.release()
    assert peer.response(7).result["content"][0]["text"] == "counted 5"
    assert peer.response(second).result == COMPLETED
    assert not any("id" in message for message in peer.settle())


@pytest.mark.needs_one_process("a replica knows the ids of its own requests", over="http")
@pytest.mark.parametrize("id", [7, "7"])
def test_a_stream_cannot_come_under_an_id_that_is_in_flight(
    wire: Wire, gate: Gate, gate2: Gate, id: int | str
) -> None:
    """W§5: "An id is taken on a connection […] while in flight there […]. `stream/resume` of a
    stream whose original id is taken: `id_in_use`"; W§2: `"7"` is not `7`."""
    started = held(maker := wire.streams(), gate, id=7)
    maker.cut()
    peer = wire.positions()
    busy = held(peer, gate2, id=id)
    reader = Reader(peer)
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 0})
    if id == 7:
        refused(reader.response(resume_id), "id_in_use")
    else:
        reader.until_seq(started.stream, 5)
    gate2.release()
    reader.until(answers_to(id))
    reader.until(method_is(END))
    gate.release()
    if id == 7:
        resume_id = peer.request("stream/resume", {**started.with_token, "after": 0})
    assert "result" in reader.response(resume_id)
    assert reader.seqs(started.stream) == up_to(6)
    assert reader.seqs(busy.stream) == up_to(6)


@pytest.mark.parametrize("positions", [False, True])
def test_a_resume_with_the_id_of_the_call_is_answered_with_its_response(
    wire: Wire, positions: bool
) -> None:
    """W§5: a resume displaces "under the same id" too. Two responses cannot have one id: the
    response of the call is the reply, and where none is left there is the reply alone."""
    started = start(maker := wire.positions(), "count", 7, n=5)
    maker.expect(method_is(END))
    peer = wire.positions() if positions else wire.streams()
    peer.request("stream/resume", {**started.with_token, "after": 0}, id=7)
    assert peer.response(7).result["content"][0]["text"] == "counted 5"
    peer.expect(method_is(END))
    assert not any("id" in message for message in peer.settle())
    peer.request("stream/resume", {**started.with_token, "after": 6}, id=7)
    assert peer.response(7).result == COMPLETED


def test_an_own_call_in_flight_is_displaced_by_its_resume(wire: Wire, gate: Gate) -> None:
    """W§5: "a resume […] displaces that one at once", and "an original call […] gets the error
    `superseded` under its id"; "All other checks come after" the token's (W§9)."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    wrong = maker.request("stream/resume", {**started.by_id, "resumeToken": UNKNOWN})
    refused(reader.response(wrong), "stream_not_found")
    own = maker.request("stream/resume", {**started.by_id, "after": 5})
    refused(reader.response(started.id), "superseded")
    gate.release()
    assert reader.response(own).result == COMPLETED
    assert reader.entries[started.stream][6].result["content"][0]["text"] == "counted 5"


@pytest.mark.needs_one_process("a replica knows the ids of its own requests", over="http")
def test_a_new_request_may_not_take_an_id_in_flight(wire: Wire, gate: Gate) -> None:
    """W§5: "A new request with a taken id: -32600"; when the call is over, its id is free."""
    peer = wire.streams()
    started = held(peer, gate, id=7)
    for method in ("ping", "tools/list", "stream/poll/all"):
        assert peer.ask(method, {}, id=7).error["code"] == -32600
    assert "result" in peer.ask("ping", id="7")
    gate.release()
    assert peer.response(started.id).result["content"][0]["text"] == "counted 5"
    peer.expect(method_is(END))
    assert "result" in peer.ask("ping", id=7)


@pytest.mark.needs_one_process("a replica knows the ids of its own requests", over="http")
@pytest.mark.parametrize("positions", [False, True])
def test_a_new_request_may_not_take_a_resumed_streams_id(
    wire: Wire, gate: Gate, positions: bool
) -> None:
    """W§5: an id is taken "while a stream with that originating id is attached without positions";
    a positions client can tell an entry from an answer."""
    started = held(maker := wire.streams(), gate, id=7)
    maker.cut()
    peer = wire.positions() if positions else wire.streams()
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 5})
    peer.arrived()
    peer.request("ping", id=7)
    answer = peer.response(7)
    if positions:
        assert "result" in answer
    else:
        assert answer.error["code"] == -32600
    gate.release()
    assert peer.response(7).result["content"][0]["text"] == "counted 5"
    assert "result" in peer.response(resume_id)


def test_ids_are_taken_on_one_connection_only(wire: Wire, gate: Gate) -> None:
    """W§5: "An id is taken **on a connection**": another's are its own."""
    started = held(maker := wire.streams(), gate, id=7)
    other = wire.streams()
    assert "result" in other.ask("ping", id=7)
    gate.release()
    assert "result" in maker.response(started.id)


def test_an_ack_reaches_no_further_than_what_was_written(wire: Wire, gate: Gate) -> None:
    """W§4: "Only the attached connection may, up to what was written to it; anything else is
    dropped and logged": dropped, not clipped."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    ack(maker, started.stream, 6)
    reader.settle()
    assert last_kept(wire, started) == up_to(5)
    gate.release()


def test_an_ack_of_another_connection_is_dropped(wire: Wire, gate: Gate) -> None:
    """W§4: "Only the attached connection may": not one that was never attached, even the owner's,
    and not one that was displaced."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    other = wire.positions()
    ack(other, started.stream, 5)
    other.settle()
    assert last_kept(wire, started) == up_to(5)
    refused(reader.response(started.id), "superseded")
    ack(maker, started.stream, 5)
    reader.settle()
    assert last_kept(wire, started) == up_to(5)
    gate.release()


def test_an_ack_needs_positions(wire: Wire, gate: Gate) -> None:
    """W§8: "Positions and acks only with `positions: true`"."""
    maker = wire.streams()
    started = held(maker, gate)
    maker.expect(lambda message: counted([message]) == [5])
    ack(maker, started.stream, 5)
    maker.settle()
    assert last_kept(wire, started) == up_to(5)
    gate.release()


def test_an_ack_counts_however_soon_it_comes(wire: Wire) -> None:
    """W§4: "up to what was written to it": a message that the client has read was written, even if
    the server's call to send has not returned yet."""
    peer = wire.positions()
    reader = Reader(peer)
    for _ in range(50):
        call_id = peer.call("count", n=5)
        stream = reader.until(method_is(CREATE)).params["stream"]["streamId"]
        reader.response(call_id)
        ack(peer, stream, 6)
        poll = peer.request("stream/poll", {"streamId": stream})
        assert reader.response(poll).result["pendingMessages"] is False


@pytest.mark.parametrize(
    "params",
    [None, {}, {"streamId": UNKNOWN, "seq": 1}, {"seq": 1}, {"streamId": 7, "seq": 1}],
)
def test_an_ack_that_makes_no_sense_is_dropped(wire: Wire, params: object) -> None:
    """W§4: "anything else is dropped and logged"; a notification is never answered."""
    peer = wire.positions()
    peer.notify("notifications/stream/ack", params)
    assert peer.settle() == []


@pytest.mark.parametrize("seq", [0, -1, "3", 2.5, None, True, 2**70])
def test_an_ack_of_no_number_is_dropped(wire: Wire, gate: Gate, seq: object) -> None:
    """W§4: as above; an ack never goes back either."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    ack(maker, started.stream, 2)
    ack(maker, started.stream, seq)
    ack(maker, started.stream, 1)
    reader.settle()
    assert last_kept(wire, started) == [3, 4, 5]
    gate.release()


def test_an_ack_over_a_resumed_connection_counts(wire: Wire, gate: Gate) -> None:
    """W§4: "While attached, a positions client confirms": the attached connection, which is now the
    resumed one.
    """
    started = held(maker := wire.positions(), gate)
    maker.cut()
    peer = wire.positions()
    peer.request("stream/resume", started.with_token)
    reader = Reader(peer)
    reader.until_seq(started.stream, 5)
    ack(peer, started.stream, 4)
    reader.settle()
    peer.cut()
    gate.release()
    again, _ = read_stream(wire.positions(), started.with_token)
    assert again.seqs(started.stream) == [5, 6]


def test_a_message_is_the_same_object_for_everyone(wire: Wire, gate: Gate) -> None:
    """W§4: "stored bytes untouched", whether they come live, on a resume, or to a client without
    positions."""
    maker = wire.positions()
    started = held(maker, gate)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    other = wire.streams()
    other.request("stream/resume", {**started.with_token, "after": 0})
    read = other.read_until(lambda message: counted([message]) == [5])
    plain: list[Message] = [message for message in read if message.method != CREATE]
    entries = reader.entries[started.stream]
    assert [one.raw for one in plain] == [entries[seq].raw for seq in up_to(5)]
    gate.release()
