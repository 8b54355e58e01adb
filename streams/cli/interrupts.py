"""The signals that end a command which has files or processes to remove first."""

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import trio

_T = TypeVar("_T")


def ending_signals() -> Sequence[signal.Signals]:
    """Those that end this process. A shell lets a job in the background ignore SIGINT, and nohup
    lets a command ignore SIGHUP.
    """
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return [each for each in ending if signal.getsignal(each) is not signal.SIG_IGN]


async def unless_interrupted(act: Callable[[], Awaitable[_T]]) -> _T | None:
    """The result of `act`, which is cancelled by a signal: then None.

    A KeyboardInterrupt would leave files that a thread opens at that moment.
    """
    result: _T | None = None

    async def cancel_at_signal(signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(*ending_signals()) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_at_signal, signals)
            result = await act()
            nursery.cancel_scope.cancel()
    return result
