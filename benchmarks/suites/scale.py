"""Ten million idle streams of a message each: how soon a server serves, and their memory."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from benchmarks import scale
from benchmarks.harness import Plan, Subject, in_thread

RESTART, RESTART_OF_A_TENTH = "restart to serving", "restart to serving, a tenth of them"
POLLS: Final = "polls of any of them"
STREAM_BYTES: Final = "memory for each"


@asynccontextmanager
async def opened(plan: Plan, folder: Path) -> AsyncIterator[Sequence[Subject]]:
    """The journals are written once: that takes minutes."""
    amount = scale.QUICK if plan.is_quick else scale.Plan()
    journals = await trio.to_thread.run_sync(scale.prepare, amount, folder)

    def restart_s(streams: int) -> Callable[[scale.Results], float]:
        return lambda found: _of(found, streams).restart_s

    figure = in_thread(lambda _: scale.measure(amount, journals), folder).figure
    tenth = amount.streams // 10
    yield [
        Subject(RESTART_OF_A_TENTH, 0, figure(restart_s(tenth)), unit="s"),
        Subject(RESTART, 0, figure(restart_s(amount.streams)), unit="s", of=RESTART_OF_A_TENTH),
        Subject(
            POLLS, 0, figure(lambda found: _of(found, amount.streams).polls_per_s), unit="polls/s"
        ),
        Subject(STREAM_BYTES, 0, figure(lambda found: found.stream_bytes), unit="B"),
    ]


def _of(found: scale.Results, streams: int) -> scale.Figure:
    return next(each for each in found.figures if each.streams == streams)
