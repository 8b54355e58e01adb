"""The client: calls that outlive their connection.

    async with Client(dial("ws://127.0.0.1:8765")) as client:
        async with client.call("build", {"rows": 3}) as call:
            async for message in call:
                ...
            result = await call.result()

A server that knows nothing of streams is served as any MCP client would; then a call ends with its
connection, in `CallLost`. One of ours is sent a call again where the connection goes before
anything of it has come, and runs it once all the same: each call has a key of its own.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

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

FAREWELL_S: Final = 1.0  # for the last words, when the client is closed

# A listing without an end is given up: after so many pages, or so many bytes.
PAGES_MAX: Final = 10_000
LISTED_BYTES_MAX: Final = 64 * 1024 * 1024

_T = TypeVar("_T")
_PageT = TypeVar("_PageT", StatusPage, ToolPage)


class Joined(msgspec.Struct, frozen=True):
    """What `Client.join` came back with; `result` is as the server sent it, decoded."""

    is_done: bool
    result: Any = None


class Client:
    """A connection to one server, made anew as often as it is lost. Use it in `async with`.

    `dialer` opens a connection (`transports.dial`). `dialects` are the proposals that the server is
    told of; a call uses the best that it announces. `answers` are handlers for what the server may
    ask, by method (`elicitation/create`): each gets the params and returns the result, and its
    exception becomes the error that the server sees. `on_notification` is told what belongs to no
    call. `connect_timeout_s` is for one attempt, hello included. Entering makes one, or repeats it
    for `connect_s` seconds, for a server that is just starting; an answer that will not change ends
    that. Later attempts are repeated for `patience_s`, at least every 2 seconds while a call waits.
    Then every running call raises `CannotConnect`, and the next request begins to try again.
    `silence_s` is for a server that is not ours and that something is awaited from: one that is
    silent for longer, and answers no ping, is connected to anew, where every call can be resumed.
    """

    def __init__(
        self,
        dialer: Dialer,
        *,
        name: str = "mcp-streams",
        version: str = "1",
        dialects: Sequence[str] = ("streams", "resumableRequests"),
        answers: Mapping[str, AnswerHandler] | None = None,
        on_notification: Callable[[Message], None] | None = None,
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
            raise ValueError(f"dialects: {', '.join(unknown)}: there are {', '.join(known)}")
        self._answers = Answers(dict(answers or {}))
        self._on_notification = on_notification or _log_notification
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
        self._nursery_manager = trio.open_nursery()
        self._nursery: trio.Nursery

    async def __aenter__(self) -> "Client":
        """Connect. Raises `CannotConnect`."""
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
        """Say what is left to be said (a second at most) and close. Handlers are cancelled."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
            await self._reconnector.farewell()
        return await self._close(error)

    async def _close(self, error: BaseException | None) -> bool:
        """Close the nursery; an error comes out as it was raised, not in a group."""
        self._nursery.cancel_scope.cancel()
        kind = type(error) if error is not None else None
        traceback = error.__traceback__ if error is not None else None
        try:
            return bool(await self._nursery_manager.__aexit__(kind, error, traceback))
        except BaseExceptionGroup as group:
            # Where the block was cancelled meanwhile, its error is in no need of company.
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
        """The revision of MCP that was agreed upon."""
        return self._reconnector.hello.protocol_version

    @property
    def server_info(self) -> dict[str, Any]:
        """Name, version and whatever else the server says of itself."""
        return self._reconnector.hello.server_info

    @property
    def capabilities(self) -> dict[str, Any]:
        """What the server says that it can do."""
        return self._reconnector.hello.capabilities

    def on_request(self, method: str, handler: AnswerHandler) -> None:
        """Answer what the server asks under `method`.

        A capability that belongs to it is declared when a connection begins: register before
        entering.
        """
        self._answers.handlers[method] = handler

    # Calls

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> RunningCall:
        """Call a tool, for the length of an `async with` block; leaving it does not end the work.

        Entering raises `CannotConnect`.
        """
        request_id = self._reconnector.new_id()
        return self._call(wire.call(name, arguments or {}, request_id, new_id()), request_id)

    def _call(self, params: dict[str, msgspec.Raw], request_id: str) -> RunningCall:
        request = messages.request(request_id, "tools/call", params)
        return RunningCall(self._resumer, request, request_id)

    def resume(self, ticket: Ticket) -> RunningCall:
        """Come back to a call, for the length of an `async with` block, from where `ticket` stands.

        Entering raises `CannotConnect`, and `StreamGone` where this client still receives the
        stream for a block that is open, or that was left at another place than the ticket's. Raises
        `ValueError` for a ticket of a proposal that this client does not know.
        """
        wire.resuming(ticket)
        left = self._calls.of(ticket)
        if left is not None and left.rejoin(ticket):
            return left
        return RunningCall.of(self._resumer, ticket)

    async def join(self, ticket: Ticket, *, timeout_s: float | None = None) -> Joined:
        """The result of a call, from wherever it was begun; without it, that it is not done yet.

        A ticket is all that this takes, and the same one does it again until the result was had.
        The call's messages are passed over: where they are to be read, `resume` is better. Waits
        `timeout_s` seconds at most, connecting included; for ever without. Raises what reading a
        call does.
        """
        wire.resuming(ticket)
        call = self._calls.of(ticket)
        if call is None or not call.rejoin(None):
            call = RunningCall.of(self._resumer, msgspec.structs.replace(ticket, after=None))
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            async with call:
                return Joined(is_done=True, result=await call.result())
        return Joined(is_done=False)

    def pages(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, token: str | None = None
    ) -> Pages:
        """The pages of a tool, one after the other; with `token` from the page on that it leads to.

        What the tool sends ahead of a page goes to `on_notification`. Iterating raises what reading
        a call does.
        """
        given = dict(arguments or {})
        params = wire.call(name, given, self._reconnector.new_id(), key=None)

        def begin() -> RunningCall:
            nonlocal params
            request_id = self._reconnector.new_id()
            params = wire.call(name, given, request_id, new_id())
            return self._call(params, request_id)

        def turn(lead: Lead) -> Awaitable[Message]:
            return self._reconnector.ask("tools/call", wire.page_call(params, lead))

        return Pages(begin, turn, self._on_notification, token)

    async def poll(self, ticket: Ticket | str) -> Standing:
        """How a stream stands, by its ticket or, where this client may ask so, by its id.

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
            # Somebody has gone on from a later place than the ticket's.
            return await self.poll(msgspec.structs.replace(ticket, after=None))
        return _read(reply, word.method, word.hear)

    async def poll_all(self) -> list[Standing]:
        """How all streams stand that run, or were not delivered, for who this client is.

        Raises `CallFailed` or `CannotConnect`; `ClientError` for a listing without an end.
        """
        pages = await self._list(wire.poll_all(), StatusPage)
        return [status for page in pages for status in page.statuses]

    # Other requests

    async def list_tools(self) -> list[Tool]:
        """The server's tools, all pages. Raises as `poll_all` does."""
        return [tool for page in await self._list("tools/list", ToolPage) for tool in page.tools]

    async def ping(self) -> None:
        """Ask the server for a sign of life. Raises `CannotConnect`."""
        await self._reconnector.ask("ping", {})

    async def set_level(self, level: str) -> None:
        """Have log messages from `level` on, on this and every later connection.

        Raises `CallFailed` or `CannotConnect`.
        """
        await self._reconnector.ask("logging/setLevel", {"level": level})
        self._reconnector.level = level

    async def _list(self, method: str, shape: type[_PageT]) -> list[_PageT]:
        """All pages of a listing. Raises `ClientError` where there seems to be no end of them."""
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
