"""The response to one HTTP request, as a `Channel` that only sends."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import trio

from streams import messages
from streams.engine.framing import Framing
from streams.errors import INTERNAL_ERROR, Refusal
from streams.exchange import NO_CLAIMS, Caller, Headers, Responder, Scopes, TraceHeaders
from streams.messages import Incoming, RequestId
from streams.server.http.events import JSON, KEEP_ALIVE, content

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

KEEP_ALIVE_S: Final = 15.0  # proxies close a response that is silent for a minute
CLOSE_S: Final = 1.0
# For a call that was cancelled before it sent anything, and while the server shuts down.
_DROPPED: Final = Refusal(INTERNAL_ERROR, "The server dropped this request: send it again.")


class ResponseChannel:
    """Sent lines become the body of the response.

    The body has the type `media_type`, or is one JSON message where `framing` decides so.
    """

    transport: Final = "http"  # see `streams.exchange.transport_of`

    def __init__(
        self,
        responder: Responder,
        principal: str,
        media_type: str,
        framing: Framing | None = None,
        *,
        caller: Caller | None = None,
        request_id: RequestId | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        is_resumed: bool = False,
    ) -> None:
        """The channel ends when the authentication of `caller` expires.

        `request_id` is the id of the request that is answered, and `headers` are its headers. With
        `is_resumed` the response is never sent as a whole, see `content`.
        """
        self._headers = headers
        self._request_id = request_id
        self._media_type = media_type
        self._is_resumed = is_resumed
        self._framing = framing
        self._responder = responder
        self._principal = principal
        self._caller = caller
        self._has_begun = self._is_open = False
        self._is_sending = False
        self._wrote_at = 0.0  # while it is open

    @property
    def principal(self) -> str:
        return self._principal

    @property
    def scopes(self) -> Scopes:
        return frozenset() if self._caller is None else self._caller.scopes

    @property
    def claims(self) -> Mapping[str, Any]:
        """See `streams.exchange.claims_of`."""
        return NO_CLAIMS if self._caller is None else self._caller.claims

    @property
    def http_trace(self) -> TraceHeaders | None:
        """See `streams.exchange.http_trace_of`."""
        return TraceHeaders.of(self._headers)

    async def receive(self) -> Sequence[Incoming]:
        """Wait for the end, since the request was the only message."""
        while (holds_for_s := self._holds_for_s()) > 0:
            with trio.move_on_after(holds_for_s):
                await self._responder.gone()
                break
        raise trio.EndOfChannel

    def _holds_for_s(self) -> float:
        return math.inf if self._caller is None else self._caller.holds_for_s()

    def is_writable(self) -> bool:
        return self._responder.is_open()

    async def send(self, *lines: bytes) -> None:
        self._is_sending = True
        if self._is_open:
            await self._responder.write(*lines)
        else:
            self._has_begun = self._is_open = True
            headers = content(self._media_type, is_whole=False)
            await self._responder.start(200, headers, *lines)
        self._is_sending = False
        self._wrote_at = trio.current_time()

    async def send_whole(self, *lines: bytes) -> None:
        """See `streams.exchange.ResponseChannel`. The connection is kept for the next request."""
        if self._is_resumed:
            await self.send(*lines)
            return
        self._has_begun = True
        is_json = self._framing is not None and self._framing.is_json
        headers = content(JSON if is_json else self._media_type)
        await self._responder.respond(200, headers, b"".join(lines))

    async def refuse(self, status: int, headers: Headers, line: bytes) -> None:
        """Respond with an HTTP error. Nothing may be sent before it or after it."""
        self._has_begun = True
        await self._responder.respond(status, (*content(JSON), *headers), line)

    @property
    def is_over(self) -> bool:
        """See `streams.exchange.ResponseChannel`."""
        is_whole = self._has_begun and not self._is_open
        return is_whole or not self._responder.is_open()

    async def ping(self) -> bool:
        """Write a keep-alive if nothing was written for a while. A client never answers it."""
        is_quiet = trio.current_time() - self._wrote_at >= KEEP_ALIVE_S / 2
        if self._is_open and is_quiet and not self._is_sending:
            await self.send(KEEP_ALIVE[self._media_type])
        else:
            await trio.lowlevel.checkpoint()
        return False

    def unsent_bytes(self) -> int | None:
        return self._responder.unsent_bytes()

    async def aclose(self) -> None:
        if self.is_over:
            return
        with trio.move_on_after(CLOSE_S):
            try:
                if self._is_open:
                    await self._responder.finish()
                elif not self._has_begun:
                    nothing = messages.error(self._request_id, _DROPPED)
                    await self._responder.respond(503, content(JSON), nothing)
            except trio.BrokenResourceError:
                return  # the client has gone
