"""The ends of a run of pages: by itself, by an error, cancelled, forgotten, or with its server."""

import base64
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.wire.conftest import Wire
from tests.wire.pages_verbs import (
    TTL,
    ask_page,
    following,
    held,
    held_run,
    invalid,
    request_page,
    rest_of,
    text_of,
    texts_of,
    token_of,
    under_one_id,
    wire_of_each_kind,
)
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import DEADLINE_S, Message, Peer
from tests.wire.verbs import refused, start


@pytest.fixture
def wires(server: ServerProcess) -> Iterator[list[Wire]]:
    """Every way to the module's server, for waits that all of them can share."""
    with ExitStack() as stack:
        yield wire_of_each_kind(server, stack)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[list[Wire]]:
    """Every way to a server that deletes last pages after a second."""
    (tmp_path / "hasty").mkdir()
    options = ("--limit", "last_page_s=1")
    with ServerProcess(tmp_path / "hasty", options=options) as server, ExitStack() as stack:
        yield wire_of_each_kind(server, stack)


def assert_tokenless(answer: Message) -> None:
    """WIRE §3: "Never on a JSON-RPC error or a result with `isError: true`"."""
    assert b"esumeT" not in answer.raw


def test_a_tool_that_raises_ends_its_run(wire: Wire) -> None:
    """W§3: never a token "on a JSON-RPC error or a result with `isError: true`", which is the last
    page and is repeated as one; page: servers "MUST omit the nextResumeToken if the operation
    errors"."""
    peer = wire.plain()
    pages = [ask_page(peer, "failing_pages", n=3)]
    pages.append(ask_page(peer, "failing_pages", following(pages[0]), n=3))
    assert texts_of(pages) == ["page 1", "page 2"]
    token = following(pages[1])
    for one in (peer, peer):
        last = ask_page(one, "failing_pages", token, n=3)
        assert last.result["isError"] is True
        assert "the tool says no" in text_of(last)
        assert_tokenless(last)
    invalid(ask_page(peer, "failing_pages", following(pages[0]), n=3))


def test_a_tool_may_raise_before_its_first_page(wire: Wire) -> None:
    """W§3: as above."""
    answer = ask_page(wire.plain(), "failing_pages", n=1)
    assert answer.result["isError"] is True
    assert_tokenless(answer)


def test_cancelling_a_page_call_stops_the_tool(wire: Wire, gate: Gate) -> None:
    """W§3: "resume tokens […] cancelled: `invalid_token`"; MCP, Cancellation: no response comes for
    a cancelled request."""
    peer = wire.plain()
    token = held_run(peer, gate)
    call_id = request_page(peer, "pages", token, **held(gate))
    peer.arrived()
    peer.notify("notifications/cancelled", {"requestId": call_id, "reason": "enough"})
    gate.wait_for("cancelled")
    assert not any(message.answers(call_id) for message in peer.settle())
    invalid(ask_page(peer, "pages", token, **held(gate)))


def test_the_first_call_can_be_cancelled_too(wire: Wire, gate: Gate) -> None:
    """W§2: "`notifications/cancelled` for the originating request stops the work"."""
    peer = wire.streams()
    call_id = request_page(peer, "pages", n=3, gate=gate.path)
    gate.wait_for("at 1")
    peer.notify("notifications/cancelled", {"requestId": call_id})
    gate.wait_for("cancelled")
    assert not any(message.answers(call_id) for message in peer.settle())


def test_a_call_that_was_answered_cannot_be_cancelled(wire: Wire) -> None:
    """MCP, Cancellation: "the request processing has already completed": the call has its page,
    and it was the call's id that was named."""
    peer = wire.plain()
    call_id = request_page(peer, "pages", n=4)
    token = following(peer.response(call_id))
    peer.notify("notifications/cancelled", {"requestId": call_id})
    peer.settle()
    call_id = request_page(peer, "pages", token, n=4)
    token = following(peer.response(call_id))
    peer.notify("notifications/cancelled", {"requestId": call_id})
    peer.settle()
    assert text_of(ask_page(peer, "pages", token, n=4)) == "page 3"


