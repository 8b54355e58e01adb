"""A call that began on one transport goes on over another: it is the same stream."""

import itertools
from contextlib import ExitStack
from typing import Any

import pytest

from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Peer
from tests.wire.verbs import (
    COMPLETED,
    POSITIONS,
    STREAMS,
    Reader,
    counted,
    opting_in,
    read_stream,
    resume,
    start,
)

PAIRS = [
    pair
    for pair in itertools.permutations(("stdio", "ws-streams", "http-sse", "http-lines"), 2)
    if any(kind.startswith("http") for kind in pair)
]


@pytest.fixture(params=PAIRS, ids="-to-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    kinds: tuple[str, str] = request.param
    return kinds


def connected(
    stack: ExitStack, server: ServerProcess, kind: str, capabilities: dict[str, Any]
) -> Peer:
    peer = stack.enter_context(server.connect(kind))
    peer.initialize(opting_in(kind, capabilities))
    return peer


@pytest.mark.over_stores
def test_a_ticket_moves(server: ServerProcess, gate: Gate, pair: tuple[str, str]) -> None:
    """W§2: "anyone else needs the token", over any transport: the ticket has streamId, token and a
    number; W§4: "stored bytes untouched"."""
    with ExitStack() as stack:
        maker = connected(stack, server, pair[0], POSITIONS)
        started = start(maker, "steps", n=6, gate=gate.path)
        gate.release(3)
        before = Reader(maker)
        before.until_seq(started.stream, 3)
        maker.cut()
        gate.release(3)
        taker = connected(stack, server, pair[1], POSITIONS)
        after, reply = read_stream(taker, started.with_token, after=2)
    of_both = [reader.entries[started.stream] for reader in (before, after)]
    assert list(of_both[1]) == [3, 4, 5, 6, 7]
    assert of_both[0][3].raw == of_both[1][3].raw
    assert of_both[1][7].answers(started.id)
    assert reply.result == COMPLETED


@pytest.mark.over_stores
def test_the_newest_wins_across_transports(
    server: ServerProcess, gate: Gate, pair: tuple[str, str]
) -> None:
    """W§5: "One connection at a time is attached to a stream […]. **Newest wins.**" """
    with ExitStack() as stack:
        maker = connected(stack, server, pair[0], STREAMS)
        started = start(maker, "count", n=3, gate=gate.path)
        gate.wait_for("sent")
        taker = connected(stack, server, pair[1], STREAMS)
        resume_id = taker.request("stream/resume", {**started.with_token, "after": 3})
        assert maker.response(started.id).reason == "superseded"
        gate.release()
        assert taker.response(started.id).result["content"][0]["text"] == "counted 3"
        assert taker.response(resume_id).result == COMPLETED


def test_a_ticket_moves_while_the_server_is_killed(
    fresh: ServerProcess, gate: Gate, pair: tuple[str, str]
) -> None:
    """W§1: the journal is the same for all of them; W§9: `interrupted`."""
    with ExitStack() as stack:
        maker = connected(stack, fresh, pair[0], STREAMS)
        started = start(maker, "count", n=3, gate=gate.path)
        gate.wait_for("sent")
        fresh.restart()
        taker = connected(stack, fresh, pair[1], STREAMS)
        messages = resume(taker, started.with_token, after=0)
    assert counted(messages) == [1, 2, 3]
    assert messages[-3].answers(started.id)
    assert messages[-3].reason == "interrupted"
