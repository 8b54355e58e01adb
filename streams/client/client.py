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

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import AnswerHandler, Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls
from streams.client.pages import Pages
from streams.client.reconnect import Reconnector, Resumer
from streams.client.wire import Standing, StatusPage, Tool, ToolPage
from streams.errors import ClientError, StreamGone
from streams.exchange import Dialer
from streams.keys import new_id
from streams.logs import log
from streams.messages import Message
from streams.protocol.dialects import DIALECTS
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import Lead

FAREWELL_S: Final = 1.0  # for what is still to be written, when the client is closed

# A listing is given up after this many pages, or bytes.
PAGES_MAX: Final = 10_000
LISTED_BYTES_MAX: Final = 64 * 1024 * 1024

_T = TypeVar("_T")
_PageT = TypeVar("_PageT", StatusPage, ToolPage)


class Joined(msgspec.Struct, frozen=True):
    """The return value of `Client.join`; `result` is as the server sent it, decoded."""

    is_done: bool
    result: Any = None


class Client:
    """A connection to one server, made anew each time it is lost. Use it in `async with`.

    `dialer` opens a connection (`transports.dial`). `dialects` are the proposals that the client
    offers to the server; a call uses the best one that the server announces for it. `answers` are
    handlers for requests of the server, by method (`elicitation/create`): each gets the params and
    returns the result, and its exception becomes the error that the server sees. `on_notification`
    gets the notifications that belong to no call.

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
        dialer: Dialer,
        *,
        name: str = "mcp-streams",
        version: str = "1",
        dialects: Sequence[str] = ("streams", "resumableRequests"),
        answers: Mapping[str, AnswerHandler] | None = None,
        on_notification: Callable[[Message], None] | None = None,
        idempotency_keys: bool = True,
        connect_s: float = 0.0,
        connect_timeout_s: float = 10.0,
        patience_s: float = 300.0,
        silence_s: float = 20.0,
    ) -> None:
        self._name = name
        self._version = version
        self._dialects = tuple(dialects)
        known = [name for name, dialect in DIALECTS.items() if dialect.announcing]
        if unknown := set(dialects).difference(known):
            raise ValueError(
                f"dialects: unknown {', '.join(unknown)}; known are {', '.join(known)}"
            )
        self._answers = Answers(dict(answers or {}))
        self._on_notification = on_notification or _log_notification
        self._has_keys = idempotency_keys
        self._calls = Calls()
        self._reconnector = Reconnector(
            dialer,
            self._answers,
            self._calls,
            greeting=self._greeting,
            on_notification=self._on_notification,
            connect_s=connect_s,
            connect_timeout_s=connect_timeout_s,
            patience_s=patience_s,
            silence_s=silence_s,
        )
        self._resumer = Resumer(
            self._reconnector, self._calls, self._answers, patience_s=patience_s
        )
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None]
        self._nursery: trio.Nursery

    async def __aenter__(self) -> Self:
        """Connect. Raises `CannotConnect`."""
        self._nursery_manager = trio.open_nursery()  # needs a run of trio
        self._nursery = self._answers.nursery = await self._nursery_manager.__aenter__()
        try:
            await self._nursery.start(self._reconnector.run, self._resumer)
        except BaseException as error:
            if not await self._close(error):
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Write what is left to be written (a second at most) and close. Handlers are cancelled."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
            await self._reconnector.farewell()
        return await self._close(error)

    async def _close(self, error: BaseException | None) -> bool:
        """Close the nursery; an error is raised as it was, not in a group."""
        self._nursery.cancel_scope.cancel()
        kind = type(error) if error is not None else None
        traceback = error.__traceback__ if error is not None else None
        try:
            return bool(await self._nursery_manager.__aexit__(kind, error, traceback))
        except BaseExceptionGroup as group:
            # Cancellations beside the error say nothing more.
            errors = [each for each in group.exceptions if not _is_cancellation(each)]
            if len(errors) != 1:
                raise
            if errors[0] is error:
                return False
            raise errors[0] from None

    def _greeting(self) -> dict[str, Any]:
        return wire.hello(self._name, self._version, self._answers.handlers, self._dialects)

    # The server

    @property
    def protocol_version(self) -> str:
        """The revision of MCP that was negotiated."""
        return self._reconnector.hello.protocol_version

    @property
    def server_info(self) -> dict[str, Any]:
        """The server's name, version and other fields of its `serverInfo`."""
        return self._reconnector.hello.server_info

    @property
    def capabilities(self) -> dict[str, Any]:
        """The capabilities that the server declares."""
        return self._reconnector.hello.capabilities

    def on_request(self, method: str, handler: AnswerHandler) -> None:
        """Answer the server's requests of `method` with `handler`.

        The capability that belongs to it is declared when a connection begins, so register before
        entering.
        """
        self._answers.handlers[method] = handler

    # Calls

    def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        idempotency_key: bool | None = None,
    ) -> RunningCall:
        """Call a tool, in an `async with` block. Leaving the block does not end the work.

        `idempotency_key` replaces the client's `idempotency_keys` for this call. Without a key, the
        call ends in `CallLost` if its connection is lost before the server has announced a ticket.
        Entering raises `CannotConnect`.
        """
        request_id = self._reconnector.new_id()
        key = self._new_key(idempotency_key)
        return self._call(wire.call(name, arguments or {}, request_id, key), request_id, key)

    def _new_key(self, has_key: bool | None = None) -> str | None:
        return new_id() if (self._has_keys if has_key is None else has_key) else None

    def _call(
        self, params: dict[str, msgspec.Raw], request_id: str, key: str | None
    ) -> RunningCall:
        request = messages.request(request_id, "tools/call", params)
        return self._call_type(self._resumer, request, request_id, has_key=key is not None)

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
        call = self._calls.of(ticket)
        if call is None or not call.rejoin(None):
            call = self._call_type.of(self._resumer, msgspec.structs.replace(ticket, after=None))
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
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
            return self._call(params, request_id, key)

        def turn(lead: Lead) -> Awaitable[Message]:
            return self._reconnector.ask("tools/call", wire.page_call(params, lead))

        return self._pages_type(begin, turn, self._on_notification, token)

    async def poll(self, ticket: Ticket | str) -> Standing:
        """The status of a stream, by its ticket or, if the server allows that to this client, by
        its id.

        Raises `StreamGone`, `CallFailed` or `CannotConnect`.
        """
        if isinstance(ticket, str):
            ticket = Ticket(ticket, "", "")
        word, params = wire.poll(ticket)
        try:
            reply = await self._reconnector.ask(word.method, params, self._calls.of(ticket))
        except StreamGone as gone:
            if gone.reason not in wire.MISPLACED or ticket.after is None:
                raise
            # The call was read elsewhere since; its status needs no cursor.
            return await self.poll(msgspec.structs.replace(ticket, after=None))
        return _read(reply, word.method, word.hear)

    async def poll_all(self) -> list[Standing]:
        """The status of all streams of this client that run, or were not delivered.

        Raises `CallFailed` or `CannotConnect`; `ClientError` for a listing without an end.
        """
        pages = await self._list(wire.poll_all(), StatusPage)
        return [status for page in pages for status in page.statuses]

    # Other requests

    async def list_tools(self) -> list[Tool]:
        """The server's tools, all pages. Raises as `poll_all` does."""
        return [tool for page in await self._list("tools/list", ToolPage) for tool in page.tools]

    async def ping(self) -> None:
        """Wait for the server to answer a ping. Raises `CannotConnect`."""
        await self._reconnector.ask("ping", {})

    async def set_level(self, level: str) -> None:
        """Ask for log messages from `level` on, over this and every later connection.

        Raises `CallFailed` or `CannotConnect`.
        """
        await self._reconnector.ask("logging/setLevel", {"level": level})
        self._reconnector.level = level

    async def _list(self, method: str, shape: type[_PageT]) -> list[_PageT]:
        """All pages of a listing. Raises `ClientError` if they do not seem to end."""
        pages: list[_PageT] = []
        cursors: set[str] = set()
        cursor: str | None = None
        size = 0
        while len(pages) < PAGES_MAX and size <= LISTED_BYTES_MAX and cursor not in cursors:
            if cursor is not None:
                cursors.add(cursor)
            reply = await self._reconnector.ask(
                method, {} if cursor is None else {"cursor": cursor}
            )
            page = _read(reply, method, lambda result: messages.decode(result, shape))
            pages.append(page)
            size += len(wire.result_of(reply))
            cursor = page.next_cursor
            if cursor is None:
                return pages
        limit = f"{PAGES_MAX} pages and {LISTED_BYTES_MAX} bytes"
        raise ClientError(f"The server's pages of {method} have no end below {limit}.")


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancellation, error.exceptions))
    return isinstance(error, trio.Cancelled)


def _read(reply: Message, method: str, hear: Callable[[msgspec.Raw], _T]) -> _T:
    try:
        return hear(wire.result_of(reply))
    except ValueError as error:
        raise ClientError(f"The server's answer to {method} does not fit: {error}.") from None


def _log_notification(message: Message) -> None:
    log.debug("a notification that belongs to no call", method=message.method)
