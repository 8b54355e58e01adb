"""A run of trio as the guest of an asyncio loop, in the same thread, and the ways between them.

- `Guest.run` awaits a trio function from an asyncio task, `run_asyncio` an asyncio function from a
  trio task. A cancellation goes the same way as the call, its exception the way back.
- `Held` enters a trio context manager for an asyncio task. Both of its ends run in one trio task,
  as nurseries and cancel scopes need it.

Trio allows one run in a thread, so all clients and servers of a loop share one guest. It begins
with the first of them and ends with the last. If the loop ends before, as `asyncio.run` does it by
cancelling all tasks, then the guest is cancelled and ends first.

Functions of trio that do not wait, such as `Event.set`, may be called from asyncio directly.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, TypeVar, TypeVarTuple, Unpack

import outcome
import trio

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Ts = TypeVarTuple("_Ts")


class GuestEnded(RuntimeError):
    """The loop ends, or another task has ended the guest."""

    def __init__(self) -> None:
        super().__init__("the run of trio behind streams.aio has ended: enter a new client")


class _Thread(threading.local):
    guest: "Guest | None" = None


_thread: Final = _Thread()


def current_guest() -> "Guest":
    """The guest of the running loop. Raises `RuntimeError` where no client is entered in it."""
    guest = _thread.guest
    if guest is None or guest.loop is not asyncio.get_running_loop():
        raise RuntimeError("no streams.aio.Client is entered in this event loop: use `async with`")
    return guest


class Guest:
    """The guest of one asyncio loop. `enter` and `leave` it, or `run` in it what belongs to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.nursery: trio.Nursery
        self._users = 0
        self._scope = trio.CancelScope()
        self._ready = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._failure: BaseException | None = None  # what ended it
        self._is_over = False
        self._tick: Callable[[], object] | None = None  # the next one of trio; there is one at most
        # For a loop that was closed before its guest had ended: see `_finish`.
        self._late: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        try:
            trio.lowlevel.start_guest_run(
                self._main,
                run_sync_soon_threadsafe=self._soon,
                run_sync_soon_not_threadsafe=self._soon_here,
                done_callback=self._done,
                host_uses_signal_set_wakeup_fd=True,
            )
        except RuntimeError as error:
            raise RuntimeError(
                "trio runs in this thread already: one loop can have one guest run of trio"
            ) from error
        self._keeper = loop.create_task(self._keep(), name="streams.aio")

    @classmethod
    async def enter(cls) -> "Guest":
        """The guest of this loop, which lasts until `leave` was called as often."""
        loop = asyncio.get_running_loop()
        while (guest := _thread.guest) is not None and (guest._is_ending or guest.loop is not loop):
            if guest.loop is not loop:
                guest._finish()
            else:
                await asyncio.shield(guest._ended)
        if guest is None:
            guest = _thread.guest = cls(loop)
        guest._users += 1
        try:
            await asyncio.shield(guest._ready)
        except BaseException:
            await guest.leave()
            raise
        return guest

    async def leave(self) -> None:
        """Undo one `enter`. The last one ends the guest."""
        self._users -= 1
        if not self._users:
            self._scope.cancel()
            await self._settle()

    async def _settle(self) -> None:
        """Wait for the end, and raise the error that ended the guest, such as KeyboardInterrupt."""
        await _settled(self._ended)
        if self._failure is not None:
            raise self._failure

    async def run(self, function: Callable[[Unpack[_Ts]], Awaitable[_T]], *args: *_Ts) -> _T:
        """Await a trio function from an asyncio task.

        A cancelled task cancels the function, and waits for its end. If the function returns all
        the same, its value is lost.
        """
        self._check()
        done: asyncio.Future[outcome.Outcome[_T]] = self.loop.create_future()
        scope = trio.CancelScope()

        async def work() -> None:
            async def capture() -> outcome.Outcome[_T]:
                with scope:
                    return outcome.Value(await function(*args))
                return outcome.Error(asyncio.CancelledError())  # `_unwrapped` has cancelled it

            await _report(capture, done)

        self.nursery.start_soon(work)
        try:
            return await _unwrapped(done, scope)
        except GuestEnded:
            await self._settle()
            raise

    def _check(self) -> None:
        if self._is_ending:
            raise GuestEnded

    @property
    def _is_ending(self) -> bool:
        return self._is_over or self._scope.cancel_called

    # The run

    async def _main(self) -> None:
        _host.set(self)
        interrupt: KeyboardInterrupt | None = None
        with self._scope:
            async with trio.open_nursery() as self.nursery:
                self._ready.set_result(None)
                try:
                    await trio.sleep_forever()
                except KeyboardInterrupt as error:  # of a loop that has no handler for the signal
                    interrupt = error
                    self._scope.cancel()
        if interrupt is not None:
            raise interrupt

    async def _keep(self) -> None:
        """Live as long as the guest. Cancelled with all tasks of the loop, end the guest first."""
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self._scope.cancel()
            await _settled(self._ended)
            raise

    def _soon(self, tick: Callable[[], object]) -> None:
        self._tick = tick
        try:
            self.loop.call_soon_threadsafe(self._run_tick)
        except RuntimeError:  # the loop is closed
            self._late.put(self._run_tick)

    def _soon_here(self, tick: Callable[[], object]) -> None:
        self._tick = tick
        if not self.loop.is_closed():
            self.loop.call_soon(self._run_tick)

    def _run_tick(self) -> None:
        tick, self._tick = self._tick, None
        if tick is not None:
            tick()

    def _done(self, result: outcome.Outcome[None]) -> None:
        self._is_over = True
        if isinstance(result, outcome.Error):
            self._failure = result.error
        if _thread.guest is self:
            _thread.guest = None
        if self.loop.is_closed():
            return
        if not self._ready.done():
            self._ready.cancel()
        self._ended.set_result(None)

    def _finish(self) -> None:
        """End the guest of a loop that was closed without `leave`.

        Raises `RuntimeError` if that loop is not closed.
        """
        if not self.loop.is_closed():
            raise RuntimeError("trio runs in this thread already, for another event loop")
        self._scope.cancel()
        while not self._is_over:
            if self._tick is None:
                self._late.get()()  # of trio's thread, which waits for sockets
            else:
                self._run_tick()


