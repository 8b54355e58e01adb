"""The client: calls that outlive their connection.

    async with Client(dial("ws://127.0.0.1:8765")) as client:
        async with client.call("build", {"rows": 3}) as call:
            async for message in call:
                ...
            result = await call.result()

With a server that does not know streams, the client works as any MCP client does: a call ends with
its connection, in `CallLost`. With one of ours, a call whose connection is lost before anything has
come is sent a second time. The server runs it once all the same, because each call has an
idempotency key of its own. Without keys, such a call ends in `CallLost` too.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast, overload

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import AnswerHandler, Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls
from streams.client.inprocess import InProcess, Openable, Running, is_server
from streams.client.notifications import NotificationHandler, Notifications
from streams.client.pages import Pages
from streams.client.reconnect import Reconnector, Resumer
from streams.client.requests import Requests, read_reply
from streams.client.results import CallToolResult
from streams.errors import StreamGone
from streams.exchange import Dialer
from streams.keys import new_id
from streams.logs import log
from streams.messages import Kind, Message
from streams.protocol.dialects import DIALECTS
from streams.protocol.extension import KEY
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import Lead, Standing

FAREWELL_S: Final = 1.0  # for what is still to be written, when the client is closed

_T = TypeVar("_T")

ProgressHandler = Callable[[float, float | None, str | None], object]
"""Gets the progress of a call, its total and its message. A plain function or async."""


class Joined(msgspec.Struct, frozen=True):
    """The return value of `Client.join`; `result` is as the server sent it, decoded."""

    is_done: bool
    result: Any = None


class _Progress(msgspec.Struct, frozen=True):
    progress: float
    total: float | None = None
    message: str | None = None


class Client(Requests):
    """A connection to one server, made anew each time it is lost. Use it in `async with`.

    `dialer` opens a connection (`transports.dial`). It may be a `Server`, for tests: that runs in
    this process for the length of the block, with a journal in memory. `dialects` are the proposals
    that the client offers to the server; a call uses the best one that the server announces for it.

    `answers` are handlers for requests of the server, by method (`elicitation/create`): each gets
    the params and returns the result, and its exception becomes the error that the server sees. A
    handler with a second parameter gets the `RunningCall` that asks as well, or None where that is
    unknown. `on_notification` gets the notifications that belong to no call; it may be async, and
    its failures are logged.

    `connect_timeout_s` limits one attempt to connect, `initialize` included. Entering makes one
    attempt. With `connect_s`, it makes more for that many seconds, for a server that is just
    starting, unless the error is one that will not change. A lost connection is retried for
    `patience_s`, at least every 2 seconds while a call waits. After that every running call raises
    `CannotConnect`, and the next request begins to retry.

    With `idempotency_keys`, each call has a key, by which it can be sent again. Before the tool
    starts, the server makes such a call durable. That costs an fsync, unless the tool has
    `readOnlyHint` or `idempotentHint`.

    `silence_s` is for servers that are not ours. If such a server owes an answer, is silent for
    longer, and answers no ping, the client connects anew, provided that every call can be resumed.
    """

    _call_type: type[RunningCall] = RunningCall  # `streams.aio` has its own
    _pages_type: type[Pages] = Pages

    def __init__(
        self,
        dialer: Dialer | Openable | Running,
        *,
        name: str = "mcp-streams",
        version: str = "1",
        dialects: Sequence[str] = ("streams", "resumableRequests"),
        answers: Mapping[str, AnswerHandler] | None = None,
        on_notification: Callable[[Message], object] | None = None,
        idempotency_keys: bool = True,
        connect_s: float = 0.0,
        connect_timeout_s: float = 10.0,
        patience_s: float = 300.0,
        silence_s: float = 20.0,
    ) -> None:
        self._house: InProcess | None = None
        if is_server(dialer):
            self._house = InProcess(cast(Openable | Running, dialer))
            dialer = self._house.connect
        elif not callable(dialer):
            raise TypeError(f"Client: expected a Server, or dial(url), got {dialer!r}")
        self._name = name
        self._version = version
        self._dialects = tuple(dialects)
        known = [name for name, dialect in DIALECTS.items() if dialect.announcing]
        if unknown := set(dialects).difference(known):
            raise ValueError(
                f"dialects: unknown {', '.join(unknown)}; known are {', '.join(known)}"
            )
        self._answers = Answers(dict(answers or {}))
        self._notifications = Notifications(on_notification)
        self._has_keys = idempotency_keys
        self._calls = Calls()
        self._reconnector = Reconnector(
            dialer,
            self._answers,
            self._calls,
            greeting=self._greeting,
            on_notification=self._notifications.take,
            connect_s=connect_s,
            connect_timeout_s=connect_timeout_s,
            patience_s=patience_s,
            silence_s=silence_s,
        )
        if on_notification is not None:
            self._reconnector.listen()
        self._resumer = Resumer(
            self._reconnector, self._calls, self._answers, patience_s=patience_s
        )
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None]
        self._nursery: trio.Nursery
        self._is_entered = False

    async def __aenter__(self) -> Self:
        """Connect. Raises `CannotConnect`."""
        if not trio.lowlevel.in_trio_task():
            raise RuntimeError(
                "streams.Client runs under trio, and this code does not: in an asyncio program use "
                "`from streams.aio import Client`, otherwise start with trio.run(main)"
            )
        if self._is_entered:
            raise RuntimeError("a Client is entered once: make another one")
        self._is_entered = True
        if self._house is not None:
            await _alone(self._house.enter)
        self._nursery_manager = trio.open_nursery()
        try:
            self._nursery = self._answers.nursery = await self._nursery_manager.__aenter__()
            try:
                await self._start()
            except BaseException as error:
                if not await self._close(error):
                    raise
        except BaseException:
            await self._leave_house()
            raise
        return self

    async def _start(self) -> None:
        self._nursery.start_soon(self._notifications.run)
        if self._house is not None:
            await self._nursery.start(self._house.serve)
        await self._nursery.start(self._reconnector.run, self._resumer)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:  # to a type checker, plain `bool` says that errors of the block are swallowed
        """Write what is left to be written (a second at most) and close. Handlers are cancelled."""
        try:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
                await self._reconnector.farewell()
            return await self._close(error)
        finally:
            await self._leave_house()

    async def _leave_house(self) -> None:
        """Shut down a server in this process. It does not see the error of the block."""
        if self._house is not None:
            await _alone(self._house.leave)

    async def _close(self, error: BaseException | None) -> bool:
        """Close the nursery; an error is raised as it was, not in a group."""
        self._nursery.cancel_scope.cancel()
        kind = type(error) if error is not None else None
        traceback = error.__traceback__ if error is not None else None
        try:
            return bool(await self._nursery_manager.__aexit__(kind, error, traceback))
        except BaseExceptionGroup as group:
            only = _only(group)
            if only is None:
                raise
            if only is error:
                return False
            raise only from None
        finally:  # tasks outside of the block may still wait
            self._resumer.close()
            self._reconnector.close()

    def cut(self) -> None:
        """Cut the connection to a server in this process, for a test: what is in flight is lost.

        The client connects again by itself. Raises `RuntimeError` for any other server.
        """
        if self._house is None:
            raise RuntimeError("only the connection of Client(server), in one process, can be cut")
        self._house.cut()

    def _greeting(self) -> dict[str, Any]:
        return wire.hello(self._name, self._version, self._answers.handlers, self._dialects)

    # Handlers

    def on_request(self, method: str, handler: AnswerHandler) -> None:
        """Answer the server's requests of `method` with `handler`.

        The capability that belongs to it is declared when a connection begins, so register before
        entering.
        """
        self._answers.handlers[method] = handler

    def on_notification(self, method: str, handler: NotificationHandler) -> None:
        """Call `handler` for the server's notifications of `method` that belong to no call.

        `notifications/message` (a log message), `notifications/resources/updated` and
        `notifications/tools/list_changed` are such. Notifications of a call come with its messages;
        `call_tool` passes those to the same handlers. Handlers run one after the other.
        """
        self._notifications.on(method, handler)
        self._reconnector.listen()

    # Calls

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        idempotency_key: bool | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> RunningCall:
        """Call a tool, in an `async with` block. Leaving the block does not end the work.

        `meta` are fields for the request's `_meta`. `idempotency_key` replaces the client's
        `idempotency_keys` for this call. Without a key, the call ends in `CallLost` if its
        connection is lost before the server has announced a ticket. A key of your own,
        `mcp-streams/idempotencyKey` in `meta`, takes the place of a random one.
        Entering raises `CannotConnect`.
        """
        request_id = self._reconnector.new_id()
        key = meta[KEY] if meta and KEY in meta else self._new_key(idempotency_key)
        params = wire.call(name, arguments or {}, request_id, key, meta)
        return self._call(params, request_id, key, name, arguments)

    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_progress: ProgressHandler | None = None,
        idempotency_key: bool | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> CallToolResult: ...
    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: type[_T],
        on_progress: ProgressHandler | None = None,
        idempotency_key: bool | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> _T: ...
    @overload
    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any,
        on_progress: ProgressHandler | None = None,
        idempotency_key: bool | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Any: ...

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        type: Any = CallToolResult,
        on_progress: ProgressHandler | None = None,
        idempotency_key: bool | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a tool and wait for its result: a `CallToolResult`, or the tool's value as a `type`.

        It outlives its connection as any call does; only `call` has a ticket to come back with
        later. Other notifications of the call go to the handlers of `on_notification`. Raises what
        `RunningCall.result` raises: with a `type`, `ToolFailed` if the tool failed.
        """
        running = self.call(name, arguments, idempotency_key=idempotency_key, meta=meta)
        async with running as call:
            async for message in call:
                if message.method == wire.PROGRESS and on_progress is not None:
                    await _tell(on_progress, message)
                elif message.kind is Kind.NOTIFICATION:
                    await self._notifications.handle(message, call)
            return await call.result(type)

    def _new_key(self, has_key: bool | None = None) -> str | None:
        return new_id() if (self._has_keys if has_key is None else has_key) else None

    def _call(
        self,
        params: dict[str, msgspec.Raw],
        request_id: str,
        key: str | None,
        name: str,
        arguments: Mapping[str, Any] | None,
    ) -> RunningCall:
        return self._call_type(
            self._resumer,
            messages.request(request_id, "tools/call", params),
            request_id,
            has_key=key is not None,
            name=name,
            arguments=arguments,
        )

    def resume(self, ticket: Ticket) -> RunningCall:
        """Resume a call from the position of `ticket`, in an `async with` block.

        Entering raises `CannotConnect`, or `StreamGone` if this client still receives the stream
        for an open block, or for a block that was left at another position. Raises `ValueError` for
        a ticket of a dialect that this client does not know.
        """
        wire.resuming(ticket)
        left = self._calls.of(ticket)
        if left is not None and left.rejoin(ticket):
            return left
        return self._call_type.of(self._resumer, ticket)

    async def join(self, ticket: Ticket, *, timeout_s: float | None = None) -> Joined:
        """Wait for the result of a call, wherever it was begun; `is_done` is False if it is not
        there yet.

        It takes only a ticket, and the same ticket may be used until the result was returned. The
        call's messages are skipped; to read them, use `resume`. Waits `timeout_s` seconds at most,
        connecting included, or without a limit. Raises the errors that reading a call raises.
        """
        wire.resuming(ticket)
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            call = self._calls.of(ticket)
            if call is None or not call.rejoin(None):
                unread = msgspec.structs.replace(ticket, after=None)
                call = self._call_type.of(self._resumer, unread)
            async with call:
                return Joined(is_done=True, result=await call.result())
        return Joined(is_done=False)

    def pages(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, token: str | None = None
    ) -> Pages:
        """Iterate over the pages of a tool; with the page token `token`, from its page on.

        Notifications that the tool sends ahead of a page go to `on_notification`. Iterating raises
        the errors that reading a call raises.
        """
        given = dict(arguments or {})
        params = wire.call(name, given, self._reconnector.new_id(), key=None)

        def begin() -> RunningCall:
            nonlocal params
            request_id = self._reconnector.new_id()
            key = self._new_key()
            params = wire.call(name, given, request_id, key)
            return self._call(params, request_id, key, name, given)

        def turn(lead: Lead) -> Awaitable[Message]:
            return self._reconnector.ask("tools/call", wire.page_call(params, lead))

        return self._pages_type(begin, self.resume, turn, self._notifications.take, token)

    async def poll(self, ticket: Ticket | str) -> Standing:
        """The status of a stream, by its ticket, which may be written as a word, or, if the server
        allows that to this client, by its id.

        Raises `StreamGone`, `CallFailed` or `CannotConnect`.
        """
        if isinstance(ticket, str):
            ticket = _ticket_of(ticket)
        word, params = wire.poll(ticket)
        try:
            reply = await self._reconnector.ask(word.method, params, self._calls.of(ticket))
        except StreamGone as gone:
            if gone.reason not in wire.MISPLACED or ticket.after is None:
                raise
            # The call was read elsewhere since; its status needs no cursor.
            return await self.poll(msgspec.structs.replace(ticket, after=None))
        return read_reply(reply, word.method, word.hear)


def _ticket_of(text: str) -> Ticket:
    """The ticket that a word is, or one for a stream of which only this id is known."""
    try:
        return Ticket.parse(text)
    except ValueError:
        return Ticket(text, "", "")


async def _tell(handler: ProgressHandler, message: Message) -> None:
    try:
        progress = messages.decode(message.params, _Progress)
    except ValueError as error:
        log.info("progress that cannot be read", why=str(error))
        return
    done = handler(progress.progress, progress.total, progress.message)
    if inspect.isawaitable(done):
        await done


async def _alone(act: Callable[[], Awaitable[None]]) -> None:
    """Raise an error that is alone in groups, however deep, as it was."""
    try:
        await act()
    except BaseExceptionGroup as group:
        only: BaseException | None = group
        while isinstance(only, BaseExceptionGroup):
            only = _only(only)
        if only is None:
            raise
        raise only from None


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """The one error of a group; cancellations beside it say nothing more."""
    errors = [each for each in group.exceptions if not _is_cancellation(each)]
    return errors[0] if len(errors) == 1 else None


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancellation, error.exceptions))
    return isinstance(error, trio.Cancelled)
