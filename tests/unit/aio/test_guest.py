"""Trio as a guest of asyncio: values, errors and cancellations cross, and the end is clean.

Nothing here runs under pytest-trio: a thread has one run of trio.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import anyio
import pytest
import trio

from streams.aio import run_asyncio
from streams.aio.guest import Guest, GuestEnded, Held, current_guest
from tests.rigs.needing import lacking

WITHIN_S = 30


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, WITHIN_S), debug=True)


@contextlib.asynccontextmanager
async def guest() -> AsyncIterator[Guest]:
    found = await Guest.enter()
    try:
        yield found
    finally:
        await found.leave()


def test_a_value_and_an_error_come_back() -> None:
    async def double(number: int) -> int:
        await trio.lowlevel.checkpoint()
        return 2 * number

    async def fail() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise ValueError("as it is")

    async def main() -> None:
        async with guest() as trios:
            assert await trios.run(double, 4) == 8
            with pytest.raises(ExceptionGroup) as raised:
                await trios.run(fail)
            assert raised.group_contains(ValueError, match="as it is")

    run(main())


def test_a_cancelled_task_cancels_the_trio_function_and_waits_for_its_end() -> None:
    seen = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.01)
            seen.append("ended")

    async def main() -> None:
        async with guest() as trios:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await trios.run(work)
            assert seen == ["ended"]
            assert await trios.run(trio.sleep, 0) is None

    run(main())


def test_a_function_that_returns_although_it_is_cancelled_does_not_hide_the_cancellation() -> None:
    async def stubborn() -> int:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.05)
        return 1

    async def main() -> None:
        async with guest() as trios:
            task = asyncio.create_task(trios.run(stubborn))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            task.cancel()  # twice, which changes nothing
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())


def test_a_cancelled_trio_task_cancels_the_asyncio_function_and_waits_for_its_end() -> None:
    seen = []

    async def work() -> None:
        try:
            await asyncio.sleep(WITHIN_S)
        finally:
            await asyncio.sleep(0.01)
            seen.append("ended")

    async def ask() -> bool:
        with trio.move_on_after(0.01) as scope:
            await run_asyncio(work)
        return scope.cancelled_caught

    async def main() -> None:
        async with guest() as trios:
            assert await trios.run(ask)
            assert seen == ["ended"]

    run(main())


def test_asyncio_functions_and_plain_ones_return_and_raise_into_trio() -> None:
    async def of_asyncio(word: str) -> str:
        assert asyncio.current_task() is not None
        await asyncio.sleep(0)
        return word

    def plain() -> None:
        raise KeyError("plain")

    async def give_up() -> None:
        raise asyncio.CancelledError

    async def ask() -> str:
        with pytest.raises(KeyError, match="plain"):
            await run_asyncio(plain)
        with pytest.raises(RuntimeError, match="cancelled by other code"):
            await run_asyncio(give_up)
        answer: str = await run_asyncio(of_asyncio, word="here")
        return answer

    async def main() -> None:
        async with guest() as trios:
            assert await trios.run(ask) == "here"

    run(main())


def test_an_asyncio_function_that_exits_ends_neither_the_loop_nor_the_guest() -> None:
    async def leave() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    async def ask() -> str:
        for function in (leave, sys.exit):
            with pytest.raises(SystemExit):
                await run_asyncio(function)
        return "still here"

    async def main() -> None:
        async with guest() as trios:
            assert await trios.run(ask) == "still here"

    run(main())


async def test_without_asyncio_there_is_no_loop_to_use() -> None:
    with pytest.raises(RuntimeError, match="without asyncio"):
        await run_asyncio(print)


def test_users_of_one_loop_share_the_guest_and_the_last_one_ends_it() -> None:
    async def main() -> None:
        for _ in range(2):  # a new one can begin after it
            async with guest() as one:
                async with guest() as other:
                    assert one is other is current_guest()
                await one.run(trio.sleep, 0)
            with pytest.raises(GuestEnded):
                await one.run(trio.sleep, 0)
            with pytest.raises(RuntimeError, match="is entered in this event loop"):
                current_guest()
        await asyncio.gather(*(use_briefly() for _ in range(20)))

    async def use_briefly() -> None:
        async with guest() as trios:
            await trios.run(trio.sleep, 0)

    run(main())


def test_a_guest_that_nothing_has_left_ends_with_the_loop() -> None:
    seen = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append("ended")

    async def main() -> None:
        trios = await Guest.enter()
        main.task = asyncio.create_task(trios.run(work))  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    run(main())
    assert seen == ["ended"]
    trio.run(trio.sleep, 0)  # the thread is free


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_guest_of_a_loop_that_was_closed_around_it_ends_before_the_next_begins(
    is_busy: bool,
) -> None:
    """Closed while the guest waits, or while its next step is due."""
    seen = []

    async def work() -> None:
        try:
            while is_busy:
                await trio.lowlevel.checkpoint()
            await trio.sleep_forever()
        finally:
            seen.append("ended")

    async def begin() -> None:
        trios = await Guest.enter()
        trios.nursery.start_soon(work)
        await trios.run(trio.sleep, 0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    # The end of `asyncio.run` is left out, so the task of the guest stays.
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()

    async def main() -> None:
        async with guest() as trios:
            assert seen == ["ended"]
            await trios.run(trio.sleep, 0)

    run(main())


@contextlib.asynccontextmanager
async def breaking(after_s: float) -> AsyncIterator[str]:
    async def fail() -> None:
        await trio.sleep(after_s)
        raise OSError("broken")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        yield "entered"


def test_a_context_that_breaks_cancels_the_block_and_raises_its_error() -> None:
    async def main() -> None:
        async with guest() as trios:
            held = Held(trios, breaking(0.01))
            assert await held.enter() == "entered"
            body: BaseException | None = None
            try:
                await asyncio.sleep(WITHIN_S)
            except asyncio.CancelledError as error:
                body = error
            with pytest.raises(ExceptionGroup) as raised:
                await held.leave(body)
            assert raised.group_contains(OSError, match="broken")
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()

    run(main())


def test_a_context_whose_entering_is_cancelled_is_not_left_open() -> None:
    seen = []

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        try:
            await trio.sleep(WITHIN_S)
            yield
        finally:
            seen.append("closed")

    async def main() -> None:
        async with guest() as trios:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await Held(trios, slow()).enter()
            assert seen == ["closed"]

    run(main())


def test_the_error_of_the_block_reaches_the_context() -> None:
    seen: list[BaseException] = []

    @contextlib.asynccontextmanager
    async def swallowing() -> AsyncIterator[None]:
        try:
            yield
        except KeyError as error:
            seen.append(error)

    async def main() -> None:
        async with guest() as trios:
            held = Held(trios, swallowing())
            await held.enter()
            error = KeyError("mine")
            assert await held.leave(error)
            assert seen == [error]

    run(main())


def test_under_anyio() -> None:
    async def main() -> None:
        async with guest() as trios, anyio.create_task_group() as group:
            group.start_soon(trios.run, trio.sleep_forever)
            with anyio.fail_after(WITHIN_S):
                await trios.run(trio.sleep, 0.01)
            group.cancel_scope.cancel()

    anyio.run(main, backend="asyncio")


def test_under_uvloop() -> None:
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        lacking("there is no uvloop")

    async def main() -> None:
        async with guest() as trios:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await trios.run(trio.sleep_forever)
            await trios.run(trio.sleep, 0.01)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


INTERRUPTED = """
import asyncio, sys, trio
from streams.aio.guest import Guest

async def main():
    trios = await Guest.enter()
    try:
        await trios.run(waiting)
    finally:
        await trios.leave()
        print("left", flush=True)

async def waiting():
    print("waiting", flush=True)
    try:
        await trio.sleep_forever()
    finally:
        print("ended", flush=True)

{start}
"""


@pytest.mark.parametrize(
    "start",
    ["asyncio.run(main())", "asyncio.new_event_loop().run_until_complete(main())"],
    ids=["run", "without a runner"],
)
def test_ctrl_c_ends_both_sides(start: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(start=start)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    said, complaints = child.communicate(timeout=WITHIN_S)
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT
    if "asyncio.run(" in start:
        assert said == "ended\nleft\n"
