"""SIGKILL while streams are evicted and loaded: the journal has all that a server needs."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.process import ServerProcess
from tests.wire.raw import answers_to
from tests.wire.verbs import (
    KINDS,
    POSITIONS,
    Started,
    counted,
    opting_in,
    resume,
    start,
    up_to,
)

STREAMS = 12
MESSAGES = 5


@pytest.fixture(params=[0, 4])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that keeps so many idle streams in memory."""
    options = (f"--limit=resident_max={request.param}",)
    with ServerProcess(tmp_path, options=options) as server:
        yield server


def called(server: ServerProcess, kind: str) -> list[Started]:
    """Calls that have ended, and whose client has left before the end."""
    begun = []
    with server.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        for _ in range(STREAMS):
            call = start(peer, "count", n=MESSAGES)
            peer.read_until(answers_to(call.id))
            begun.append(call)
    return begun


@pytest.mark.parametrize("kind", KINDS)
def test_whenever_the_server_is_killed_every_stream_is_there(
    server: ServerProcess, kind: str
) -> None:
    dice = random.Random(kind)
    begun = called(server, kind)
    for _ in range(3):
        with server.connect(kind) as peer:
            peer.initialize(opting_in(kind, POSITIONS))
            for call in dice.sample(begun, dice.randint(1, STREAMS)):
                assert counted(resume(peer, call.with_token)) == up_to(MESSAGES)
            server.kill()  # some are being evicted, and some loaded
        server.start()
    with server.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        for call in begun:
            assert counted(resume(peer, call.with_token)) == up_to(MESSAGES)