def test_nobody_else_may_cancel_a_page_call(wire: Wire, gate: Gate) -> None:
    """W§10: "`cancelled` reaches requests of this connection (session) and streams attached to
    it"."""
    peer, other = wire.plain(), wire.plain()
    token = held_run(peer, gate, n=2)
    call_id = request_page(peer, "pages", token, **held(gate, n=2))
    peer.arrived()
    other.notify("notifications/cancelled", {"requestId": call_id})
    other.settle()
    gate.release()
    assert text_of(peer.response(call_id)) == "page 2"


@pytest.mark.needs_one_process("the balancer tells of a cut when it next writes", over="http-lines")
def test_what_was_never_answered_ends_with_its_connection(wire: Wire, gate: Gate) -> None:
    """W§5: "A stream that was never announced, on a transport without event ids […], can never be
    resumed: it is cancelled at disconnect": no token had been given yet."""
    if wire.kind == "http-sse":
        pytest.skip("W§8: over HTTP it is safe from its first event id on")
    peer = wire.plain()
    request_page(peer, "pages", n=3, gate=gate.path)
    gate.wait_for("at 1")
    peer.cut()
    gate.wait_for("cancelled")


def test_what_nobody_comes_back_for_is_stopped(wires: list[Wire], gate: Gate) -> None:
    """W§3: "`resumeTtl` says for how long it holds, counted from its last use"; "expired: -32602
    `invalid_token`": of two runs the one that was used again is stopped later."""
    peers = plain_over(wires)
    tokens = []
    for peer, wire in zip(peers, wires, strict=True):
        used = brief(gate, f" {wire.kind} used")
        again = following(ask_page(peer, "brief_pages", **used))
        left = brief(gate, f" {wire.kind} left")
        first = ask_page(peer, "brief_pages", **left)
        assert first.result["_meta"][TTL] == 1
        tokens += [(left, following(first)), (used, again)]
        assert text_of(ask_page(peer, "brief_pages", again, **used)) == "page 2"
    stopped = [mark for mark in all_marks(gate, 2 * len(wires)) if mark.startswith("cancelled")]
    for wire in wires:
        order = [stopped.index(f"cancelled {wire.kind} {which}") for which in ("left", "used")]
        assert order == sorted(order)
    for peer in peers:
        for arguments, token in tokens:
            invalid(ask_page(peer, "brief_pages", token, **arguments))


def brief(gate: Gate, name: str) -> dict[str, Any]:
    """Arguments of a run with two pages at once, and a third that waits."""
    return {**held(gate, free=2), "name": name}


def all_marks(gate: Gate, cancelled: int) -> list[str]:
    """The tools' marks, once so many of them were stopped."""
    deadline = time.monotonic() + DEADLINE_S
    while sum(mark.startswith("cancelled") for mark in gate.marks()) < cancelled:
        assert time.monotonic() < deadline, gate.marks()
    return gate.marks()


def test_who_waits_for_a_page_keeps_its_run(wires: list[Wire], gate: Gate, gate2: Gate) -> None:
    """W§2: "`max` runs only while no connection is attached": for a call that waits it does not."""
    peers = plain_over(wires)
    calls = []
    for peer in peers:
        first = ask_page(peer, "brief_pages", **held(gate2))
        calls.append(request_page(peer, "brief_pages", following(first), **held(gate2)))
        peer.arrived()
        ask_page(peer, "brief_pages", **held(gate, free=2))
    for _ in peers:
        gate.wait_for("cancelled")
    assert "cancelled" not in gate2.marks()
    gate2.release(2 * len(calls))
    pages = [peer.response(call_id) for peer, call_id in zip(peers, calls, strict=True)]
    assert texts_of(pages) == ["page 2"] * len(calls)


