"""Appending: a message of each of a thousand streams in every commit, ours beside a plain table."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import append
from benchmarks.harness import Plan, Subject, in_thread

SIZE: Final = 200  # bytes of a message
OURS, OURS_AT_MANY, PLAIN = "journal, 1 million messages", "journal, 10 million", "rowid + index"
COMMIT_P99, WAL = "journal: commit p99", "journal: largest WAL"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """Nothing is prepared: both journals are written anew in each round."""
    amount = append.QUICK if plan.is_quick else append.Plan()

    figure = in_thread(partial(append.run, amount), folder).figure
    yield [
        Subject(PLAIN, SIZE, figure(lambda found: found.plain.rate), role="bare"),
        Subject(OURS, SIZE, figure(lambda found: found.ours.rate), of=PLAIN),
        Subject(OURS_AT_MANY, SIZE, figure(lambda found: found.ours_at_many.rate), of=OURS),
        Subject(COMMIT_P99, SIZE, figure(lambda found: found.ours.commit_p99_ms), unit="ms"),
        Subject(WAL, SIZE, figure(lambda found: found.wal_bytes_max / 2**20), unit="MiB"),
    ]
