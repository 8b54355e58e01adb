"""A million idle streams: how fast a server starts, their cost, how fast one is found.

A journal of N streams with M messages in all is written through the journal's own interface, in the
state in which a server leaves it once its clients have left. Then a real server is started on it,
and asked over pipes. That is done with few streams, with a tenth of N and with N, so that costs
that do not depend on N show.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from benchmarks.memory import resident_bytes
from benchmarks.servers import APP, ROOT
from streams.journal.ownership import key_path
from streams.journal.records import Append, Change, Create, Evict, Outcome, Record
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring, new_id
from streams.messages import Run

STREAMS_AT_ONCE: Final = 20_000  # in one commit, while the journal is written
POLLS_AT_ONCE: Final = 100
MESSAGE_BYTES: Final = 200
MAX_S: Final = 86_400.0
PRINCIPAL: Final = f"os({os.getuid()})"
_HELLO: Final = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"streams": {}},
    "clientInfo": {"name": "benchmarks", "version": "1"},
}


class Plan(msgspec.Struct, frozen=True):
    """How many streams with how many messages in all; `few` is the number to compare with."""

    streams: int = 1_000_000
    messages: int = 10_000_000
    few: int = 10_000  # more than stay in memory
    polls: int = 10_000


QUICK: Final = Plan(streams=2_000, messages=20_000, few=200, polls=200)


class Figure(msgspec.Struct, frozen=True):
    """One journal, and a server on it. Sizes are in bytes."""

    streams: int
    messages: int
    build_s: float
    file_bytes: int
    restart_s: float  # from the start of the process to the answer to its first poll
    polls_per_s: float  # of streams that are chosen at random
    pass_s: float  # stream/poll/all, page by page, through all of them
    started_bytes: int  # resident, after the first poll
    resident_bytes: int  # resident, at the end


class Results(msgspec.Struct, frozen=True):
    """`stream_bytes` is the memory of one more idle stream: between `few` and all."""

    plan: Plan
    figures: Sequence[Figure]
    stream_bytes: float


def run(plan: Plan, folder: Path) -> Results:
    """Measure all sizes. Raises `ValueError` where an answer is wrong or a stream is missing."""
    sizes = sorted({plan.few, plan.streams // 10, plan.streams})
    each = plan.messages // plan.streams
    figures = []
    for size in sizes:
        journal = folder / f"journal-{size}.db"
        began = time.monotonic()
        ids = trio.run(_build, journal, size, each)
        build_s = time.monotonic() - began
        figures.append(_measure(plan, journal, ids, each, build_s))
        journal.unlink()
    few, many = figures[0], figures[-1]
    grown = many.resident_bytes - few.resident_bytes
    return Results(plan, figures, grown / (many.streams - few.streams))


async def _build(path: Path, streams: int, each: int) -> list[str]:
    """Write the journal; returns the streams' ids."""
    keyring, ids = Keyring.load(key_path(path)), [new_id() for _ in range(streams)]
    line = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n'
    line %= b"x" * (MESSAGE_BYTES - len(line) + 2)
    run = Run(1, each, line * each)
    numbers = count(1)
    async with open_sqlite_journal(path, durability="process") as journal:
        for some in _pieces(ids, STREAMS_AT_ONCE):
            changes: list[Change] = []
            for stream in some:
                changes += _stream(stream, next(numbers), run, keyring)
            if any(await journal.commit(changes)):
                raise ValueError("the journal refused a stream")
    return ids


def _pieces(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _stream(stream: str, number: int, run: Run, keyring: Keyring) -> list[Change]:
    now = time.time()
    origin = (
        b'{"jsonrpc":"2.0","id":%d,"method":"tools/call",'
        b'"params":{"name":"fill","arguments":{"count":10,"size":200}}}' % number
    )
    record = Record(
        stream=stream,
        principal=PRINCIPAL,
        origin=origin,
        min_s=0.0,
        max_s=MAX_S,
        created_at=now,
        fence=1,
        is_announced=True,
        number=number,
    )
    return [
        Create(record),
        Append(stream, 1, run, 0, 0, Outcome.COMPLETED, now),
        Evict(stream, 1, now + MAX_S, False, tuple(keyring.names(stream))),
    ]


def _measure(plan: Plan, journal: Path, ids: list[str], each: int, build_s: float) -> Figure:
    chosen = random.Random(1).sample(ids, min(plan.polls, len(ids)))  # nosec B311 # a sample, not a secret
    began = time.monotonic()
    with _serving(journal, len(ids)) as asked:
        asked.poll(chosen[:1])
        restart_s = time.monotonic() - began
        started_bytes = asked.resident_bytes()
        began = time.monotonic()
        for some in _pieces(chosen, POLLS_AT_ONCE):
            asked.poll(some)
        polls_s = time.monotonic() - began
        began = time.monotonic()
        if asked.poll_all() != ids:
            raise ValueError("poll/all does not list every stream once, in order")
        return Figure(
            streams=len(ids),
            messages=each * len(ids),
            build_s=build_s,
            file_bytes=journal.stat().st_size,
            restart_s=restart_s,
            polls_per_s=len(chosen) / polls_s,
            pass_s=time.monotonic() - began,
            started_bytes=started_bytes,
            resident_bytes=asked.resident_bytes(),
        )


class _Asked:
    """A server with requests over its pipes."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._numbers = count(1)

    def ask(self, method: str, *params: dict[str, Any]) -> list[Any]:
        """Write a request for each of the params at once; returns the results."""
        asked = {next(self._numbers): each for each in params}
        for number, each in asked.items():
            request = {"jsonrpc": "2.0", "id": number, "method": method, "params": each}
            self._stdin.write(msgspec.json.encode(request) + b"\n")
        self._stdin.flush()
        answers = [msgspec.json.decode(self._stdout.readline()) for _ in asked]
        if [answer["id"] for answer in answers] != list(asked):
            raise ValueError(f"not the answers that were asked for: {answers[:3]}")
        return [answer["result"] for answer in answers]

    def poll(self, ids: Sequence[str]) -> None:
        """Poll streams by their ids, and check their statuses."""
        statuses = self.ask("stream/poll", *({"streamId": each} for each in ids))
        told = [(s["streamId"], s["status"], s["pendingMessages"]) for s in statuses]
        if told != [(each, "completed", True) for each in ids]:
            raise ValueError(f"a poll was answered wrongly: {told[:3]}")

    def poll_all(self) -> list[str]:
        """The ids of all streams, page by page."""
        ids: list[str] = []
        params: dict[str, Any] = {}
        while True:
            [page] = self.ask("stream/poll/all", params)
            ids += [status["streamId"] for status in page["statuses"]]
            if "nextCursor" not in page:
                return ids
            params = {"cursor": page["nextCursor"]}

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes(self._process.pid)


@contextmanager
def _serving(journal: Path, streams: int) -> Iterator[_Asked]:
    command = [sys.executable, "-m", "streams.cli", "serve", APP, "--stdio", "--foreground"]
    limits = [f"--limit=streams_per_principal_max={2 * streams}"]
    with subprocess.Popen(  # nosec B603 # our own program
        [*command, "--journal", str(journal), *limits],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            asked = _Asked(process)
            asked.ask("initialize", _HELLO)
            yield asked
        finally:
            process.terminate()
