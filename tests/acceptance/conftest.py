"""A server for one test, at each kind of address."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance.launch import owners, wait_for_end
from tests.acceptance.ways import KINDS, Listening, Owned, Served
from tests.wire.process import ServerProcess

Serve = Callable[[str], Served]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serve(kind: str, tmp_path: Path) -> Iterator[Serve]:
    """Serve an app to this test alone, in the usual way for this kind of address."""
    with ExitStack() as stack:

        def serve(app: str) -> Served:
            if kind != "stdio":
                process = stack.enter_context(ServerProcess(tmp_path, app=app))
                return Listening(process, app)
            owned = Owned(tmp_path, app)
            stack.callback(_end_owners, owned.journal)
            return owned

        yield serve


def _end_owners(journal: Path) -> None:
    for pid in owners(journal):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
