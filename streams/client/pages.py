"""The pages of one tool, for a client. `streams.server.pages` is the other side."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from streams import messages
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.reconnect import RETRY_S
from streams.errors import CannotConnect, ClientError
from streams.messages import Kind, Message
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import Lead


class Pages:
    """Iterates over results, one a page; made by `Client.pages`. `token` is the page token of the
    next page.

    Keep it to read on at another time, from another process. It is None before the first page and
    after the last one. Where the server does not authenticate clients, it is a secret.
    """

    def __init__(
        self,
        begin: Callable[[], RunningCall],
        resume: Callable[[Ticket], RunningCall],
        turn: Callable[[Lead], Awaitable[Message]],
        on_notification: Callable[[Message], None],
        token: str | None,
    ) -> None:
        self._lead = None if token is None else Lead(token)
        self._begin = begin
        self._resume = resume
        self._call: RunningCall | None = None  # for the first page, once it has begun
        self._turn = turn
        self._on_notification = on_notification
        self._is_over = False
        self._has_reader = False

    @property
    def token(self) -> str | None:
        """The page token of the page behind the last one."""
        return None if self._lead is None else self._lead.token

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> dict[str, Any]:
        """The next page, as the server sent it.

        Pages without content are skipped: they say only that there is nothing yet, or nothing more.
        A page that was lost on its way is asked for again. One task at a time may read.
        """
        if self._has_reader:  # each of the two would begin a run, or lose pages to the other
            raise RuntimeError("another task reads these pages: only one may")
        self._has_reader = True
        try:
            return await self._next_with_content()
        finally:
            self._has_reader = False

    async def _next_with_content(self) -> dict[str, Any]:
        while not self._is_over:
            result = await self._next()
            asked_with, self._lead = self._lead, _lead_in(result)
            self._is_over = self._lead is None
            if any(map(result.get, ("content", "structuredContent", "isError"))):
                return result
            if self._lead == asked_with:
                await trio.sleep(RETRY_S)
        raise StopAsyncIteration

    async def _next(self) -> dict[str, Any]:
        result = await (self._first() if self._lead is None else self._behind(self._lead))
        if not isinstance(result, dict):
            raise ClientError("The server's page is not a result of a tool.")
        return result

    async def _first(self) -> Any:
        """The page of the call itself. If its reader was cancelled, that call is resumed."""
        ticket = None if self._call is None else self._call.ticket
        self._call = self._begin() if ticket is None else self._resume(ticket)
        try:
            async with self._call as call:
                async for message in call:
                    if message.kind is Kind.NOTIFICATION:
                        self._on_notification(message)
                return await call.result()
        except CannotConnect:
            raise  # it may still be resumed
        except ClientError:
            self._call = None
            raise

    async def _behind(self, lead: Lead) -> Any:
        reply = await self._turn(lead)
        try:
            return messages.decode(wire.result_of(reply), Any)
        except ValueError as error:
            raise ClientError(f"The server's page cannot be read: {error}.") from None


def _lead_in(result: dict[str, Any]) -> Lead | None:
    try:
        return wire.next_page(result)
    except ValueError as error:
        raise ClientError(f"The server's page does not fit: {error}.") from None
