"""Channels over HTTP from the server's side, for the suite that all transports must pass.

HTTP has requests, but no connection that both sides could lose. So a session here stands for the
client's channel. The handler receives the bodies of the session's POSTs, one after another. Its
messages go into the response to the last POST, until it asks for the next.
"""

from collections.abc import Sequence
from typing import Final

import trio

from streams import messages
from streams.exchange import Handler, Request, Responder, Scopes
from streams.keys import new_id
from streams.messages import Incoming
from tests.rigs.scripted_http import NDJSON

HELLO: Final = messages.request(0, "initialize", {"protocolVersion": "2025-11-25"})
WELCOME: Final = messages.result(0, {"protocolVersion": "2025-11-25", "capabilities": {}})
SESSION: Final = "Mcp-Session-Id"
HEADERS: Final = [("Content-Type", NDJSON)]


class Post:
    """One request, while its response is open."""

    def __init__(self, body: bytes, responder: Responder) -> None:
        self.body = body
        self.responder = responder
        self.is_over = trio.Event()
        self._has_begun = False

    async def begin(self, session_id: str) -> None:
        """Answer the request that opens the session."""
        self._has_begun = True
        await self.responder.start(200, [*HEADERS, (SESSION, session_id)], WELCOME)

    async def write(self, *lines: bytes) -> None:
        if self._has_begun:
            await self.responder.write(*lines)
        else:
            self._has_begun = True
            await self.responder.start(200, HEADERS, *lines)

    async def finish(self) -> None:
        try:
            if self._has_begun:
                await self.responder.finish()
            else:
                await self.responder.respond(202)
        except trio.BrokenResourceError:
            pass  # this client has hung up; the session goes on
        finally:
            self.is_over.set()


class SessionChannel:
    """One session as a `Channel`."""

    def __init__(self, hello: Post) -> None:
        self._answering = hello
        self._is_closed = False
        self._offer, self._posts = trio.open_memory_channel[Post](0)

    async def take(self, post: Post) -> bool:
        """Pass `post` to the handler, and wait until it is answered; False when the session is
        over.
        """
        try:
            await self._offer.send(post)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        await post.is_over.wait()
        return True

    def end(self) -> None:
        """The client has ended the session."""
        self._offer.close()

    @property
    def principal(self) -> str:
        return "session"

    @property
    def scopes(self) -> Scopes:
        return None

    async def receive(self) -> Sequence[Incoming]:
        await self._answering.finish()
        self._answering = await self._posts.receive()
        return [self._answering.body]

    def is_writable(self) -> bool:
        return not self._is_closed and self._answering.responder.is_open()

    async def send(self, *lines: bytes) -> None:
        await self._answering.write(*lines)

    async def ping(self) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    def unsent_bytes(self) -> int | None:
        return self._answering.responder.unsent_bytes()

    async def aclose(self) -> None:
        self._is_closed = True
        self._posts.close()
        if not self._answering.is_over.is_set():
            await self._answering.finish()


class Sessions:
    """An `Endpoint` that runs `handler` for each session."""

    def __init__(self, handler: Handler, nursery: trio.Nursery) -> None:
        self._handler = handler
        self._nursery = nursery
        self._channels: dict[str, SessionChannel] = {}

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.body == HELLO.rstrip():
            await self._open(Post(request.body, responder))
            return
        channel = self._channels.get(request.headers.get(SESSION.lower(), ""))
        if channel is not None and request.method == "DELETE":
            channel.end()
            await responder.respond(200)
        elif channel is None or not await channel.take(Post(request.body, responder)):
            await responder.respond(404)

    async def _open(self, hello: Post) -> None:
        session_id = new_id()
        channel = self._channels[session_id] = SessionChannel(hello)
        await hello.begin(session_id)
        self._nursery.start_soon(self._run, channel)
        await hello.is_over.wait()

    async def _run(self, channel: SessionChannel) -> None:
        try:
            await self._handler(channel)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await channel.aclose()
