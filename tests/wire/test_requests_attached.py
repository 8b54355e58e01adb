"""Attachment by `requests/resume`: the newest reader wins, ids that are taken, and detaching."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Peer, PeerGone, method_is
from tests.wire.requests_verbs import (
    POLICY,
    REQUESTS,
    REQUESTS_POSITIONS,
    RESUME,
    Promised,
    both,
    cancel,
    held,
    promise,
    regained,
    regained_by_seq,
    return_for,
    sole,
    text_of,
    until_seq,
    wires_to,
)
from tests.wire.verbs import (
    END,
    SUPERSEDED,
    Reader,
    Started,
    counted,
    refused,
    start,
    up_to,
)


def held_stream(peer: Peer, gate: Gate, id: int) -> Started:
    started = start(peer, "count", id, n=5, gate=gate.path)
    gate.wait_for("sent")
    return started


def test_the_original_call_is_told_that_it_was_superseded(wire: Wire, gate: Gate) -> None:
    """W§5: "**Newest wins.** […] an original call […] gets the error `superseded` under its id (not
    an entry)"; the rest comes to the newest alone, here under the very id of the call."""
    maker = wire.opened(REQUESTS_POSITIONS)
    promised = held(maker, gate, 7)
    reader = Reader(maker)
    until_seq(reader, 5)
    newest = wire.opened(REQUESTS_POSITIONS)
    return_for(newest, promised, 7, after=5)
    told = reader.response(7)
    refused(told, "superseded")
    assert told in reader.others, "not an entry: it has no number"
    assert reader.response(maker.request("ping", id=7)).result == {}, "its id is free again"
    gate.release()
    of_newest = Reader(newest)
    assert text_of(of_newest.response(7)) == "counted 5"
    reader.settle()
    assert list(sole(reader)) == up_to(5)


@pytest.mark.parametrize("by", [RESUME, "stream/resume"])
def test_a_resume_is_told_that_it_was_superseded(wire: Wire, gate: Gate, by: str) -> None:
    """W§5: "a `requests/resume` gets the error `superseded` under its id (not an entry)", whichever
    method the newest has used."""
    started = held_stream(maker := both(wire), gate, 7)
    maker.cut()
    first, second = wire.opened(REQUESTS_POSITIONS), both(wire)
    return_for(first, Promised.of(started), "first", after=0)
    of_first = Reader(first)
    until_seq(of_first, 5)
    params = {**started.with_token} if by == "stream/resume" else Promised.of(started).by_token
    second.request(by, {**params, "after": 5}, id="second")
    told = of_first.response("first")
    refused(told, "superseded")
    assert told in of_first.others
    gate.release()
    of_second = Reader(second)
    assert "result" in of_second.response("second")
    assert list(sole(of_second)) == [6]
    of_first.settle()
    assert list(sole(of_first)) == up_to(5)


def test_a_resume_of_the_other_dialect_is_told_in_its_own(wire: Wire, gate: Gate) -> None:
    """W§5: "The displaced one is told: `stream/resume` gets its reply with `superseded`"."""
    started = held_stream(maker := both(wire), gate, 7)
    maker.cut()
    first = both(wire)
    first.request("stream/resume", {**started.with_token, "after": 0}, id="first")
    of_first = Reader(first)
    until_seq(of_first, 5)
    second = wire.opened(REQUESTS)
    return_for(second, Promised.of(started), 7, after=5)
    assert of_first.response("first").result == SUPERSEDED
    assert not any(map(method_is(END), of_first.others)), "the stream goes on elsewhere"
    gate.release()
    assert text_of(second.response(7)) == "counted 5"


def test_the_newest_wins_every_time(wire: Wire, gate: Gate) -> None:
    """W§5: "the originating request's own, or that of the newest resume": two connections take the
    request from each other in the words of both dialects, and the last has it."""
    started = held_stream(maker := both(wire), gate, 7)
    promised = Promised.of(started)
    maker.cut()
    peers = [both(wire), both(wire)]
    for turn in range(8):
        peer, other = peers[turn % 2], peers[1 - turn % 2]
        if turn % 4 < 2:
            return_for(peer, promised, f"turn {turn}", after=3)
        else:
            peer.request("stream/resume", {**started.with_token, "after": 3}, id=f"turn {turn}")
        peer.expect(lambda message: counted([message]) == [5])
        if turn:
            told = other.response(f"turn {turn - 1}")
            is_told = told.result == SUPERSEDED if "result" in told else told.reason == "superseded"
            assert is_told
            assert ("error" in told) == ((turn - 1) % 4 < 2), "each in the words of its own method"
    gate.release()
    assert "result" in peers[1].response("turn 7")
    assert not any(message.get("id") == 7 for message in peers[0].settle())


