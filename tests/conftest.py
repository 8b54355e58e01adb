"""What holds for every test."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import structlog

from streams import Server
from tests.rigs.journals import OpenJournal, journals
from tests.rigs.server import Steps

_numbers = count()


@pytest.fixture(scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def callbook_path(_state_folder: Path) -> Iterator[Path]:
    """Where the command notes its calls, in this process and in children: in no real home."""
    before = os.environ.get("MCP_STREAMS_STATE")
    path = _state_folder / str(next(_numbers)) / "calls.json"
    os.environ["MCP_STREAMS_STATE"] = str(path)
    yield path
    if before is None:
        del os.environ["MCP_STREAMS_STATE"]
    else:
        os.environ["MCP_STREAMS_STATE"] = before


@pytest.fixture(autouse=True)
def log_as_by_default() -> Iterator[None]:
    """A command that ran in this process has sent the log to its own standard error."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def steps(server: Server) -> Steps:
    """The tool `step` of the `server` that a file's tests are about."""
    return Steps(server)


@pytest.fixture(params=["memory", "sqlite"])
def open_journal(request: pytest.FixtureRequest, tmp_path: Path) -> OpenJournal:
    return journals(request.param, tmp_path)


# What takes longest comes first, or else one worker would be left with it at the end.
_LONG = ("tests/system/test_benchmarks.py", "tests/sdk/", "tests/wire/test_http_refusals.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; within a file nothing changes."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