def test_a_completed_run_is_forgotten(hasty: list[Wire]) -> None:
    """W§3: "the last token repeats the last page for 120 s after completion. […] completed:
    -32602 `invalid_token`"; here for 1 s, counted from when it was first sent."""
    peers = plain_over(hasty)
    lasts = []
    for peer in peers:
        token = following(ask_page(peer, "pages", n=2))
        last = ask_page(peer, "pages", token, n=2)
        assert token_of(last) is None
        assert ask_page(peer, "pages", token, n=2).result == last.result
        lasts.append((peer, token, last))
    deadline = time.monotonic() + DEADLINE_S
    for peer, token, last in lasts:
        while "result" in (answer := ask_page(peer, "pages", token, n=2)):
            assert answer.result == last.result
            assert time.monotonic() < deadline, "not even 1 s is for ever"
        invalid(answer)
        garbage = ask_page(peer, "pages", "nonsense", n=2)
        assert under_one_id(answer) == under_one_id(garbage)


def plain_over(wires: list[Wire]) -> list[Peer]:
    return [wire.plain() for wire in wires]


def whole_run(peer: Peer) -> str:
    """A run that is over and in the journal, and whose first page was read.

    Returns the page token for the second.
    """
    started = start(peer, "ahead_pages", n=4)
    first = peer.response(started.id)
    while peer.ask("stream/poll", started.by_id).result["status"] != "completed":
        pass
    return following(first)


def test_a_dead_servers_pages_can_still_be_had(wires: list[Wire], gate: Gate) -> None:
    """W§1: "stored in the journal before they are sent"; W§3: "Stable: the same token gives the
    same page", killed or shut down; W§9: `interrupted` in place of later pages, without a token,
    for it is an error."""
    arguments = held(gate, free=2)
    peers = [wire.streams() for wire in wires]
    tokens = [following(ask_page(peer, "pages", **arguments)) for peer in peers]
    calls = list(zip(peers, tokens, strict=True))
    seconds = [ask_page(peer, "pages", token, **arguments) for peer, token in calls]
    over = [whole_run(peer) for peer in peers]
    server = wires[0].server
    server.restart()
    runs = list(zip(plain_over(wires), tokens, seconds, over, strict=True))
    lasts = []
    for peer, token, second, whole in runs:
        for _ in range(2):
            assert ask_page(peer, "pages", token, **arguments).result == second.result
        pages = rest_of(peer, "ahead_pages", ask_page(peer, "ahead_pages", whole, n=4), n=4)
        assert texts_of(pages) == ["page 2", "page 3", "page 4"]
        lasts.append((following(pages[-2]), pages[-1]))
    server.stop(signal.SIGTERM)
    server.start()
    ended = zip(plain_over(wires), tokens, seconds, lasts, strict=True)
    for peer, token, second, (last_token, last) in ended:
        assert ask_page(peer, "pages", token, **arguments).result == second.result
        for _ in range(2):
            end = ask_page(peer, "pages", following(second), **arguments)
            assert refused(end, "interrupted", -32603) == {"reason": "interrupted"}
            assert_tokenless(end)
        invalid(ask_page(peer, "pages", token, **arguments))
        assert ask_page(peer, "ahead_pages", last_token, n=4).result == last.result


@pytest.mark.needs_file("the keys of a store are not in a file")
def test_old_keys_stay_valid_for_reading(wires: list[Wire]) -> None:
    """W§3: "Keys live in `<journal>.key`"; W§2: "old keys stay valid for reading": with a new key
    on top the tokens of old are honoured; without the old one they are void."""
    server = wires[0].server
    keys = server.journal.with_name(server.journal.name + ".key")
    old = keys.read_bytes()
    new = base64.urlsafe_b64encode(os.urandom(32)) + b"\n"
    peers = [wire.streams() for wire in wires]
    tokens = [whole_run(peer) for peer in peers]
    left = [whole_run(peer) for peer in peers]
    server.stop()
    keys.write_bytes(new + old)
    server.start()
    for peer, token in zip(plain_over(wires), tokens, strict=True):
        second = ask_page(peer, "ahead_pages", token, n=4)
        pages = rest_of(peer, "ahead_pages", second, n=4)
        assert texts_of(pages) == ["page 2", "page 3", "page 4"]
    server.stop()
    keys.write_bytes(new)
    server.start()
    for peer, token in zip(plain_over(wires), left, strict=True):
        invalid(ask_page(peer, "ahead_pages", token, n=4))
