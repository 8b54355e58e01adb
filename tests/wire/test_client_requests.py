"""Requests of a tool to the client: sent again after a reconnect, answered once."""

import json
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, Peer, method_is
from tests.wire.verbs import (
    COMPLETED,
    END,
    UNKNOWN,
    Reader,
    Started,
    counted,
    read_stream,
    refused,
    resume,
    start,
)

ELICIT = "elicitation/create"
ACCEPT = {"action": "accept", "content": {"go": True}}
DECLINE = {"action": "decline"}


def asked(peer: Peer) -> tuple[Started, Reader, Message]:
    """A positions client's call that now waits for the client's answer, which is seq 2."""
    started = start(peer, "ask")
    reader = Reader(peer)
    reader.until_seq(started.stream, 2)
    return started, reader, reader.entries[started.stream][2]


def answer_that_counted(response: Message) -> Any:
    return json.loads(response.result["content"][0]["text"])


def test_the_client_is_asked_and_its_answer_arrives(wire: Wire) -> None:
    """W§5, "**Requests to the client**"; W§1: they are entries of the stream; no two of them
    have the same id ("their ids are unique per journal")."""
    peer = wire.positions()
    ids = set()
    for _ in range(3):
        started, reader, request = asked(peer)
        assert request.method == ELICIT
        assert request.params["message"] == "Go on?"
        assert isinstance(request["id"], int | str)
        ids.add(request["id"])
        peer.answer(request["id"], ACCEPT)
        assert answer_that_counted(reader.response(started.id)) == ACCEPT
        reader.until(method_is(END))
        assert reader.seqs(started.stream) == [1, 2, 3, 4]
    assert len(ids) == 3


def test_ids_stay_unique_across_a_restart(wire: Wire) -> None:
    """W§5: "their ids are unique per journal"."""
    _, _, first = asked(wire.positions())
    wire.server.restart()
    _, _, second = asked(wire.positions())
    assert first["id"] != second["id"]


@pytest.mark.parametrize("after", [2, None])
def test_an_unanswered_request_is_asked_again_below_the_cursor(
    wire: Wire, after: int | None
) -> None:
    """W§5: "Unanswered ones are kept whatever the cursor says; `stream/resume` […] first re-send
    those at or below the cursor, without a number, under the same id"."""
    maker = wire.positions()
    started, _, request = asked(maker)
    maker.cut()
    peer = wire.positions()
    reader = Reader(peer)
    cursor = {} if after is None else {"after": after}
    resume_id = peer.request("stream/resume", {**started.with_token, **cursor})
    again = reader.until(method_is(ELICIT))
    assert again.raw == request.raw
    if after is not None:
        assert reader.others == [again], "first of all, without a number"
        assert reader.seqs(started.stream) == []
    peer.answer(request["id"], ACCEPT)
    assert answer_that_counted(reader.response(started.id)) == ACCEPT
    assert reader.response(resume_id).result == COMPLETED
    assert reader.seqs(started.stream)[-2:] == [3, 4]


def test_an_acked_request_is_asked_again(wire: Wire) -> None:
    """W§5: "Unanswered ones are kept whatever the cursor says", an ack's too (W§4: a resume without
    a cursor starts at the mark)."""
    maker = wire.positions()
    started, reader, request = asked(maker)
    maker.notify("notifications/stream/ack", {"streamId": started.stream, "seq": 2})
    reader.settle()
    maker.cut()
    peer = wire.positions()
    peer.request("stream/resume", started.with_token)
    assert peer.receive().raw == request.raw
    peer.answer(request["id"], DECLINE)
    assert answer_that_counted(Reader(peer).response(started.id)) == DECLINE


def test_an_answered_request_is_not_asked_again(wire: Wire, gate: Gate) -> None:
    """W§5: only "Unanswered ones" are re-sent below the cursor."""
    maker = wire.positions()
    started = start(maker, "ask", gate=gate.path)
    reader = Reader(maker)
    reader.until_seq(started.stream, 2)
    maker.answer(reader.entries[started.stream][2]["id"], ACCEPT)
    gate.wait_for("answered")
    maker.cut()
    gate.release()
    again, _ = read_stream(wire.positions(), started.with_token, after=2)
    assert again.seqs(started.stream) == [3, 4]
    assert not any(map(method_is(ELICIT), again.all))