def keep_guest() -> None:
    """Let the guest of this run of trio, if it is one, last as long as its loop."""
    with suppress(LookupError):
        _host.get()._users += 1


_host: Final = trio.lowlevel.RunVar[Guest]("the guest that this run of trio is")


def is_guest() -> bool:
    """Whether this run of trio is the guest of an asyncio loop."""
    try:
        return bool(_host.get())
    except LookupError:
        return False


async def run_asyncio(function: Callable[_P, Any], *args: _P.args, **kwargs: _P.kwargs) -> Any:
    """Await an asyncio function from a trio task, such as a tool of a server in an ASGI app.

    The function runs in a task of the asyncio loop that hosts this run of trio. A plain function is
    called there too. If the trio task is cancelled, so is that task, and its end is waited for.
    Raises `RuntimeError` where trio runs without asyncio.
    """
    try:
        loop = _host.get().loop
    except LookupError:
        raise RuntimeError("trio runs without asyncio here: there is no loop to use") from None

    async def call() -> Any:
        try:
            given = function(*args, **kwargs)
            return await given if isinstance(given, Awaitable) else given
        except SystemExit as error:  # asyncio would raise it from the loop, and end all tasks
            return _Exited(error)

    waiting = trio.lowlevel.current_task()
    task: asyncio.Task[Any] | None = None
    cancelled: list[Callable[[], Any]] = []

    def begin() -> None:
        nonlocal task
        task = loop.create_task(call())
        task.add_done_callback(lambda _: trio.lowlevel.reschedule(waiting))

    def abort(raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        if task is None:
            begun.cancel()
            return trio.lowlevel.Abort.SUCCEEDED
        cancelled.append(raise_cancel)
        task.cancel()
        return trio.lowlevel.Abort.FAILED  # the end of the task is waited for

    # Not begun here: an eager task runs at once, and would run within this task of trio.
    begun = loop.call_soon(begin)
    await trio.lowlevel.wait_task_rescheduled(abort)
    assert task is not None
    if not task.cancelled():
        if isinstance(found := task.result(), _Exited):
            raise found.error
        return found
    for raise_cancel in cancelled:
        raise_cancel()
    raise RuntimeError("the asyncio task was cancelled by other code than its caller")


class _Exited:
    """Takes the place of a value where an asyncio function has raised `SystemExit`."""

    def __init__(self, error: SystemExit) -> None:
        self.error = error


class Held(Generic[_T]):
    """A trio context manager that an asyncio task enters and leaves.

    If it ends by itself in between, as a nursery does in which a task has failed, then the asyncio
    task is cancelled, and `leave` raises the error.
    """

    def __init__(self, guest: Guest, context: AbstractAsyncContextManager[_T, bool | None]) -> None:
        self._guest = guest
        self._context = context
        self._scope = trio.CancelScope()
        self._entered: asyncio.Future[outcome.Outcome[_T]] = guest.loop.create_future()
        self._ended: asyncio.Future[outcome.Outcome[bool]] = guest.loop.create_future()
        self._leaving = trio.Event()
        self._error: BaseException | None = None  # of the block
        self._has_cancelled = False
        self._task: asyncio.Task[Any] | None = None

    async def enter(self) -> _T:
        self._guest._check()
        self._guest.nursery.start_soon(_report, self._live, self._ended)
        ended = self._ended
        try:
            await asyncio.wait((self._entered, ended), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._scope.cancel()
            await _settled(ended)
            raise
        if not self._entered.done():
            ended.result().unwrap()
            raise GuestEnded
        self._task = asyncio.current_task()
        ended.add_done_callback(self._cancel_task)
        return self._entered.result().unwrap()

    async def leave(self, error: BaseException | None) -> bool:
        """Leave with the error of the block, if any. Returns whether the error is swallowed."""
        self._ended.remove_done_callback(self._cancel_task)
        self._error = error
        self._leaving.set()
        if self._has_cancelled:
            assert self._task is not None
            self._task.uncancel()
        try:
            return await _unwrapped(self._ended, self._scope)
        except GuestEnded:
            if error is None:
                raise
            return False

    def _cancel_task(self, _: object) -> None:
        assert self._task is not None
        self._has_cancelled = True
        self._task.cancel()

    async def _live(self) -> outcome.Outcome[bool]:
        with self._scope:
            value = await self._context.__aenter__()
            self._entered.set_result(outcome.Value(value))
            try:
                await self._leaving.wait()
            except BaseException as error:
                if not await self._context.__aexit__(type(error), error, error.__traceback__):
                    raise
            else:
                is_swallowed = await self._context.__aexit__(*_parts(self._error))
                return outcome.Value(bool(is_swallowed))
        return outcome.Value(False)


def _parts(
    error: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


async def _report(
    work: Callable[[], Awaitable[outcome.Outcome[_T]]],
    done: "asyncio.Future[outcome.Outcome[_T]]",
) -> None:
    """Run `work` in a trio task, and tell the asyncio side how it ended."""
    try:
        result = await work()
    except BaseException as error:
        if _is_cancellation(error):  # the whole guest ends
            done.set_result(outcome.Error(GuestEnded()))
            raise
        result = outcome.Error(error)  # it is raised in the asyncio task
    done.set_result(result)


def _is_cancellation(error: BaseException) -> bool:
    """Whether it is a `trio.Cancelled`, or a group of them, as a nursery raises it."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


async def _unwrapped(done: "asyncio.Future[outcome.Outcome[_T]]", scope: trio.CancelScope) -> _T:
    """Wait for the end of a trio task; a cancellation cancels `scope`, and is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            scope.cancel()
    try:
        value = done.result().unwrap()
    except asyncio.CancelledError:
        raise cancelled or asyncio.CancelledError from None
    if cancelled is not None:
        raise cancelled
    return value


async def _settled(done: "asyncio.Future[Any]") -> None:
    """Wait, however often the task is cancelled meanwhile; then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
