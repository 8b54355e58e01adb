"""A thread of its own for work that may not hold up trio, and must be done in order."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import trio

_T = TypeVar("_T")


class JobThread:
    """One thread that does one job after the other for a trio program."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given = self._done = 0  # jobs; each is counted by one thread alone
        # A daemon: a disk that hangs for ever must not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether it has done all that it was given."""
        return self._done == self._given

    async def run(self, job: Callable[[], _T]) -> _T:
        """Do `job` and return what it returns. Cancelled half-way, it is done all the same."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        answers: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(job())
            except BaseException as error:  # whatever it is, it belongs to who waits
                errors.append(error)
            self._done += 1
            with suppress(trio.RunFinishedError):  # nobody waits any more
                token.run_sync_soon(done.set)

        self._given += 1
        self._jobs.put(work)
        await done.wait()
        if errors:
            raise errors.pop()
        return answers.pop()

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
