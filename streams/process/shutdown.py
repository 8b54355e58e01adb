"""The ends of a server process: by signals, by a drain, and by a failure.

`streams.process.succession` has the steps of each. SIGHUP reads files again, unless its cause is a
terminal that is gone: then it ends the process too.
"""

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from streams.admin.health import Health
from streams.logs import log
from streams.process.deadline import END_OF_FAILURE, END_OF_SIGNAL, END_SIGNALS, Exit
from streams.process.options import CannotServe
from streams.process.succession import handing_over, is_awaited
from streams.process.systemd import Notices
from streams.server.running import RunningServer

DOWN: Final = "The command has ended, and it is not started again: the log says why."


class Shutdown:
    """Ends the server of a process. Each end is told to balancers and to systemd first."""

    def __init__(
        self,
        running: RunningServer,
        exit: Exit,
        health: Health,
        notices: Notices,
        journal: Path | None,
    ) -> None:
        """`journal` is the file that the next process may wait for, if the journal is a file."""
        self._running = running
        self._exit = exit
        self._health = health
        self._notices = notices
        self._journal = journal
        exit.tools = lambda: running.running_tools
        exit.failure = lambda: running.engine.failure
        running.engine.before_departure = self._depart

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """When this block fails or is cancelled, start the deadline of the process."""
        try:
            yield
        except BaseException:
            self._exit.begin(END_OF_FAILURE)
            raise
        finally:
            self._tell_end()

    async def on_signals(self) -> None:
        """Shut down at each of `END_SIGNALS`; only the first one may leave a grace."""
        is_first = True
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(*END_SIGNALS) as signals, self._exit.with_signals():
                async for number in signals:
                    grace_s = self._exit.grace_of(number) if is_first else 0.0
                    nursery.start_soon(self._shut_down, signal.Signals(number), grace_s)
                    is_first = False

    async def on_hangup(
        self, reload: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Call `reload` at each SIGHUP.

        If the terminal is gone, shut down instead: closing a terminal sends SIGHUP too.
        """
        had_terminal = _has_terminal()
        shown = [fd for fd in (0, 1, 2) if os.isatty(fd)]
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                if had_terminal and not _has_terminal():
                    self._exit.begin(END_OF_SIGNAL)
                    _leave_terminal(shown)
                    await self._shut_down(signal.SIGHUP, 0.0)
                    return
                await reload()

    async def when_ended(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` after a shutdown or a drain, whatever has begun it."""
        await self._running.engine.ended.wait()
        scope.cancel()

    async def when_down(self, down: trio.Event) -> None:
        """Fail when the backend has failed for good, so that a supervisor restarts the process."""
        await down.wait()
        self._tell_end()
        await self._running.engine.shut_down()
        raise CannotServe(DOWN)

    async def _shut_down(self, number: signal.Signals, grace_s: float) -> None:
        """Give running calls `grace_s` seconds to end, then end the server."""
        self._tell_end()
        if grace_s:
            log.info("draining", signal=number.name, grace_s=grace_s)
            await self._running.drain(grace_s)
            return
        log.info("shutting down", signal=number.name)
        if self._running.engine.is_draining or is_awaited(self._journal):
            await self._running.drain(0)
        else:
            await self._running.engine.shut_down()

    async def _depart(self, grace_s: float) -> None:
        """Before a drain: see `Engine.before_departure`."""
        self._exit.begin(END_OF_SIGNAL, grace_s)
        self._tell_end()
        await handing_over(self._journal)

    def _tell_end(self) -> None:
        """Balancers and systemd are told once; later calls do nothing."""
        self._health.drain()
        self._notices.stopping()


def heeds_hangup() -> bool:
    """Whether SIGHUP is for this process: nohup has it ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def _leave_terminal(fds: Sequence[int]) -> None:
    """Redirect these to /dev/null: writing to a closed terminal fails, even for the log."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, which sends SIGHUP when it closes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
