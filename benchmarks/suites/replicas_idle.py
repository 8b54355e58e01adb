"""The cost of 100,000 idle streams of a message each, in a store and in a file.

They are evicted: they have ended, and no client is attached. A server keeps nothing of them in its
memory, and a restart passes over them.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks import replicas_idle, store
from benchmarks.harness import Batch, Plan, Subject, in_thread, unmeasured
from benchmarks.peers import Missing
from benchmarks.replicas_idle import Costs
from streams.limits import MIB

IN_FILE, IN_STORE = "SQLite: file, for each stream", "store: its memory, for each stream"
ON_FILE, ON_STORE = "SQLite: memory of the server", "store: memory of a replica"


def with_few(row: str) -> str:
    """The name of the same row with one stream of a hundred."""
    return f"{row}, with 1,000 streams"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """Everything is written anew in each round."""
    amount = replicas_idle.QUICK if plan.is_quick else replicas_idle.Plan()
    try:
        with store.opened(folder / "store") as found:
            batch = in_thread(lambda place: replicas_idle.measure(amount, found, place), folder)
            yield _subjects(batch)
    except Missing as missing:
        yield [Subject(IN_STORE, 0, unmeasured, missing=str(missing))]


def _subjects(batch: Batch[Costs]) -> list[Subject]:
    size, figure = replicas_idle.MESSAGE_BYTES, batch.figure
    return [
        Subject(IN_FILE, size, figure(lambda found: found.in_file), unit="B"),
        Subject(IN_STORE, size, figure(lambda found: found.in_store), unit="B", of=IN_FILE),
        *(
            Subject(name, size, figure(read), unit="MiB", of=of)
            for name, read, of in (
                (ON_FILE, lambda found: found.many.server_on_file / MIB, with_few(ON_FILE)),
                (with_few(ON_FILE), lambda found: found.few.server_on_file / MIB, ""),
                (ON_STORE, lambda found: found.many.server_on_store / MIB, with_few(ON_STORE)),
                (with_few(ON_STORE), lambda found: found.few.server_on_store / MIB, ""),
            )
        ),
    ]
