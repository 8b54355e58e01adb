"""A streamId without its token: whose streams it opens, and to which callers.

W§2: "`streamId` alone is honoured for the principal that made the stream (section 10), and, where
that principal was anonymous (`session`, `conn`), for any caller that presents it […]. A stream of a
`bearer` or `os` principal needs the token of anyone else."
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Peer
from tests.wire.verbs import (
    KINDS,
    PLAIN,
    STREAMS,
    UNKNOWN,
    Started,
    counted,
    refused,
    start,
    up_to,
)

METHODS = ("stream/poll", "stream/resume")
ANONYMOUS = [kind for kind in KINDS if kind != "stdio"]


def held(peer: Peer, gate: Gate) -> Started:
    started = start(peer, "count", 7, n=3, gate=gate.path)
    gate.wait_for("sent")
    return started


def taken_by_id(caller: Peer, started: Started, gate: Gate) -> None:
    """Poll and resume by the id alone; all of the stream must come."""
    assert caller.ask("stream/poll", started.by_id).result["status"] == "live"
    resume = caller.request("stream/resume", {**started.by_id, "after": 0}, id="resume")
    gate.release()
    messages = caller.read_until(lambda message: message.answers(resume))
    assert counted(messages) == up_to(3)
    assert [message for message in messages if message.answers(7)]


@pytest.mark.parametrize("made_over", ANONYMOUS)
@pytest.mark.parametrize("taken_over", KINDS)
def test_an_anonymous_callers_stream_is_opened_by_its_id(
    server: ServerProcess, gate: Gate, made_over: str, taken_over: str
) -> None:
    with server.connect(made_over) as maker, server.connect(taken_over) as other:
        maker.initialize(STREAMS)
        started = held(maker, gate)
        maker.cut()
        other.initialize(STREAMS)
        wrong = {**started.by_id, "resumeToken": UNKNOWN}
        for method in METHODS:
            refused(other.ask(method, wrong), "stream_not_found")
        assert other.ask("stream/poll/all").result["statuses"] == []
        taken_by_id(other, started, gate)


@pytest.mark.parametrize("taken_over", ANONYMOUS)
def test_a_users_stream_is_opened_to_others_by_its_token_alone(
    server: ServerProcess, gate: Gate, taken_over: str
) -> None:
    """W§9: one answer, byte-identical to that for an unknown id."""
    with (
        server.connect("stdio") as maker,
        server.connect(taken_over) as other,
        server.connect("stdio") as same_user,
    ):
        for peer in (maker, other, same_user):
            peer.initialize(STREAMS)
        started = held(maker, gate)
        for method in METHODS:
            unknown = other.ask(method, {"streamId": UNKNOWN}, id="x").raw
            assert other.ask(method, started.by_id, id="x").raw == unknown
        assert other.ask("stream/poll", started.with_token).result["status"] == "live"
        taken_by_id(same_user, started, gate)


def test_a_client_that_declared_nothing_may_come_by_id(wire: Wire, gate: Gate) -> None:
    """The page asks for no capability to use `stream/poll`."""
    started = held(wire.streams(), gate)
    other = wire.opened(PLAIN)
    assert other.ask("stream/poll", started.by_id).result["status"] == "live"
    gate.release()


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("strict")
    with ServerProcess(folder, options=("--require-resume-token",)) as server:
        yield server


@pytest.mark.parametrize("kind", ANONYMOUS)
def test_an_operator_can_require_the_token(
    strict_server: ServerProcess, gate: Gate, kind: str
) -> None:
    """W§2: "An operator can switch the bare id off (`--require-resume-token`)". The connection or
    session that made the stream is known without a token, as ever.
    """
    with ExitStack() as stack:
        maker, other = (stack.enter_context(strict_server.connect(kind)) for _ in range(2))
        maker.initialize(STREAMS)
        other.initialize(STREAMS)
        started = held(maker, gate)
        for method in METHODS:
            unknown = other.ask(method, {"streamId": UNKNOWN}, id="x").raw
            assert other.ask(method, started.by_id, id="x").raw == unknown
        assert maker.ask("stream/poll", started.by_id).result["status"] == "live"
        assert other.ask("stream/poll", started.with_token).result["status"] == "live"
        gate.release()


def test_the_id_opens_a_stream_after_a_restart_too(fresh: ServerProcess, tmp_path: Path) -> None:
    with fresh.connect("ws-mcp") as maker:
        maker.initialize(STREAMS)
        started = start(maker, "count", 7, n=3)
        maker.response(7)
    fresh.restart()
    with fresh.connect("http-sse") as other:
        other.initialize(STREAMS)
        status = other.ask("stream/poll", started.by_id).result
        assert status["status"] == "completed"
