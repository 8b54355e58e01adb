"""Refusals: the errors, and that they reveal nothing to callers without a right to know."""

from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate
from tests.wire.raw import Message, Peer, method_is
from tests.wire.verbs import (
    COMPLETED,
    CREATE,
    UNKNOWN,
    Started,
    read_stream,
    refused,
    resume,
    start,
)

METHODS = ("stream/resume", "stream/poll")


def garbled(secret: str) -> str:
    return ("A" if secret[0] != "A" else "B") + secret[1:]


def held(peer: Peer, gate: Gate, tool: str = "count") -> Started:
    arguments = {"n": 3} if tool == "count" else {}
    started = start(peer, tool, gate=gate.path, **arguments)
    gate.wait_for("sent")
    return started


def answer(peer: Peer, message: dict[str, Any] | list[Any]) -> Message:
    """Send a line, valid or not; returns the error that answers it."""
    peer.send(message)
    return peer.expect(lambda reply: "error" in reply)


def test_one_answer_for_all_who_may_not_know(wire: Wire, gate: Gate) -> None:
    """W§9: "`stream_not_found` | -32602 | unknown, someone else's, wrong token: one answer,
    byte-identical. All other checks come after it"; W§2: "A wrong token is an error even for the
    maker"."""
    maker = wire.positions()
    started = held(maker, gate)
    other = wire.positions()
    wrong = [garbled(started.token), "", UNKNOWN, started.stream, started.token + "A", "ä"]
    attempts = [
        (other, {"streamId": UNKNOWN}),
        (other, {"streamId": garbled(started.stream)}),
        (other, {"streamId": UNKNOWN, "resumeToken": started.token}),
        (other, {"streamId": "", "resumeToken": ""}),
        (other, {"streamId": garbled(started.stream), "resumeToken": started.token, "after": 999}),
        *[(other, {**started.by_id, "resumeToken": token}) for token in wrong],
        *[(maker, {**started.by_id, "resumeToken": token}) for token in wrong],
        (maker, {**started.by_id, "resumeToken": garbled(started.token), "after": 999}),
    ]
    answers = {
        peer.ask(method, params, id=7).raw for peer, params in attempts for method in METHODS
    }
    assert len(answers) == 1, answers
    refused(Message(answers.pop()), "stream_not_found")
    gate.release()


def test_the_refused_have_changed_nothing(wire: Wire, gate: Gate) -> None:
    """W§9: "All other checks come after it": no cursor of a stranger's deletes anything."""
    maker = wire.positions()
    started = held(maker, gate)
    other = wire.positions()
    other.ask("stream/resume", {**started.by_id, "resumeToken": UNKNOWN, "after": 3})
    other.ask("stream/poll", {**started.by_id, "resumeToken": UNKNOWN, "after": 3})
    gate.release()
    reader, reply = read_stream(other, started.with_token, after=0)
    assert reader.seqs(started.stream) == [1, 2, 3, 4]
    assert reply.result == COMPLETED


def test_abandoned_after_its_time(wire: Wire, gate: Gate) -> None:
    """W§2: "when it runs out the stream is abandoned, its handler cancelled, its entries deleted";
    W§9: "`abandoned` | -32602 | past `max`; told to the owner or a right token" (or, where the
    owner was anonymous, the bare id); to others it is unknown; W§2: "Not sent [`stream/end`] for an
    abandoned stream"."""
    maker = wire.streams()
    started = held(maker, gate, "brief")
    maker.cut()
    gate.wait_for("cancelled")
    peer = wire.streams()
    for method in METHODS:
        refused(peer.ask(method, started.with_token), "abandoned")
        unknown = peer.ask(method, {"streamId": UNKNOWN}, id=7).raw
        wrong = {**started.by_id, "resumeToken": garbled(started.token)}
        assert peer.ask(method, wrong, id=7).raw == unknown
        refused(peer.ask(method, started.by_id, id=7), "abandoned")
    assert peer.settle() == []


