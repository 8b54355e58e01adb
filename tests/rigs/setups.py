"""Where the servers that tests start keep their journals, and how many processes each of them is.

A test starts "a server" (`tests.wire.process.ServerProcess`) and does not say which. The fixture
`setup` in tests/conftest.py chooses one of `SETUPS` for a module; `pytest --over` for all.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from streams.journal.ownership import owner_of

SETUPS: Final = {
    "file": "one process with a SQLite file",
    "redis": "one process with a journal on Redis",
    "replicas": "three replicas with a journal on Redis, behind HAProxy without sticky sessions",
}

REPLICAS: Final = 3

# Longer than any pause of a replica on a busy machine: no test may depend on that. A test that
# kills a server waits for so long until the next one takes over its calls.
LEASE_S: Final = 5.0

_numbers: Final = count(1)


@dataclass(frozen=True)
class Place:
    """Where one server keeps its journal: a file, or a store and the folder of an owner's files."""

    journal: str
    state: Path | None = None

    @property
    def options(self) -> list[str]:
        """The options that name the journal."""
        over_store = [] if self.state is None else ["--lease", str(LEASE_S)]
        return ["--journal", self.journal, *over_store]

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that serves the journal over stdio, also for hosts that keep environments."""
        state = [] if self.state is None else ["env", f"XDG_STATE_HOME={self.state}"]
        return [*state, *words, *self.options]

    def owner(self) -> int | None:
        """The process that owns the file, or serves relays on the store."""
        if self.state is None:
            return owner_of(Path(self.journal))
        owners = [owner_of(lock.with_suffix("")) for lock in self.state.glob("mcp-streams/*.lock")]
        return next((pid for pid in owners if pid is not None), None)

    def end_owner(self) -> None:
        """Kill that process, if there is one, and wait for its end."""
        if (pid := self.owner()) is not None:
            end = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([end], [], [])
            os.close(end)


@dataclass(frozen=True)
class Setup:
    """A setup; over a store it has the store's URL."""

    name: str = "file"
    store: str = ""

    @property
    def replicas(self) -> int:
        """The number of processes of a server."""
        return REPLICAS if self.name == "replicas" else 1

    def place(self, folder: Path) -> Place:
        """The journal of a new server, which may use this folder."""
        if not self.store:
            return Place(str(folder / "journal.db"))
        return Place(f"{self.store}/0?prefix=test-{next(_numbers)}", folder / "state")


current = Setup()


@contextmanager
def using(name: str, store_url: Callable[[str], str]) -> Iterator[None]:
    """Use this setup for the servers that are made in the block."""
    global current  # noqa: PLW0603 # what a test starts is not handed a fixture
    before = current
    current = Setup(name, "" if name == "file" else store_url("redis"))
    try:
        yield
    finally:
        current = before


def skipped(item: pytest.Item, name: str) -> str:
    """Why this test is not run in this setup; empty if it is. Its marks say so."""
    marks = []
    if name != "file":
        marks.append("needs_file")
    if name == "replicas":
        marks.append("needs_one_process")
    given = getattr(item, "callspec", None)
    values = [str(value) for value in given.params.values()] if given else []
    for mark in (mark for kind in marks for mark in item.iter_markers(kind)):
        over = mark.kwargs.get("over", "")  # the kind of connection, where others are not meant
        if not over or any(value.startswith(over) for value in values):
            return str(mark.args[0])
    return ""
