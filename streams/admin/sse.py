"""Responses of server-sent events: their number, their head, comments in silence, and their end."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from streams.admin.endpoint import NO_STORE
from streams.exchange import Headers, HttpError, Request, Responder

SILENCE_S: Final = 15.0  # then a comment is sent, so that a connection that is cut is noticed
# A client that takes longer to read what it is sent is cut: feeds are few, and others wait for one.
UNREAD_S: Final = 30.0
COMMENT: Final = b":\n\n"
HEADERS: Final[Headers] = (
    ("content-type", "text/event-stream"),
    NO_STORE,
    ("x-accel-buffering", "no"),
)

Send = Callable[[bytes], Awaitable[None]]
"""Sends events. Without any it sends a comment, if the last ones were sent `SILENCE_S` ago."""


class Responses:
    """The responses of one kind that are open: at most `open_max` of them."""

    def __init__(self, open_max: int, kind: str, headers: Headers = HEADERS) -> None:
        self.open = 0
        self._open_max = open_max
        self._kind = kind
        self._headers = headers

    async def answer(
        self, request: Request, responder: Responder, respond: Callable[[], Awaitable[None]]
    ) -> None:
        """Call `respond`, or answer HEAD, which opens nothing. Raises `HttpError`."""
        if request.method == "HEAD":
            await responder.respond(200, self._headers)
            return
        if self.open >= self._open_max:
            raise HttpError(503, f"{self._open_max} {self._kind} are open: close one.")
        self.open += 1
        try:
            await respond()
        finally:
            self.open -= 1


@asynccontextmanager
async def while_connected(
    responder: Responder, headers: Headers = HEADERS, first: bytes = COMMENT
) -> AsyncIterator[Send]:
    """Begin a response, and run the block until it ends or the client has gone.

    A client that goes while events are sent raises `trio.BrokenResourceError`, in a group: the
    listener of HTTP expects that. A client that does not read for `UNREAD_S` counts as gone.
    """
    sent_at = trio.current_time()

    async def send(events: bytes) -> None:
        nonlocal sent_at
        if not events and trio.current_time() - sent_at < SILENCE_S:
            return
        with trio.move_on_after(UNREAD_S) as unread:
            await responder.write(events or COMMENT)
        if unread.cancelled_caught:
            raise trio.BrokenResourceError(f"nothing was read for {UNREAD_S:.0f} s")
        sent_at = trio.current_time()

    async def watch(scope: trio.CancelScope) -> None:
        await responder.gone()
        scope.cancel()

    await responder.start(200, headers, first)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        yield send
        nursery.cancel_scope.cancel()