def test_the_first_answer_counts(wire: Wire, gate: Gate) -> None:
    """W§5: "the first counts, later ones are dropped"; the page of a stream does not grow by it."""
    peer = wire.positions()
    started, reader, request = asked(peer)
    peer.answer(request["id"], ACCEPT)
    peer.answer(request["id"], DECLINE)
    peer.answer(request["id"], ACCEPT)
    assert answer_that_counted(reader.response(started.id)) == ACCEPT
    reader.until(method_is(END))
    peer.answer(request["id"], DECLINE)
    before = len(reader.all)
    reader.settle()
    assert len(reader.all) == before + 2, "a late answer is dropped without a word"


def test_two_connections_answer_once(wire: Wire) -> None:
    """W§5: "An answer counts from the stream's owner or from the connection that it was delivered
    to; the first counts": the displaced connection had been asked as well."""
    maker = wire.positions()
    started, _, request = asked(maker)
    peer = wire.positions()
    reader = Reader(peer)
    peer.request("stream/resume", {**started.with_token, "after": 2})
    reader.until(method_is(ELICIT))
    maker.answer(request["id"], ACCEPT)
    Reader(maker).settle()
    peer.answer(request["id"], DECLINE)
    assert answer_that_counted(reader.response(started.id)) == ACCEPT


def test_somebody_elses_answer_is_ignored(anonymous: Wire) -> None:
    """W§5: "An answer counts from the stream's owner or from the connection that it was delivered
    to"; W§10: another anonymous connection is neither."""
    maker = anonymous.positions()
    started, reader, request = asked(maker)
    stranger = anonymous.positions()
    stranger.answer(request["id"], DECLINE)
    assert stranger.settle() == []
    assert anonymous.plain().ask("stream/poll", started.with_token).result["hasRequest"] is True
    maker.answer(request["id"], ACCEPT)
    assert answer_that_counted(reader.response(started.id)) == ACCEPT


def test_the_owner_may_answer_from_anywhere(stdio: Wire) -> None:
    """W§5: "An answer counts from the stream's owner"; W§10: over stdio that is the user."""
    maker = stdio.positions()
    started, reader, request = asked(maker)
    stdio.positions().answer(request["id"], DECLINE)
    assert answer_that_counted(reader.response(started.id)) == DECLINE


def test_an_error_is_an_answer(wire: Wire) -> None:
    """JSON-RPC: a response is a result or an error; the tool is told, and its stream ends."""
    peer = wire.positions()
    started, reader, request = asked(peer)
    error = {"code": -32601, "message": "no such thing here"}
    peer.send({"jsonrpc": "2.0", "id": request["id"], "error": error})
    assert reader.response(started.id).result["isError"] is True
    reader.until(method_is(END))


@pytest.mark.parametrize("id", [UNKNOWN, 7, -1, "", 2**53])
def test_an_answer_to_what_was_never_asked_is_dropped(wire: Wire, id: int | str) -> None:
    """W§5: an answer that does not count is dropped."""
    peer = wire.positions()
    peer.answer(id, ACCEPT)
    assert peer.settle() == []


def test_an_answer_after_the_cancelling_is_dropped(wire: Wire) -> None:
    """W§2: "`notifications/cancelled` for the originating request stops the work"; an answer that
    comes late changes nothing of that."""
    peer = wire.positions()
    started, reader, request = asked(peer)
    peer.notify("notifications/cancelled", {"requestId": started.id})
    peer.answer(request["id"], ACCEPT)
    reader.settle()
    refused(wire.positions().ask("stream/resume", started.with_token), "cancelled")


def test_without_positions_the_request_comes_once_more_at_most(wire: Wire) -> None:
    """W§4: "a plain client may see a message twice, never miss one"; W§5: re-sent "at or below the
    cursor", so with `after: 2` it comes alone."""
    maker = wire.streams()
    started = start(maker, "ask")
    request = maker.expect(method_is(ELICIT))
    maker.cut()
    peer = wire.streams()
    peer.request("stream/resume", {**started.with_token, "after": 2})
    assert peer.receive().raw == request.raw
    peer.answer(request["id"], ACCEPT)
    messages = peer.read_until(method_is(END))
    assert counted(messages) == [3]
    assert messages[-2].answers(started.id)


def test_a_question_dies_with_the_server_that_asked_it(wire: Wire) -> None:
    """W§9: `interrupted`: the handler is gone, and the stream has ended: an answer now has no
    effect."""
    maker = wire.positions()
    started, _, request = asked(maker)
    wire.server.restart()
    peer = wire.positions()
    peer.answer(request["id"], ACCEPT)
    messages = resume(wire.streams(), started.with_token, after=2)
    refused(messages[-3], "interrupted", -32603)
    assert messages[-3].answers(started.id)
    assert messages[-1].result == COMPLETED
    assert peer.settle() == []