def test_the_abandoned_stay_abandoned_after_a_restart(wire: Wire, gate: Gate) -> None:
    """W§9: "a tombstone is kept for a day"."""
    maker = wire.streams()
    started = held(maker, gate, "brief")
    maker.cut()
    gate.wait_for("cancelled")
    peer = wire.streams()
    refused(peer.ask("stream/poll", started.with_token), "abandoned")
    start(peer, "count", n=1)  # announced once it is durable, as is everything before it
    wire.server.restart()
    refused(wire.streams().ask("stream/resume", started.with_token), "abandoned")


def test_the_clock_runs_only_while_nobody_is_attached(wire: Wire, gate: Gate) -> None:
    """W§2: "`max` runs only while no connection is attached". The one wait for time to pass: more
    than `max` goes by before the tool is let go."""
    maker = wire.streams()
    started = held(maker, gate, "brief")
    with pytest.raises(TimeoutError):
        gate.wait_for("cancelled", within_s=1.5)
    gate.release()
    assert maker.response(started.id).result["content"][0]["text"] == "brief"


@pytest.mark.parametrize("method", ["stream/poll", "stream/poll/all"])
def test_who_asks_keeps_the_stream(stdio: Wire, gate: Gate, method: str) -> None:
    """W§2: "resume, poll, poll/all (each stream listed) […] reset it": asked without a pause until
    more than `max` has gone by, it is there still."""
    maker = stdio.streams()
    started = held(maker, gate, "brief")
    peer = stdio.streams()
    maker.cut()
    for _ in range(15):
        with pytest.raises(TimeoutError):
            gate.wait_for("cancelled", within_s=0.1)
        peer.ask(method, started.with_token if method == "stream/poll" else {})
    gate.release()
    assert resume(peer, started.with_token)[-1].result == COMPLETED


def test_what_lasts_no_time_is_not_resumable(wire: Wire, gate: Gate) -> None:
    """W§2: "`max: 0` = not resumable, cancelled on disconnect". Whether it is announced is
    not said: where it is, `max` says that it will not last."""
    maker = wire.streams()
    maker.call("fleeting", gate=gate.path)
    gate.wait_for("sent")
    for create in filter(method_is(CREATE), maker.settle()):
        assert create.params["stream"]["resumeInterval"]["max"] == 0
    maker.cut()
    gate.wait_for("cancelled")


def test_a_resume_without_id_is_an_invalid_request(wire: Wire, gate: Gate) -> None:
    """W§2: "`stream/resume` without `id` (the page's example) is an invalid request": -32600, and
    the stream stays where it is."""
    maker = wire.streams()
    started = held(maker, gate)
    other = wire.streams()
    refusal = answer(
        other, {"jsonrpc": "2.0", "method": "stream/resume", "params": started.with_token}
    )
    assert refusal.error["code"] == -32600
    assert refusal.get("id") is None
    gate.release()
    assert "result" in maker.response(started.id)
    assert other.settle() == []


def test_errors_tell_what_to_do_next(wire: Wire) -> None:
    """W§9: "a one-sentence `message` that says what to do next, and `data.reason`"."""
    refusal = wire.streams().ask("stream/poll", {"streamId": UNKNOWN})
    assert set(refusal) == {"jsonrpc", "id", "error"}
    assert set(refusal.error) == {"code", "message", "data"}
    assert refusal.error["message"].endswith(".")


def test_unknown_methods_are_not_found(wire: Wire) -> None:
    """W§9: "-32601 […] unknown method"; a notification is never answered."""
    peer = wire.streams()
    for method in (
        "no/such",
        "",
        "stream/poll/some",
        "tools/call/x",
        "notifications/stream/create",
    ):
        assert peer.ask(method).error["code"] == -32601
    peer.notify("notifications/no/such", {"a": 1})
    peer.notify("no/such")
    assert peer.settle() == []


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"name": 7},
        {"name": None},
        {"name": "no such tool"},
        {"name": "add", "arguments": 7},
    ],
)
def test_a_call_needs_a_tool(wire: Wire, params: object) -> None:
    """W§9: "bad params" -32602."""
    assert wire.streams().ask("tools/call", params).error["code"] == -32602


