"""Ten million idle streams: how fast a server starts, their cost, how fast one is found.

A journal of N streams with M messages in all is written (`benchmarks.idle`), in the state in which
a server leaves it once its clients have left. Then a real server is started on it, and asked over
pipes. That is done with few streams, with a tenth of N and with N, so that costs that do not depend
on N show. Ten million streams of a message take 6.6 GB; further messages would never be read.
"""

import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import idle
from benchmarks.memory import resident_bytes
from benchmarks.servers import APP, ROOT

POLLS_AT_ONCE: Final = 100
_HELLO: Final = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"streams": {}},
    "clientInfo": {"name": "benchmarks", "version": "1"},
}


class Plan(msgspec.Struct, frozen=True):
    """How many streams with how many messages in all; `few` is the number to compare with."""

    streams: int = 10_000_000
    messages: int = 10_000_000
    few: int = 10_000  # more than stay in memory
    polls: int = 10_000
    listed: int = 100_000  # at most, by stream/poll/all; it writes a row for each


QUICK: Final = Plan(streams=2_000, messages=20_000, few=200, polls=200)


class Figure(msgspec.Struct, frozen=True):
    """One journal, and a server on it. Sizes are in bytes."""

    streams: int
    messages: int
    file_bytes: int
    restart_s: float  # from the start of the process to the answer to its first poll
    polls_per_s: float  # of streams that are chosen at random
    pass_s: float  # stream/poll/all, page by page, through those that are listed
    started_bytes: int  # resident, after the first poll
    resident_bytes: int  # resident, at the end


class Results(msgspec.Struct, frozen=True):
    """`stream_bytes` is the memory of one more idle stream: between `few` and all."""

    plan: Plan
    figures: Sequence[Figure]
    stream_bytes: float


class Journal(msgspec.Struct, frozen=True):
    """A journal to be measured."""

    path: Path
    streams: int
    messages: int
    chosen: Sequence[str]  # ids of streams, at random
    listed: Sequence[str]  # ids of the first streams, in their order


def prepare(plan: Plan, folder: Path) -> Sequence[Journal]:
    """Write the journals of all sizes, the smallest first."""
    return [_prepared(plan, folder, size) for size in sorted(_sizes(plan))]


def _sizes(plan: Plan) -> set[int]:
    return {plan.few, plan.streams // 10, plan.streams}


def _prepared(plan: Plan, folder: Path, size: int) -> Journal:
    path, each = folder / f"journal-{size}.db", plan.messages // plan.streams
    idle.write(path, size, each)
    drawn = random.Random(1).sample(range(1, size + 1), min(plan.polls, size))  # nosec B311 # a sample, not a secret
    with closing(sqlite3.connect(path)) as db:
        one = "SELECT stream FROM streams WHERE id = ?"
        chosen = [db.execute(one, (number,)).fetchone()[0] for number in drawn]
        first = "SELECT stream FROM streams ORDER BY id LIMIT ?"
        listed = [row[0] for row in db.execute(first, (plan.listed,))]
    return Journal(path, size, each * size, chosen, listed)


def measure(plan: Plan, journals: Sequence[Journal]) -> Results:
    """Measure each. Raises `ValueError` where an answer is wrong or a stream is missing."""
    figures = [_measure(journal) for journal in journals]
    few, many = figures[0], figures[-1]
    grown = many.resident_bytes - few.resident_bytes
    return Results(plan, figures, grown / (many.streams - few.streams))


def _measure(journal: Journal) -> Figure:
    began = time.monotonic()
    with serving(str(journal.path), journal.streams) as asked:
        asked.poll(journal.chosen[:1])
        restart_s = time.monotonic() - began
        started_bytes = asked.resident_bytes()
        began = time.monotonic()
        for start in range(0, len(journal.chosen), POLLS_AT_ONCE):
            asked.poll(journal.chosen[start : start + POLLS_AT_ONCE])
        polls_s = time.monotonic() - began
        began = time.monotonic()
        ids = asked.poll_all(len(journal.listed) + 1)
        if ids[: len(journal.listed)] != journal.listed or len(ids) > journal.streams:
            raise ValueError("poll/all does not list every stream once, in order")
        return Figure(
            streams=journal.streams,
            messages=journal.messages,
            file_bytes=journal.path.stat().st_size,
            restart_s=restart_s,
            polls_per_s=len(journal.chosen) / polls_s,
            pass_s=time.monotonic() - began,
            started_bytes=started_bytes,
            resident_bytes=asked.resident_bytes(),
        )


class Asked:
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

    def poll_all(self, most: int) -> list[str]:
        """The ids of all streams, page by page; the first ones where there are more than `most`."""
        ids: list[str] = []
        params: dict[str, Any] = {}
        while len(ids) < most:
            [page] = self.ask("stream/poll/all", params)
            ids += [status["streamId"] for status in page["statuses"]]
            if "nextCursor" not in page:
                break
            params = {"cursor": page["nextCursor"]}
        return ids

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        return resident_bytes(self._process.pid)


@contextmanager
def serving(journal: str, streams: int) -> Iterator[Asked]:
    """A server on a journal with so many idle streams: a path or a URL."""
    command = [sys.executable, "-m", "streams.cli", "serve", APP, "--stdio", "--foreground"]
    names = ("streams_per_principal_max", "streams_max")
    limits = [f"--limit={name}={2 * streams}" for name in names]
    with subprocess.Popen(  # nosec B603 # our own program
        [*command, "--journal", journal, *limits],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            asked = Asked(process)
            asked.ask("initialize", _HELLO)
            yield asked
        finally:
            process.terminate()
