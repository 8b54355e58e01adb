"""Status without delivery: `stream/poll` and `stream/poll/all`."""

from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Peer, method_is
from tests.wire.verbs import END, KINDS, POSITIONS, STREAMS, Reader, Started, ack, start, up_to


def poll(peer: Peer, params: dict[str, Any], **more: object) -> dict[str, Any]:
    status: dict[str, Any] = peer.ask("stream/poll", {**params, **more}).result
    return status


def status(started: Started, status: str, *flags: bool) -> dict[str, Any]:
    pending, has_request, has_error = flags
    return {
        "streamId": started.stream,
        "status": status,
        "pendingMessages": pending,
        "hasRequest": has_request,
        "hasError": has_error,
    }


def listed(peer: Peer) -> list[dict[str, Any]]:
    """All pages of `stream/poll/all`."""
    page = peer.ask("stream/poll/all").result
    statuses: list[dict[str, Any]] = page["statuses"]
    while "nextCursor" in page:
        page = peer.ask("stream/poll/all", {"cursor": page["nextCursor"]}).result
        statuses += page["statuses"]
    return statuses


def test_a_status_has_its_five_fields_and_no_others(wire: Wire, gate: Gate) -> None:
    """W§2: "StreamStatus = {streamId, status: "live"|"completed", pendingMessages, hasRequest,
    hasError}   all required"."""
    maker = wire.streams()
    started = start(maker, "count", n=0, gate=gate.path)
    gate.wait_for("sent")
    assert poll(maker, started.by_id) == status(started, "live", False, False, False)
    assert poll(wire.streams(), started.with_token) == status(started, "live", False, False, False)
    gate.release()


def test_pending_is_what_lies_above_the_mark_or_the_cursor(wire: Wire, gate: Gate) -> None:
    """W§2: "**pendingMessages**: an entry has a seq above the highest delivered (section 4), or
    above `after` where given"."""
    maker = wire.positions()
    started = start(maker, "count", n=5, gate=gate.path)
    reader = Reader(maker)
    reader.until_seq(started.stream, 5)
    peer = wire.plain()
    assert poll(peer, started.with_token)["pendingMessages"] is True
    assert poll(peer, started.with_token, after=4)["pendingMessages"] is True
    assert poll(peer, started.with_token, after=5)["pendingMessages"] is False
    ack(maker, started.stream, 5)
    reader.settle()
    assert poll(peer, started.with_token)["pendingMessages"] is False
    gate.release()
    reader.until(method_is(END))
    assert poll(peer, started.with_token) == status(started, "completed", True, False, False)
    assert poll(peer, started.with_token, after=6) == status(
        started, "completed", False, False, False
    )


def test_a_poll_takes_nothing(wire: Wire, gate: Gate) -> None:
    """Page, Polling: "Clients can check a stream's status without receiving all unsent messages";
    W§5: "One connection at a time is attached": a poll attaches no connection."""
    maker = wire.positions()
    started = start(maker, "steps", n=5, gate=gate.path)
    other = wire.streams()
    for _ in range(5):
        gate.release()
        assert poll(other, started.with_token, after=0)["streamId"] == started.stream
    reader = Reader(maker)
    reader.until(method_is(END))
    assert reader.seqs(started.stream) == up_to(6)
    assert other.settle() == []


def test_a_request_is_pending_until_it_is_answered(wire: Wire) -> None:
    """W§2: "**hasRequest**: a request to the client is undelivered **or unanswered**"."""
    maker = wire.positions()
    started = start(maker, "ask")
    reader = Reader(maker)
    asked = reader.until(method_is("elicitation/create"))
    assert poll(wire.plain(), started.with_token) == status(started, "live", True, True, False)
    assert poll(wire.plain(), started.with_token, after=2) == status(
        started, "live", False, True, False
    )
    maker.answer(asked["id"], {"action": "decline"})
    reader.until(method_is(END))
    assert poll(wire.plain(), started.with_token, after=2) == status(
        started, "completed", True, False, False
    )
    ack(maker, started.stream, 4)
    reader.settle()
    assert poll(wire.plain(), started.with_token)["hasRequest"] is False