@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"a": "x", "b": 2}, {"a": None, "b": 2}])
def test_arguments_that_do_not_fit_are_refused(wire: Wire, arguments: dict[str, Any]) -> None:
    """W§9: "bad params" -32602, or, as MCP 2025-11-25 would have it, a result with `isError`; in
    either case the tool has not run."""
    reply = wire.streams().ask("tools/call", {"name": "add", "arguments": arguments})
    if "result" in reply:
        assert reply.result["isError"] is True
    else:
        assert reply.error["code"] == -32602


@pytest.mark.parametrize("params", [[], [1], "x", 7, True])
def test_params_are_an_object(wire: Wire, params: object) -> None:
    """W§9: -32600 or -32602, under the request's id."""
    assert wire.streams().ask("tools/call", params).error["code"] in (-32600, -32602)


@pytest.mark.parametrize("bad", [None, 1.5, True, False, [], [1], {}, {"a": 1}])
def test_an_id_is_a_string_or_an_integer(wire: Wire, bad: object) -> None:
    """W§9: "not a request" -32600; its id cannot be told back."""
    peer = wire.streams()
    refusal = answer(peer, {"jsonrpc": "2.0", "id": bad, "method": "ping"})
    assert refusal.error["code"] == -32600
    assert refusal.get("id") is None
    assert peer.settle() == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"jsonrpc": "2.0"},
        {"jsonrpc": "1.0", "id": 7, "method": "ping"},
        {"id": 7, "method": "ping"},
        {"jsonrpc": "2.0", "id": 7},
        {"jsonrpc": "2.0", "id": 7, "method": 7},
        {"jsonrpc": "2.0", "id": 7, "method": "ping", "result": {}},
    ],
)
def test_json_that_is_no_message_is_an_invalid_request(wire: Wire, body: dict[str, Any]) -> None:
    """W§9: "not a request" -32600; "Parse errors and invalid requests never end a connection on
    their own"."""
    peer = wire.streams()
    refusal = answer(peer, body)
    assert refusal.error["code"] == -32600
    assert refusal.get("id") in (body.get("id"), None)
    assert peer.settle() == []


@pytest.mark.parametrize("data", [b"7", b'"x"', b"null", b"true"])
def test_json_that_is_no_object_is_an_invalid_request(wire: Wire, data: bytes) -> None:
    """W§9: "not a request" -32600."""
    peer = wire.streams()
    peer.send_raw(data)
    refusal = peer.expect(lambda reply: "error" in reply)
    assert refusal.error["code"] == -32600
    assert refusal.get("id") is None


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_batches_are_refused(wire: Wire, size: int, revision: str) -> None:
    """W§6: "batches of the oldest: -32600"; the later revisions have none. One refusal for the
    batch, and none of it is done."""
    peer = wire.connect()
    peer.initialize({}, revision=revision)
    refusal = answer(peer, [{"jsonrpc": "2.0", "id": n, "method": "ping"} for n in range(size)])
    assert refusal.error["code"] == -32600
    assert refusal.get("id") is None
    assert peer.settle() == []


@pytest.mark.parametrize(
    "data", [b"{", b"nonsense", b'{"jsonrpc":"2.0","id":1,"method":"ping"', b"[" * 5000]
)
def test_a_parse_error_is_answered_and_the_connection_goes_on(wire: Wire, data: bytes) -> None:
    """W§7: "Bad UTF-8 or JSON in a line: -32700, and on with the next"; W§9: "Parse errors […]
    never end a connection on their own"."""
    peer = wire.streams()
    peer.send_raw(data)
    refusal = peer.expect(lambda reply: "error" in reply)
    assert refusal.error["code"] == -32700
    assert refusal.get("id") is None
    assert peer.settle() == []
