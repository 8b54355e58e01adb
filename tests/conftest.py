"""Fixtures of every test."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import structlog

from streams import Server
from tests.rigs import redis_servers, setups
from tests.rigs.journals import (
    OpenJournal,
    OpenReplica,
    journals,
    lone_journals,
    replicas_of,
    shared_journals,
)
from tests.rigs.server import Steps

_numbers = count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--over",
        choices=list(setups.SETUPS),
        help="; ".join(f"{name}: {what}" for name, what in setups.SETUPS.items()),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the mark `over_stores` in its setups, unless one is chosen."""
    definition = metafunc.definition
    mark = definition.get_closest_marker("over_stores")
    if mark is not None and metafunc.config.option.over is None:
        names = mark.args or [*setups.SETUPS]
        names = [name for name in names if not setups.skipped(definition, name)]
        metafunc.parametrize("server_setup", names, indirect=True, scope="module")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot hold in the setup."""
    chosen = getattr(item, "callspec", None)
    name = chosen.params.get("server_setup") if chosen else None
    reason = setups.skipped(item, name or item.config.option.over or "file")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def server_setup(request: pytest.FixtureRequest, store_url: Callable[[str], str]) -> Iterator[str]:
    """How the servers of this module are set up."""
    name = getattr(request, "param", None) or request.config.option.over or "file"
    with setups.using(name, store_url):
        yield name


@pytest.fixture(scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def callbook_path(_state_folder: Path) -> Iterator[Path]:
    """The path of the command's callbook, in this process and in children: outside the real home
    folder.
    """
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
    """Reset the log after each test: a command run in this process redirects it to its standard
    error.
    """
    yield
    structlog.reset_defaults()


@pytest.fixture
def steps(server: Server) -> Steps:
    """The tool `step`, registered on the `server` of the test's own module."""
    return Steps(server)


@pytest.fixture(scope="session")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URL of a store of a kind (`redis_servers.STORES`), which all tests share."""
    with ExitStack() as stack:

        @cache
        def url_of(kind: str) -> str:
            folder = tmp_path_factory.mktemp(kind)
            if kind in redis_servers.KINDS:
                return stack.enter_context(redis_servers.running(kind, folder)).url
            nodes = stack.enter_context(redis_servers.cluster("redis", folder))
            return redis_servers.cluster_url(nodes)

        yield url_of


@pytest.fixture(params=["memory", "sqlite", *redis_servers.STORES])
def open_journal(
    request: pytest.FixtureRequest, tmp_path: Path, store_url: Callable[[str], str]
) -> OpenJournal:
    if request.param in redis_servers.STORES:
        return lone_journals(store_url(request.param))
    return journals(request.param, tmp_path)


@pytest.fixture(params=["memory", *redis_servers.STORES])
def open_replica(request: pytest.FixtureRequest, store_url: Callable[[str], str]) -> OpenReplica:
    if request.param in redis_servers.STORES:
        return replicas_of(store_url(request.param))
    return shared_journals(request.param)


# The longest files come first. A long file that starts last would keep one worker busy alone.
_LONG = (
    "tests/system/test_benchmarks.py",
    "tests/system/test_torture_replicas.py",
    "tests/simulation/test_simulation.py",
    "tests/sdk/",
    "tests/wire/test_http_refusals.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long files first; the order within a file stays."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


def pytest_collection_finish() -> None:
    """Let no collection of garbage visit the collected tests again: half a second each time."""
    gc.collect()
    gc.freeze()