def test_an_error_is_pending_until_it_is_delivered(wire: Wire, gate: Gate) -> None:
    """W§2: "**hasError**: a pending JSON-RPC error response, or a pending result with `isError:
    true`"."""
    maker = wire.positions()
    started = start(maker, "fail", gate=gate.path)
    peer = wire.plain()
    gate.wait_for("sent")
    assert poll(peer, started.with_token)["hasError"] is False
    gate.release()
    Reader(maker).until(method_is(END))
    assert poll(peer, started.with_token) == status(started, "completed", True, False, True)
    assert poll(peer, started.with_token, after=1)["hasError"] is True
    assert poll(peer, started.with_token, after=2) == status(
        started, "completed", False, False, False
    )


def test_an_interrupted_call_has_an_error(wire: Wire, gate: Gate) -> None:
    """W§9: `interrupted`, -32603: "final response of a call whose handler died with the server";
    W§2: a pending JSON-RPC error response is `hasError`."""
    maker = wire.positions()
    started = start(maker, "count", n=3, gate=gate.path)
    gate.wait_for("sent")
    wire.server.restart()
    peer = wire.plain()
    wire.server.taken_over(lambda: poll(peer, started.with_token)["status"] != "live")
    assert poll(peer, started.with_token) == status(started, "completed", True, False, True)


def test_everyone_lists_only_their_own(wire: Wire, gate: Gate) -> None:
    """W§10: "`poll/all` lists that principal's running and undelivered streams"; `os(uid)` over
    stdio sees those of its other connections, "`conn(256 random bits)` for an anonymous WebSocket"
    only its own."""
    maker, other = wire.streams(), wire.streams()
    running = start(maker, "count", n=0, gate=gate.path)
    undelivered = start(wire.positions() if wire.is_one_principal else maker, "count", n=1)
    gate.wait_for("sent")
    own = {one["streamId"]: one for one in listed(maker)}
    assert own[running.stream] == status(running, "live", False, False, False)
    if wire.is_one_principal:
        assert undelivered.stream in own
        assert running.stream in {one["streamId"] for one in listed(other)}
    else:
        assert set(own) <= {running.stream, undelivered.stream}
        assert listed(other) == []
    gate.release()


def test_a_listing_holds_no_token(wire: Wire, gate: Gate) -> None:
    """W§2: the token is "never listed by `poll/all`"."""
    maker = wire.streams()
    started = start(maker, "count", n=0, gate=gate.path)
    page = maker.ask("stream/poll/all")
    assert set(page.result) <= {"statuses", "nextCursor"}
    assert started.stream.encode() in page.raw
    assert started.token.encode() not in page.raw
    for one in page.result["statuses"]:
        assert set(one) == {"streamId", "status", "pendingMessages", "hasRequest", "hasError"}
    gate.release()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capabilities", [STREAMS, POSITIONS], ids=["streams", "positions"])
def test_many_streams_are_listed_in_pages(
    fresh: ServerProcess, kind: str, capabilities: dict[str, Any]
) -> None:
    """W§2: `stream/poll/all   params {cursor?} → {statuses: [StreamStatus], nextCursor?}`."""
    with fresh.connect(kind) as peer:
        peer.initialize(capabilities)
        started = [start(peer, "forever") for _ in range(300)]
        first = peer.ask("stream/poll/all").result
        assert 0 < len(first["statuses"]) < 300, "300 streams are more than one page"
        assert isinstance(first["nextCursor"], str)
        all_of_them = [one["streamId"] for one in listed(peer)]
    assert len(all_of_them) == len(set(all_of_them)) == 300
    assert set(all_of_them) == {one.stream for one in started}


@pytest.mark.parametrize("cursor", ["nonsense", "", 7, [], {}])
def test_a_cursor_that_we_did_not_give_is_bad_params(wire: Wire, cursor: object) -> None:
    """W§9: "bad params" -32602; MCP, Pagination: "Invalid cursors SHOULD result in an error with
    code -32602"."""
    peer = wire.streams()
    assert peer.ask("stream/poll/all", {"cursor": cursor}).error["code"] == -32602


@pytest.mark.parametrize("params", [None, {}, {"streamId": 7}, {"streamId": None}, {"stream": "x"}])
@pytest.mark.parametrize("method", ["stream/poll", "stream/resume"])
def test_a_poll_needs_a_stream(wire: Wire, method: str, params: object) -> None:
    """W§9: "bad params" -32602."""
    assert wire.streams().ask(method, params).error["code"] == -32602
