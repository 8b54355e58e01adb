"""Worker processes, for checks against schemas that may take long.

A worker runs `streams.schemas.validator` and does one check at a time. The kernel ends a worker
that needs more than `CPU_S` for a check, and the value is then refused. Workers are started when
they are needed. They end with the server, even if it is killed, because their input ends.
"""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from streams.forks import withhold
from streams.logs import log
from streams.schemas import validator
from streams.schemas.validator import FIT, LENGTH, REQUEST, shortened

# Two checks at a time. More would only share the same processors.
WORKERS_MAX: Final = 2
# How long a check may wait for a worker, and then for its verdict. Both are longer than `CPU_S`,
# since the machine may be busy.
WAIT_S: Final = 20.0
VERDICT_S: Final = 20.0
# A worker that checked a larger value is not used again, since it does not free all its memory.
REUSE_BYTES_MAX: Final = 1024 * 1024


class Workers:
    """The worker processes of one server."""

    def __init__(self) -> None:
        self._idle: list[trio.Process] = []
        self._limiter = trio.CapacityLimiter(WORKERS_MAX)
        self._turns: dict[str, trio.CapacityLimiter] = {}
        self._is_closed = False

    async def check(self, schema: bytes, encoded: bytes, whole: str, principal: str) -> None:
        """Check the JSON text `encoded` against a schema, which is a JSON text as well.

        Raises `ValueError` with the mismatch, or with the reason why the check was not done.

        Each principal has one check at a time, so that the others do not wait for all of its
        checks.
        """
        turn = self._turns.setdefault(principal, trio.CapacityLimiter(1))
        try:
            with trio.move_on_after(WAIT_S) as waiting:
                await turn.acquire_on_behalf_of(waiting)
                try:
                    async with self._limiter:
                        waiting.deadline = float("inf")
                        await self._check(schema, encoded, whole)
                finally:
                    turn.release_on_behalf_of(waiting)
            if waiting.cancelled_caught:
                raise ValueError(f"{whole}: too many checks are waiting: try again later")
        finally:
            if not turn.borrowed_tokens and not turn.statistics().tasks_waiting:
                self._turns.pop(principal, None)

    async def _check(self, schema: bytes, encoded: bytes, whole: str) -> None:
        try:
            async with self._worker(len(encoded)) as worker:
                with trio.fail_after(VERDICT_S):
                    mismatch = await self._mismatch(worker, schema, encoded, whole)
        except (_Lost, trio.TooSlowError):
            log.warning("a check against a schema took too long", bytes=len(encoded))
            raise ValueError(
                f"{whole}: checking this takes too long: send less, or nest it less deeply"
            ) from None
        except OSError as error:
            log.error("a worker process cannot be started", why=str(error))
            raise ValueError(f"{whole}: cannot be checked now: try again later") from None
        if mismatch is not None:
            raise ValueError(mismatch)

    async def _mismatch(
        self, worker: trio.Process, schema: bytes, encoded: bytes, whole: str
    ) -> str | None:
        """The worker's sentence about a value that does not fit; None for one that fits.

        Raises `ValueError` where the worker ended before it found the sentence.
        """
        assert worker.stdin is not None
        name = whole.encode()
        header = REQUEST.pack(len(schema), len(encoded), len(name))
        try:
            await worker.stdin.send_all(header + schema + encoded + name)
            if await _read(worker, 1) == FIT:
                return None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise _Lost from None
        try:
            (length,) = LENGTH.unpack(await _read(worker, LENGTH.size))
            return shortened((await _read(worker, length)).decode())
        except _Lost:
            raise ValueError(f"{whole}: does not fit the schema (see tools/list)") from None

    @asynccontextmanager
    async def _worker(self, size: int) -> AsyncIterator[trio.Process]:
        """A worker for one check. An exception ends it, since it may still be busy."""
        worker = await self._take()
        is_ready = False
        try:
            yield worker
            is_ready = True
        finally:
            if is_ready and size <= REUSE_BYTES_MAX and not self._is_closed:
                self._idle.append(worker)
            else:
                await _end(worker)

    async def _take(self) -> trio.Process:
        while self._idle:
            worker = self._idle.pop()
            if worker.poll() is None:
                return worker
            await _end(worker)  # it was killed while it was idle
        return await _start()

    async def aclose(self) -> None:
        """End all workers. No check may be under way."""
        self._is_closed = True
        while self._idle:
            await _end(self._idle.pop())


class _Lost(Exception):
    """The worker ended without a verdict."""


async def _start() -> trio.Process:
    worker = await trio.lowlevel.open_process(
        # -P: modules in the folder of this file must not hide those of the standard library.
        [sys.executable, "-P", str(Path(validator.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    # A child process of a tool with these descriptors would keep the worker alive after the server
    # ended.
    withhold(worker.stdin)
    withhold(worker.stdout)
    return worker


async def _end(worker: trio.Process) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with trio.CancelScope(shield=True):  # after SIGKILL the process ends at once
        worker.kill()
        await worker.wait()
        await worker.stdin.aclose()
        await worker.stdout.aclose()


async def _read(worker: trio.Process, count: int) -> bytes:
    assert worker.stdout is not None
    found = b""
    while len(found) < count:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            data = await worker.stdout.receive_some(count - len(found))
            if data:
                found += data
                continue
        raise _Lost
    return found
