"""Cancelling a call stops its work; cancelling a resume only detaches."""

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Id, Peer
from tests.wire.verbs import (
    COMPLETED,
    UNKNOWN,
    Reader,
    Started,
    counted,
    read_stream,
    refused,
    resume,
    start,
    up_to,
)


def held(peer: Peer, gate: Gate, id: Id | None = None) -> Started:
    started = start(peer, "count", id, n=3, gate=gate.path)
    gate.wait_for("sent")
    return started


def cancel(peer: Peer, id: object) -> None:
    peer.notify("notifications/cancelled", {"requestId": id, "reason": "enough"})


@pytest.mark.parametrize("id", [7, "7"])
def test_cancelling_the_call_stops_the_work(wire: Wire, gate: Gate, id: Id) -> None:
    """W§2: "`notifications/cancelled` for the originating request stops the work; a later resume
    answers `cancelled`"; MCP, Cancellation: no response is sent for it."""
    maker = wire.streams()
    started = held(maker, gate, id)
    cancel(maker, id)
    gate.wait_for("cancelled")
    assert not any(message.answers(id) for message in maker.settle())
    peer = wire.streams()
    for one in (peer, maker):
        refused(one.ask("stream/resume", started.with_token), "cancelled")
    refused(peer.ask("stream/poll", started.with_token), "cancelled")


def test_the_cancelled_are_told_to_nobody_else(wire: Wire, gate: Gate) -> None:
    """W§9: callers without a right to know get `stream_not_found`, byte-identical; the token, or
    the id alone of an anonymous caller's stream (W§2), gives that right."""
    maker = wire.streams()
    started = held(maker, gate)
    cancel(maker, started.id)
    gate.wait_for("cancelled")
    peer = wire.streams()
    unknown = peer.ask("stream/resume", {"streamId": UNKNOWN}, id=7).raw
    wrong = {**started.by_id, "resumeToken": UNKNOWN}
    assert peer.ask("stream/resume", wrong, id=7).raw == unknown
    refused(peer.ask("stream/resume", started.by_id, id=7), "cancelled")


def test_a_cancelled_stream_is_listed_no_more(wire: Wire, gate: Gate) -> None:
    """W§10: "`poll/all` lists that principal's running and undelivered streams": it is neither."""
    maker = wire.streams()
    started = held(maker, gate)
    cancel(maker, started.id)
    gate.wait_for("cancelled")
    maker.settle()
    page = maker.ask("stream/poll/all")
    assert started.stream not in [status["streamId"] for status in page.result["statuses"]]


def test_a_cancelled_call_stays_cancelled_after_a_restart(wire: Wire, gate: Gate) -> None:
    """W§9: a tombstone is kept for a day."""
    maker = wire.streams()
    started = held(maker, gate)
    cancel(maker, started.id)
    gate.wait_for("cancelled")
    peer = wire.streams()
    refused(peer.ask("stream/resume", started.with_token), "cancelled")
    start(peer, "count", n=1)  # announced once it is durable, as is everything before it
    wire.server.restart()
    refused(wire.streams().ask("stream/resume", started.with_token), "cancelled")


def test_the_resumer_may_cancel_the_call(wire: Wire, gate: Gate) -> None:
    """W§10: "`cancelled` reaches requests of this connection (session) and streams attached to it":
    a client that has resumed the call may stop its work, under the original id."""
    started = held(maker := wire.streams(), gate, 7)
    maker.cut()
    peer = wire.positions()
    peer.request("stream/resume", {**started.with_token, "after": 0})
    Reader(peer).until_seq(started.stream, 3)
    cancel(peer, 7)
    gate.wait_for("cancelled")
    refused(wire.streams().ask("stream/resume", started.with_token), "cancelled")


@pytest.mark.parametrize("attached", [False, True])
def test_nobody_else_may_cancel_it(wire: Wire, gate: Gate, attached: bool) -> None:
    """W§10: `cancelled` reaches neither requests of other connections, the owner's own included,
    nor a stream that was attached here and is no longer."""
    maker = wire.positions()
    started = held(maker, gate, 7)
    other = wire.positions()
    if attached:
        other.request("stream/resume", {**started.with_token, "after": 0})
        Reader(other).until_seq(started.stream, 3)
        newest = wire.positions()
        newest.request("stream/resume", {**started.with_token, "after": 0})
        Reader(newest).until_seq(started.stream, 3)
        maker = newest
    cancel(other, 7)
    other.settle()
    assert gate.marks() == []
    gate.release()
    answer = Reader(maker).response(7)
    assert answer.result["content"][0]["text"] == "counted 3"


def test_cancelling_keeps_to_the_ids_type(wire: Wire, gate: Gate) -> None:
    """W§2: "`"1"` is not `1`"."""
    maker = wire.streams()
    held(maker, gate, 7)
    for other_id in ("7", 7.5, None, [7], UNKNOWN, 8):
        cancel(maker, other_id)
    maker.notify("notifications/cancelled")
    maker.notify("notifications/cancelled", {})
    maker.ask("ping")
    assert gate.marks() == []
    gate.release()
    assert maker.response(7).result["content"][0]["text"] == "counted 3"


def test_cancelling_a_resume_only_detaches(wire: Wire, gate: Gate) -> None:
    """W§2: "Cancelling a `stream/resume` only detaches": the work goes on, and can be resumed, here
    and elsewhere."""
    started = held(maker := wire.streams(), gate)
    maker.cut()
    peer = wire.positions()
    reader = Reader(peer)
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 0})
    reader.until_seq(started.stream, 3)
    cancel(peer, resume_id)
    reader.settle()
    gate.release()
    reader.settle()
    assert reader.seqs(started.stream) == up_to(3), "nothing more comes here"
    again, reply = read_stream(peer, started.with_token, after=0)
    assert again.seqs(started.stream) == up_to(4)
    assert reply.result == COMPLETED
    assert counted(resume(wire.streams(), started.with_token)) == up_to(3)


def test_a_completed_call_cannot_be_cancelled(wire: Wire) -> None:
    """MCP, Cancellation: "the request processing has already completed": ignored; the stream is as
    it was."""
    maker = wire.positions()
    started = start(maker, "count", n=3)
    Reader(maker).response(started.id)
    cancel(maker, started.id)
    Reader(maker).settle()
    reader, reply = read_stream(wire.positions(), started.with_token, after=0)
    assert reader.seqs(started.stream) == up_to(4)
    assert reply.result == COMPLETED


def test_a_call_that_was_not_announced_can_be_cancelled_too(wire: Wire, gate: Gate) -> None:
    """W§8: a plain client gets the behaviour of a plain MCP server, cancellation included."""
    peer = wire.plain()
    call_id = peer.call("count", n=1, gate=gate.path)
    gate.wait_for("sent")
    cancel(peer, call_id)
    gate.wait_for("cancelled")
    assert not any(message.answers(call_id) for message in peer.settle())


def test_a_call_without_a_way_back_ends_with_its_connection(wire: Wire, gate: Gate) -> None:
    """No client can resume it, so its work would be for nothing. Its tool is silent, and nothing of
    it was stored or sent."""
    with wire.plain() as peer:
        peer.call("hold", gate=gate.path)
        gate.wait_for("started")
    gate.wait_for("cancelled")