def test_one_may_resume_anew_on_ones_own_connection(wire: Wire, gate: Gate) -> None:
    """W§5: nothing is sent under the id of the call, so that nothing stands in the way of a second
    `requests/resume` beside the first, or beside the call itself: the newest wins."""
    peer = wire.opened(REQUESTS)
    promised = held(peer, gate, 7)
    for resume_id, before in (("first", 7), ("second", "first")):
        return_for(peer, promised, resume_id, after=5)
        refused(peer.response(before), "superseded")
    gate.release()
    assert text_of(peer.response("second")) == "counted 5"
    assert not any("id" in message for message in peer.settle())


@pytest.mark.needs_one_process("a replica knows the ids of its own requests", over="http")
def test_an_id_in_flight_is_taken(wire: Wire, gate: Gate, gate2: Gate) -> None:
    """W§3: "Refused only if that id is taken (section 5)"; W§5: "A new request with a taken id:
    -32600": by another call or by its resume; and none of them is the worse for it."""
    peer = wire.opened(REQUESTS)
    promised = held(peer, gate, 7)
    other = held(peer, gate2, 8)
    return_for(peer, promised, 8)
    assert peer.response(8).error["code"] == -32600
    return_for(peer, promised, "r", after=5)
    refused(peer.response(7), "superseded")
    return_for(peer, other, "r")
    assert peer.response("r").error["code"] == -32600
    gate.release()
    gate2.release()
    assert text_of(peer.response("r")) == "counted 5"
    assert text_of(peer.response(8)) == "counted 5"


def test_a_call_may_be_resumed_under_its_own_id_while_it_is_attached(
    wire: Wire, gate: Gate
) -> None:
    """W§5: a resume displaces a delivery of the same stream "under the same id (925 demands it)":
    under that id comes the response of the call, once, and no error."""
    peer = wire.opened(REQUESTS)
    promised = held(peer, gate, 7)
    peer.expect(lambda message: counted([message]) == [5])
    return_for(peer, promised, 7, after=3)
    peer.expect(lambda message: counted([message]) == [5])
    gate.release()
    assert text_of(peer.response(7)) == "counted 5"
    assert not any("id" in message for message in peer.settle())


def test_the_calls_id_is_free_while_it_is_resumed_under_another(
    wire: Wire, gate: Gate, gate2: Gate
) -> None:
    """W§3: "the final entry is sent under the id of the `requests/resume` message": the call's own
    id is free here."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    peer = wire.opened(REQUESTS)
    busy = held(peer, gate2, 7, n=1)
    return_for(peer, promised, "r")
    peer.expect(lambda message: counted([message]) == [5])
    gate2.release()
    assert text_of(peer.response(busy.id)) == "counted 1"
    assert peer.ask("ping", id=7).result == {}
    gate.release()
    assert text_of(peer.response("r")) == "counted 5"


@pytest.mark.needs_one_process("a replica knows the ids of its own requests", over="http")
def test_an_id_that_a_stream_has_taken_is_free_for_its_own_resume(wire: Wire, gate: Gate) -> None:
    """W§5: taken "while a stream with that originating id is attached without positions […] except
    by a delivery of the very stream that is asked for"."""
    started = held_stream(maker := wire.streams(), gate, 7)
    maker.cut()
    peer = wire.streams()
    resume_id = peer.request("stream/resume", {**started.with_token, "after": 5})
    peer.arrived()
    assert peer.ask("ping", id=7).error["code"] == -32600
    return_for(peer, Promised.of(started), 7)
    assert peer.response(resume_id).result == SUPERSEDED
    gate.release()
    assert text_of(peer.response(7)) == "counted 5"
    assert not any("id" in message for message in peer.settle())


def test_cancelling_under_the_calls_id_stops_the_work(wire: Wire, gate: Gate) -> None:
    """W§3: "Cancelling it: under the original id it stops the work"; MCP, Cancellation: no response
    is sent for it."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    peer = wire.opened(REQUESTS)
    return_for(peer, promised, 7, after=0)
    peer.expect(lambda message: counted([message]) == [5])
    cancel(peer, 7)
    gate.wait_for("cancelled")
    assert not any(message.answers(7) for message in peer.settle())
    refused(peer.ask(RESUME, promised.by_token), "cancelled")


def test_cancelling_under_another_id_only_detaches(wire: Wire, gate: Gate) -> None:
    """W§3: "under another it detaches": the work goes on, and can be had here and elsewhere."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    peer = wire.opened(REQUESTS_POSITIONS)
    reader = Reader(peer)
    return_for(peer, promised, "r", after=0)
    until_seq(reader, 5)
    cancel(peer, "r")
    reader.settle()
    assert gate.marks() == []
    gate.release()
    again, response = regained_by_seq(peer, promised, 7, after=0)
    assert list(sole(again)) == up_to(6)
    assert text_of(response) == "counted 5"
    assert not any(message.answers("r") for message in [*reader.all, *peer.settle()])
    assert list(sole(reader)) == up_to(5), "nothing more came here"


