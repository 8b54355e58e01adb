"""The cost of an idle stream in a store, in a file, and in the memory of a server on either.

The same journals are measured in both: a file is written (`benchmarks.idle`), and `mcp-streams
copy` copies it into the store and compares each message. The cost of a stream is that of one more,
between a few of them and many.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import idle, scale
from benchmarks.numbered import Lost
from benchmarks.servers import ROOT
from benchmarks.store import Store

MESSAGE_BYTES: Final = idle.MESSAGE_BYTES


class Plan(msgspec.Struct, frozen=True):
    """Two numbers of streams, of a message each."""

    few: int = 1_000
    many: int = 100_000


QUICK: Final = Plan(few=20, many=520)


class _Used(msgspec.Struct, frozen=True):
    """Bytes of all streams of a journal, and of the servers that have it."""

    file: int
    store: int
    server_on_file: int
    server_on_store: int


class Costs(msgspec.Struct, frozen=True):
    """Bytes: of one more stream in a file and in a store, and the memory of a server with all."""

    in_file: float
    in_store: float
    few: _Used
    many: _Used


def measure(plan: Plan, store: Store, folder: Path) -> Costs:
    """Write, copy and serve all. Raises `Lost` where a server does not have each stream."""
    few, many = (_used(store, folder, streams) for streams in (plan.few, plan.many))
    grown = plan.many - plan.few
    in_file, in_store = (many.file - few.file) / grown, (many.store - few.store) / grown
    return Costs(in_file, in_store, few, many)


def _used(store: Store, folder: Path, streams: int) -> _Used:
    path = folder / f"{streams}.db"
    idle.write(path, streams, 1)
    url = store.url(f"{folder.name}-{streams}")
    before = store.used_bytes
    command = [sys.executable, "-m", "streams.cli", "copy", str(path), url, "--keys"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)  # nosec B603 # our own program
    used = store.used_bytes - before
    servers = [_memory(journal, streams) for journal in (str(path), url)]
    return _Used(path.stat().st_size, used, *servers)


def _memory(journal: str, streams: int) -> int:
    """Resident memory of a server that has started on a journal, once it has answered."""
    with scale.serving(journal, streams) as asked:
        found = asked.resident_bytes()
        if len(set(asked.poll_all(streams + 1))) != streams:
            raise Lost(f"a server does not list the {streams} streams of its journal")
    return found
