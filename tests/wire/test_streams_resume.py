"""Resumes of a stream: the missing messages, in order, with the same bytes."""

from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import answers_to, method_is
from tests.wire.verbs import (
    COMPLETED,
    CREATE,
    END,
    Reader,
    Started,
    ack,
    counted,
    read_stream,
    refused,
    resume,
    start,
    up_to,
)


def finished(wire: Wire, n: int = 5) -> Started:
    """A positions client's call that is over; no message was confirmed, and its client has left."""
    peer = wire.positions()
    started = start(peer, "count", n=n)
    peer.expect(method_is(END))
    peer.cut()
    return started


def test_a_resume_brings_everything_and_its_reply_last(wire: Wire) -> None:
    """W§2: "`stream/resume` → {}, sent last"; "Its reply comes **last**, when this delivery ends:
    `{"_meta": {"mcp-streams/ended": "completed"[…]}}`"; "Announcements go out whenever delivery
    starts at seq 1"; "replayed as stored, under the original `id`"."""
    started = finished(wire)
    messages = resume(wire.streams(), started.with_token)
    create, *entries, response, end, reply = messages
    assert create.params["stream"] == {
        "streamId": started.stream,
        "requestId": started.id,
        "resumeInterval": {"min": 2, "max": 600},
        "resumeToken": started.token,
    }
    assert counted(entries) == up_to(5)
    assert len(entries) == 5
    assert response.answers(started.id)
    assert response.result["content"][0]["text"] == "counted 5"
    assert end.params == {"streamId": started.stream}
    assert set(reply) == {"jsonrpc", "id", "result"}
    assert reply.result == COMPLETED


def test_a_live_stream_goes_on_where_it_was_resumed(wire: Wire, gate: Gate) -> None:
    """Page, Disconnection and Resumption: "Send all unsent messages for the stream to the client";
    W§2: the reply "means "this delivery is over""."""
    maker = wire.positions()
    started = start(maker, "steps", n=6, gate=gate.path)
    gate.release(3)
    Reader(maker).until_seq(started.stream, 3)
    maker.cut()
    peer = wire.positions()
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 3})
    reader = Reader(peer)
    reader.settle()
    assert not any(message.answers(resume_id) for message in reader.all), "the delivery goes on"
    gate.release(3)
    assert reader.response(resume_id).result == COMPLETED
    assert reader.seqs(started.stream) == [4, 5, 6, 7]
    assert counted(reader.all) == [4, 5, 6]
    assert reader.entries[started.stream][7].answers(started.id)


def test_a_plain_clients_cut_loses_nothing(wire: Wire, gate: Gate) -> None:
    """W§4: "On resume without a cursor everything not delivered is sent: a plain client may see a
    message twice, never miss one"; nothing was delivered by the mere writing of it."""
    maker = wire.streams()
    started = start(maker, "steps", n=10, gate=gate.path)
    gate.release(5)
    maker.expect(lambda message: counted([message]) == [5])
    maker.cut()
    gate.release(5)
    seen = counted(resume(wire.streams(), started.with_token))
    assert seen == list(range(seen[0], 11))
    assert seen[0] <= 6, "what had come before may be sent again, what had not must be"


@pytest.mark.parametrize("after", [0, 1, 3, 5, 6])
def test_delivery_starts_after_the_cursor(wire: Wire, after: int) -> None:
    """W§4: "`after: N` = […] delivery starts at N+1"; W§2: "Announcements go out whenever delivery
    starts at seq 1"; with all of it had, "resume gives `end` and the reply"."""
    started = finished(wire)
    reader, reply = read_stream(wire.positions(), started.with_token, after=after)
    assert reader.seqs(started.stream) == list(range(after + 1, 7))
    assert counted(reader.all) == list(range(after + 1, 6))
    assert reader.is_announced() == (after == 0)
    assert [message.method for message in reader.others[-2:]] == [END, None]
    assert reply.result == COMPLETED


@pytest.mark.parametrize("after", [0, 2, 6])
def test_a_cursor_is_heard_without_positions_too(wire: Wire, after: int) -> None:
    """W§2: `params {streamId, resumeToken?, after?}`: the cursor asks for no other capability."""
    messages = resume(wire.streams(), finished(wire).with_token, after=after)
    assert counted(messages) == list(range(after + 1, 6))
    assert any(map(method_is(CREATE), messages)) == (after == 0)


def test_the_same_bytes_come_again(wire: Wire) -> None:
    """W§4: "stored bytes untouched"; W§2: "replayed as stored"."""
    maker = wire.positions()
    started = start(maker, "count", n=5, pad=100)
    first = Reader(maker)
    first.until(method_is(END))
    second, _ = read_stream(wire.positions(), started.with_token, after=0)
    of_first, of_second = first.entries[started.stream], second.entries[started.stream]
    assert {seq: entry.raw for seq, entry in of_first.items()} == {
        seq: entry.raw for seq, entry in of_second.items()
    }


def test_what_is_confirmed_does_not_come_again(wire: Wire, gate: Gate) -> None:
    """W§4: "**Delivered**: for a positions client, its cursor or ack, nothing else"."""
    maker = wire.positions()
    started = start(maker, "count", n=10, gate=gate.path)
    reader = Reader(maker)
    reader.until_seq(started.stream, 10)
    ack(maker, started.stream, 4)
    reader.settle()
    maker.cut()
    gate.release()
    again, _ = read_stream(wire.positions(), started.with_token)
    assert again.seqs(started.stream) == list(range(5, 12))
    assert not again.is_announced()


def test_nothing_is_delivered_by_being_sent(wire: Wire) -> None:
    """W§4: for a positions client "its cursor or ack, nothing else": a client that resumes without
    a cursor and has confirmed nothing gets all of it, every time."""
    started = finished(wire)
    for _ in range(3):
        reader, _ = read_stream(wire.positions(), started.with_token)
        assert reader.seqs(started.stream) == up_to(6)