def test_who_has_resumed_may_stop_the_work_by_the_calls_id(wire: Wire, gate: Gate) -> None:
    """W§10: "`cancelled` reaches requests of this connection (session) and streams attached to
    it", under whichever id they are followed here."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    peer = wire.opened(REQUESTS)
    return_for(peer, promised, "r", after=0)
    peer.expect(lambda message: counted([message]) == [5])
    cancel(peer, 7)
    gate.wait_for("cancelled")
    refused(wire.opened(REQUESTS).ask(RESUME, promised.by_token), "cancelled")


def test_a_displaced_resume_cancels_nothing(wire: Wire, gate: Gate) -> None:
    """W§10: `cancelled` does not reach a stream that was attached here and is no longer."""
    promised = held(maker := wire.opened(REQUESTS_POSITIONS), gate, 7)
    maker.cut()
    displaced = wire.opened(REQUESTS)
    return_for(displaced, promised, 7, after=0)
    displaced.expect(lambda message: counted([message]) == [5])
    newest = wire.opened(REQUESTS)
    return_for(newest, promised, "newest")
    refused(displaced.response(7), "superseded")
    cancel(displaced, 7)
    displaced.settle()
    assert gate.marks() == []
    gate.release()
    assert text_of(newest.response("newest")) == "counted 5"


LETTING_GO = """
from streams import Call, Server
from tests.wire.tools_server import mark, passage, say

server = Server("letting-go", version="1", resume_min_s=0)

@server.tool
async def let_go(call: Call, gate: str) -> str:
    await say(call, 1)
    await passage(gate)
    await call.disconnect()
    await say(call, 2)
    await passage(gate)
    return "gone on"
"""


@pytest.fixture
def letting_go(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with a tool that detaches its client on the test's order."""
    (tmp_path / "app.py").write_text(LETTING_GO)
    with ServerProcess(tmp_path, app=f"{tmp_path / 'app.py'}:server") as server:
        yield server


def test_who_is_let_go_is_told_and_comes_back(letting_go: ServerProcess, gate: Gate) -> None:
    """W§5: "A server that lets go […] ends […] `requests/resume` with the error `released`", not an
    entry; over HTTP with event ids the response may just end (W§6: "The server may close the
    connection after any id, only if more will come")."""
    with wires_to(letting_go) as wires:
        for wire in wires:
            maker = wire.opened(REQUESTS_POSITIONS)
            promised = promise(maker, "let_go", 7, gate=gate.path)
            until_seq(Reader(maker), 1)
            maker.cut()
            peer = wire.opened(REQUESTS)
            return_for(peer, promised, "r", after=0)
            assert [peer.receive().method for _ in range(2)] == [POLICY, "notifications/message"]
            gate.release()
            with contextlib.suppress(*[PeerGone] if wire.kind == "http-sse" else []):
                refused(peer.response("r"), "released")
            gate.release()
            *entries, response = regained(wire.opened(REQUESTS), promised, 7, after=1)
            assert counted(entries) == [2]
            assert text_of(response) == "gone on"


def test_a_signal_ends_resumes_in_good_order(fresh: ServerProcess, gate: Gate) -> None:
    """W§5: "A server that lets go (drain, shutdown) ends […] `requests/resume` with the error
    `released`", unless what is over by then has been delivered to its end: W§7, "running handlers
    end as `interrupted`"."""
    followed = []
    with wires_to(fresh) as wires:
        for wire in wires:
            promised = held(wire.opened(REQUESTS), gate, 7)
            peer = wire.opened(REQUESTS)
            return_for(peer, promised, "r", after=0)
            peer.expect(lambda message: counted([message]) == [5])
            followed.append((wire, promised, peer))
        assert fresh.stop(signal.SIGTERM, within_s=5) == 0
        for _, _, peer in followed:
            assert peer.response("r").reason in ("released", "interrupted")
        fresh.start()
        for wire, promised, _ in followed:
            again = wire.opened(REQUESTS)
            response = regained(again, promised, 7)[-1]
            refused(response, "interrupted", -32603)
