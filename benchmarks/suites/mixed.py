"""Short calls on a busy server, without and with a client that resumes many messages meanwhile."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from benchmarks import calls
from benchmarks.calls import ECHO, HttpDriver, Took
from benchmarks.harness import Batch, Plan, Subject
from benchmarks.mixed import Process, Resumed, Work
from benchmarks.servers import APP, everywhere
from benchmarks.suites.calls import COLUMNS as COLUMNS_OF_CALLS
from benchmarks.suites.calls import P50, P99, RATE, TURNS, median

RESUMED: Final = "resumed messages"
# As in the suite `calls`.
TIMES: Final = {column: COLUMNS_OF_CALLS[column] for column in (RATE, P50, P99)}
COLUMNS: Final = (*TIMES, RESUMED)
ALONE, MEANWHILE = "32 clients of short calls", "32 clients, and one that resumes"


class Amount(msgspec.Struct, frozen=True):
    """The amounts of the suite."""

    plan: calls.Plan = calls.Plan()
    clients: int = 32
    work: Work = Work()


QUICK: Final = Amount(calls.QUICK, clients=4, work=Work(idle=5, live=2, resumed=1_000))


class _Mixed(NamedTuple):
    alone: Took
    meanwhile: Took
    resumed: Resumed


def row(line: str, column: str) -> str:
    """The name of a row."""
    return f"{line}: {column}"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """One server, with all clients attached."""
    amount = QUICK if plan.is_quick else Amount()
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(everywhere(APP, folder / "journal.db"))
        work = msgspec.structs.replace(amount.work, url=served["ws"].url)
        crowd = await _process(stack, "crowd", work)
        resuming = await _process(stack, "resume", work)
        web = served["http"]
        driver = await trio.to_thread.run_sync(HttpDriver, web.url, [web.pid], amount.clients)

        def turn() -> _Mixed:
            alone = driver.calls(amount.clients, ECHO, amount.plan)
            resuming.ask(b"begin")
            meanwhile = driver.calls(amount.clients, ECHO, amount.plan)
            resumed = msgspec.json.decode(resuming.ask(b"end"), type=Resumed)
            crowd.ask(b"well?")
            return _Mixed(alone, meanwhile, resumed)

        def run() -> _Mixed:
            turns = [turn() for _ in range(TURNS)]
            return _Mixed(
                median([each.alone for each in turns]),
                median([each.meanwhile for each in turns]),
                Resumed(
                    sum(each.resumed.messages for each in turns),
                    sum(each.resumed.seconds for each in turns),
                ),
            )

        figure = Batch(partial(trio.to_thread.run_sync, run)).figure
        subjects = [
            Subject(row(name, column), 0, figure(partial(_of, number, read)), unit=unit)
            for number, name in enumerate((ALONE, MEANWHILE))
            for column, (unit, read) in TIMES.items()
        ]
        per_s = figure(lambda found: found.resumed.messages / found.resumed.seconds)
        yield [*subjects, Subject(row(MEANWHILE, RESUMED), 0, per_s, unit="1/s")]


def _of(number: int, read: Callable[[Took], float], found: _Mixed) -> float:
    return read(found[:2][number])


async def _process(stack: AsyncExitStack, kind: str, work: Work) -> Process:
    """Start it; it ends with `stack`."""
    process = await trio.to_thread.run_sync(Process, kind, work)

    async def close() -> None:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.close)

    stack.push_async_callback(close)
    return process
