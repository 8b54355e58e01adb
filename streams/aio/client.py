"""`streams.Client`, its calls and its pages for asyncio.

The classes derive from those for trio, and `for_asyncio` gives them a shell of each method that may
wait. Called in an asyncio task, it runs the method in the guest (`streams.aio.guest`). Called in a
trio task, by the client itself, it is the method. So all signatures are those of `streams.Client`.

Reading is written by hand, so that a cancelled task loses nothing: a message or a page is taken
only when its reader gets it.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import trio

from streams.aio.guest import Guest, Held, current_guest, run_asyncio
from streams.client import call, client, pages
from streams.messages import Message, Run

_Class = TypeVar("_Class", bound=type[Any])

_in_trio: Final = trio.lowlevel.in_trio_task


def for_asyncio(cls: _Class) -> _Class:
    """Give a class that derives from one for trio a shell of each method that may wait, and of
    those that take a handler: `on_…`.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name not in vars(cls) and inspect.iscoroutinefunction(method):
            setattr(cls, name, _shell(method))
        elif name.startswith("on_") and inspect.isfunction(method):
            setattr(cls, name, _registering(method))
    return cls


def _shell(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def run(*args: Any, **settings: Any) -> Any:
        given = functools.partial(method, *args, **_with_handlers(settings))
        return await (given() if _in_trio() else current_guest().run(given))

    return run


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    """`on_request` and `on_notification` with a handler for asyncio."""

    @functools.wraps(register)
    def run(self: Any, method: str, handler: Callable[..., Any]) -> Any:
        return register(self, method, _answerer(handler))

    return run


def _answerer(given: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(given)
    async def run(*args: Any, **named: Any) -> Any:
        return await run_asyncio(given, *args, **named)

    return run


def _with_handlers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose handlers, `on_…`, can be called from trio."""
    return {
        name: _handler(value) if name.startswith("on_") and callable(value) else value
        for name, value in settings.items()
    }


def _handler(given: Callable[..., Any]) -> Callable[..., Any]:
    """A user's handler that is called here, and awaited in asyncio if it is async."""

    @functools.wraps(given)
    def call(*args: Any) -> Any:
        done = given(*args)
        return run_asyncio(lambda: done) if inspect.isawaitable(done) else done

    return call


@for_asyncio
class RunningCall(call.RunningCall):
    """A call: iterate over its messages, then ask for its `result`. See `streams.RunningCall`."""

    _held: "Held[Any] | None" = None

    async def __aenter__(self) -> Self:
        if _in_trio():
            await super().__aenter__()
            return self
        held = Held(current_guest(), _InTrio(self))
        await held.enter()
        self._held = held
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _in_trio():
            await super().__aexit__(kind, error, traceback)
            return
        assert self._held is not None
        await self._held.leave(error)

    async def __anext__(self) -> Message:
        if _in_trio():
            return await super().__anext__()
        for message in self._outlet.messages:
            return message
        await self._have_some()
        return self._next()

    async def _next_run(self) -> Run:
        if _in_trio():
            return await super()._next_run()
        self._is_waiting = True
        await self._have_some()
        return self._take_run()


@for_asyncio
class Pages(pages.Pages):
    """Iterates over results, one a page. See `streams.Pages`."""

    _unread: tuple[dict[str, Any], str | None] | None = None  # a page, and the token before it

    async def __anext__(self) -> dict[str, Any]:
        if _in_trio():
            return await super().__anext__()
        if self._unread is None:
            await current_guest().run(self._fetch)
        assert self._unread is not None
        page, _ = self._unread
        self._unread = None
        return page

    async def _fetch(self) -> None:
        token = self.token
        self._unread = await super().__anext__(), token

    @property
    def token(self) -> str | None:
        return super().token if self._unread is None else self._unread[1]


@for_asyncio
class Client(client.Client):
    """`streams.Client` for asyncio programs: the same settings and methods.

    Handlers are asyncio coroutine functions or plain functions. They run in the loop of the client.
    A client belongs to the loop in which it was entered.
    """

    _call_type = RunningCall
    _pages_type = Pages
    _guest: Guest
    _held: "Held[Any]"

    if not TYPE_CHECKING:  # the signatures are those of `streams.Client`

        @functools.wraps(client.Client.__init__)
        def __init__(self, *args: Any, **settings: Any) -> None:
            answers = settings.get("answers")
            if answers is not None:
                settings["answers"] = {each: _answerer(answers[each]) for each in answers}
            super().__init__(*args, **_with_handlers(settings))

    async def __aenter__(self) -> Self:
        if _in_trio():
            await super().__aenter__()
            return self
        self._guest = await Guest.enter()
        self._held = Held(self._guest, _InTrio(self))
        try:
            await self._held.enter()
        except BaseException:
            await self._guest.leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if _in_trio():
            return await super().__aexit__(kind, error, traceback)
        try:
            return await self._held.leave(error)
        finally:
            await self._guest.leave()


class _InTrio:
    """A context manager of one of these classes, for `Held`: trio enters it."""

    def __init__(self, context: AbstractAsyncContextManager[Any, bool | None]) -> None:
        self._context = context

    async def __aenter__(self) -> Any:
        return await self._context.__aenter__()

    async def __aexit__(self, *given: Any) -> bool | None:
        return await self._context.__aexit__(*given)