def test_a_cursor_confirms_what_lies_below(wire: Wire) -> None:
    """W§4: "`after: N` = "I have processed everything up to N" […] below may be deleted"; "Below
    what is kept: `messages_gone` with `earliestSeq`: never a silent gap"."""
    started = finished(wire)
    read_stream(wire.positions(), started.with_token, after=4)
    peer = wire.positions()
    gone = peer.ask("stream/resume", {**started.with_token, "after": 2})
    assert refused(gone, "messages_gone") == {"reason": "messages_gone", "earliestSeq": 5}
    reader, _ = read_stream(peer, started.with_token)
    assert reader.seqs(started.stream) == [5, 6]


def test_an_acks_messages_are_gone(wire: Wire, gate: Gate) -> None:
    """W§4: as for a cursor; W§9: "`messages_gone` […] with `earliestSeq`"; errors come at once."""
    maker = wire.positions()
    started = start(maker, "count", n=10, gate=gate.path)
    reader = Reader(maker)
    reader.until_seq(started.stream, 10)
    ack(maker, started.stream, 7)
    reader.settle()
    peer = wire.positions()
    gone = peer.ask("stream/resume", {**started.with_token, "after": 6})
    assert refused(gone, "messages_gone")["earliestSeq"] == 8
    assert "result" in peer.ask("stream/poll", {**started.with_token, "after": 7})
    gate.release()


def test_a_cursor_ahead_deletes_nothing(wire: Wire, gate: Gate) -> None:
    """W§4: "`after` above the last seq: `cursor_ahead` with `lastSeq`, nothing deleted"."""
    maker = wire.positions()
    started = start(maker, "count", n=5, gate=gate.path)
    gate.wait_for("sent")
    peer = wire.positions()
    for after in (6, 7, 2**40, 2**63 - 1):
        ahead = peer.ask("stream/resume", {**started.with_token, "after": after})
        assert refused(ahead, "cursor_ahead") == {"reason": "cursor_ahead", "lastSeq": 5}
    gate.release()
    reader, _ = read_stream(peer, started.with_token, after=0)
    assert reader.seqs(started.stream) == up_to(6)


@pytest.mark.parametrize("after", [-1, "1", 1.5, True, [], {}, 2**70])
def test_a_cursor_that_is_no_position_is_refused(wire: Wire, after: Any) -> None:
    """W§9: "bad params" -32602, or, for a number beyond every stream, `cursor_ahead`; the stream
    itself goes on unharmed."""
    started = finished(wire)
    peer = wire.positions()
    for method in ("stream/resume", "stream/poll"):
        assert peer.ask(method, {**started.with_token, "after": after}).error["code"] == -32602
    reader, _ = read_stream(peer, started.with_token, after=0)
    assert reader.seqs(started.stream) == up_to(6)


def test_the_id_alone_leads_to_a_stream(wire: Wire) -> None:
    """W§2: "`streamId` alone is honoured for the principal that made the stream (section 10), and,
    where that principal was anonymous […], for any caller that presents it"; over stdio another
    connection is the same principal."""
    maker = wire.positions()
    started = start(maker, "count", n=5)
    first = Reader(maker)
    first.until(method_is(END))
    reader, reply = read_stream(maker, started.by_id, after=3)
    assert reader.seqs(started.stream) == [4, 5, 6]
    assert reply.result == COMPLETED
    other = wire.positions()
    resume_id = other.request("stream/resume", {**started.by_id, "after": 4})
    assert Reader(other).response(resume_id).result == COMPLETED


def test_a_drained_stream_keeps_its_status(wire: Wire) -> None:
    """W§2: "A drained stream keeps its status until `max` […]: resume gives `end` and the reply,
    poll gives completed and nothing pending; `poll/all` leaves it out"."""
    maker = wire.positions()
    started = start(maker, "count", n=5)
    reader = Reader(maker)
    reader.until(method_is(END))
    ack(maker, started.stream, 6)
    reader.settle()
    for peer in (maker, wire.positions(), wire.streams()):
        end, reply = resume(peer, started.with_token)
        assert end == {"jsonrpc": "2.0", "method": END, "params": {"streamId": started.stream}}
        assert reply.result == COMPLETED
        assert peer.ask("stream/poll", started.with_token).result == {
            "streamId": started.stream,
            "status": "completed",
            "pendingMessages": False,
            "hasRequest": False,
            "hasError": False,
        }
    listed = maker.ask("stream/poll/all").result["statuses"]
    assert started.stream not in [status["streamId"] for status in listed]


def test_a_stream_outlives_the_server(wire: Wire) -> None:
    """W§1: entries are "stored in the journal before they are sent, kept until the client is known
    to have them"; a restart is just another disconnect."""
    started = finished(wire)
    wire.server.restart()
    reader, reply = read_stream(wire.positions(), started.with_token, after=2)
    assert reader.seqs(started.stream) == [3, 4, 5, 6]
    assert reply.result == COMPLETED


@pytest.mark.parametrize("positions", [False, True])
def test_a_tool_may_let_go_of_its_connection(wire: Wire, gate: Gate, positions: bool) -> None:
    """Page, Disconnection and Resumption: "Either the client or server may disconnect at any
    time. After a disconnection, the client can resume the stream"."""
    maker = wire.positions() if positions else wire.streams()
    started = start(maker, "hang_up", gate=gate.path)
    gate.wait_for("sent")
    peer = wire.streams()
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 0})
    gate.release()
    messages = peer.read_until(answers_to(resume_id))
    assert counted(messages) == [1, 2]
    assert messages[-3].answers(started.id)
