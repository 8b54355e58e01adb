"""Refusals of `requests/resume`: by token, params or time; they reveal nothing."""

from pathlib import Path

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Message
from tests.wire.requests_verbs import (
    REQUESTS,
    REQUESTS_POSITIONS,
    RESUME,
    STATUS,
    cancel,
    finished,
    held,
    promise,
    regained,
    regained_by_seq,
    sole,
    text_of,
    wires_to,
)
from tests.wire.verbs import UNKNOWN, refused, up_to


def garbled(secret: str) -> str:
    return ("A" if secret[0] != "A" else "B") + secret[1:]


def test_one_answer_for_all_who_may_not_know(wire: Wire) -> None:
    """W§9: "`stream_not_found` | -32602 | unknown, someone else's, wrong token: one answer,
    byte-identical. All other checks come after it": in both dialects the same; and the refusals
    change nothing."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    token = promised.token
    wrong = [
        UNKNOWN,
        garbled(token),
        token[:-1],
        token + "A",
        token.swapcase(),
        "",
        "ä",
        "x" * 9999,
    ]
    answers = {peer.ask(RESUME, {"resumeToken": one}, id="r").raw for one in wrong}
    answers |= {peer.ask(RESUME, {"resumeToken": one, "after": 6}, id="r").raw for one in wrong}
    answers.add(peer.ask("stream/resume", {"streamId": UNKNOWN}, id="r").raw)
    assert len(answers) == 1, answers
    refused(Message(answers.pop()), "stream_not_found")
    reader, _ = regained_by_seq(peer, promised, after=0)
    assert list(sole(reader)) == up_to(6)


def test_a_token_is_its_own_requests(wire: Wire) -> None:
    """W§3: "The token identifies the request": under the id of another one it is the token's."""
    maker = wire.opened(REQUESTS_POSITIONS)
    one, other = promise(maker, "count", 7, n=1), promise(maker, "count", 8, n=2)
    maker.response(7)
    maker.response(8)
    maker.cut()
    peer = wire.opened(REQUESTS)
    assert text_of(regained(peer, other, 7)[-1]) == "counted 2"
    assert text_of(regained(peer, one, 8)[-1]) == "counted 1"


def test_params_that_do_not_fit_are_refused(wire: Wire) -> None:
    """W§9: "bad params" -32602, or, for a number beyond every request, `cursor_ahead`; the request
    itself goes on unharmed."""
    peer = wire.opened(REQUESTS_POSITIONS)
    promised, _ = finished(peer)
    assert peer.ask(RESUME).error["code"] == -32602
    tokens = [{"resumeToken": token} for token in (None, 7, 1.5, True, [], {})]
    cursors = [{**promised.by_token, "after": after} for after in (-1, "1", 1.5, True, [], 2**70)]
    for params in ({}, {"after": 3}, {"requestId": promised.id}, *tokens, *cursors):
        assert peer.ask(RESUME, params).error["code"] == -32602, params
    reader, _ = regained_by_seq(peer, promised)
    assert list(sole(reader)) == up_to(6)


def test_a_resume_without_id_is_an_invalid_request(wire: Wire, gate: Gate) -> None:
    """W§9: -32600: there is no id to answer under; the request stays where it is."""
    maker = wire.opened(REQUESTS)
    promised = held(maker, gate, 7)
    other = wire.opened(REQUESTS)
    for method, params in ((RESUME, promised.by_token), (STATUS, promised.named)):
        other.send({"jsonrpc": "2.0", "method": method, "params": params})
        refusal = other.expect(lambda reply: "error" in reply)
        assert refusal.error["code"] == -32600
        assert refusal.get("id") is None
    gate.release()
    assert text_of(maker.response(7)) == "counted 5"
    assert other.settle() == []


def test_the_cancelled_are_told_so(wire: Wire, gate: Gate) -> None:
    """W§2: "a later resume answers `cancelled`"; to any client with the token, under any id."""
    maker = wire.opened(REQUESTS)
    promised = held(maker, gate, 7)
    cancel(maker, 7)
    gate.wait_for("cancelled")
    for peer, resume_id in ((wire.plain(), 7), (maker, "r")):
        refused(peer.ask(RESUME, promised.by_token, id=resume_id), "cancelled")
        refused(peer.ask(STATUS, promised.named), "cancelled")
        refused(peer.ask(STATUS, {**promised.named, "requestId": 8}), "stream_not_found")
        wrong = peer.ask(RESUME, {"resumeToken": garbled(promised.token)}, id="r")
        refused(wrong, "stream_not_found")


def test_what_is_gone_stays_gone_after_a_restart(server: ServerProcess, gate: Gate) -> None:
    """W§9: "a tombstone is kept for a day"; keys outlive the server (W§2), and a wrong token still
    gets the same answer."""
    with wires_to(server) as wires:
        gone = []
        for wire in wires:
            maker = wire.opened(REQUESTS)
            gone.append(held(maker, gate, 7))
            cancel(maker, 7)
            gate.wait_for("cancelled")
            refused(maker.ask(RESUME, gone[-1].by_token), "cancelled")
            promise(maker, "count", n=0)  # announced once it is durable, as is everything before it
        server.restart()
        for wire, promised in zip(wires, gone, strict=True):
            peer = wire.opened(REQUESTS)
            refused(peer.ask(RESUME, promised.by_token), "cancelled")
            refused(peer.ask(STATUS, promised.named), "cancelled")
            refused(peer.ask(RESUME, {"resumeToken": UNKNOWN}), "stream_not_found")


def test_what_lasts_no_time_cannot_be_resumed(wire: Wire, gate: Gate) -> None:
    """W§2: "`max: 0` = not resumable, cancelled on disconnect": it has no token, or one that opens
    nothing."""
    maker = wire.opened(REQUESTS)
    maker.call("fleeting", gate=gate.path)
    gate.wait_for("sent")
    tokens = [
        one.params["resumeToken"] for one in maker.settle() if "resumeToken" in one.raw.decode()
    ]
    maker.cut()
    gate.wait_for("cancelled")
    for token in tokens:
        assert wire.plain().ask(RESUME, {"resumeToken": token}).error["code"] == -32602


STRICT = """
from streams import Server
from tests.wire import tools_server

server = Server("strict", version="1", resume_min_s=60, resume_max_s=600, enforce_min=True)
server.tool(tools_server.count)
"""


@pytest.fixture
def strict(tmp_path: Path) -> str:
    """A server file that makes clients wait."""
    (tmp_path / "strict.py").write_text(STRICT)
    return f"{tmp_path / 'strict.py'}:server"


def test_who_is_too_early_is_told_when_to_come(strict: str, tmp_path: Path, gate: Gate) -> None:
    """W§2: "Who comes back earlier [than `min`] is served and counted, or, where the server is told
    to enforce it, gets `too_early` with `retryAfter`"; "the client waits that long before it
    resumes or polls"."""
    with ServerProcess(tmp_path, app=strict) as server, wires_to(server) as wires:
        for wire in wires:
            promised = held(maker := wire.opened(REQUESTS), gate, 7)
            maker.cut()
            peer = wire.opened(REQUESTS)
            # The server counts a client as early only once it has seen the other connection end.
            while (told := peer.ask(STATUS, promised.named)).get("result") is not None:
                pass
            early = [told, peer.ask(RESUME, promised.by_token, id=7)]
            for refusal in early:
                data = refused(refusal, "too_early")
                assert set(data) == {"reason", "retryAfter"}
                assert 0 < data["retryAfter"] <= 60
            refused(peer.ask(RESUME, {"resumeToken": UNKNOWN}), "stream_not_found")
            gate.release()
